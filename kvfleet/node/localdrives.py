"""The drives of a node, and what joins them to the rest of it."""

from __future__ import annotations

import asyncio

from kvfleet.config import FleetConfig
from kvfleet.core.block import KEY_BYTES, BlockKey
from kvfleet.node.dram import DramTier
from kvfleet.node.drivereads import DriveReads
from kvfleet.node.mirror import Mirror
from kvfleet.node.nvme import NvmeTier
from kvfleet.node.publishing import Publisher
from kvfleet.node.spilling import Spiller

__all__ = ["LocalDrives"]


class LocalDrives:
    """The NVMe tier of a node: what comes to it and leaves it is told to all who count on it.

    Threads: the manager's event loop.

    Attributes:
        nvme: the drives.
        reads: from them, for loads and for other nodes.
        spiller: writes to them.
        takes: their gate.
    """

    def __init__(self, dram: DramTier, publisher: Publisher, config: FleetConfig) -> None:
        assert dram.arena.drive_records is not None, "an arena of a node with drives has a table of them"
        self.nvme = NvmeTier(config.nvme, config)
        self.reads = DriveReads(self.nvme, config)
        self.spiller = Spiller(dram, self.nvme, config)
        self._dram = dram
        self._publisher = publisher
        self._number = dram.holdings.add_tier(
            lambda key, shard: self.nvme.find(BlockKey(key), shard) is not None,
            lambda: ((r[:KEY_BYTES], int.from_bytes(r[KEY_BYTES:], "little")) for r in self.nvme.records()),
        )
        self._mirror = Mirror(dram.arena.drive_records, self._changed)
        self.nvme.on_change = self._mirror.note
        self.takes = self.spiller.takes
        dram.on_use = self.nvme.touch

    def _changed(self, key: BlockKey, shard: int, present: bool) -> None:
        """A drive has a record now, or has it no longer.

        One that is lost is not written again as long as nobody uses it: a drive that is full would drop another for it.
        """
        if present:
            self._dram.placement.saved(key, shard, "nvme")
        else:
            self._dram.placement.lost(key, shard, "nvme", again=False)
        self._dram.holdings.changed(key, shard, present=present, tier=self._number)
        self._publisher.wake()

    async def end(self) -> None:
        """Let what is under way end, and close the drives. `NvmeTier.run` goes on until then."""
        await asyncio.gather(self.reads.end(), self.spiller.settle())
        await self.nvme.close()

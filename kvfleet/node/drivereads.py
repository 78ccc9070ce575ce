"""Reads of this node's drives into the arena."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Hashable

from typing_extensions import override

from kvfleet.config import FleetConfig
from kvfleet.core.block import BlockKey
from kvfleet.errors import CorruptBlockError, TierError
from kvfleet.node.landing import BlockSlots
from kvfleet.node.messages import Bytes, Miss, Outcome, Source
from kvfleet.node.namespaces import layout_of
from kvfleet.node.nvme import NvmeTier
from kvfleet.node.readahead import ReadAhead

__all__ = ["DriveReads"]

_log = logging.getLogger(__name__)
_AHEAD = 2  # reads that wait for a drive: so its threads need not wait for the event loop between two


class DriveReads(ReadAhead):
    """Reads blocks from the drives for the loads of a node and for its peers, `nvme_inflight_max` at once from each.

    Threads: the manager's event loop; the reads themselves run in the drives' threads.
    """

    def __init__(self, nvme: NvmeTier, config: FleetConfig) -> None:
        super().__init__(Source.NVME, config.nvme_inflight_max + _AHEAD, patience_s=config.holder_timeout_s)
        self._nvme = nvme

    def has(self, key: BlockKey, shard: int, num_bytes: int) -> bool:
        """Whether a drive has a block of that size, and reads it within a time that loads wait for."""
        stored = self._nvme.find(key, shard)
        return stored is not None and stored.num_bytes == num_bytes and not self._stuck(self._nvme.where(key, shard))

    def bring(self, slots: BlockSlots, first: int, stop: int) -> AsyncGenerator[Outcome, None]:
        """Read blocks [first, stop) of a load into the arena; yields and raises as `ReadAhead.read` does."""

        async def fill(index: int, memory: Bytes) -> int | Miss:
            return await self._fill(slots, index, memory)

        return self.read(slots, first, stop, fill)

    @override
    def _medium(self, slots: BlockSlots, index: int) -> Hashable:
        return self._nvme.where(slots.keys[index], slots.request.shard)

    async def _fill(self, slots: BlockSlots, index: int, memory: Bytes) -> int | Miss:
        request, key = slots.request, slots.keys[index]
        if not self.has(key, request.shard, len(memory)):
            return Miss.EVICTED
        try:
            checksum = await self._nvme.read(key, request.shard, memory, layout_of(request.namespace).itemsize)
        except CorruptBlockError as error:
            _log.warning("%s", error)
            return Miss.CORRUPT
        except TierError as error:
            _log.info("%s", error)
            return Miss.STORAGE_FAILED
        return Miss.EVICTED if checksum is None else checksum

    @override
    def _landed(self, slots: BlockSlots, index: int) -> None:
        key, shard = slots.keys[index], slots.request.shard
        if self._nvme.find(key, shard) is not None:  # the drive may have lost it, or gone, since it was read
            slots.dram.placement.saved(key, shard, "nvme")

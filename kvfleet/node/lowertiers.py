"""What is below the arena of a node: its drives, and the tier that all nodes share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from kvfleet.config import FleetConfig
from kvfleet.core.admission import PREFIX_PART, UNBOUNDED, shared_takes
from kvfleet.core.block import BlockKey
from kvfleet.core.inventory import split_records
from kvfleet.core.placement import Gate, LowerTier, Transfer
from kvfleet.node.catalog import CatalogKeeper
from kvfleet.node.codecs import codec_of
from kvfleet.node.dram import DramTier
from kvfleet.node.drivecalls import DaemonThreads
from kvfleet.node.endpoint import SharedEndpoint
from kvfleet.node.localdrives import LocalDrives
from kvfleet.node.publishing import DeltaReply, DirectoryLink, Publisher
from kvfleet.node.saving import Saver
from kvfleet.node.shared import SharedTier
from kvfleet.node.startup import NodeHome
from kvfleet.node.uses import ArenaUses
from kvfleet.node.waiting import now

__all__ = ["LowerTiers"]

Work = Callable[[], Coroutine[Any, Any, None]]


class LowerTiers:
    """The lower tiers of a node and who writes to them. Use it once it has `join`ed the parts that are above.

    Threads: the manager's event loop.

    Attributes:
        gates: what each tier takes, in order of demotion; only of the tiers there are.
        endpoint: of the shared tier, or None.
        saver: writes to it.
        catalog: says what is in it, or None.
        drives: of the node, or None.
    """

    def __init__(self, config: FleetConfig) -> None:
        """Open the shared tier.

        Raises:
            ConfigError: it cannot be.
        """
        self._config = config
        # Threads of their own, so that a shared tier that hangs on writes holds up nothing else.
        self._threads = DaemonThreads(2 * config.save_inflight_max, "kvfleet-save")
        self.endpoint: SharedEndpoint | None = None
        if config.shared_url is not None:
            codec = codec_of(config.shared_codec, "shared_codec")
            shared = SharedTier(config.shared_url, config.shared_options, config.shared_timeout_s, codec)
            self.endpoint = SharedEndpoint(shared, config)
        self.saver: Saver
        self.catalog: CatalogKeeper | None = None
        self.drives: LocalDrives | None = None
        self.gates: dict[LowerTier, Gate] = {}
        if config.nvme:
            self.gates["nvme"] = lambda num_bytes, uses, expected_uses: (
                self.drives is not None and self.drives.takes(num_bytes, uses, expected_uses)
            )
        if self.endpoint is not None:
            self.gates["shared"] = shared_takes

    @property
    def prefix_bytes_max(self) -> int:
        """How long a prefix can be kept in one of them; not to the last slot, as drives do not fill evenly."""
        shared = 0 if self.endpoint is None else self._config.shared_bytes_max or UNBOUNDED
        return max(shared, 0 if self.drives is None else int(PREFIX_PART * self.drives.nvme.capacity_bytes))

    def join(self, dram: DramTier, publisher: Publisher, link: DirectoryLink, home: NodeHome) -> None:
        """Make those who write to the tiers. Nothing runs yet."""
        self._publisher = publisher
        self.saver = Saver(dram, self.endpoint, publisher, link, self._config, self._threads)
        if self.endpoint is not None:
            self.catalog = CatalogKeeper(home.node_id, home.epoch, self.endpoint, publisher, link, self._config)
            self.uses = ArenaUses(dram, publisher)
        if self._config.nvme:
            self.drives = LocalDrives(dram, publisher, self._config)
        if self.drives is not None and self.endpoint is not None:
            self.saver.drain_drives(self.drives.nvme, self._config.save_inflight_max)

    def on_moved(self, told: Callable[[], None]) -> None:
        """Have somebody told of the end of each transfer."""
        self.saver.on_moved = told
        if self.drives is not None:
            self.drives.spiller.on_moved = told

    def works(self) -> list[Work]:
        """What runs in the background until it is cancelled; `end` then waits for what is under way."""
        works: list[Work] = [self.saver.run]
        if self.endpoint is not None:
            works.append(self.endpoint.run)
        if self.catalog is not None:
            works.append(self.catalog.run)
            works.append(self.uses.run)
        if self.drives is not None:
            works.append(self.drives.spiller.run)
        return works

    def last_works(self) -> list[Work]:
        """What runs in the background until `end` has returned."""
        return [] if self.drives is None else [self.drives.nvme.run]

    def hear(self, reply: DeltaReply) -> None:
        """The directory has answered: copies that were found to be gone or bad are made again."""
        if self.endpoint is not None:
            for record in split_records(reply.lost):
                self.endpoint.lost(record)
        for record in split_records(reply.dropped):
            self.saver.dropped(record)
        if self.catalog is not None:
            self.catalog.hear(reply)

    def wake(self) -> None:
        """There are new blocks."""
        self.saver.wake()
        if self.drives is not None:
            self.drives.spiller.wake()

    def retire(self, keys: Sequence[BlockKey]) -> None:
        """Blocks will not be used again, it is said: the first to go from the drives. Nobody may save them for that."""
        if self.drives is not None:
            self.drives.nvme.retire(keys)

    async def move(self, transfers: Sequence[Transfer]) -> None:
        """Have each transfer carried out by who writes to its tier; it is completed as it ends."""
        moves = [self.saver.move([t for t in transfers if t.tier == "shared"])]
        if self.drives is not None:
            moves.append(self.drives.spiller.move([t for t in transfers if t.tier == "nvme"]))
        await asyncio.gather(*moves)

    async def flush(self, timeout_s: float) -> None:
        """Copy what is not there yet, as far as the tiers take it, and have it in the manifests, for `timeout_s`."""
        deadline = now() + timeout_s
        if self.catalog is not None:
            self.catalog.hurry(timeout_s)
        flushes = [self.saver.flush(timeout_s)]
        if self.drives is not None:
            flushes.append(self.drives.spiller.flush(timeout_s))
        await asyncio.gather(*flushes)
        if self.endpoint is not None and self.endpoint.allows("write"):
            await self._publisher.written(deadline - now())

    async def end(self) -> None:
        """Wait for the writes under way; the `works` were cancelled."""
        await self.saver.settle()
        if self.drives is not None:
            await self.drives.end()

    async def close(self) -> None:
        """Close the tiers; nothing uses them any more."""
        await asyncio.to_thread(self._threads.shutdown)
        if self.catalog is not None:
            await self.catalog.close()
        if self.endpoint is not None:
            await self.endpoint.close()
            await asyncio.to_thread(self.endpoint.shared.close)

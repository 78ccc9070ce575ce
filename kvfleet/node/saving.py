"""Copies from the arena to the shared tier: write-behind of what is new, demotion of what must make room.

Bounded: at most `save_inflight_max` objects of each kind at once; what waits, waits in the arena. While the shared
tier fails or hangs (`SharedEndpoint` knows), blocks stay in DRAM; those that must leave meanwhile are lost and counted:
nobody waits for a tier that is known to be bad. A block that cannot be written while others can is tried again later
(`Postponed`) and holds up none of them.

Before it writes, a node claims the blocks at the directory: content is written once, however many nodes hold it. Only
what must make room does not wait for another node that is writing it.

A node that drains writes by value, within a budget, and then nothing any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from kvfleet.config import MIB, FleetConfig
from kvfleet.core.inventory import parts_of
from kvfleet.core.placement import LowerTier, Transfer
from kvfleet.core.postponed import Postponed
from kvfleet.node.claiming import Claimer
from kvfleet.node.draining import Drained, SaveBudget
from kvfleet.node.dram import DramTier, record_id
from kvfleet.node.drivedraining import DriveDrain
from kvfleet.node.endpoint import SharedEndpoint, Way
from kvfleet.node.nvme import NvmeTier
from kvfleet.node.publishing import CALL_TIMEOUT_S, DirectoryLink, Publisher
from kvfleet.node.sharedwrites import End, Patience, SharedWrites
from kvfleet.node.waiting import now, within

__all__ = ["Saver"]

_log = logging.getLogger(__name__)
_BATCH_BYTES, _BATCH_PART = 256 * MIB, 8


class Saver:
    """Writes blocks of one node to the shared tier.

    Threads: the manager's event loop; writes run in threads.

    Attributes:
        on_moved: called at the end of each transfer: its block may be evictable now.
        writes: what it does them with.
    """

    def __init__(
        self,
        dram: DramTier,
        endpoint: SharedEndpoint | None,
        publisher: Publisher,
        link: DirectoryLink,
        config: FleetConfig,
        executor: Executor,
    ) -> None:
        self._dram = dram
        self._endpoint = endpoint
        self._publisher = publisher
        # What is in transfer cannot be evicted: only a part of the arena is at a time.
        self._batch_bytes = min(_BATCH_BYTES, dram.arena.capacity_bytes // _BATCH_PART)
        self._moved = asyncio.Event()
        self._wake = asyncio.Event()
        self._heartbeat_s = config.heartbeat_s
        self._hurry_s = config.lookup_timeout_s
        self._claimer = Claimer(link, publisher)
        self._postponed = Postponed()
        self._saves: dict[asyncio.Task[None], int] = {}  # bytes of each
        self._retry_from = 0.0  # what began before and failed is tried once more at once
        self.on_moved: Callable[[], None] = lambda: None
        self._drives: DriveDrain | None = None
        self.writes = SharedWrites(dram, endpoint, publisher, config.save_inflight_max, executor)
        if endpoint is not None:
            endpoint.on_well = self._again
            endpoint.on_lost = self._save_anew

    def wake(self) -> None:
        """There are new blocks."""
        self._wake.set()

    def _again(self, way: Way) -> None:
        """The tier can be written again: what failed was not to blame."""
        if way == "write":
            self._retry_all()

    def _retry_all(self, *, every: bool = False) -> None:
        self._retry_from = now()
        self._postponed.clear()
        self._dram.placement.requeue("shared", every=every)
        self.wake()

    def _save_anew(self, record: bytes) -> None:
        """The copy of a record is gone or bad: if the block is here, it is written again."""
        self._postponed.done(record)
        self._dram.placement.lost(*parts_of(record), "shared", again=True)
        self.wake()

    def dropped(self, record: bytes) -> None:
        """The copy of a record was deleted, as there were too many: it is written again when the block must go."""
        self._dram.placement.lost(*parts_of(record), "shared", again=False)

    async def run(self) -> None:
        """Save what is not saved yet, oldest first. Runs until cancelled."""
        if self._endpoint is None:
            return
        try:
            while True:
                if transfers := self._next(self._endpoint):
                    await self._begin(self._endpoint, transfers)
                    continue
                # Blocks that readers use again say nothing: look for them now and then.
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(self._heartbeat_s, self._wake.wait())
                self._wake.clear()
        finally:
            for save in self._saves:
                save.cancel()
            await asyncio.gather(*self._saves, return_exceptions=True)

    def _next(self, endpoint: SharedEndpoint) -> list[Transfer]:
        """Transfers to begin now: none while half of what may be under way is."""
        for record in self._postponed.take_due(now()):
            self._dram.placement.lost(*parts_of(record), "shared", again=True)
            self._moved.set()  # unless it is gone meanwhile
        room_bytes = self._batch_bytes - sum(self._saves.values())
        if self.writes.paused or not endpoint.allows("write") or room_bytes < self._batch_bytes // 2:
            return []
        begun = []
        for transfer in self._dram.placement.next_saves("shared", room_bytes):
            if self._postponed.waits(record_id(transfer.key, transfer.shard)):  # it was used again
                self._complete(transfer, ok=False, again=False)
            else:
                begun.append(transfer)
        return begun

    async def _begin(self, endpoint: SharedEndpoint, transfers: Sequence[Transfer]) -> None:
        """Start the writes that are left for this node to do."""
        for transfer in await self._left(endpoint, transfers, CALL_TIMEOUT_S):
            save = asyncio.create_task(self._move_one(transfer))
            self._saves[save] = transfer.num_bytes
            save.add_done_callback(self._ended)

    async def _left(
        self, endpoint: SharedEndpoint, transfers: Sequence[Transfer], timeout_s: float
    ) -> Sequence[Transfer]:
        """Claim transfers; those that are to be carried out. The others are completed.

        One whose block another node is writing is put off, unless somebody waits for its room.
        """
        records = [record_id(transfer.key, transfer.shard) for transfer in transfers]
        try:
            claimed = await self._claimer.claim(records, timeout_s)
        except BaseException:
            for transfer in transfers:
                self._complete(transfer, ok=False)
            raise
        left = []
        for record, transfer in zip(records, transfers, strict=True):
            if record in claimed.saved:
                endpoint.counts["known"] += 1
                self._postponed.done(record)
                self._complete(transfer, ok=True)
            elif record in claimed.taken and transfer.kind == "save":
                endpoint.counts["elsewhere"] += 1
                self._postponed.elsewhere(record, now())
                self._complete(transfer, ok=False, again=False)
            else:
                left.append(transfer)
        return left

    def _ended(self, save: asyncio.Task[None]) -> None:
        del self._saves[save]
        self.wake()
        if not save.cancelled() and (error := save.exception()) is not None:
            _log.error("a save failed unexpectedly", exc_info=error)

    async def move(self, transfers: Sequence[Transfer]) -> None:
        """Carry transfers out, and complete each as it ends."""
        endpoint = self._endpoint
        if transfers and endpoint is not None and endpoint.allows("write") and not self.writes.paused:
            transfers = await self._left(endpoint, transfers, self._hurry_s)
        await asyncio.gather(*(self._move_one(transfer) for transfer in transfers))

    async def _move_one(self, transfer: Transfer) -> None:
        end: End = "later"
        begun, record = now(), record_id(transfer.key, transfer.shard)
        try:
            end = await self.writes.write(transfer)
        finally:
            if end != "saved":
                self._claimer.give_back(record)
            if end == "failed" and begun > self._retry_from:
                self._postponed.failed(record, now())
                self._complete(transfer, ok=False, again=False)
            else:
                self._complete(transfer, ok=end == "saved")
        if end == "saved":
            self._postponed.done(record)

    def _complete(self, transfer: Transfer, *, ok: bool, again: bool = True) -> None:
        self._dram.placement.complete(transfer, ok=ok, again=again)
        self._moved.set()
        self.on_moved()

    def drain_drives(self, nvme: NvmeTier, num_at_once: int) -> None:
        """Have the node's drives drained with it."""
        self._drives = DriveDrain(self._dram, nvme, self.writes, self._claimer, num_at_once)

    async def settle(self) -> None:
        """Wait for the writes that nobody waits for."""
        await self.writes.settle()
        if self._drives is not None:
            await self._drives.end()

    async def flush(self, timeout_s: float) -> None:
        """Save what is unsaved and tell the directory, for at most `timeout_s`.

        What cannot be written while the rest can holds it up for three tries, some seconds. A tier that takes nothing
        is given the time that one needs to be found well again: waiting longer for it is in vain.
        """
        if self._endpoint is None:
            return
        deadline = now() + timeout_s
        self._retry_all(every=True)
        patience = Patience(self._endpoint.recovers_s, now())
        ended = False
        while not ended and now() < deadline:
            await self._until(lambda: self.writes.paused or self._done, min(deadline, now() + self._heartbeat_s))
            ended = self.writes.paused or self._done or patience.ended(self.writes, self._endpoint, now())
        await self._publisher.flush(max(0.0, deadline - now()))

    @property
    def num_unsaved(self) -> int:
        """Records that wait for their copy in the shared tier, or are being copied; without one, on the drives."""
        tier: LowerTier = "nvme" if self._endpoint is None else "shared"
        return self._dram.placement.num_unsaved(tier) + self._postponed.num_waiting

    @property
    def num_waiting(self) -> int:
        """Records that have no copy in any tier below, and are to have one. Looks at all records."""
        return self._dram.placement.num_waiting(map(parts_of, self._postponed.waiting))

    @property
    def _done(self) -> bool:
        """Whether nothing is left that could be saved now."""
        return not self._dram.placement.num_unsaved("shared") and not self._postponed.num_soon

    async def drain(self, timeout_s: float, bytes_max: int | None) -> Drained:
        """Save the most valuable of what is unsaved, within a budget; from then on nothing is saved any more.

        Args:
            timeout_s: no write begins after it.
            bytes_max: of blocks written; None for no limit.
        """
        deadline = now() + timeout_s
        self.pause()  # what waits for its turn goes back into the queue
        placement = self._dram.placement
        await self._until(lambda: not placement.num_in_transfer("shared"), deadline)
        if self.writes.budget is None:
            return Drained(0, 0, *placement.unsaved("shared"))  # the node is to go on after all
        if self._endpoint is not None:
            self._retry_all(every=True)
            self._dram.rank_saves("shared")
        blocks, num_bytes = self.writes.blocks, self.writes.num_bytes
        budget = self.writes.budget = SaveBudget(bytes_max, deadline)
        self.wake()
        await self._until(
            lambda: self._done or (self.writes.paused and not placement.num_in_transfer("shared")), deadline
        )
        on_drives = (0, 0) if self._drives is None else await self._drives.run(budget, deadline)
        budget.close()
        await self._publisher.flush(max(0.0, deadline - now()))
        left = [sum(pair) for pair in zip(placement.unsaved("shared"), on_drives, strict=True)]
        return Drained(self.writes.blocks - blocks, self.writes.num_bytes - num_bytes, *left)

    def pause(self) -> None:
        """Save nothing until `resume`."""
        self._go_on(SaveBudget(0, now()))

    def resume(self) -> None:
        """Save as if there had been no `drain` or `pause`."""
        self._go_on(None)
        self.wake()

    def _go_on(self, budget: SaveBudget | None) -> None:
        """With another budget; whoever is at work by the last one ends."""
        if self.writes.budget is not None:
            self.writes.budget.close()
        self.writes.budget = budget

    async def _until(self, done: Callable[[], bool], deadline: float) -> None:
        """Wait for something that only the end of a transfer can bring about, or for the deadline."""
        while not done() and (left := deadline - now()) > 0:
            self._moved.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await within(left, self._moved.wait())

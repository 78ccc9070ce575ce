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
from kvfleet.core.block import KEY_BYTES, BlockKey
from kvfleet.core.breaker import Breaker
from kvfleet.core.directory import split_records
from kvfleet.core.placement import Transfer
from kvfleet.core.postponed import Postponed
from kvfleet.errors import KvFleetError
from kvfleet.node.draining import Drained, SaveBudget
from kvfleet.node.dram import DramTier, record_id
from kvfleet.node.endpoint import SharedEndpoint, Way
from kvfleet.node.publishing import CALL_TIMEOUT_S, DirectoryLink, Publisher
from kvfleet.node.sharedwrites import End, SharedWrites
from kvfleet.node.waiting import now, within

__all__ = ["Saver"]

_log = logging.getLogger(__name__)
_BATCH_BYTES = 256 * MIB
_BATCH_PART = 8
_CLAIM_PAUSES_S = (1.0, 10.0)  # of a directory that does not answer


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
        self._link = link
        # What is in transfer cannot be evicted: only a part of the arena is at a time.
        self._batch_bytes = min(_BATCH_BYTES, dram.arena.capacity_bytes // _BATCH_PART)
        self._moved = asyncio.Event()
        self._wake = asyncio.Event()
        self._heartbeat_s = config.heartbeat_s
        self._hurry_s = config.lookup_timeout_s
        self._claims = Breaker(*_CLAIM_PAUSES_S)
        self._postponed = Postponed()
        self._saves: dict[asyncio.Task[None], int] = {}  # bytes of each
        self._retry_from = 0.0  # what began before and failed is tried once more at once
        self.on_moved: Callable[[], None] = lambda: None
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

    def _retry_all(self) -> None:
        self._retry_from = now()
        self._postponed.clear()
        self._dram.placement.requeue("shared")
        self.wake()

    def _save_anew(self, record: bytes) -> None:
        """The copy of a record is gone or bad: if the block is here, it is written again."""
        self._postponed.done(record)
        self._requeue(record)
        self.wake()

    def dropped(self, record: bytes) -> None:
        """The copy of a record was deleted, as there were too many: it is written again when the block must go."""
        self._requeue(record, again=False)

    def _requeue(self, record: bytes, *, again: bool = True) -> None:
        key, shard = BlockKey(record[:KEY_BYTES]), int.from_bytes(record[KEY_BYTES:], "little")
        self._dram.placement.lost(key, shard, "shared", again=again)

    async def run(self) -> None:
        """Save what is not saved yet, oldest first. Runs until cancelled."""
        if self._endpoint is None:
            return
        try:
            while True:
                transfers = self._next(self._endpoint)
                if transfers:
                    await self._begin(self._endpoint, transfers)
                    continue
                # Blocks that loads brought say nothing: look for them now and then.
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
            self._requeue(record)
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
            saved, taken = await self._claim(records, timeout_s)
        except BaseException:
            for transfer in transfers:
                self._complete(transfer, ok=False)
            raise
        left = []
        for record, transfer in zip(records, transfers, strict=True):
            if record in saved and not self._publisher.is_untold(record):
                endpoint.counts["known"] += 1
                self._postponed.done(record)
                self._complete(transfer, ok=True)
            elif record in taken and transfer.kind == "save":
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

    async def _claim(self, records: Sequence[bytes], timeout_s: float) -> tuple[set[bytes], set[bytes]]:
        """Records that are saved already, by another node or an earlier life of this one, and those others write."""
        if not self._claims.allows(now()):
            return set(), set()
        try:
            claimed = await self._link.claim(self._publisher.node, b"".join(records), timeout_s)
        except KvFleetError:
            self._claims.failed(now())
            return set(), set()
        self._claims.worked()
        return set(split_records(claimed.saved)), set(split_records(claimed.taken))

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

    async def settle(self) -> None:
        """Wait for the writes that nobody waits for."""
        await self.writes.settle()

    async def flush(self, timeout_s: float) -> None:
        """Save what is unsaved and tell the directory, for at most `timeout_s`.

        What cannot be written while the rest can holds it up for three tries, some seconds.
        """
        if self._endpoint is None:
            return
        deadline = now() + timeout_s
        self._retry_all()
        await self._until(lambda: self.writes.paused or self._done, deadline)
        await self._publisher.flush(max(0.0, deadline - now()))

    @property
    def num_unsaved(self) -> int:
        """Records that wait for their copy in the shared tier, or are being copied."""
        return self._dram.placement.num_unsaved("shared") + self._postponed.num_waiting

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
            self._retry_all()
            self._dram.rank_saves("shared")
        blocks, num_bytes = self.writes.blocks, self.writes.num_bytes
        budget = self.writes.budget = SaveBudget(bytes_max, deadline)
        self.wake()
        await self._until(
            lambda: self._done or (self.writes.paused and not placement.num_in_transfer("shared")), deadline
        )
        budget.close()
        await self._publisher.flush(max(0.0, deadline - now()))
        writes = self.writes
        return Drained(writes.blocks - blocks, writes.num_bytes - num_bytes, *placement.unsaved("shared"))

    def pause(self) -> None:
        """Save nothing until `resume`."""
        self.writes.budget = SaveBudget(0, now())

    def resume(self) -> None:
        """Save as if there had been no `drain` or `pause`."""
        self.writes.budget = None
        self.wake()

    async def _until(self, done: Callable[[], bool], deadline: float) -> None:
        """Wait for something that only the end of a transfer can bring about, or for the deadline."""
        while not done() and (left := deadline - now()) > 0:
            self._moved.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await within(left, self._moved.wait())

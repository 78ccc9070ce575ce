"""Copies from the arena to the shared tier: write-behind of what is new, demotion of what must make room.

Bounded: at most `save_inflight_max` objects of each kind at once; what waits, waits in the arena. While the shared
tier fails or hangs, blocks stay in DRAM and are tried again after a pause; those that must leave meanwhile are lost
and counted: nobody waits for a tier that is known to be bad.

A node that drains writes by value, within a budget, and then nothing any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial

from kvfleet.config import MIB, FleetConfig
from kvfleet.core.directory import split_records
from kvfleet.core.placement import Transfer
from kvfleet.errors import CorruptBlockError, KvFleetError, TierError
from kvfleet.node.draining import Drained, SaveBudget
from kvfleet.node.dram import DramTier, record_id
from kvfleet.node.landing import settle
from kvfleet.node.namespaces import layout_of
from kvfleet.node.publishing import CALL_TIMEOUT_S, DirectoryLink, Publisher
from kvfleet.node.records import Record
from kvfleet.node.shared import SharedTier
from kvfleet.node.waiting import now, within

__all__ = ["Saver"]

_log = logging.getLogger(__name__)
_BATCH_BYTES = 256 * MIB
_BATCH_PART = 8
_PAUSE_S = 1.0
_PAUSE_MAX_S = 30.0
_DEMOTION_TIMEOUT_S = 2.0  # somebody waits for the room


class Saver:
    """Writes blocks of one node to the shared tier.

    Threads: the manager's event loop; writes run in threads.

    Attributes:
        on_moved: called at the end of each transfer: its block may be evictable now.
        problem: why the shared tier's last answer was an error, or "".
        works: set once the shared tier was tried out successfully.
    """

    def __init__(
        self,
        dram: DramTier,
        shared: SharedTier | None,
        publisher: Publisher,
        link: DirectoryLink,
        config: FleetConfig,
        executor: Executor,
    ) -> None:
        self._dram = dram
        self._shared = shared
        self._publisher = publisher
        self._link = link
        self._executor = executor
        # What is in transfer cannot be evicted: only a part of the arena is at a time.
        self._batch_bytes = min(_BATCH_BYTES, dram.arena.capacity_bytes // _BATCH_PART)
        self._moved = asyncio.Event()
        self._places = {kind: asyncio.Semaphore(config.save_inflight_max) for kind in ("save", "demote")}
        self._wake = asyncio.Event()
        self._heartbeat_s = config.heartbeat_s
        self._pause_s = 0.0
        self._bad_until = 0.0
        self._late: set[asyncio.Future[bool]] = set()
        self._budget: SaveBudget | None = None
        self.on_moved: Callable[[], None] = lambda: None
        self.problem = ""
        self.works = asyncio.Event()
        self.saved_blocks = 0
        self.saved_bytes = 0
        self.failures = 0

    def wake(self) -> None:
        """There are new blocks."""
        self._wake.set()

    async def run(self) -> None:
        """Save what is not saved yet, oldest first. Runs until cancelled."""
        if self._shared is None:
            return
        await self._try_out(self._shared)
        while True:
            transfers = [] if self._paused else self._dram.placement.next_saves(self._batch_bytes)
            if not transfers:
                # Blocks that loads brought say nothing: look for them now and then.
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(self._heartbeat_s, self._wake.wait())
                self._wake.clear()
                continue
            try:
                known = await self._known(transfers)
            except BaseException:
                for transfer in transfers:
                    self._complete(transfer, ok=False)
                raise
            for transfer in transfers:
                if record_id(transfer.key, transfer.shard) in known:
                    self._complete(transfer, ok=True)
            await self.move([t for t in transfers if record_id(t.key, t.shard) not in known])
            await asyncio.sleep(max(0.0, self._bad_until - now()))

    @property
    def _paused(self) -> bool:
        return self._budget is not None and self._budget.closed(now())

    async def _try_out(self, shared: SharedTier) -> None:
        """Check the shared tier until it works, so that `status` can say what is wrong with it."""
        while not self.works.is_set():
            try:
                await settle(self._executor, shared.check)
                self._good()
                self.works.set()
            except TierError as error:
                self._bad(error)
                _log.warning("the shared tier does not work, next try in %.0f s: %s", self._pause_s, error)
                await asyncio.sleep(self._pause_s)

    def _good(self) -> None:
        self.problem = ""
        self._pause_s = self._bad_until = 0.0

    def _bad(self, error: object) -> None:
        """The tier failed: leave it alone for a while, longer each time."""
        self.problem = str(error)
        if now() >= self._bad_until:
            self._pause_s = min(_PAUSE_MAX_S, max(_PAUSE_S, 2 * self._pause_s))
            self._bad_until = now() + self._pause_s

    async def _known(self, transfers: Sequence[Transfer]) -> set[bytes]:
        """Records that another node, or an earlier life of this one, has saved already, as the directory knows."""
        records = b"".join(record_id(transfer.key, transfer.shard) for transfer in transfers)
        try:
            return set(split_records(await self._link.shared_among(records, CALL_TIMEOUT_S)))
        except KvFleetError:
            return set()

    async def move(self, transfers: Sequence[Transfer]) -> None:
        """Carry transfers out, and complete each as it ends."""
        await asyncio.gather(*(self._move_one(transfer) for transfer in transfers))

    async def _move_one(self, transfer: Transfer) -> None:
        ok = False
        try:
            ok = await (self._demote(transfer) if transfer.kind == "demote" else self._save(transfer))
        finally:
            self._complete(transfer, ok=ok)

    def _complete(self, transfer: Transfer, *, ok: bool) -> None:
        self._dram.placement.complete(transfer, ok=ok)
        self._moved.set()
        self.on_moved()

    async def _demote(self, transfer: Transfer) -> bool:
        """Save a block somebody waits to see gone: for a short time, and not while the tier is known to be bad."""
        if self._paused or now() < self._bad_until:
            return False
        save = asyncio.ensure_future(self._save(transfer))
        await asyncio.wait({save}, timeout=_DEMOTION_TIMEOUT_S)
        if save.done():
            return save.result()
        save.cancel()
        self._late.add(save)
        save.add_done_callback(self._late.discard)
        self._bad(f"a write took longer than {_DEMOTION_TIMEOUT_S} s")
        return False

    async def _save(self, transfer: Transfer) -> bool:
        assert self._shared is not None, "no transfers without a tier below"
        await self.works.wait()
        async with self._places[transfer.kind]:
            record = self._dram.arena.records.record(transfer.slot)
            if record.key != transfer.key or not record.committed:
                return False  # dropped while we waited
            namespace = self._dram.namespaces[record.namespace]
            num_shards = layout_of(namespace).num_shards
            view = self._dram.view(transfer.slot, record.length)
            write = partial(
                self._shared.write, namespace, num_shards, transfer.key, transfer.shard, view, record.checksum
            )
            budget = self._budget
            if budget is not None and not budget.take(record.length, now()):
                return False
            saved = await self._write(write, transfer, record)
            if budget is not None and not saved:
                budget.give_back(record.length)
        if not saved:
            return False
        self._good()
        self.saved_blocks += 1
        self.saved_bytes += record.length
        self._publisher.shared(record_id(transfer.key, transfer.shard), present=True)
        return True

    async def _write(self, write: Callable[[], int], transfer: Transfer, record: Record) -> bool:
        try:
            await settle(self._executor, write)
        except CorruptBlockError as error:
            _log.warning("block %s in DRAM: %s", transfer.key.hex(), error)
            if self._dram.arena.records.record(transfer.slot).generation == record.generation:
                self._dram.drop(transfer.key)
            return False
        except TierError as error:
            self.failures += 1
            self._bad(error)
            _log.info("block not saved: %s", error)
            return False
        return True

    async def settle(self) -> None:
        """Wait for the writes that nobody waits for."""
        await asyncio.gather(*self._late, return_exceptions=True)

    async def drain(self, timeout_s: float) -> int:
        """Save what is unsaved and tell the directory, for at most `timeout_s`. Returns how many blocks are left."""
        if self._shared is None:
            return 0
        deadline = now() + timeout_s
        await self._until(lambda: self._paused or not self._dram.placement.num_unsaved, deadline)
        await self._publisher.flush(max(0.0, deadline - now()))
        return self._dram.placement.num_unsaved

    async def leave(self, timeout_s: float, bytes_max: int | None) -> Drained:
        """Save the most valuable of what is unsaved, within a budget; from then on nothing is saved any more.

        Args:
            timeout_s: no write begins after it.
            bytes_max: of blocks written; None for no limit.
        """
        deadline = now() + timeout_s
        self.pause()  # what waits for its turn goes back into the queue
        await self._until(lambda: not self._dram.placement.in_transfer, deadline)
        self._dram.rank_saves()
        saved_blocks, saved_bytes = self.saved_blocks, self.saved_bytes
        budget = self._budget = SaveBudget(bytes_max, deadline)
        self.wake()
        placement = self._dram.placement
        await self._until(lambda: not placement.num_unsaved or (self._paused and not placement.in_transfer), deadline)
        budget.close()
        await self._publisher.flush(max(0.0, deadline - now()))
        return Drained(self.saved_blocks - saved_blocks, self.saved_bytes - saved_bytes, *placement.unsaved())

    def pause(self) -> None:
        """Save nothing until `resume`."""
        self._budget = SaveBudget(0, now())

    def resume(self) -> None:
        """Save as if there had been no `leave` or `pause`."""
        self._budget = None
        self.wake()

    async def _until(self, done: Callable[[], bool], deadline: float) -> None:
        """Wait for something that only the end of a transfer can bring about, or for the deadline."""
        while not done() and (left := deadline - now()) > 0:
            self._moved.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await within(left, self._moved.wait())

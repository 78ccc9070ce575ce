"""Writes blocks to one drive, in batches, of which one is written while another is flushed and entered.

1. An index transaction forgets what was evicted for the batch, and saves the write budget if that is due. As a rule it
   is the one that enters the batch before.
2. The blocks are written to their slots, several at once.
3. They are flushed; then a transaction enters them.

While the drive is read, one block of a batch is written at a time: loads come before stores.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

from kvfleet.config import MIB
from kvfleet.core.block import BlockKey
from kvfleet.core.placement import Evicted, NewBlock
from kvfleet.errors import TierError, TierFullError
from kvfleet.node.codecs import RAW, Codec
from kvfleet.node.drive import Drive, moment
from kvfleet.node.drivebooks import NS
from kvfleet.node.drivecalls import DriveCalls
from kvfleet.node.driveentry import Entry
from kvfleet.node.drivejobs import Write, encode, outgrown
from kvfleet.node.driveledger import DriveLedger
from kvfleet.node.drivestatus import DriveCounts

__all__ = ["DriveWriter"]

_BATCH_BLOCKS = 64
_BATCH_BYTES = 128 * MIB  # or more, if half of what may be in flight is more
# At once: two are written, two are flushed and entered, which takes as long where the drive's own queue is full.
_BATCHES = 4


@dataclass(eq=False, slots=True)
class _Run:
    """Blocks of a batch, shared by the threads that write them."""

    waiting: deque[tuple[Write, Entry]]
    written: list[tuple[Write, Entry, float]] = field(default_factory=list)
    failures: list[TierError] = field(default_factory=list)


class DriveWriter:
    """The one writer of a drive.

    Threads: the event loop; what blocks goes through `DriveCalls`.

    Attributes:
        queued_bytes: on their way to the drive.
    """

    def __init__(
        self,
        drive: Drive,
        calls: DriveCalls,
        codec: Codec,
        inflight_max: int,
        counts: DriveCounts,
        on_entry: Callable[[Entry, bool], None],
    ) -> None:
        """Begin with nothing to write.

        Args:
            drive: to write to.
            calls: how.
            codec: of the blocks.
            inflight_max: blocks written at once.
            counts: to count in.
            on_entry: a block can be read from the drive now, or no longer.
        """
        self.on_transfer: Callable[[int, float], None] = lambda num_bytes, seconds: None
        self._drive = drive
        self._books = drive.books
        self._calls = calls
        self._codec = codec
        self._inflight_max = inflight_max
        self._counts = counts
        self._on_entry = on_entry
        self._queue: deque[Write] = deque()
        self._batches: list[list[Write]] = []
        self._ledger = DriveLedger(drive, calls)
        self._stopping = False
        self._wake = asyncio.Event()
        self.queued_bytes = 0

    def add(self, write: Write) -> None:
        """Write a block when its turn comes."""
        self._queue.append(write)
        self.queued_bytes += write.entry.num_bytes
        self._wake.set()

    def forget(self, key: BlockKey) -> bool:
        """Take a block out of the drive, whoever reads it. Returns whether it was there."""
        gone = self._books.placement.drop(key)
        self._gone(gone)
        self._wake.set()  # the index has to be told
        return bool(gone)

    async def touch(self, uses: Mapping[bytes, int]) -> None:
        """Have the drive know last uses, by record, as far as the budget goes.

        Raises:
            TierError: as `Drive.touch`.
        """
        if self._drive.budget.allows(self._drive.cost(len(uses)), moment().monotonic_s):
            await self._ledger.touch(uses)

    def fail(self, error: TierError) -> None:
        """Nothing will be written any more."""
        for write in chain(*self._batches, self._queue):
            if not write.done.done():
                write.done.set_exception(error)
                write.done.exception()  # whoever asked may be gone
                self._counts.dropped_writes += 1
        self.queued_bytes -= sum(write.entry.num_bytes for write in self._queue)
        self._queue.clear()

    async def run(self) -> None:
        """Write what is queued. Runs until cancelled.

        Raises:
            TierUnavailableError: the drive failed.
            TierFullError: it takes nothing, for now, and nothing is under way. It may be run again.
        """
        self._stopping = False
        self._batches = []
        workers = [asyncio.create_task(self._work()) for _ in range(_BATCHES)]
        try:
            done, others = await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
            if others and all(isinstance(worker.exception(), TierFullError) for worker in done):
                self._stopping = True
                self._wake.set()
                done, _ = await asyncio.wait(workers)
            errors = [error for worker in done if (error := worker.exception()) is not None]
            raise next((error for error in errors if not isinstance(error, TierFullError)), errors[0])
        finally:
            for worker in workers:
                worker.cancel()

    async def _work(self) -> None:
        while not self._stopping:
            batch = self._take()
            if not batch and not self._books.deleted:
                self._wake.clear()
                await self._wake.wait()
                continue
            self._batches.append(batch)
            try:
                await self._write_batch(batch)
            finally:
                self.queued_bytes -= sum(write.entry.num_bytes for write in batch)
            # Not if it failed: then they are told so.
            self._batches.remove(batch)
            for write in batch:
                self._counts.dropped_writes += not write.done.done()
                write.end(stored=False)

    def _take(self) -> list[Write]:
        batch: list[Write] = []
        left = _BATCH_BYTES
        while self._queue and len(batch) < _BATCH_BLOCKS:
            left -= self._queue[0].entry.num_bytes
            if left < 0 and 2 * len(batch) >= self._inflight_max:
                break
            batch.append(self._queue.popleft())
        return batch

    async def _write_batch(self, batch: Sequence[Write]) -> None:
        writes = await self._coded(batch)
        for key, again in (await outgrown(self._drive, self._calls, writes)).items():
            self.forget(key)
            writes += again
        slots = self._admit(writes)
        try:
            await self._ledger.prepare(sum(map(self._books.slabs.slot_bytes, slots.values())))
            with self._ledger.writing():
                written = await self._write_all(slots)
                if written:
                    await self._enter(written)
        finally:
            for write in slots:
                if self._books.placement.pending(BlockKey(write.entry.key), write.entry.shard):
                    self._books.placement.abort(BlockKey(write.entry.key), write.entry.shard)

    # Before

    async def _coded(self, batch: Sequence[Write]) -> list[Write]:
        """The blocks as they will be written."""
        if self._codec is RAW:
            return list(batch)
        coded = await asyncio.gather(*(self._calls.write(partial(encode, self._codec, write)) for write in batch))
        for write, result in zip(batch, coded, strict=True):
            if result is None and write.check():
                write.corrupt()
        return [write for write in coded if write is not None and write.check()]

    def _admit(self, writes: Sequence[Write]) -> dict[Write, int]:
        """Give slots to blocks, evicting others. Returns the slots' numbers."""
        placement, now = self._books.placement, self._drive.budget.elapsed_s(moment().monotonic_s)
        slots: dict[Write, int] = {}
        for size, group in self._by_size(writes).items():
            blocks = [NewBlock(BlockKey(write.entry.key), write.entry.shard, write.parent, size) for write in group]
            admission = placement.admit(blocks, now)
            self._gone(admission.evicted)
            self._counts.evicted_blocks += len(admission.evicted)
            slots.update((group[grant.index], grant.slot) for grant in admission.grants)
        return slots

    def _by_size(self, writes: Sequence[Write]) -> dict[int, list[Write]]:
        """The blocks for which there is budget, by the size of their slots: one for all shards of a block."""
        drive, placement, now = self._drive, self._books.placement, moment().monotonic_s
        by_size: dict[int, list[Write]] = {}
        sizes: dict[bytes, int] = {}
        num_bytes = 2 * drive.cost(len(writes))
        for write in writes:
            key = write.entry.key
            sizes[key] = max(sizes.get(key, 0), write.entry.slot_bytes)
        for write in writes:
            key = BlockKey(write.entry.key)
            others = len(placement.shards(key))
            size = placement.block_bytes(key) // others if others else sizes[key]
            if write.entry.slot_bytes <= size and drive.budget.allows(num_bytes + size, now):
                num_bytes += size
                by_size.setdefault(size, []).append(write)
        return by_size

    def _gone(self, evicted: Sequence[Evicted]) -> None:
        for entry in self._books.gone(evicted):
            self._on_entry(entry, False)

    # The bytes

    async def _write_all(self, slots: dict[Write, int]) -> list[tuple[Write, Entry]]:
        """Write blocks, several at once. Returns those that are whole, with what to say of them.

        Raises:
            TierError: one could not be written.
        """
        slabs = self._books.slabs
        run = _Run(deque())
        for write, slot in slots.items():
            if write.check():
                place = replace(write.entry, offset=slabs.offset(slot), slot_bytes=slabs.slot_bytes(slot))
                run.waiting.append((write, place))
        while run.waiting and not run.failures:
            # All are waited for, unless the drive is given up: a slot is free when nobody writes to it any more.
            works = [partial(self._write_some, run, n) for n in range(min(self._inflight_max, len(run.waiting)))]
            await asyncio.gather(*map(self._calls.write, works))
        if run.failures:
            raise run.failures[0]
        for _, entry, seconds in run.written:
            self.on_transfer(entry.slot_bytes, seconds)
        return [(write, entry) for write, entry, _ in run.written if write.check()]

    def _write_some(self, run: _Run, number: int, beat: Callable[[], float]) -> None:
        """Write blocks one after the other, in a thread; all but the first thread end when the drive is read."""
        while not run.failures and not (number and self._calls.num_reads):
            try:
                write, entry = run.waiting.popleft()
            except IndexError:
                return
            begun = beat()
            try:
                self._drive.write(entry.offset, write.source)
            except TierError as error:
                run.failures.append(error)
                return
            run.written.append((write, entry, beat() - begun))
            if self._calls.num_reads:
                return

    async def _enter(self, written: Sequence[tuple[Write, Entry]]) -> None:
        """Have the index speak of blocks that were written; from here on they are stored."""
        now = self._drive.budget.elapsed_s(moment().monotonic_s)
        entries = [replace(entry, last_access=int(now * NS)) for _, entry in written]
        await self._calls.index(self._drive.flush)
        await self._ledger.enter(entries)
        for (write, _), entry in zip(written, entries, strict=True):
            self._books.stored(entry)
            self._counts.written_blocks += 1
            self._counts.written_bytes += entry.slot_bytes
            self._on_entry(entry, True)
            write.end(stored=True)

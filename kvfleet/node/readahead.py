"""Reads of a slower tier into the arena: several at once, first blocks first."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Iterable

from kvfleet.errors import DeadlineExceededError
from kvfleet.node.dram import Granted
from kvfleet.node.landing import BlockSlots
from kvfleet.node.messages import Bytes, Miss, Outcome, Source

__all__ = ["Fill", "ReadAhead"]

Fill = Callable[[int, Bytes], Awaitable["int | Miss"]]
"""Fills the memory of a slot with the block of an index.

Ends with the checksum of what it verified, or with why the block did not come. No thread writes to the memory after
that. Raises nothing of the world's.
"""

_Read = asyncio.Task[Miss | None]
"""Ends with the block in the arena, visible and held once, or with the reason of a miss."""


class ReadAhead:
    """Reads of one tier for all loads of a node, at most `inflight_max` at once from each medium of it.

    Threads: the manager's event loop.

    Args:
        source: the tier.
        inflight_max: reads at once, of one load, and of all from one medium.
        patience_s: how long a load waits for its next block, where reads have no end of their own; or None.
    """

    def __init__(self, source: Source, inflight_max: int, *, patience_s: float | None = None) -> None:
        self._source = source
        self._inflight_max = inflight_max
        self._wait_s = patience_s
        self._overdue: dict[_Read, Hashable] = {}  # with their mediums
        self._queued: set[_Read] = set()  # not begun: they wait for a place
        self._reading: dict[_Read, Hashable] = {}  # begun
        self._places: dict[Hashable, asyncio.Semaphore] = {}  # as many as a node has mediums
        self._adopted: set[asyncio.Task[None]] = set()

    def _medium(self, slots: BlockSlots, index: int) -> Hashable:
        """What a block is read from, where a tier has several: one that hangs does not keep the others waiting."""
        return None

    def _stuck(self, medium: Hashable) -> bool:
        """Whether so many reads of a medium do not end that there is no place for another."""
        return bool(self._overdue) and Counter(self._overdue.values())[medium] >= self._inflight_max

    async def read(self, slots: BlockSlots, first: int, stop: int, fill: Fill) -> AsyncGenerator[Outcome, None]:
        """Read blocks [first, stop) of a load into the arena.

        Args:
            slots: of the load.
            first: index of the first block.
            stop: index after the last one.
            fill: reads one.

        Yields:
            What became of each, in order, up to the first miss. A block with the tier's `Source` is here, and held
            until the next one is asked for; one with `Source.DRAM` is here by another's hand, or being written.

        Raises:
            DeadlineExceededError: no room in time.
        """
        reads: deque[tuple[int, _Read]] = deque()
        index = first
        try:
            for due in range(first, stop):
                while index < stop and len(reads) < self._inflight_max:
                    granted = await self._reserve(slots, index, patient=not reads)
                    if granted is None:
                        break
                    reads.append((index, asyncio.create_task(self._read(slots, index, granted, fill))))
                    index += 1
                if not reads:
                    index += 1
                    yield Source.DRAM
                    continue
                await asyncio.wait({reads[0][1]}, timeout=self._wait_s)
                if not reads[0][1].done():
                    self._give_up([read for _, read in reads])
                    yield Miss.TOO_SLOW
                    return
                miss = reads.popleft()[1].result()
                if miss is not None:
                    yield miss
                    return
                try:
                    yield self._source
                finally:
                    slots.release(due)
        finally:
            # Reads under way go on by themselves: their threads still write to their slots. Others keep no slot.
            for abandoned, read in reads:
                self._adopt(slots, abandoned, read)

    async def _reserve(self, slots: BlockSlots, index: int, *, patient: bool) -> Granted | None:
        try:
            return await slots.reserve(index, patient=patient)
        except DeadlineExceededError:
            if patient:
                raise
            return None

    def _give_up(self, reads: Iterable[_Read]) -> None:
        for read in reads:
            if read in self._reading:
                self._overdue[read] = self._reading[read]
                read.add_done_callback(self._overdue.pop)

    def _adopt(self, slots: BlockSlots, index: int, read: _Read) -> None:
        """Let a read end without its load."""
        if read in self._queued:
            read.cancel()
        task = asyncio.create_task(self._see_off(slots, index, read))
        self._adopted.add(task)
        task.add_done_callback(self._adopted.discard)

    async def _see_off(self, slots: BlockSlots, index: int, read: _Read) -> None:
        if await read is None:
            slots.release(index)

    async def end(self) -> None:
        """Wait for the reads that no load waits for; where they have no end of their own, as long as a load would."""
        if self._adopted:
            await asyncio.wait(self._adopted, timeout=self._wait_s)

    async def _read(self, slots: BlockSlots, index: int, granted: Granted, fill: Fill) -> Miss | None:
        got: int | Miss = Miss.STORAGE_FAILED
        this: _Read | None = asyncio.current_task()
        assert this is not None, "each read is a task"
        medium = self._medium(slots, index)
        self._queued.add(this)
        try:
            async with self._places.setdefault(medium, asyncio.Semaphore(self._inflight_max)):
                self._queued.discard(this)
                self._reading[this] = medium
                got = await fill(index, slots.view(granted))
        finally:
            self._queued.discard(this)
            self._reading.pop(this, None)
            if isinstance(got, Miss):
                slots.abort(granted)
        if isinstance(got, Miss):
            return got
        if not slots.commit(granted, got):
            return Miss.NO_ROOM
        slots.hold(index)
        self._landed(slots, index)
        return None

    def _landed(self, slots: BlockSlots, index: int) -> None:
        """A block is in the arena now; nobody else has seen it yet."""

"""Where arriving blocks go: slots reserved one by one, filled, verified, made visible.

A slot is given back only when no thread of ours can write to it any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import suppress
from typing import TypeVar

import numpy as np
import xxhash

from kvfleet.core.block import BlockKey, split
from kvfleet.core.placement import NewBlock
from kvfleet.errors import CorruptBlockError, DeadlineExceededError, LayoutMismatchError
from kvfleet.node.admission import Admitter
from kvfleet.node.dram import DramTier, Granted, Incoming
from kvfleet.node.messages import Bytes, LoadRequest, Window, WindowPart
from kvfleet.node.waiting import now, settled, within

__all__ = ["BlockSlots", "land", "settle"]

_ARENA_PART = 4  # a load may hold a quarter of the arena
_PIECE_BYTES = 256 << 10  # copied, then hashed while still in the cache

T = TypeVar("T")


async def settle(executor: Executor | None, work: Callable[[], T]) -> T:
    """Run blocking work in a thread; if we are cancelled meanwhile, still wait until the thread is done with it.

    However often: a load is cancelled by its deadline, by its client and by the end of the manager.
    """
    return await settled(asyncio.get_running_loop().run_in_executor(executor, work))


class Pace:
    """How far a load runs ahead of its client: what the client has not copied yet is held in the arena."""

    def __init__(self, blocks_max: int) -> None:
        assert blocks_max > 0
        self._blocks_max = blocks_max
        self._held = 0
        self._copied = asyncio.Event()

    def note(self, held: int) -> None:
        """So many blocks are held now."""
        if held < self._held:
            self._copied.set()
        self._held = held

    def full(self, arriving: int = 0) -> bool:
        """Whether the client has enough to copy for now, with so many that are arriving."""
        return self._held + arriving >= self._blocks_max

    async def room(self, timeout_s: float) -> bool:
        """Wait until the client has copied enough for another block. False: not within `timeout_s`."""
        deadline = now() + timeout_s
        while self.full() and (left := deadline - now()) > 0:
            self._copied.clear()
            with suppress(asyncio.TimeoutError):
                await within(left, self._copied.wait())
        return not self.full()


class BlockSlots:
    """Slots for the blocks of one load. Indexes count from the first block of the request."""

    def __init__(self, dram: DramTier, admitter: Admitter, request: LoadRequest) -> None:
        self.dram = dram
        self.request = request
        self.keys = split(request.keys)
        self.began = now()
        self.deadline = self.began + request.timeout_s
        self.pace = Pace(max(1, dram.arena.capacity_bytes // _ARENA_PART // request.num_bytes))
        self._admitter = admitter

    def parent(self, index: int) -> BlockKey | None:
        """The block before one in its prefix, if there is one."""
        if index:
            return self.keys[index - 1]
        return BlockKey(self.request.parent) if self.request.parent else None

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self.deadline - now())

    def resident(self, index: int) -> bool:
        """Whether a block can be read from the arena now."""
        return self.dram.placement.resident(self.keys[index], self.request.shard) is not None

    def pending(self, index: int) -> bool:
        """Whether somebody is writing a block: a client of this node, or a load that was given up."""
        return self.dram.placement.pending(self.keys[index], self.request.shard)

    async def settled(self, index: int, timeout_s: float) -> bool:
        """Wait until nobody is writing a block. False: not within `timeout_s`, or the deadline."""
        deadline = min(self.deadline, now() + timeout_s)
        while self.pending(index):
            left = deadline - now()
            if left <= 0:
                return False
            await self._admitter.changed(left)
        return True

    async def reserve(self, index: int, *, patient: bool) -> Granted | None:
        """A slot for a block; None if there is one with it already, or being written.

        Args:
            index: of the block.
            patient: make room, or wait until others let go of their blocks.

        Raises:
            DeadlineExceededError: no room in time; without patience, no room now.
        """
        request = self.request
        block = NewBlock(self.keys[index], request.shard, self.parent(index), request.num_bytes)
        got = await self._admitter.reserve(
            [Incoming(block, request.depth + index)], request.namespace, 0, self.left_s, patient=patient
        )
        if got.refused:
            raise DeadlineExceededError("room in the arena", request.timeout_s)
        return got.granted[0] if got.granted else None

    def hold(self, index: int) -> None:
        """Keep a block that is here."""
        self.dram.hold(self.keys[index])

    def release(self, index: int) -> None:
        """End a hold."""
        self.dram.release(self.keys[index])
        self._admitter.freed()

    def view(self, granted: Granted) -> Bytes:
        """The memory of a granted slot."""
        return self.dram.view(granted.slot, self.request.num_bytes)

    def commit(self, granted: Granted, checksum: int) -> bool:
        """Make a written block visible. False: it could not be."""
        committed = self.dram.commit(granted.slot, granted.generation, checksum, brought=True)
        self._admitter.freed()
        return committed

    def abort(self, granted: Granted) -> None:
        """Give an unwritten slot back."""
        self.dram.abort(granted.slot, granted.generation)
        self._admitter.freed()


class _Filling:
    """A block whose bytes are arriving."""

    def __init__(self, index: int, granted: Granted | None, view: Bytes | None) -> None:
        self.index = index
        self.granted = granted
        self.view = view
        self.hasher = xxhash.xxh3_64()
        self.num_bytes = 0
        self.checksum = 0

    def take(self, part: WindowPart) -> None:
        """Copy a part in and hash it. Without a slot (the block is here already) the part is passed over."""
        if self.view is None:
            return
        target = self.view[part.start : part.start + len(part.data)]
        for start in range(0, len(target), _PIECE_BYTES):
            piece = target[start : start + _PIECE_BYTES]
            np.copyto(piece, part.data[start : start + _PIECE_BYTES])
            self.hasher.update(piece.data)


async def land(
    windows: AsyncIterator[Window], slots: BlockSlots, first: int, executor: Executor, *, patience_s: float
) -> AsyncGenerator[int, None]:
    """Put arriving windows into slots, up to the last window, or until the client is too slow.

    Args:
        windows: of blocks from `first` on, as the transport brings them.
        slots: of the load.
        first: index of the first block in the windows.
        executor: runs the copies.
        patience_s: longest wait for the client to copy what is here.

    Yields:
        The index of each block when it is verified and visible, in order.

    Raises:
        CorruptBlockError: the bytes of a block, or their order, are not what the holder announced.
        LayoutMismatchError: the holder's blocks have another size.
        DeadlineExceededError: no room in time.
    """
    landing = _Landing(slots, first, executor)
    try:
        async for window in windows:
            for part in window.parts:
                if part.start == 0 and not await landing.open(part.index, patient=False):
                    for index in await landing.flush():  # so that the client can let go of these
                        yield index
                    landing.check()
                    if not await slots.pace.room(patience_s):
                        return
                    await landing.open(part.index, patient=True)
                landing.add(part)
                del part
            del window  # borrowed: given back before the next one is awaited
            for index in await landing.flush():
                yield index
            landing.check()
    finally:
        landing.abort()


class _Landing:
    """Blocks on their way into their slots: one thread hop a window, however many blocks it has."""

    def __init__(self, slots: BlockSlots, first: int, executor: Executor) -> None:
        self._slots = slots
        self._first = first
        self._executor = executor
        self._open: list[_Filling] = []  # in order; only the last one may lack parts
        self._steps: list[tuple[_Filling, WindowPart]] = []
        self._bad: _Filling | None = None

    async def open(self, index: int, *, patient: bool) -> bool:
        """Get block `index` of the windows a slot. False, without patience: no room now."""
        index += self._first
        if index >= len(self._slots.keys):
            raise CorruptBlockError("peer", f"block {index} was not asked for")
        if not patient and self._slots.pace.full(len(self._open)):
            return False
        try:
            granted = await self._slots.reserve(index, patient=patient)
        except DeadlineExceededError:
            if patient:
                raise
            return False
        self._open.append(_Filling(index, granted, self._slots.view(granted) if granted else None))
        return True

    def add(self, part: WindowPart) -> None:
        """Take the next part, which `flush` will copy."""
        num_bytes = self._slots.request.num_bytes
        if part.num_bytes != num_bytes:
            raise LayoutMismatchError(f"blocks of {num_bytes} bytes", f"{part.num_bytes} bytes from a peer")
        filling = self._open[-1] if self._open else None
        fits = part.start + len(part.data) <= part.num_bytes
        if filling is None or not fits or (part.index + self._first, part.start) != (filling.index, filling.num_bytes):
            raise CorruptBlockError("peer", f"part {part.index}+{part.start} of {part.num_bytes} bytes is out of place")
        filling.num_bytes += len(part.data)
        filling.checksum = part.checksum
        self._steps.append((filling, part))

    async def flush(self) -> list[int]:
        """Copy what was added; verify the blocks that are complete and make them visible. Their indexes.

        Of blocks that are complete, those in front of a bad one: they came. Then `check` raises.
        """
        steps, self._steps = self._steps, []
        if steps:
            await settle(self._executor, lambda: _take_all(steps))
        steps.clear()
        landed = []
        while self._open and self._open[0].num_bytes == self._slots.request.num_bytes:
            filling = self._open[0]
            if filling.granted is not None and filling.hasher.intdigest() != filling.checksum:
                self._bad = filling
                break
            self._open.pop(0)
            if filling.granted is not None:
                self._slots.commit(filling.granted, filling.checksum)
            landed.append(filling.index)
        return landed

    def check(self) -> None:
        """See that no block was bad.

        Raises:
            CorruptBlockError: the one behind those that the last `flush` returned is.
        """
        if self._bad is not None:
            raise CorruptBlockError("peer", f"block {self._slots.keys[self._bad.index].hex()} has another checksum")

    def abort(self) -> None:
        """Give back the slots of blocks that did not get all their parts."""
        for filling in self._open:
            if filling.granted is not None:
                self._slots.abort(filling.granted)


def _take_all(steps: list[tuple[_Filling, WindowPart]]) -> None:
    for filling, part in steps:
        filling.take(part)

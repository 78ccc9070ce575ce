"""Blocks on their way to a drive, and how they are coded for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from kvfleet.core.block import BlockKey
from kvfleet.core.slabs import SlabMap
from kvfleet.errors import CorruptBlockError
from kvfleet.node.codecs import RAW, Codec
from kvfleet.node.drive import Drive, moment, pages
from kvfleet.node.drivecalls import DriveCalls
from kvfleet.node.driveentry import Entry

__all__ = ["Write", "encode", "outgrown"]

_SIZE_STEPS = 16  # slots of coded blocks come in so many sizes

Bytes = npt.NDArray[np.uint8]


@dataclass(eq=False, slots=True)
class Write:
    """A block that is to be written.

    Attributes:
        entry: what will be said of it; where it is, is not known yet.
        parent: of the block, if it is to go after those that build on it.
        source: `(num_bytes,)`, uint8, contiguous, beginning on a page.
        check: whether `source` still holds it.
        done: True once it is stored, False if there was no room, or a TierError.
    """

    entry: Entry
    parent: BlockKey | None
    source: Bytes
    check: Callable[[], bool]
    done: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def end(self, stored: bool) -> None:
        """Tell those who wait for it."""
        if not self.done.done():
            self.done.set_result(stored)

    def corrupt(self) -> None:
        """Tell them that the source does not have its checksum."""
        if not self.done.done():
            self.done.set_exception(CorruptBlockError("dram", f"{self.entry.record.hex()}: checksum mismatch"))
            self.done.exception()  # whoever asked may be gone


def encode(codec: Codec, write: Write, _: Callable[[], float]) -> Write | None:
    """Code a block, in a thread; one that does not get smaller by it stays raw.

    Returns:
        None if its source does not have its checksum.
    """
    entry = write.entry
    encoded = codec.encode(write.source, entry.itemsize)
    if encoded.checksum != entry.checksum:
        return None
    if encoded.num_bytes >= entry.num_bytes:
        return write
    data = pages(encoded.num_bytes)
    start = 0
    for piece in encoded.pieces:
        raw = np.frombuffer(memoryview(piece), np.uint8)
        data[start : start + len(raw)] = raw
        start += len(raw)
    step = SlabMap.slot_size(-(-entry.num_bytes // _SIZE_STEPS))
    entry = replace(entry, coded_bytes=start, slot_bytes=-(-start // step) * step, codec=codec.number)
    return replace(write, entry=entry, source=data)


async def outgrown(drive: Drive, calls: DriveCalls, writes: Sequence[Write]) -> dict[BlockKey, list[Write]]:
    """Read what a drive has of blocks of which a shard comes that is coded larger than their slots.

    All shards of a block have slots of one size: with any of them missing the others are of no use. So these are to be
    forgotten and written again, raw, to slots that are large enough whatever else comes.

    Raises:
        TierUnavailableError: the drive failed.
    """
    found: dict[BlockKey, list[Entry]] = {}
    num_bytes = 2 * drive.cost(len(writes))
    for write in writes:
        key = BlockKey(write.entry.key)
        shards = [] if key in found else drive.books.shards(key)
        cost = (1 + len(shards)) * SlabMap.slot_size(write.entry.num_bytes)
        too_large = bool(shards) and write.entry.slot_bytes > shards[0].slot_bytes
        if too_large and drive.budget.allows(num_bytes + cost, moment().monotonic_s):
            num_bytes += cost
            found[key] = shards
    parents = {BlockKey(write.entry.key): write.parent for write in writes}
    again = {key: [await _again(drive, calls, entry, parents[key]) for entry in found[key]] for key in found}
    return {
        key: [write for write in again[key] if write is not None]
        for key in found
        if drive.books.shards(key) == found[key]  # none came or went meanwhile
    }


async def _again(drive: Drive, calls: DriveCalls, entry: Entry, parent: BlockKey | None) -> Write | None:
    """A shard that is on the drive, to be written once more; None if it is damaged."""
    data = pages(entry.num_bytes)
    try:
        await calls.read(partial(drive.read, entry, data))
    except CorruptBlockError:
        return None
    raw = replace(entry, coded_bytes=entry.num_bytes, slot_bytes=SlabMap.slot_size(entry.num_bytes), codec=RAW.number)
    return Write(raw, parent, data, lambda: True)

"""Blocks on their way to a drive, and how they are coded for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from kvfleet.core.block import BlockKey
from kvfleet.core.slabs import SlabMap
from kvfleet.errors import CorruptBlockError
from kvfleet.node.codecs import Codec
from kvfleet.node.drive import pages
from kvfleet.node.driveentry import Entry

__all__ = ["Write", "encode"]

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

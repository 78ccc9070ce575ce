"""What a drive's index says of one block shard."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from kvfleet.core.slabs import SLOT_ALIGN

__all__ = ["Entry"]

_ENTRY = struct.Struct("<QIIIQ16sIHBBQ")
_DIGEST = struct.Struct("<Q")
_VALUE_BYTES = _ENTRY.size + _DIGEST.size
_KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class Entry:
    """A block shard on a drive.

    Attributes:
        record: its id: key and shard, 18 bytes.
        offset: of its slot in the data file.
        num_bytes: of the block.
        coded_bytes: of what is in the slot.
        slot_bytes: of the slot, whole pages.
        checksum: xxh3-64 of the block.
        namespace_id: 16 bytes, public.
        parent_fingerprint: `key_fingerprint` of the parent's key; 0 for none.
        depth: index of the block in its prefix, at most 65,535.
        codec: how the bytes are coded, a number of `codecs`.
        itemsize: bytes of one number in the block.
        last_access: nanoseconds of the drive's own time, which does not go back from one process to the next.
    """

    record: bytes
    offset: int
    num_bytes: int
    coded_bytes: int
    slot_bytes: int
    checksum: int
    namespace_id: bytes
    parent_fingerprint: int
    depth: int
    codec: int
    itemsize: int
    last_access: int

    @property
    def key(self) -> bytes:
        """Of the block, 16 bytes."""
        return self.record[:_KEY_BYTES]

    @property
    def shard(self) -> int:
        """Of the block."""
        return int.from_bytes(self.record[_KEY_BYTES:], "little")

    def pack(self) -> bytes:
        """All but the record id, as it is stored."""
        packed = _ENTRY.pack(
            self.offset,
            self.num_bytes,
            self.coded_bytes,
            self.slot_bytes // SLOT_ALIGN,
            self.checksum,
            self.namespace_id,
            self.parent_fingerprint,
            self.depth,
            self.codec,
            self.itemsize,
            self.last_access,
        )
        return packed + _digest(self.record, packed)

    @classmethod
    def unpack(cls, record: bytes, value: bytes) -> Entry | None:
        """Read what `pack` made; None if it was damaged."""
        if len(value) != _VALUE_BYTES or _digest(record, value[: _ENTRY.size]) != value[_ENTRY.size :]:
            return None
        offset, num_bytes, coded_bytes, pages, *rest = _ENTRY.unpack_from(value)
        return cls(record, offset, num_bytes, coded_bytes, pages * SLOT_ALIGN, *rest)


def _digest(record: bytes, packed: bytes) -> bytes:
    return _DIGEST.pack(xxhash.xxh3_64_intdigest(record + packed))

"""What the NVMe tier says of a record, and what its drives do."""

from __future__ import annotations

from dataclasses import dataclass

from kvfleet.core.block import BlockKey
from kvfleet.core.slabs import SlabMap
from kvfleet.node.codecs import RAW
from kvfleet.node.driveentry import Entry

__all__ = ["Stored", "entry_of", "stored_of"]

_DEPTH_MAX = 0xFFFF


@dataclass(frozen=True, slots=True)
class Stored:
    """A record on a drive, or one that is to be there.

    Attributes:
        key: of the block.
        shard: of the record.
        num_bytes: of the block.
        checksum: xxh3-64 of it.
        namespace_id: 16 bytes, public.
        depth: index of the block in its prefix.
        parent_fingerprint: `key_fingerprint` of the parent's key; 0 for none.
    """

    key: BlockKey
    shard: int
    num_bytes: int
    checksum: int
    namespace_id: bytes
    depth: int
    parent_fingerprint: int


def stored_of(entry: Entry) -> Stored:
    """What an entry says to those who ask the tier."""
    return Stored(
        key=BlockKey(entry.key),
        shard=entry.shard,
        num_bytes=entry.num_bytes,
        checksum=entry.checksum,
        namespace_id=entry.namespace_id,
        depth=entry.depth,
        parent_fingerprint=entry.parent_fingerprint,
    )


def entry_of(record: bytes, stored: Stored, itemsize: int) -> Entry:
    """What will be said of a record, uncoded; where it is, is not known yet."""
    return Entry(
        record=record,
        offset=0,
        num_bytes=stored.num_bytes,
        coded_bytes=stored.num_bytes,
        slot_bytes=SlabMap.slot_size(stored.num_bytes),
        checksum=stored.checksum,
        namespace_id=stored.namespace_id,
        parent_fingerprint=stored.parent_fingerprint,
        depth=min(stored.depth, _DEPTH_MAX),
        codec=RAW.number,
        itemsize=itemsize,
        last_access=0,
    )

"""How a node tells the directory what it holds, and what it is answered.

A *record* is a key and a shard, 18 bytes packed: the key, then the shard as little-endian uint16.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NewType

import numpy as np

from kvfleet.core.block import KEY_BYTES, BlockKey

__all__ = [
    "RECORD_BYTES",
    "Applied",
    "Delta",
    "Digest",
    "InventoryPage",
    "NodeId",
    "parts_of",
    "record_id",
    "split_records",
]

NodeId = NewType("NodeId", str)

RECORD_BYTES = 18
_OBJECT_BYTES = 71


@dataclass(frozen=True, slots=True)
class Digest:
    """A fingerprint of a set of records.

    Attributes:
        count: of records.
        xor: of all records, 18 bytes.
    """

    count: int
    xor: bytes

    @classmethod
    def of(cls, records: bytes) -> Digest:
        """Digest of distinct packed records."""
        table = np.frombuffer(records, np.uint8).reshape(-1, RECORD_BYTES)
        return cls(len(table), np.bitwise_xor.reduce(table, axis=0).tobytes())


@dataclass(frozen=True, slots=True)
class Delta:
    """What changed at a node since the delta before, net: no record is both added and removed.

    Attributes:
        node: the sender.
        epoch: of its manager; grows with each start.
        seq: one more than that of the delta or inventory before.
        added: packed records the node holds now.
        removed: packed records it no longer holds.
        shared_added: packed records of which the shared tier has a copy, whoever wrote it.
        shared_removed: packed records whose shared copy is gone or bad, for everyone.
        shared_dropped: those of them that the keeper of the catalog is about to delete, as there are too many.
        shared_lost: those of them whose copy should have been there and good: who holds them saves them again.
        digest: of all the node's records after this delta, or None.
        not_admitted: packed records that clients wanted to store here and could not. A hint: it may be lost.
        objects: packed rows (`objectrows.ROW`) of objects that were written to the shared tier, or used.
        unclaimed: packed records that the node has claimed and does not write for now. A hint.
        retired: packed records that will not be used again, as their session has ended. A hint.
        may_keep: the sender reaches the shared tier: it may be named to keep its catalog.
    """

    node: NodeId
    epoch: int
    seq: int
    added: bytes = b""
    removed: bytes = b""
    shared_added: bytes = b""
    shared_removed: bytes = b""
    digest: Digest | None = None
    not_admitted: bytes = b""
    objects: bytes = b""
    shared_lost: bytes = b""
    shared_dropped: bytes = b""
    unclaimed: bytes = b""
    retired: bytes = b""
    may_keep: bool = True

    @property
    def num_records(self) -> int:
        """How many records it tells something of; a measure of the work it makes."""
        told = (self.added, self.removed, self.shared_added, self.shared_removed, self.not_admitted, self.retired)
        return sum(map(len, told)) // RECORD_BYTES + len(self.objects) // _OBJECT_BYTES


@dataclass(frozen=True, slots=True)
class InventoryPage:
    """A part of all the records a node holds. Pages come in order; the last one puts the inventory into effect.

    Attributes:
        node: the sender.
        epoch: of its manager.
        seq: state the inventory shows; the next delta has `seq + 1`. The same in all pages.
        page: number, from 0.
        last: no page follows.
        records: packed, distinct over all pages.
    """

    node: NodeId
    epoch: int
    seq: int
    page: int
    last: bool
    records: bytes


class Applied(Enum):
    """What the directory did with a message."""

    OK = "ok"
    NEED_INVENTORY = "need_inventory"  # send page 0 next
    STALE_EPOCH = "stale_epoch"  # nothing changed; a later life of the node has spoken
    BUSY = "busy"  # nothing changed; send the same again, a little later


def record_id(key: bytes, shard: int) -> bytes:
    """A key and a shard packed: 18 bytes."""
    return key + shard.to_bytes(RECORD_BYTES - len(key), "little")


def parts_of(record: bytes) -> tuple[BlockKey, int]:
    """Key and shard of a record."""
    assert len(record) == RECORD_BYTES
    return BlockKey(record[:KEY_BYTES]), int.from_bytes(record[KEY_BYTES:], "little")


def split_records(packed: bytes) -> list[bytes]:
    """The packed records one by one."""
    assert len(packed) % RECORD_BYTES == 0, "packed records are 18 bytes each"
    return [packed[i : i + RECORD_BYTES] for i in range(0, len(packed), RECORD_BYTES)]

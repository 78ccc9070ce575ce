"""What is told of an object in the shared tier: one row of 71 bytes, in messages, manifests and the catalog alike."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvfleet.core.inventory import RECORD_BYTES

__all__ = ["NUM_SHARDS_MAX", "ROW", "ROW_BYTES", "ObjectRows", "SharedObject", "gone_rows", "record_ids", "rows_of"]

NUM_SHARDS_MAX = 1 << 16

ROW = np.dtype(
    [
        ("namespace_id", "V16"),
        ("key", "V16"),
        ("shard", "<u2"),
        ("num_shards", "<u4"),
        ("bytes", "<u8"),  # of the object; 0: it is gone
        ("stored_at", "<i8"),  # ms since 1970, UTC; 0: not known, the row tells of a use
        ("last_used", "<i8"),  # likewise
        ("depth", "<u4"),  # index of the block in its prefix
        ("parent", "<u4"),  # the first 4 bytes of its parent's key, little-endian; 0 without one
        ("deleting", "u1"),  # 1: it is to be deleted, and nobody should look for it
    ]
)
ObjectRows = npt.NDArray[np.void]
"""Shape (num_rows,), dtype ROW."""

ROW_BYTES = ROW.itemsize
_PACKED = struct.Struct("<16s16sHIQqqIIB")
_RECORD = np.dtype({"names": ["record"], "formats": [f"S{RECORD_BYTES}"], "offsets": [16], "itemsize": ROW_BYTES})
assert _PACKED.size == ROW_BYTES


@dataclass(frozen=True, slots=True)
class SharedObject:
    """A block shard in the shared tier.

    Attributes:
        namespace_id: 16 bytes.
        key: 16 bytes.
        shard: of the block.
        num_shards: of the block.
        num_bytes: of the object.
        depth: index of the block in its prefix.
        parent_fingerprint: the first 4 bytes of its parent's key, little-endian; 0 without one.
    """

    namespace_id: bytes
    key: bytes
    shard: int
    num_shards: int
    num_bytes: int
    depth: int
    parent_fingerprint: int

    def __post_init__(self) -> None:
        assert len(self.namespace_id) == len(self.key) == 16
        assert 0 <= self.shard < self.num_shards <= NUM_SHARDS_MAX
        assert self.num_bytes > 0

    @property
    def record(self) -> bytes:
        """Its record id, 18 bytes."""
        return self.key + self.shard.to_bytes(2, "little")

    def row(self, *, stored_at: int, last_used: int) -> bytes:
        """Its row.

        Args:
            stored_at: ms since 1970; 0 if it was used, and when it was stored is not known.
            last_used: ms since 1970.
        """
        return _PACKED.pack(
            self.namespace_id, self.key, self.shard, self.num_shards, self.num_bytes,
            stored_at, last_used, self.depth, self.parent_fingerprint, 0,
        )  # fmt: skip


def rows_of(packed: bytes) -> ObjectRows:
    """The rows of a message; not writable."""
    return np.frombuffer(packed, ROW)


def gone_rows(records: bytes) -> bytes:
    """Packed rows that say that some packed records are gone. Who knows the records knows the rest."""
    rows = np.zeros(len(records) // RECORD_BYTES, ROW)
    rows["num_shards"] = NUM_SHARDS_MAX
    rows.view(_RECORD)["record"] = np.frombuffer(records, f"S{RECORD_BYTES}")
    return rows.tobytes()


def record_ids(rows: ObjectRows) -> bytes:
    """The packed 18-byte record ids of rows: key and shard, as the directory takes them."""
    return rows.view(_RECORD)["record"].tobytes()

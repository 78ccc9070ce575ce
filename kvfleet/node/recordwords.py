"""What a record of the table is: its words, and what readers get to see of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["RECORD", "Found", "Record", "committed", "in_use", "key_fingerprint"]

RECORD = np.dtype(
    [
        ("generation", "<u8"),
        ("key_low", "<u8"),
        ("key_high", "<u8"),
        ("checksum", "<u8"),  # while reserved: the client that writes, 0 = the manager itself or nobody
        ("offset", "<u8"),
        ("last_access", "<u8"),
        ("length", "<u4"),
        ("parent_fingerprint", "<u4"),
        ("shard", "<u2"),
        ("depth", "<u2"),
        ("namespace", "<u2"),
        ("codec", "u1"),
        ("tier", "u1"),
    ]
)
WORDS = 8  # 64-bit words in a record
GENERATION, KEY_LOW, KEY_HIGH, CHECKSUM, OFFSET, LAST_ACCESS, SIZES, PLACE = range(WORDS)
KEY_BYTES = 16
DEPTH_MAX = 0xFFFF

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]
Indexes = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Found:
    """Where the asked-for blocks are. All arrays have shape (num_keys,), in the order of the keys.

    Attributes:
        slots: record numbers; -1 is a miss, and then the other arrays hold nothing of use.
        generations: as they were before anything else was read; give them to `RecordTable.unchanged`.
        offsets: of the slots in the arena file, bytes.
        lengths: of the blocks, bytes.
        checksums: xxh3-64 of the blocks' bytes.
        pending: misses that a client of this node is writing, as far as is known.
    """

    slots: Indexes
    generations: Words
    offsets: Words
    lengths: npt.NDArray[np.uint32]
    checksums: Words
    pending: Flags


class Record(NamedTuple):
    """One record as the manager reads it: committed, or reserved by `client_id`, whose bits `checksum` holds then."""

    slot: int
    key: bytes
    client_id: int
    generation: int
    checksum: int
    offset: int
    last_access: int
    length: int
    parent_fingerprint: int
    shard: int
    depth: int
    namespace: int
    codec: int
    tier: int

    @property
    def committed(self) -> bool:
        """Whether readers can see it."""
        return self.generation % 2 == 0 and self.generation != 0


def key_fingerprint(key: bytes) -> int:
    """The 32 bits of a key that its children's records keep; 0 for the root's children (`b""`)."""
    return int.from_bytes(key[:4], "little")


def committed(generations: Words) -> Flags:
    """Which generations are those of committed records."""
    even: Flags = np.equal(generations & np.uint64(1), 0)
    even &= generations != 0
    return even


def in_use(generations: Words, checksums: Words) -> Flags:
    """Which records are committed, or reserved by a client."""
    flags: Flags = committed(generations) | ((generations & np.uint64(1) != 0) & (checksums != 0))
    return flags

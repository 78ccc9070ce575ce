"""Hints from key to record number: a hash table in shared memory that may be wrong but never misleads.

Buckets of eight 64-bit hints, one cache line each; a hint is 32 bits of the key and the record number plus one,
written by one 8-byte store. Who follows a hint compares the whole key with the record's, so that a torn table costs
a miss at worst.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["HintTable", "hint_bytes"]

WAYS = 8

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]
Indexes = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_LOW32 = np.uint64(0xFFFF_FFFF)
_SHIFT32 = np.uint64(32)
_FINGERPRINT_BIT = 0x8000_0000  # set in every fingerprint, so that an empty hint matches nothing
_SHARD_STEP = 0x9E37_79B9_7F4A_7C15  # spreads the shards of one key over the buckets
_MASK64 = 0xFFFF_FFFF_FFFF_FFFF


def _num_buckets(num_records: int) -> int:
    # A power of two with at most one record a bucket on average: a bucket of eight then overflows about once
    # in a million commits when every record is in use.
    return 1 << max(0, num_records - 1).bit_length()


def hint_bytes(num_records: int) -> int:
    """Bytes of the hints of `num_records` records."""
    return _num_buckets(num_records) * WAYS * 8


class HintTable:
    """Hints over a buffer of `hint_bytes(num_records)` bytes, 8-byte aligned, zero when new.

    Keys are pairs of words: the low and the high eight bytes of a key, little-endian.

    Threads: `match` and `all_of` may be called from any thread of any process at any time. All other methods belong
    to the one writer and must not run concurrently.
    """

    def __init__(self, buffer: Bytes, num_records: int) -> None:
        assert 0 < num_records < _FINGERPRINT_BIT
        assert buffer.shape == (hint_bytes(num_records),)
        self._num_records = num_records
        self._flat: Words = buffer.view(np.uint64)
        self._rows: Words = self._flat.reshape(-1, WAYS)
        self._mask = len(self._rows) - 1
        # The writer's single loads and stores: 8 bytes each, never torn, cheaper than numpy scalars.
        self._cells = buffer.data.cast("Q")

    def match(self, pairs: Words, shard: int) -> tuple[Indexes, Flags]:
        """The first record hinted at for each key.

        Args:
            pairs: keys, shape (num_keys, 2).
            shard: of the wanted records.

        Returns:
            Record numbers, shape (num_keys,), -1 where there is no hint; and which ways of the bucket match,
            shape (num_keys, 8): more than one where a fingerprint is shared, see `all_of`.
        """
        fingerprints = (pairs[:, 1] >> _SHIFT32) | np.uint64(_FINGERPRINT_BIT)
        buckets = (pairs[:, 0] + np.uint64(shard * _SHARD_STEP & _MASK64)) & np.uint64(self._mask)
        hints = self._rows.take(buckets.view(np.int64), axis=0)
        matches = (hints >> _SHIFT32) == fingerprints[:, None]
        cells = matches.argmax(axis=1)
        cells += np.arange(0, len(pairs) * WAYS, WAYS)
        slots = (hints.reshape(-1).take(cells) & _LOW32).view(np.int64)
        slots *= matches.reshape(-1).take(cells)
        slots -= 1
        slots[slots >= self._num_records] = -1
        return slots, matches

    def all_of(self, low: int, high: int, shard: int) -> list[int]:
        """Every record hinted at for one key."""
        fingerprint = high >> 32 | _FINGERPRINT_BIT
        hints = [self._cells[cell] for cell in self._bucket(low, shard)]
        slots = [(hint & 0xFFFF_FFFF) - 1 for hint in hints if hint >> 32 == fingerprint]
        return [slot for slot in slots if 0 <= slot < self._num_records]

    def vacancy(self, low: int, shard: int) -> int | None:
        """A free cell for a key's hint, None if its bucket is full."""
        return next((cell for cell in self._bucket(low, shard) if self._cells[cell] == 0), None)

    def link(self, vacancy: int, high: int, slot: int) -> None:
        """Write a record's hint into the free cell found for it."""
        self._cells[vacancy] = _hint(high, slot)

    def unlink(self, low: int, high: int, shard: int, slot: int) -> None:
        """Remove a record's hint, if it has one."""
        hint = _hint(high, slot)
        for cell in self._bucket(low, shard):
            if self._cells[cell] == hint:
                self._cells[cell] = 0

    def clear(self) -> None:
        """Remove all hints."""
        self._flat[:] = 0

    def prune(self, low: Words, high: Words, shards: Words, in_use: Flags) -> Flags:
        """Remove hints that are not of a record in use.

        Args:
            low: low words of the records' keys, shape (num_records,), as the other arguments.
            high: high words.
            shards: shards.
            in_use: which records are.

        Returns:
            Which records have a hint now.
        """
        slots = (self._flat & _LOW32).view(np.int64) - 1
        right = (slots >= 0) & (slots < self._num_records)
        slots[~right] = 0
        right &= in_use[slots]
        right &= (self._flat >> _SHIFT32) == ((high >> _SHIFT32) | np.uint64(_FINGERPRINT_BIT))[slots]
        buckets = (low + shards * np.uint64(_SHARD_STEP)) & np.uint64(self._mask)
        right &= buckets[slots] == np.arange(len(self._flat), dtype=np.uint64) // np.uint64(WAYS)
        self._flat[~right] = 0
        linked = np.zeros(self._num_records, np.bool_)
        linked[slots[right]] = True
        return linked

    def _bucket(self, low: int, shard: int) -> range:
        first = ((low + shard * _SHARD_STEP) & self._mask) * WAYS
        return range(first, first + WAYS)


def _hint(high: int, slot: int) -> int:
    return (high >> 32 | _FINGERPRINT_BIT) << 32 | (slot + 1)

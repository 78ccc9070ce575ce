"""The record table: the index of a node's blocks, in shared memory, read without locks or calls.

One 64-byte record per slot, and a hash table of hints from key to record. The record is the truth: a hint that
is missing or stale is a miss, never a wrong block. There is one writer, the node's manager, and any number of
readers in other processes, which register nowhere and hold nothing.

A record's generation is its state: even and nonzero is committed, odd is free or being written, zero was never
used. Reading a block is a seqlock (Boehm, "Can seqlocks get along with programming language memory models?",
MSPC 2012): take the generation, copy the slot, take it again. It is safe because the writer makes the
generation odd before the first other byte changes. It relies on loads and stores being seen in order, as on
x86-64; where `ORDERED` is false readers must verify the block's checksum as well.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvfleet.node.hints import HintTable, hint_bytes
from kvfleet.node.recordwords import (
    CHECKSUM,
    DEPTH_MAX,
    GENERATION,
    KEY_BYTES,
    KEY_HIGH,
    KEY_LOW,
    LAST_ACCESS,
    OFFSET,
    PLACE,
    RECORD,
    SIZES,
    WORDS,
    Bytes,
    Flags,
    Found,
    Indexes,
    Record,
    Words,
    committed,
    in_use,
    key_fingerprint,
)

__all__ = ["ORDERED", "RECORD", "Found", "Record", "RecordTable", "key_fingerprint", "table_bytes"]

ORDERED = platform.machine() in {"x86_64", "AMD64"}

_LOW16 = np.uint64(0xFFFF)
_LOW32 = np.uint64(0xFFFF_FFFF)
_NAMESPACE_SHIFT = np.uint64(32)


def table_bytes(num_records: int) -> int:
    """Bytes of a table of `num_records` records with its hints."""
    return num_records * RECORD.itemsize + hint_bytes(num_records)


class RecordTable:
    """Records and hints over a buffer of `table_bytes(num_records)` bytes, 8-byte aligned, zero when new.

    Threads: `find`, `unchanged` and `touch` may be called from any thread of any process at any time. All other
    methods belong to the one writer and must not run concurrently. Nothing blocks.
    """

    def __init__(self, buffer: Bytes, num_records: int) -> None:
        assert RECORD.itemsize == WORDS * 8
        assert buffer.dtype == np.uint8
        assert buffer.shape == (table_bytes(num_records),)
        split = num_records * RECORD.itemsize
        self.num_records = num_records
        self._flat: Words = buffer[:split].view(np.uint64)
        self._words: Words = self._flat.reshape(num_records, WORDS)
        self._hints = HintTable(buffer[split:], num_records)
        # The writer's single loads and stores: 8 bytes each, never torn, cheaper than numpy scalars.
        self._cells = buffer[:split].data.cast("Q")
        self.last_access: Words = self._words[:, LAST_ACCESS]

    def depths(self, slots: npt.NDArray[np.intp]) -> Words:
        """Indexes in their prefixes of the blocks in some slots, up to 65,535."""
        depths: Words = self._words[slots, PLACE] >> np.uint64(16) & _LOW16
        return depths

    def find(self, keys: bytes, shard: int = 0) -> Found:
        """Look up packed keys, 16 bytes each."""
        assert len(keys) % KEY_BYTES == 0
        pairs = np.frombuffer(keys, np.uint64).reshape(-1, 2)
        slots, matches = self._hints.match(pairs, shard)
        generations, records, same = self._snapshot(slots, pairs, shard)
        hits = same & committed(generations)
        if not hits.all():
            # Two hints in one bucket with the same fingerprint, one of them of another key: very rare.
            for i in np.flatnonzero(~hits & (np.count_nonzero(matches, axis=1) > 1)).tolist():
                for slot in self._hints.all_of(int(pairs[i, 0]), int(pairs[i, 1]), shard):
                    one = self._snapshot(np.array([slot]), pairs[i : i + 1], shard)
                    if one[2][0]:
                        slots[i], generations[i], records[i], same[i] = slot, one[0][0], one[1][0], True
                        break
            hits = same & committed(generations)
            slots[~hits] = -1
        return Found(
            slots=slots,
            generations=generations,
            offsets=records[:, OFFSET],
            lengths=(records[:, SIZES] & _LOW32).astype(np.uint32),
            checksums=records[:, CHECKSUM],
            pending=same & ~hits,
        )

    def unchanged(self, slots: Indexes, generations: Words) -> Flags:
        """Which of the found slots still hold what they held: call it after copying them. Misses are false."""
        now: Words = self._flat.take(np.maximum(slots, 0) * WORDS)
        return np.equal(now, generations) & (slots >= 0)

    def touch(self, slots: Indexes, now_ns: int) -> None:
        """Note the use of found slots at monotonic time `now_ns`. Misses (-1) are skipped."""
        self.last_access[slots[slots >= 0]] = now_ns

    def reserve(  # noqa: PLR0913 - the fields of a record
        self,
        slot: int,
        *,
        key: bytes,
        shard: int,
        parent_fingerprint: int,
        depth: int,
        namespace: int,
        offset: int,
        length: int,
        client_id: int,
    ) -> int:
        """Give a slot to a writer. Whatever it held is gone for readers before this returns.

        Args:
            slot: record number.
            key: 16 bytes.
            shard: of the block.
            parent_fingerprint: `key_fingerprint` of the parent's key.
            depth: index of the block in its prefix; kept up to 65,535.
            namespace: number of the block's namespace.
            offset: of the slot in the arena file, bytes.
            length: of the block, bytes.
            client_id: of the process that will write, 0 for the manager itself.

        Returns:
            The odd generation to give back at `commit`.
        """
        assert len(key) == KEY_BYTES
        generation = self.free(slot)
        cells, base = self._cells, slot * WORDS
        cells[base + KEY_LOW] = int.from_bytes(key[:8], "little")
        cells[base + KEY_HIGH] = int.from_bytes(key[8:], "little")
        cells[base + OFFSET] = offset
        cells[base + LAST_ACCESS] = 0
        cells[base + SIZES] = length | parent_fingerprint << 32
        cells[base + PLACE] = shard | min(depth, DEPTH_MAX) << 16 | namespace << 32
        if client_id:
            self._link(slot)  # so that readers see that it is being written; without a vacancy they do not
        # Last, so that a manager that dies before this leaves a free slot, not half a reservation.
        cells[base + CHECKSUM] = client_id
        return generation

    def commit(self, slot: int, generation: int, checksum: int, now_ns: int) -> bool:
        """Make a written slot visible.

        Returns:
            False if the slot is no longer this reservation's (nothing is changed), or if the key's hint bucket is
            full (the slot is free then).
        """
        assert generation % 2 == 1
        cells, base = self._cells, slot * WORDS
        if cells[base + GENERATION] != generation:
            return False
        if not (self._linked(slot) or self._link(slot)):
            self.free(slot)
            return False
        cells[base + CHECKSUM] = checksum
        cells[base + LAST_ACCESS] = now_ns
        cells[base + GENERATION] = generation + 1
        return True

    def free(self, slot: int) -> int:
        """Take a slot back, committed, reserved or free. Every generation of it that is known is void from here on.

        Returns:
            Its new, odd generation.
        """
        # The store that hides the block comes first; whatever follows it is invisible to readers.
        cells, base = self._cells, slot * WORDS
        generation = cells[base + GENERATION]
        hidden = generation + 1 + generation % 2
        used = generation != 0 and (generation % 2 == 0 or cells[base + CHECKSUM] != 0)
        cells[base + GENERATION] = hidden
        cells[base + CHECKSUM] = 0
        if used:
            low, high, shard = cells[base + KEY_LOW], cells[base + KEY_HIGH], cells[base + PLACE] & 0xFFFF
            self._hints.unlink(low, high, shard, slot)
        return hidden

    def record(self, slot: int) -> Record:
        """One record, whatever its state."""
        generation, low, high, checksum, offset, last_access, sizes, place = self._cells[
            slot * WORDS : (slot + 1) * WORDS
        ].tolist()
        return Record(
            slot, low.to_bytes(8, "little") + high.to_bytes(8, "little"), checksum * (generation % 2), generation,
            checksum, offset, last_access, sizes & 0xFFFF_FFFF, sizes >> 32,
            place & 0xFFFF, place >> 16 & 0xFFFF, place >> 32 & 0xFFFF, place >> 48 & 0xFF, place >> 56,
        )  # fmt: skip

    def live(self) -> list[Record]:
        """All committed records, and the reserved ones that name a client, in order of slots."""
        return self._read(np.flatnonzero(in_use(self._words[:, GENERATION], self._words[:, CHECKSUM])))

    def slot_of(self, key: bytes, shard: int) -> int | None:
        """The slot of a committed record; for the writer, which is quicker so than by `find`."""
        low, high = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
        for slot in self._hints.all_of(low, high, shard):
            base = slot * WORDS
            generation, *words = self._cells[base : base + KEY_HIGH + 1].tolist()
            here = generation % 2 == 0 != generation
            if here and words == [low, high] and self._cells[base + PLACE] & 0xFFFF == shard:
                return slot
        return None

    def clear(self) -> None:
        """Take all slots back."""
        generations = self._words[:, GENERATION]
        generations[:] = generations + np.uint64(1) * committed(generations)
        self._words[:, CHECKSUM] = 0
        self._hints.clear()

    def namespaces(self, slots: Sequence[int]) -> set[int]:
        """The numbers of the namespaces of some records."""
        places = self._words[np.array(slots, np.int64), PLACE]
        return set(((places >> _NAMESPACE_SHIFT) & _LOW16).tolist())

    def recover(self) -> None:
        """Make the hints agree with the records again, after a manager died at any point.

        Readers may go on meanwhile and miss nothing that was found before.
        """
        words = self._words
        used = in_use(words[:, GENERATION], words[:, CHECKSUM])
        linked = self._hints.prune(words[:, KEY_LOW], words[:, KEY_HIGH], words[:, PLACE] & _LOW16, used)
        for slot in np.flatnonzero(committed(words[:, GENERATION]) & ~linked).tolist():
            if not self._link(slot):
                self.free(slot)

    def _snapshot(self, slots: Indexes, pairs: Words, shard: int) -> tuple[Words, Words, Flags]:
        """Generations and records, shape (n, 8), at one moment, and which are the wanted blocks' and in use."""
        numbers = np.maximum(slots, 0)  # a miss reads record 0, to no effect
        generations = self._flat.take(numbers * WORDS)
        records = self._words.take(numbers, axis=0)
        wanted = (slots >= 0) & (self._flat.take(numbers * WORDS) == generations)
        wanted &= in_use(generations, records[:, CHECKSUM])
        wanted &= records[:, KEY_LOW] == pairs[:, 0]
        wanted &= records[:, KEY_HIGH] == pairs[:, 1]
        wanted &= (records[:, PLACE] & _LOW16) == np.uint64(shard)
        return generations, records, wanted

    def _read(self, slots: Indexes) -> list[Record]:
        words = self._words[slots]
        keys = np.ascontiguousarray(words[:, KEY_LOW : KEY_HIGH + 1]).view("V16").reshape(-1).tolist()
        rows = words.view(RECORD).reshape(-1).tolist()
        return [
            Record(slot, key, checksum * (generation % 2), generation, checksum, *others)
            for slot, key, (generation, _, _, checksum, *others) in zip(slots.tolist(), keys, rows, strict=True)
        ]

    def _linked(self, slot: int) -> bool:
        cells, base = self._cells, slot * WORDS
        return slot in self._hints.all_of(cells[base + KEY_LOW], cells[base + KEY_HIGH], cells[base + PLACE] & 0xFFFF)

    def _link(self, slot: int) -> bool:
        cells, base = self._cells, slot * WORDS
        vacancy = self._hints.vacancy(cells[base + KEY_LOW], cells[base + PLACE] & 0xFFFF)
        if vacancy is None:
            return False
        self._hints.link(vacancy, cells[base + KEY_HIGH], slot)
        return True

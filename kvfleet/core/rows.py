"""The directory's table: record → bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from kvfleet.core.departures import Departures
from kvfleet.core.inventory import RECORD_BYTES, Digest, split_records
from kvfleet.core.outcomes import Miss

__all__ = ["SHARED", "NodeRows", "Rows", "some_bits", "split_bits"]

SHARED = 1  # bit 0 of a row
SWEEP_ROWS = 2_000  # visited by one sweep at most, give or take a part: about 2 ms
_PARTS = 1 << 12  # so that even of 20 million rows one part is no more than a sweep


@dataclass(slots=True)
class NodeRows:
    """The records of one node, under a bit of their own; `count` and `xor` are of the rows that have the bit.

    Attributes:
        epoch: of the node when it told them.
        complete: False if an addition was refused.
    """

    bit: int
    epoch: int
    count: int = 0
    xor: int = 0
    complete: bool = True

    def note(self, records: list[bytes], change: int) -> None:
        """Count records that got the bit (`change` 1) or lost it (-1)."""
        if records:
            self.count += change * len(records)
            self.xor ^= int.from_bytes(Digest.of(b"".join(records)).xor, "little")

    def differs(self, digest: Digest) -> bool:
        """Whether the node's own digest shows another set. One that is not complete differs anyway: no answer."""
        mine = Digest(self.count, self.xor.to_bytes(RECORD_BYTES, "little"))
        return self.complete and mine != digest


class Rows:
    """record → bits: bit 0 is the shared tier, one bit each other set of records.

    A bit that is retired is cleared from the rows later, a part of the table at a time, and not given out again
    before: dropping a node costs nothing at once, however much it held. A record whose last bit goes is noted in
    `departures`.
    """

    def __init__(self, rows_max: int) -> None:
        self.rows_max = rows_max
        self.count = 0
        self.shared = 0
        self.refused = 0
        self.visible = SHARED
        self.departures = Departures()
        self._parts: list[dict[bytes, int]] = [{} for _ in range(_PARTS)]  # by the first 12 bits
        self._used = SHARED  # visible, arriving or retired
        self._retired = 0
        self._retired_as: dict[Miss, int] = {Miss.HOLDER_LOST: 0, Miss.EVICTED: 0}  # bits of `_retired`
        self._sweeping = 0  # bits that no row has at the end of this round over the parts
        self._next_part = 0
        self._parts_left = 0  # in this round

    @property
    def roomy(self) -> bool:
        """Whether a tenth of the rows are free: worth asking again for what was refused."""
        return self.count <= self.rows_max - self.rows_max // 10

    def part(self, key: bytes) -> dict[bytes, int]:
        """The part that has the records of a key, to read."""
        return self._parts[key[0] << 4 | key[1] >> 4]

    def tables(self) -> Sequence[Mapping[bytes, int]]:
        """All parts, to be measured."""
        return self._parts

    def new_bit(self) -> int:
        """A bit that no row has."""
        bit = ~self._used & (self._used + 1)
        self._used |= bit
        return bit

    def retire(self, bit: int, why: Miss) -> None:
        """Make the rows forget a bit. It is not visible any more at once.

        Args:
            bit: visible or arriving.
            why: what a record is missing for that nobody else has; UNKNOWN if it may be there after all.
        """
        assert bit & self._used & ~self._retired & ~SHARED, "bit is in use"
        self.visible &= ~bit
        self._retired |= bit
        if why in self._retired_as:
            self._retired_as[why] |= bit
        self._begin_round()
        self.sweep()

    def add(self, records: bytes, bit: int) -> tuple[list[bytes], bool]:
        """Give packed records a bit: those that had it not, and whether there was room for all."""
        gained = []
        refused = before = 0
        after = bit
        for record in split_records(records):
            part = self._parts[record[0] << 4 | record[1] >> 4]
            bits = part.get(record, 0)
            if bits & bit:
                continue
            if not bits:
                if self.count >= self.rows_max:
                    refused += 1
                    continue
                self.count += 1
            if bits != before:  # rows of a run share one int: with a thousand nodes it is larger than the row
                before, after = bits, bits | bit if bits else bit
            part[record] = after
            gained.append(record)
        self.refused += refused
        self.shared += len(gained) if bit == SHARED else 0
        self.departures.forget(gained)
        self.departures.complete = self.departures.complete and not refused
        return gained, not refused

    def remove(self, records: bytes, bit: int, why: Miss = Miss.EVICTED) -> list[bytes]:
        """Take a bit from packed records: those that had it. What nobody else has is missing for the reason given."""
        lost = []
        for record in split_records(records):
            part = self._parts[record[0] << 4 | record[1] >> 4]
            bits = part.get(record, 0)
            if not bits & bit:
                continue
            if bits == bit:
                del part[record]
                self.count -= 1
            else:
                part[record] = bits ^ bit
            if not (bits ^ bit) & ~self._retired:
                self.departures.note(record, why)
            lost.append(record)
        self.shared -= len(lost) if bit == SHARED else 0
        return lost

    def not_admitted(self, records: bytes) -> None:
        """A node did not take these; note that, unless somebody has them."""
        for record in split_records(records):
            if not self.part(record).get(record, 0) & ~self._retired:
                self.departures.note(record, Miss.NOT_ADMITTED)

    def why(self, record: bytes) -> Miss | None:
        """Why nobody has a record; None if somebody has it, or if nothing is known of it."""
        bits = self.part(record).get(record, 0)
        if bits & ~self._retired:
            return None if bits & self.visible else Miss.UNKNOWN
        return self.departures.why(record) or (self._reason(bits) if bits else None)

    def sweep(self) -> None:
        """Clear retired bits from the next parts, about `SWEEP_ROWS` rows."""
        visited = 0
        while self._parts_left and visited < SWEEP_ROWS:
            part = self._parts[self._next_part]
            if part:
                self._parts[self._next_part] = self._without_retired(part)
            visited += len(part)
            self._next_part = (self._next_part + 1) % len(self._parts)
            self._parts_left -= 1
        if self._sweeping and not self._parts_left:
            self._used &= ~self._sweeping
            self._retired &= ~self._sweeping
            self._retired_as = {why: bits & self._retired for why, bits in self._retired_as.items()}
            self._sweeping = 0
            self._begin_round()

    def _begin_round(self) -> None:
        """Start over the parts for what is retired, unless a round is under way: what came later has the next one."""
        if not self._sweeping and self._retired:
            self._sweeping = self._retired
            self._parts_left = len(self._parts)

    def _without_retired(self, part: dict[bytes, int]) -> dict[bytes, int]:
        """A part without retired bits; records that had no others are noted as departed."""
        live = ~self._retired
        kept = {r: bits & live if bits & self._retired else bits for r, bits in part.items() if bits & live}
        if len(kept) < len(part):
            for record, bits in part.items():
                if not bits & live:
                    self.departures.note_late(record, self._reason(bits))
            self.count -= len(part) - len(kept)
        return kept

    def _reason(self, bits: int) -> Miss:
        """Why a record that has only retired bits is missing; the loss of a node comes first."""
        return next((why for why, retired in self._retired_as.items() if bits & retired), Miss.UNKNOWN)


def split_bits(bits: int) -> Iterator[int]:
    """The single bits of a mask, lowest first."""
    assert bits >= 0
    while bits:
        low = bits & -bits
        yield low
        bits ^= low


def some_bits(bits: int, start: int, most: int) -> Iterator[int]:
    """All single bits of a mask; of more than `most` so many, from a place on and round: with other starts, others."""
    assert most > 0
    if bits.bit_count() <= most:
        return split_bits(bits)
    place = start % max(1, bits.bit_length())
    later = bits >> place << place
    return islice(chain(split_bits(later), split_bits(bits ^ later)), most)

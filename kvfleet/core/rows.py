"""The directory's table: record → bits."""

from __future__ import annotations

from kvfleet.core.inventory import split_records

__all__ = ["SHARED", "Rows"]

SHARED = 1  # bit 0 of a row
SWEEP_ROWS = 20_000  # visited by one sweep at most, give or take a part: about 5 ms


class Rows:
    """record → bits: bit 0 is the shared tier, one bit each other set of records.

    A bit that is retired is cleared from the rows later, a part of the table at a time, and not given out again
    before: dropping a node costs nothing at once, however much it held.
    """

    def __init__(self, rows_max: int) -> None:
        self.count = 0
        self.shared = 0
        self.refused = 0
        self.visible = SHARED
        self._rows_max = rows_max
        self._parts: list[dict[bytes, int]] = [{} for _ in range(256)]  # by first byte
        self._used = SHARED  # visible, arriving or retired
        self._retired = 0
        self._next_part = 0
        self._parts_left = 0  # to be swept until no row has a retired bit

    @property
    def roomy(self) -> bool:
        """Whether a tenth of the rows are free: worth asking again for what was refused."""
        return self.count <= self._rows_max - self._rows_max // 10

    def part(self, key: bytes) -> dict[bytes, int]:
        """The part that has the records of a key, to read."""
        return self._parts[key[0]]

    def new_bit(self) -> int:
        """A bit that no row has."""
        bit = ~self._used & (self._used + 1)
        self._used |= bit
        return bit

    def retire(self, bit: int) -> None:
        """Make the rows forget a bit. It is not visible any more at once."""
        assert bit & self._used & ~self._retired & ~SHARED, "bit is in use"
        self.visible &= ~bit
        self._retired |= bit
        self._parts_left = len(self._parts)
        self.sweep()

    def add(self, records: bytes, bit: int) -> tuple[list[bytes], bool]:
        """Give packed records a bit: those that had it not, and whether there was room for all."""
        gained = []
        refused = 0
        for record in split_records(records):
            part = self._parts[record[0]]
            bits = part.get(record, 0)
            if bits & bit:
                continue
            if not bits:
                if self.count >= self._rows_max:
                    refused += 1
                    continue
                self.count += 1
            part[record] = bits | bit
            gained.append(record)
        self.refused += refused
        self.shared += len(gained) if bit == SHARED else 0
        return gained, not refused

    def remove(self, records: bytes, bit: int) -> list[bytes]:
        """Take a bit from packed records: those that had it."""
        lost = []
        for record in split_records(records):
            part = self._parts[record[0]]
            bits = part.get(record, 0)
            if not bits & bit:
                continue
            if bits == bit:
                del part[record]
                self.count -= 1
            else:
                part[record] = bits ^ bit
            lost.append(record)
        self.shared -= len(lost) if bit == SHARED else 0
        return lost

    def sweep(self) -> None:
        """Clear retired bits from the next parts, about `SWEEP_ROWS` rows."""
        visited = 0
        while self._parts_left and visited < SWEEP_ROWS:
            part = self._parts[self._next_part]
            kept = {record: left for record, bits in part.items() if (left := bits & ~self._retired)}
            self._parts[self._next_part] = kept
            self.count -= len(part) - len(kept)
            visited += len(part)
            self._next_part = (self._next_part + 1) % len(self._parts)
            self._parts_left -= 1
        if not self._parts_left:
            self._used &= ~self._retired
            self._retired = 0

"""What all managers say of shared objects, kept until the one who keeps the catalog has written it down."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvfleet.core.objectrows import ROW_BYTES

__all__ = ["Mailbox", "ObjectPage"]


@dataclass(frozen=True, slots=True)
class ObjectPage:
    """Rows in the order in which they came.

    Attributes:
        life: of the directory whose positions these are.
        rows: packed.
        position: how many rows were posted up to the end of these.
    """

    life: int
    rows: bytes
    position: int


class Mailbox:
    """Packed rows, each at a position that counts the rows posted so far.

    What is read stays until it is acknowledged. When it is full, letters are refused as a whole: who posts keeps them
    and tries again.

    Attributes:
        posted: position of the last row.
        written: position up to which rows were acknowledged.
        refused: rows that did not fit.
    """

    def __init__(self, rows_max: int) -> None:
        assert rows_max > 0, "a mailbox holds something"
        self._rows_max = rows_max
        self._letters: deque[tuple[int, bytes]] = deque()  # position after it, its rows
        self.posted = 0
        self.written = 0
        self.refused = 0

    def __len__(self) -> int:
        """How many rows wait."""
        return self.posted - self.written

    def post(self, rows: bytes) -> int | None:
        """Add a letter, and return the position after it; None if it is refused."""
        num_rows, rest = divmod(len(rows), ROW_BYTES)
        assert num_rows, "a letter says something"
        assert not rest, "rows are whole"
        if len(self) + num_rows > self._rows_max:
            self.refused += num_rows
            return None
        self.posted += num_rows
        self._letters.append((self.posted, rows))
        return self.posted

    def read(self, position: int, rows_max: int) -> tuple[bytes, int]:
        """The letters after a position, at most `rows_max` rows but at least one letter, and the position after them.

        Args:
            position: one that was returned before, not before `written`.
            rows_max: of what is returned.
        """
        assert self.written <= position <= self.posted
        found: list[bytes] = []
        left = rows_max * ROW_BYTES
        for end, rows in self._letters:
            if end <= position:
                continue
            left -= len(rows)
            if found and left < 0:
                break
            found.append(rows)
            position = end
        return b"".join(found), position

    def acknowledge(self, position: int) -> None:
        """All rows up to a position are written down."""
        assert self.written <= position <= self.posted
        while self._letters and self._letters[0][0] <= position:
            self.written = self._letters.popleft()[0]
        assert self.written == position, "positions are between letters"

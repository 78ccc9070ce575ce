"""What this node has to say of objects in the shared tier, kept until it is written down in the manifests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from kvfleet.core.inventory import split_records
from kvfleet.core.objectrows import rows_of

__all__ = ["USE_S", "Outbox", "Remarks", "Uses"]

USE_S = 3600.0  # at most so often a use of a record is told
_RECORDS_MAX = 100_000


class Uses:
    """Of which records a use was told lately: of the last 100,000."""

    def __init__(self) -> None:
        self._told: dict[bytes, float] = {}  # when, oldest first

    def is_news(self, record: bytes, now: float) -> bool:
        """Whether a use at this time, in seconds, is to be told. It is told then."""
        told = self._told.pop(record, None)
        if told is not None and now - told < USE_S:
            self._told[record] = told
            return False
        self._told[record] = now
        if len(self._told) > _RECORDS_MAX:
            del self._told[next(iter(self._told))]
        return True


class Remarks:
    """Records of which something is to be said. Hints, kept for a directory that is away: of too many, more are not."""

    def __init__(self, records_max: int) -> None:
        self._records_max = records_max
        self._waiting: dict[bytes, None] = {}

    def add(self, records: Iterable[bytes]) -> None:
        """Say it of these."""
        for record in records:
            if len(self._waiting) < self._records_max:
                self._waiting[record] = None

    def take(self, limit: int) -> bytes:
        """At most so many of them, packed, for the next delta."""
        taken = list(islice(self._waiting, limit))
        for record in taken:
            del self._waiting[record]
        return b"".join(taken)


class Outbox:
    """The last row of each record, at most 100,000 of them; more are not kept, and counted.

    Rows wait, then fly with a delta, then lie in the directory's mailbox until the keeper of the catalog has them in a
    manifest. If the directory loses its mailbox, they wait again; but not those of objects that have gone since: who
    keeps the catalog then may know nothing of them, and would believe it.

    Attributes:
        dropped: rows for which there was no room. Their objects are not known after a restart of the fleet.
    """

    def __init__(self) -> None:
        self._waiting: dict[bytes, bytes] = {}
        self._flying: dict[bytes, bytes] = {}
        self._posted: deque[tuple[int, dict[bytes, bytes]]] = deque()
        self._num_posted = 0
        self._gone: dict[bytes, None] = {}  # of these nothing that was said before is said again; oldest first
        self._life = 0  # of the directory that has what is posted
        self.dropped = 0

    def __len__(self) -> int:
        """How many are not written down."""
        return self.num_waiting + self._num_posted

    @property
    def num_waiting(self) -> int:
        """How many the directory does not have."""
        return len(self._waiting) + len(self._flying)

    def put(self, record: bytes, row: bytes) -> None:
        """Say something of a record, in place of what was to be said before."""
        if record in self._waiting or len(self) < _RECORDS_MAX:
            self._waiting[record] = row
            self._gone.pop(record, None)
        else:
            self.dropped += 1

    def forget(self, record: bytes) -> None:
        """The record is gone: nothing that waits, or has to be said again, is to be said of it."""
        self._waiting.pop(record, None)
        if self._flying or self._posted:
            self._gone[record] = None
            if len(self._gone) > _RECORDS_MAX:
                del self._gone[next(iter(self._gone))]

    def heard_gone(self, records: bytes) -> None:
        """The directory says that packed records were gone. What it has not heard yet may be newer, and is said."""
        for record in split_records(records):
            if record not in self._waiting and record not in self._flying:
                self.forget(record)

    def take(self, limit: int) -> bytes:
        """At most so many rows, for the next delta."""
        assert not self._flying, "one delta at a time"
        self._flying = dict(islice(self._waiting.items(), limit))
        for record in self._flying:
            del self._waiting[record]
        return b"".join(self._flying.values())

    def landed(self, life: int, position: int | None, written: int) -> list[bytes]:
        """A directory has the delta. Returns the records of which it has lost that they were stored.

        Args:
            life: of the directory.
            position: in its mailbox, after these rows; None if they were not taken in.
            written: position up to which rows are in a manifest.
        """
        again: list[bytes] = []
        if life != self._life:
            self._life = life
            for _, rows in reversed(self._posted):
                again += self._wait_again(rows)
            self._posted.clear()
            self._num_posted = 0
        flying, self._flying = self._flying, {}
        if flying and position is not None:
            self._posted.append((position, flying))
            self._num_posted += len(flying)
        else:
            self._wait_again(flying)
        while self._posted and self._posted[0][0] <= written:
            self._num_posted -= len(self._posted.popleft()[1])
        if not self._posted:
            self._gone.clear()
        return again

    def lost(self) -> list[bytes]:
        """The delta is given up, whether it arrived or not: said twice does no harm.

        Returns the records that a directory may know from an earlier delta, and the next one does not.
        """
        flying, self._flying = self._flying, {}
        return self._wait_again(flying)

    def _wait_again(self, rows: dict[bytes, bytes]) -> list[bytes]:
        """Put rows back; later ones of their records stay. Returns the records of objects that were stored."""
        left = {record: row for record, row in rows.items() if record not in self._gone}
        for record, row in left.items():
            self._waiting.setdefault(record, row)
        stored = rows_of(b"".join(left.values()))["stored_at"] > 0
        return [record for record, was_stored in zip(left, stored.tolist(), strict=True) if was_stored]

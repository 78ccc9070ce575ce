"""What is on a drive and where: an LMDB environment beside the drive's data file.

    blocks   record id, 18 bytes -> entry
    units    number of a unit, 4 bytes big-endian -> its value in the slab table, 8 bytes
    notes    a name -> what the drive's user keeps with it

One process has it open at a time, the holder of the drive's lock. A transaction is on the medium, whole, when `apply`
returns; the last one may be undone by a loss of power, never by the death of the process. Each entry carries a
checksum of itself and its record id, since LMDB has none: one that was damaged is no entry.
"""

from __future__ import annotations

import os
import shutil
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

import lmdb

from kvfleet.config import KIB, MIB
from kvfleet.errors import TierError
from kvfleet.node.driveentry import Entry
from kvfleet.node.drivefile import drive_errors, read_through, take_room

__all__ = ["BATCH_MAX", "DriveIndex", "index_bytes", "is_damage"]

BATCH_MAX = 256  # entries changed in one transaction

_RECORD_BYTES = 18
_UNIT_KEY = struct.Struct(">I")
_UNIT = struct.Struct("<Q")
_DATA_FILE = "data.mdb"
_LOCK_FILE = "lock.mdb"
_NEW = ".new"
_READERS = 64
_PAGE = 4 * KIB
_MAP_STEP = 64 * KIB
# An entry with its key and node takes 88 bytes of a page that is at least half full, 190 at most after any order of
# puts and deletes. A transaction writes a changed page anew, and its old page can be used again by the next but one:
# with 256 entries that are on 256 pages, and as many on the pages above them, far below 4 MiB.
_BYTES_PER_RECORD = 224
_BYTES_FIXED = 4 * MIB
_DAMAGE = (
    lmdb.BadTxnError,
    lmdb.CorruptedError,
    lmdb.CursorFullError,
    lmdb.InvalidError,
    lmdb.PageFullError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)


def is_damage(error: TierError) -> bool:
    """Whether an error of an index means that its bytes are wrong: it will not get better by being opened again."""
    return isinstance(error.__cause__, _DAMAGE)


def index_bytes(records_max: int) -> int:
    """What an index of so many records takes of a drive."""
    return -(-(_BYTES_FIXED + _BYTES_PER_RECORD * records_max) // _MAP_STEP) * _MAP_STEP


class DriveIndex:
    """An open index.

    Blocking: every method; those that change something wait for the drive.
    Threads: any, at the same time.

    Attributes:
        num_bytes: what the index takes of the drive; all of it is allocated when it is opened.
        filled_bytes: that were written for that, and to shrink it.
    """

    def __init__(self, directory: Path, records_max: int) -> None:
        """Open an index, or make one if there is none. Only the holder of the drive's lock may.

        An index that was made for more records keeps its size until `shrink`.

        Args:
            directory: of the index; the one above it must exist.
            records_max: most entries it will be given.

        Raises:
            TierFullError: no room for it.
            TierUnavailableError: the drive failed.
        """
        self._directory = directory
        self._mutex = threading.Lock()
        self._depth = 1
        self.filled_bytes = 0
        with drive_errors(directory, "open the index"):
            if not directory.exists():
                _make(directory)
            shutil.rmtree(directory / _NEW, ignore_errors=True)
            self._open(index_bytes(records_max))

    def _open(self, map_bytes: int) -> None:
        data = self._directory / _DATA_FILE
        self.num_bytes = max(map_bytes, data.stat().st_size)
        self.filled_bytes += take_room(data, self.num_bytes)
        read_through(data)
        # Nobody else has it open, so whatever a dead process left in the table of readers is void.
        (self._directory / _LOCK_FILE).unlink(missing_ok=True)
        self._env = _environment(self._directory, self.num_bytes)
        try:
            self._blocks, self._units, self._notes = map(self._env.open_db, (b"blocks", b"units", b"notes"))
        except lmdb.Error:
            self._env.close()
            raise

    def close(self) -> None:
        """Idempotent; no other call may be going on."""
        self._env.close()

    def shrink(self, records_max: int) -> None:
        """Give back the room of an index that was made for more. No other call may be going on.

        Raises:
            TierFullError: no room to write it anew. It is as it was, but closed.
            TierUnavailableError: the drive failed. It is as it was, but closed.
        """
        assert self.num_entries <= records_max, "it has no more than it may have"
        fresh = self._directory / _NEW
        with drive_errors(self._directory, "shrink the index"):
            fresh.mkdir(mode=0o700)
            self._env.copy(os.fspath(fresh), compact=True)
            self._env.close()
            self.filled_bytes += (fresh / _DATA_FILE).stat().st_size
            (fresh / _DATA_FILE).replace(self._directory / _DATA_FILE)
            shutil.rmtree(fresh)
            self._open(index_bytes(records_max))

    def cost(self, num_records: int, num_others: int) -> int:
        """The most bytes that a transaction writes that changes so many entries, and so much of the other tables."""
        # Each change may be on a leaf of its own; the rest: pages of the other tables, free list, meta page.
        return _PAGE * (num_records * max(1, self._depth - 1) + num_others + self._depth + 8)

    @property
    def num_entries(self) -> int:
        """How many there are, damaged ones included."""
        with drive_errors(self._directory, "read the index"), self._env.begin(self._blocks) as txn:
            return int(txn.stat(self._blocks)["entries"])

    def entries(self) -> Iterator[tuple[bytes, Entry | None]]:
        """All records in order, with their entries; None for one that was damaged.

        Records may come and go meanwhile; those that do are in it or not.

        Raises:
            TierUnavailableError: the drive failed.
        """
        after = b""
        while page := self._page(after):
            for record, value in page:
                yield record, Entry.unpack(record, value)
            after = page[-1][0] + b"\0"

    def _page(self, start: bytes) -> list[tuple[bytes, bytes]]:
        # A transaction that stays open keeps pages from being used again: so they are short.
        with drive_errors(self._directory, "read the index"), self._env.begin(self._blocks) as txn, txn.cursor() as at:
            there = at.set_range(start)
            rows = [(bytes(key), bytes(value)) for key, value in islice(at, 1024)] if there else []
            # LMDB follows damaged pages, also back to records that were read before: that would never end.
            if rows and (rows[-1][0] < start or any(len(record) != _RECORD_BYTES for record, _ in rows)):
                raise lmdb.CorruptedError("records that cannot be")
            return rows

    def units(self, num_units: int) -> list[int]:
        """The slab table as of the last transaction, for so many units; 0 for those that were never told.

        Raises:
            TierUnavailableError: the drive failed.
        """
        table = [0] * num_units
        with drive_errors(self._directory, "read the index"), self._env.begin(self._units) as txn, txn.cursor() as at:
            for key, value in at:
                if (len(key), len(value)) != (_UNIT_KEY.size, _UNIT.size):
                    raise lmdb.CorruptedError("a slab table that cannot be")
                (unit,), (entry,) = _UNIT_KEY.unpack(bytes(key)), _UNIT.unpack(bytes(value))
                if unit < num_units:
                    table[unit] = entry
        return table

    def note(self, name: str) -> bytes | None:
        """What is kept under a name.

        Raises:
            TierUnavailableError: the drive failed.
        """
        with drive_errors(self._directory, "read the index"), self._env.begin(self._notes) as txn:
            value = txn.get(name.encode())
        return None if value is None else bytes(value)

    def apply(
        self,
        put: Sequence[Entry] = (),
        delete: Sequence[bytes] = (),
        *,
        units: Mapping[int, int] | None = None,
        notes: Mapping[str, bytes] | None = None,
    ) -> tuple[list[bool], list[Entry | None]]:
        """Change the index in one transaction: first delete, then put.

        Args:
            put: entries; one whose record is there is passed over.
            delete: records.
            units: values for the slab table; 0 removes one.
            notes: to keep.

        Returns:
            Which entries were put; and for each deleted record the entry it had, None if there was none or a
            damaged one.

        Raises:
            TierFullError: no room. The index is unchanged.
            TierUnavailableError: the drive failed. The index is unchanged, or will be so when it is opened again.
        """
        with self._changing(len(put) + len(delete)) as txn:
            deleted = [self._entry(txn, record) for record in delete]
            for record in delete:
                txn.delete(record, db=self._blocks)
            done = [self._put(txn, entry) for entry in put]
            for unit, value in (units or {}).items():
                if value:
                    txn.put(_UNIT_KEY.pack(unit), _UNIT.pack(value), db=self._units)
                else:
                    txn.delete(_UNIT_KEY.pack(unit), db=self._units)
            for name, note in (notes or {}).items():
                txn.put(name.encode(), note, db=self._notes)
        return done, deleted

    def touch(self, uses: Mapping[bytes, int]) -> None:
        """Note last accesses by record; records that are not there are passed over, and times do not go back.

        It costs up to a page of writing for each record, so it is for many at a time, now and then.

        Raises:
            TierFullError: no room.
            TierUnavailableError: the drive failed. In both cases some may be noted.
        """
        records = list(uses)
        for start in range(0, len(records), BATCH_MAX):
            batch = records[start : start + BATCH_MAX]
            with self._changing(len(batch)) as txn:
                for entry in [self._entry(txn, record) for record in batch]:
                    if entry is not None and uses[entry.record] > entry.last_access:
                        fresh = replace(entry, last_access=uses[entry.record])
                        txn.put(entry.record, fresh.pack(), db=self._blocks)

    @contextmanager
    def _changing(self, num_records: int) -> Iterator[lmdb.Transaction]:
        assert num_records <= BATCH_MAX, "transactions are small"
        with self._mutex, drive_errors(self._directory, "write the index"), self._env.begin(write=True) as txn:
            yield txn
            self._depth = int(txn.stat(self._blocks)["depth"])

    def _put(self, txn: lmdb.Transaction, entry: Entry) -> bool:
        fresh = self._entry(txn, entry.record) is None
        if fresh:
            txn.put(entry.record, entry.pack(), db=self._blocks)
        return fresh

    def _entry(self, txn: lmdb.Transaction, record: bytes) -> Entry | None:
        value = txn.get(record, db=self._blocks)
        return None if value is None else Entry.unpack(record, bytes(value))


def _make(directory: Path) -> None:
    """Make an empty index, whole or not at all."""
    fresh = directory.with_suffix(_NEW)
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(mode=0o700)
    _environment(fresh, index_bytes(0)).close()
    fresh.replace(directory)


def _environment(directory: Path, map_bytes: int) -> lmdb.Environment:
    return lmdb.open(
        os.fspath(directory),
        map_size=map_bytes,
        max_dbs=3,
        max_readers=_READERS,
        metasync=False,
        readahead=False,
        mode=0o600,
    )

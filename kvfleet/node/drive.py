"""A drive of the NVMe tier: one directory, in which it is the only one.

    format.json   version, id and geometry, written once
    lock          held by the process that has the drive open
    blocks        the data file: slots, all allocated when it is opened
    index/        what is in them (`DriveIndex`)

A block is written to a slot that the index on the medium does not speak of; then the index speaks of it. It is deleted
from the index; then its slot may be written. So the process may die at any moment: a block is there whole or not at
all, and slots that were being written are free at the next start, because nothing speaks of them.

After a loss of power, or on a drive that tells lies, the index may speak of bytes that are not there. Each read
verifies their checksum.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from kvfleet.config import DriveConfig
from kvfleet.core.writebudget import BudgetState, Moment, WriteBudget
from kvfleet.errors import CorruptBlockError, LayoutMismatchError, TierFullError, TierUnavailableError
from kvfleet.node.arenadir import LOCK_FILE, FileLock
from kvfleet.node.codecs import RAW, codec_numbered
from kvfleet.node.drivebooks import DriveBooks
from kvfleet.node.driveentry import Entry
from kvfleet.node.drivefile import TIER, DriveFile, drive_errors
from kvfleet.node.driveformat import DATA_FILE, INDEX, cap_of, check_directory, plan_drive, read_format
from kvfleet.node.driveindex import BATCH_MAX, DriveIndex
from kvfleet.node.driveshrink import shrink
from kvfleet.node.waiting import now

__all__ = ["Drive", "Opening", "moment", "pages"]

_log = logging.getLogger(__name__)

_BUDGET = "budget"

Bytes = npt.NDArray[np.uint8]


def pages(num_bytes: int) -> Bytes:
    """Memory that begins on a page."""
    return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)


@lru_cache(maxsize=1)
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def moment() -> Moment:
    """Now, by the clock of the event loop and that of the wall."""
    return Moment(_boot_id(), now(), time.time())


@dataclass(frozen=True, slots=True)
class Opening:
    """How to open a drive.

    Attributes:
        config: of the drive.
        begun: now.
        alone: it is the only drive of its node: a block whose parent is not on it is an orphan.
        drive_id: the drive that it must be, if one was there before; else "".
        budget: of that drive; None to go on from what is saved on it.
        damage: of its index, if that was found to be damaged: it is made anew, empty. It is the index of a cache.
    """

    config: DriveConfig
    begun: Moment
    alone: bool = True
    drive_id: str = ""
    budget: WriteBudget | None = None
    damage: str = ""


class Drive:
    """An open drive. Make one with `open`.

    Threads: `open`, `close`, `read`, `write`, `flush`, `apply` and `touch` block, and run in any thread; writers of
    the index one at a time. `books` and `budget` belong to the event loop.

    Attributes:
        directory: where it is.
        drive_id: 32 hexadecimal digits, new with each drive that is made.
        books: of what is where.
        budget: of writes.
        num_dropped: entries that were found damaged, or to speak of what cannot be, when it was opened.
        num_evicted: entries that had to go when it was opened, because the cap is smaller than it was.
        remarks: what an operator should know of it.
    """

    def __init__(self, directory: Path, opening: Opening, resources: contextlib.ExitStack) -> None:
        self.directory = directory
        self._resources = resources
        self._scratch = threading.local()
        self.remarks: list[str] = []
        max_bytes = opening.config.max_bytes or cap_of(directory)
        form = read_format(directory, max_bytes)
        if opening.drive_id not in {"", form.drive_id}:
            raise TierUnavailableError(TIER, f"{directory}: another drive is here now, {form.drive_id}")
        self.drive_id = form.drive_id
        plan = plan_drive(max_bytes, form.unit_bytes)
        headless = (directory / INDEX).exists() and not (directory / DATA_FILE).exists()
        if opening.damage or headless:
            with drive_errors(directory, "remove the index"):
                shutil.rmtree(directory / INDEX)
            damaged = f"its index was damaged and was made anew, empty: {opening.damage}"
            self.remarks.append(damaged if opening.damage else "its data file was gone: it began anew, empty")
        self._index = DriveIndex(directory / INDEX, plan.records_max)
        resources.callback(self._index.close)
        self._file = DriveFile(directory / DATA_FILE)
        resources.callback(self._file.close)
        self._begun = opening.begun
        self.budget = opening.budget or self._saved_budget(opening)
        self.num_evicted = shrink(self._index, self._file, plan, self._spend)
        self._spend(self._index.filled_bytes)
        self._file.allocate(plan.num_units * plan.unit_bytes, plan.unit_bytes)
        num_units = min(self._file.num_bytes // plan.unit_bytes, plan.num_units)
        if not num_units:
            raise TierFullError(TIER, f"{directory}: no room for a single unit of {plan.unit_bytes} bytes")
        self.books = DriveBooks(num_units * plan.unit_bytes, plan.unit_bytes, plan.records_max)
        self.books.restore(self._index, alone=opening.alone)
        self.num_dropped = len(self.books.deleted)
        self._remark(num_units, plan.num_units)

    @classmethod
    def open(cls, opening: Opening) -> Drive:
        """Open a drive, or make one in an empty directory. If it may take less than it has, blocks are evicted.

        Raises:
            ConfigError: its `max_bytes` is too small for anything, or its directory is no path here.
            TierFullError: the disk has no room for the least that a drive needs.
            TierUnavailableError: another process has it open, it is of another version, the directory is missing,
                not ours or full of other things, another drive is there, or the disk failed. Nothing is changed.

        Blocking: some seconds for 100,000 blocks; with a smaller cap, as long as it takes to move blocks.
        """
        directory = Path(opening.config.path())
        empty = check_directory(directory)
        if opening.drive_id and empty:
            raise TierUnavailableError(TIER, f"{directory}: the drive is gone, an empty directory is there")
        with contextlib.ExitStack() as resources:
            lock = FileLock(directory / LOCK_FILE)
            resources.callback(lock.release)
            try:
                free = lock.acquire(0.0)
            except TierUnavailableError as error:
                raise TierUnavailableError(TIER, error.detail) from error
            if not free:
                raise TierUnavailableError(TIER, f"{directory}: another process has this drive open")
            drive = cls(directory, opening, resources)
            drive._resources = resources.pop_all()
        return drive

    def close(self) -> None:
        """Let another process have it. Idempotent; other calls are bugs from here on."""
        self._resources.close()

    def _saved_budget(self, opening: Opening) -> WriteBudget:
        state = None
        try:
            note = self._index.note(_BUDGET)
            state = None if note is None else BudgetState.from_json(note.decode())
        except ValueError as error:
            self.remarks.append(f"what was written to it before is not known: {error}")
        rated_bytes = opening.config.rated_bytes
        if rated_bytes is None:
            with drive_errors(self.directory, "measure"):
                found = os.statvfs(self.directory)
            rated_bytes = found.f_blocks * found.f_frsize
        return WriteBudget(rated_bytes, opening.config.dwpd, opening.begun, state)

    def _spend(self, num_bytes: int) -> None:
        """Count bytes written to open it, to the data file before, to the index after. Raises as `apply`."""
        if num_bytes and self.budget.charge(num_bytes, self._begun.monotonic_s):
            self.apply(budget=self.budget.state(self._begun))

    def _remark(self, num_units: int, num_wanted: int) -> None:
        if num_units < num_wanted:
            self.remarks.append(f"the disk has room for {num_units / num_wanted:.0%} of what it may take")
        for remark in self.remarks:
            _log.warning("%s: %s", self.directory, remark)

    # The medium

    def write(self, offset: int, data: Bytes) -> None:
        """Write a slot that the index does not speak of.

        Args:
            offset: of the slot.
            data: `(num_bytes,)`, uint8, contiguous, beginning on a page.

        Raises:
            TierFullError: a filesystem that allocates on each write is full.
            TierUnavailableError: the drive failed.
        """
        self._file.write(offset, data)

    def flush(self) -> None:
        """Have all that was written to slots on the medium. Raises TierUnavailableError."""
        self._file.flush()

    def read(self, entry: Entry, target: Bytes) -> int:
        """Fill `target` with a block, verified.

        Args:
            entry: of the block, whose slot must stay as it is meanwhile.
            target: `(num_bytes,)`, uint8, contiguous, beginning on a page; as long as the block.

        Returns:
            The xxh3-64 of `target`.

        Raises:
            CorruptBlockError: the bytes are not the block's; `target` holds anything.
            TierUnavailableError: the drive failed; `target` holds anything.
        """
        assert len(target) == entry.num_bytes, "target is as long as the block"
        if entry.codec == RAW.number:
            self._file.read(entry.offset, target)
            checksum = xxhash.xxh3_64_intdigest(target.data)
        else:
            coded = self._room(entry.slot_bytes)[: entry.coded_bytes]
            self._file.read(entry.offset, coded)
            try:
                checksum = codec_numbered(entry.codec).decode(coded.data, target, entry.itemsize)
            except LayoutMismatchError as error:  # a codec of a later version: of no use here
                raise CorruptBlockError(TIER, str(error)) from error
        if checksum != entry.checksum:
            raise CorruptBlockError(TIER, f"{self.directory}: {entry.record.hex()}: checksum mismatch")
        return checksum

    def _room(self, num_bytes: int) -> Bytes:
        """Memory of this thread's own that begins on a page."""
        room: Bytes | None = getattr(self._scratch, "room", None)
        if room is None or len(room) < num_bytes:
            room = self._scratch.room = pages(num_bytes)
        return room

    def apply(
        self,
        put: Sequence[Entry] = (),
        delete: Sequence[bytes] = (),
        *,
        units: Mapping[int, int] | None = None,
        budget: BudgetState | None = None,
    ) -> None:
        """Change the index, in one transaction if that is not too large: first delete, then put. Durable on return.

        Args:
            put: at most `BATCH_MAX` entries, whose blocks are on the medium.
            delete: records; those that are not there are passed over.
            units: changes of the slab table.
            budget: what to save of the write budget, in the first transaction.

        Raises:
            TierFullError: no room in the index; some may be deleted, nothing was put.
            TierUnavailableError: the drive failed. What was done is only known when it is opened again.
        """
        self._file.probe()  # a page of the index that has to be read from a medium that is gone ends the process
        notes: Mapping[str, bytes] = {} if budget is None else {_BUDGET: budget.to_json().encode()}
        while len(delete) > BATCH_MAX - len(put):
            self._index.apply((), delete[:BATCH_MAX], notes=notes)
            delete, notes = delete[BATCH_MAX:], {}
        if put or delete or notes or units:
            self._index.apply(put, delete, units=units, notes=notes)

    def cost(self, num_changes: int) -> int:
        """The most bytes that a transaction writes which changes so many things."""
        return self._index.cost(num_changes, 1)

    def touch(self, uses: Mapping[bytes, int]) -> None:
        """Note last accesses: see `DriveIndex.touch`."""
        self._index.touch(uses)

    def indexed(self) -> Iterator[tuple[bytes, Entry | None]]:
        """What the index on the medium says: see `DriveIndex.entries`. Raises TierUnavailableError."""
        return self._index.entries()

    @property
    def direct(self) -> bool:
        """False if the filesystem does not do direct I/O, so that all goes through the page cache."""
        return self._file.direct

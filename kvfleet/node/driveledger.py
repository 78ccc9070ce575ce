"""The order in which a drive's index is told: what goes before the slots are written, what comes after."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from kvfleet.errors import TierError
from kvfleet.node.drive import Drive, moment
from kvfleet.node.drivecalls import DriveCalls
from kvfleet.node.driveentry import Entry

__all__ = ["DriveLedger"]


class DriveLedger:
    """Makes the transactions of a drive's index, one at a time.

    A transaction takes along whatever the index has to forget. So as a rule a batch has one of its own, which enters
    it: what was evicted for it went with the one that entered the batch before.

    Threads: the event loop.
    """

    def __init__(self, drive: Drive, calls: DriveCalls) -> None:
        self._drive = drive
        self._calls = calls
        self._lock = asyncio.Lock()
        self._num_writing = 0
        self._saving = False  # a state of the budget is on its way to the medium
        self._due = False  # another one has to be, before anything is written
        self._moved = asyncio.Event()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A batch is being written and entered meanwhile."""
        self._num_writing += 1
        try:
            yield
        finally:
            self._num_writing -= 1
            self._move()

    def _move(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def prepare(self, num_bytes: int) -> None:
        """Have the index forget what was evicted so far, and the budget count bytes, before they are written.

        Raises:
            TierError: as `Drive.apply`.
        """
        books, budget = self._drive.books, self._drive.budget
        mine = set(books.deleted)
        self._due |= budget.charge(num_bytes, moment().monotonic_s)
        while self._due or self._saving or not mine.isdisjoint(books.deleted):
            if self._num_writing or self._saving:
                await self._moved.wait()
            else:
                await self.enter(())

    async def enter(self, entries: Sequence[Entry]) -> None:
        """Have the index speak of blocks that were written and flushed.

        Raises:
            TierError: as `Drive.apply`.
        """
        async with self._lock:
            await self._transact(entries)

    async def touch(self, uses: Mapping[bytes, int]) -> None:
        """Note last uses. Raises as `Drive.touch`."""
        async with self._lock:
            self._due |= self._drive.budget.charge(self._drive.cost(len(uses)), moment().monotonic_s)
            await self._transact(())
            await self._calls.index(partial(self._drive.touch, uses))

    async def _transact(self, put: Sequence[Entry]) -> None:
        drive, at = self._drive, moment()
        books, deleted = drive.books, list(drive.books.deleted)
        if not put and not deleted and not self._due:
            return  # another transaction took it along
        changes = dict(books.table_changes)
        books.table_changes.clear()
        self._due |= drive.budget.charge(drive.cost(len(put) + len(deleted) + len(changes)), at.monotonic_s)
        self._saving, self._due = self._due, False
        state = drive.budget.state(at) if self._saving else None
        try:
            await self._calls.index(partial(drive.apply, put, deleted, units=changes, budget=state))
        except TierError:
            books.table_changes.update({**changes, **books.table_changes})
            self._due = self._due or self._saving
            raise
        finally:
            self._saving = False
            self._move()
        books.deleted.difference_update(deleted)

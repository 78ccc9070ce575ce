"""One place for a drive: opens it, gives it up when it fails, and tries it again."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import partial

from kvfleet.config import DriveConfig, FleetConfig
from kvfleet.core.block import KEY_BYTES, BlockKey
from kvfleet.core.drives import Backoff, Health
from kvfleet.core.writebudget import WriteBudget
from kvfleet.errors import ConfigError, TierError, TierUnavailableError
from kvfleet.node.drive import Drive, Opening, moment
from kvfleet.node.driveatwork import DriveAtWork
from kvfleet.node.drivecalls import DriveCalls
from kvfleet.node.driveentry import Entry
from kvfleet.node.drivefile import TIER
from kvfleet.node.driveindex import is_damage
from kvfleet.node.drivestatus import DriveCounts, DriveReport, DriveStatus
from kvfleet.node.waiting import now, within

__all__ = ["DriveBay"]

_log = logging.getLogger(__name__)

_RETRY_S = (1.0, 60.0)
_CLOSE_TIMEOUT_S = 3.0
_UNWANTED_MAX = 4096


class DriveBay:
    """A drive that may fail and come back.

    Threads: the event loop.

    Attributes:
        config: of the drive.
        problem: why there is none, or what is wrong with it; else "".
        counts: what was done with it.
        health: whether it is slow.
        tried: set once it was opened and told of what it has, or could not be.
        at_work: the open drive, also while it is being given up; None if there is none.
    """

    def __init__(
        self, config: DriveConfig, fleet: FleetConfig, on_entry: Callable[[DriveBay, Entry, bool], None]
    ) -> None:
        """Nothing is opened yet.

        Args:
            config: of the drive.
            fleet: for the limits and the codec.
            on_entry: a block can be read from this drive now, or no longer; also told of some that never could.
        """
        self.config = config
        self.problem = ""
        self.counts = DriveCounts()
        self.health = Health()
        self.tried = asyncio.Event()
        self.at_work: DriveAtWork | None = None
        self._fleet = fleet
        self._on_entry = partial(on_entry, self)
        self._backoff = Backoff(*_RETRY_S)
        self._unwanted: dict[BlockKey, None] = {}  # oldest first
        self._drive_id = ""
        self._budget: WriteBudget | None = None
        self._damage = ""
        self._begun: float | None = None  # to open it

    @property
    def works(self) -> bool:
        """Whether it can be used, as far as is known."""
        return self.at_work is not None and self.at_work.works

    async def run(self) -> None:
        """Open the drive, and open it again whenever it fails. Runs until cancelled; then the drive is closed."""
        try:
            while True:
                try:
                    self.at_work = await self._open()
                    await self.at_work.serve(self.tried.set)
                except (TierError, ConfigError) as error:
                    self.problem = self._tell(error)
                    self._damage = self.problem if isinstance(error, TierError) and is_damage(error) else ""
                    _log.warning("%s is not used: %s", self.config.directory, self.problem)
                    await self._take_out(TierUnavailableError(TIER, str(error)))
                await asyncio.sleep(self._backoff.failed(now()))
        except asyncio.CancelledError:
            await self._end()
            raise
        except BaseException as error:  # a bug of ours: whoever runs this may try again
            await self._take_out(TierUnavailableError(TIER, repr(error)))
            raise

    def _tell(self, error: TierError | ConfigError) -> str:
        """What is wrong, for who knows which drive this is."""
        text = error.detail if isinstance(error, TierError) else str(error)
        directory = os.path.expandvars(self.config.directory)
        return text.replace(f"{directory}: ", "").replace(f"{directory}/", "")

    async def _open(self) -> DriveAtWork:
        """Open the drive, to the end even if we are cancelled: then it is closed at once.

        Raises:
            ConfigError: as `Drive.open`.
            TierError: as `Drive.open`.
        """
        alone = len(self._fleet.nvme) == 1
        budget = copy(self._budget)  # a thread charges it, while we tell of ours
        opening = Opening(self.config, moment(), alone, self._drive_id, budget, self._damage)
        calls = DriveCalls(self._fleet.nvme_inflight_max)
        self._begun = now()
        opened: list[Drive] = []
        try:
            await calls.read(lambda: opened.append(Drive.open(opening)))
        except BaseException:
            self._budget = budget
            await calls.close(opened[0].close if opened else lambda: None)
            raise
        drive = opened[0]
        self._drive_id, self._budget = drive.drive_id, drive.budget
        drive.budget.lost()
        self.counts.evicted_blocks += drive.num_evicted
        self.counts.corrupt_blocks += drive.num_dropped
        self.problem = "; ".join(drive.remarks)
        at_work = DriveAtWork(drive, calls, self._fleet, self.counts, self.health, self._on_entry)
        for key in self._unwanted:
            at_work.drop(key)
        self._unwanted.clear()
        self._backoff.worked(now())
        return at_work

    async def _take_out(self, error: TierUnavailableError) -> None:
        """Let go of a drive that failed; close it once it answers."""
        self.tried.set()
        if self.at_work is not None:
            self.at_work.fail(error)
            for record in self.at_work.unreadable:
                self._drop_later(BlockKey(record[:KEY_BYTES]))
            await self.at_work.take_out()
            at_work, self.at_work = self.at_work, None
            await at_work.close(save=False)

    async def _end(self) -> None:
        """Close the drive; one that hangs is left as it is."""
        with suppress(asyncio.TimeoutError):
            await within(_CLOSE_TIMEOUT_S, self._close())

    async def _close(self) -> None:
        if self.at_work is not None:
            works = self.at_work.works
            self.at_work.fail(TierUnavailableError(TIER, "the tier is closed"))
            await self.at_work.close(save=works)
            await self.at_work.take_out()
            self.at_work = None

    def entry(self, record: bytes) -> Entry | None:
        """What it has of a record."""
        return None if self.at_work is None else self.at_work.drive.books.entries.get(record)

    def drop(self, key: BlockKey) -> None:
        """Take out a block, all shards of it, if it is here; as soon as the drive is back if that is out."""
        if self.at_work is not None and self.at_work.works:
            self.at_work.drop(key)
        else:
            self._drop_later(key)

    def _drop_later(self, key: BlockKey) -> None:
        self._unwanted[key] = None
        if len(self._unwanted) > _UNWANTED_MAX:  # what is wrong with the oldest, its checksum will tell
            del self._unwanted[next(iter(self._unwanted))]

    def status(self) -> DriveStatus:
        """How it is."""
        status = DriveStatus(
            directory=self.config.directory,
            works=self.works,
            problem=self.problem or ("" if self.works else self._not_open()),
            tried=self.tried.is_set(),
            slow=self.health.slow,
            counts=replace(self.counts),
        )
        if self._budget is not None:
            status = status.with_budget(self._budget, now())
        if self.at_work is not None:
            status = status.with_drive(self.at_work.drive, self.at_work.queued_bytes)
        return status

    def _not_open(self) -> str:
        return "not open yet" if self._begun is None else f"not open yet, since {now() - self._begun:.0f} s"

    async def examine(self, *, repair: bool) -> DriveReport:
        """See `NvmeTier.doctor`."""
        at_work = self.at_work
        if at_work is None or not at_work.works:
            return DriveReport(self.config.directory, self.problem or "not open")
        try:
            return replace(await at_work.examine(repair=repair), directory=self.config.directory)
        except TierUnavailableError as error:
            at_work.fail(error)
            return DriveReport(self.config.directory, self._tell(error))

    def audit(self) -> list[str]:
        """What does not add up in the books; nothing, unless there is a bug."""
        books = None if self.at_work is None else self.at_work.drive.books
        return [] if books is None else [f"{self.config.directory}: {line}" for line in books.audit()]

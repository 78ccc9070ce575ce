"""An open drive at work: read, written, watched, until it fails or is not wanted any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from kvfleet.config import FleetConfig
from kvfleet.core.block import BlockKey
from kvfleet.core.drives import Health, Load
from kvfleet.errors import CorruptBlockError, TierError, TierFullError, TierUnavailableError
from kvfleet.node.codecs import codec_of
from kvfleet.node.drive import Drive, moment
from kvfleet.node.drivecalls import DriveCalls
from kvfleet.node.drivedoctor import examine, problem_of
from kvfleet.node.driveentry import Entry
from kvfleet.node.drivejobs import Write
from kvfleet.node.drivestatus import DriveCounts, DriveReport
from kvfleet.node.drivewatch import DriveWatch
from kvfleet.node.drivewriter import DriveWriter
from kvfleet.node.waiting import now

__all__ = ["DriveAtWork"]

_log = logging.getLogger(__name__)
_FULL_S = 30.0  # a full drive is left alone for so long
_TOLD_AT_ONCE = 256

Bytes = npt.NDArray[np.uint8]


class DriveAtWork:
    """A drive from when it was opened until it is closed.

    Threads: the event loop.

    Attributes:
        drive: what is at work.
        unreadable: records whose slots could not be read.
    """

    def __init__(
        self,
        drive: Drive,
        calls: DriveCalls,
        config: FleetConfig,
        counts: DriveCounts,
        health: Health,
        on_entry: Callable[[Entry, bool], None],
    ) -> None:
        """Begin.

        Args:
            drive: just opened.
            calls: to it.
            config: for the limits and the codec.
            counts: to count in.
            health: to tell how fast it is.
            on_entry: a block can be read now, or no longer; also told of some that never could.
        """
        self.drive = drive
        self.unreadable: set[bytes] = set()
        self._calls = calls
        self._alone = len(config.nvme) == 1
        self._counts = counts
        self._health = health
        self._on_entry = on_entry
        codec = codec_of(config.nvme_codec, "nvme_codec")
        self._writer = DriveWriter(drive, calls, codec, config.nvme_inflight_max, counts, on_entry)
        self._writer.on_transfer = health.note_write
        self._watch = DriveWatch(drive, calls, self._writer.touch, config.heartbeat_s, config.holder_timeout_s)
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._full_until = 0.0

    # Life

    async def serve(self, told: Callable[[], None]) -> None:
        """Have the drive at work until it fails.

        Args:
            told: called when `on_entry` was told of all that it has.

        Raises:
            TierError: how.
        """

        async def tell() -> None:
            await self._tell(present=True)
            told()

        works = [asyncio.create_task(work()) for work in (tell, self._write, self._watch.answers, self._watch.stays)]
        try:
            await asyncio.wait({self._failure, *works}, return_when=asyncio.FIRST_EXCEPTION)
            for task in (self._failure, *works):
                if task.done():
                    task.result()
        finally:
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)

    async def _tell(self, *, present: bool) -> None:
        """Tell of what the drive has, or had, not all at once."""
        entries = self.drive.books.entries
        for number, entry in enumerate(list(entries.values())):
            if entries.get(entry.record) is entry:
                self._on_entry(entry, present)
            if number % _TOLD_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def _write(self) -> None:
        """Write what comes. A drive that is full is left alone for a while.

        Raises:
            TierUnavailableError: the drive failed.
        """
        while True:
            try:
                await self._writer.run()
            except TierFullError as error:
                _log.warning("%s takes nothing for %.0f s: %s", self.drive.directory, _FULL_S, error)
                self._full_until = now() + _FULL_S
                self._writer.fail(error)
                await asyncio.sleep(_FULL_S)

    @property
    def works(self) -> bool:
        """Whether nothing has failed so far."""
        return not self._failure.done()

    def fail(self, error: TierUnavailableError) -> None:
        """It failed: nothing is begun any more, whoever waits is told."""
        if not self._failure.done():
            self._failure.set_exception(error)
            self._failure.exception()  # it may be told by another way
        self._calls.fail(error.detail)
        self._writer.fail(error)

    async def take_out(self) -> None:
        """At the end of it: tell that what it had is gone, and wait until it answers all that was asked."""
        await self._tell(present=False)
        await self._calls.idle()

    async def close(self, *, save: bool) -> None:
        """Close the drive, once nothing is under way.

        Args:
            save: what is to be saved of it; not if it failed.
        """
        await self._calls.idle()
        drive, uses, deleted = self.drive, self._watch.take_uses(), list(self.drive.books.deleted)
        if not drive.budget.allows(drive.cost(len(uses) + len(deleted)), moment().monotonic_s):
            uses = {}
        if save:
            drive.budget.charge(drive.cost(len(uses) + len(deleted)), moment().monotonic_s)
        state = drive.budget.state(moment(), closing=True)

        def work() -> None:
            try:
                if save:
                    drive.apply(delete=deleted, budget=state)
                    drive.touch(uses)
            except TierError as error:
                _log.warning("%s: its last uses are not saved: %s", drive.directory, error)
            finally:
                drive.close()

        await self._calls.close(work)

    # Use

    @property
    def queued_bytes(self) -> int:
        """On their way to the drive."""
        return self._writer.queued_bytes

    def load(self) -> Load | None:
        """What it has to do; None if nothing is to be written to it now."""
        at, slabs = now(), self.drive.books.slabs
        if not self.works or at < self._full_until or not self._health.accepts(at):
            return None
        free = slabs.capacity_bytes - slabs.used_bytes
        pressure = self.drive.budget.pressure(at)
        return Load(slabs.capacity_bytes, free, self._writer.queued_bytes, pressure, self._counts.written_bytes)

    def has(self, key: BlockKey) -> bool:
        """Whether any shard of a block is on it, or on its way."""
        return self.drive.books.placement.block_bytes(key) > 0

    def last_uses(self) -> dict[bytes, float]:
        """When each record was used last, or one that builds on it, in seconds before the newest use."""
        times = self.drive.books.placement.last_uses()
        newest = max(times.values(), default=0.0)
        return {record: newest - times[BlockKey(entry.key)] for record, entry in self.drive.books.entries.items()}

    def write(
        self, entry: Entry, parent: BlockKey | None, source: Bytes, check: Callable[[], bool]
    ) -> asyncio.Future[bool]:
        """Have a block written. See `Write`."""
        if not self._alone and parent is not None and not self.has(parent):
            parent = None  # on another drive: not missed
        write = Write(entry, parent, source, check)
        self._health.written(now())
        self._writer.add(write)
        return write.done

    async def read(self, entry: Entry, target: Bytes) -> int | None:
        """See `NvmeTier.read`."""
        drive, key, loop = self.drive, BlockKey(entry.key), asyncio.get_running_loop()

        def work() -> tuple[int, float]:
            begun = loop.time()
            return drive.read(entry, target), loop.time() - begun

        drive.books.placement.hold(key)
        try:
            checksum, seconds = await self._calls.read(work)
        except CorruptBlockError as error:
            if drive.books.entries.get(entry.record) is not entry:
                return None  # it went, and its slot is another's
            _log.warning("%s", error)
            self._counts.corrupt_blocks += 1
            self.drop(key)
            raise
        except TierUnavailableError as error:
            if self.works:
                self.unreadable.add(entry.record)
                self.fail(error)
            raise
        finally:
            drive.books.placement.release(key)
        self._health.note_read(entry.coded_bytes, seconds)
        self._counts.read_blocks += 1
        self._counts.read_bytes += entry.coded_bytes
        self.touch(key, now())
        return checksum

    async def problem_of(self, entry: Entry) -> str:
        """See `drivedoctor.problem_of`."""
        return await problem_of(self.drive, self._calls, entry)

    def touch(self, key: BlockKey, at: float) -> None:
        """Note a use of a block; one that is not here is ignored."""
        self._watch.touch(key, at)

    def drop(self, key: BlockKey) -> None:
        """Take out a block, all shards of it."""
        self._writer.forget(key)

    async def examine(self, *, repair: bool) -> DriveReport:
        """Read all of it. See `NvmeTier.doctor`.

        Raises:
            TierUnavailableError: the drive failed. A read that hangs goes on by itself.
        """
        forget = self._writer.forget if repair else None
        looking = asyncio.ensure_future(examine(self.drive, self._calls, forget, self.unreadable))
        ends: tuple[asyncio.Future[Any], ...] = (looking, self._failure)
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return looking.result() if looking.done() else self._gone()
        finally:
            looking.cancel()

    def _gone(self) -> NoReturn:
        """Tell how the drive failed."""
        error = self._failure.exception()
        assert error is not None, "it has failed"
        raise error

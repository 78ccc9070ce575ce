"""Looking after a drive that works: whether it answers, whether it is where it was, what was used last."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path

from kvfleet.core.block import BlockKey
from kvfleet.core.inventory import record_id
from kvfleet.errors import TierFullError, TierUnavailableError
from kvfleet.node.drive import Drive
from kvfleet.node.drivebooks import NS
from kvfleet.node.drivecalls import DriveCalls
from kvfleet.node.drivefile import TIER, drive_errors
from kvfleet.node.driveformat import DATA_FILE, INDEX
from kvfleet.node.waiting import now

__all__ = ["DriveWatch"]

_SAVE_USES_S = 300.0
_USES_MAX = 1024  # last uses saved at a time: each may cost a page of writing
_EARLIER_BY_DEPTH_S = 1e-6


class DriveWatch:
    """Looks after one open drive.

    Threads: the event loop.
    """

    def __init__(
        self,
        drive: Drive,
        calls: DriveCalls,
        save: Callable[[Mapping[bytes, int]], Awaitable[None]],
        tick_s: float,
        patience_s: float,
    ) -> None:
        """Begin.

        Args:
            drive: that works.
            calls: to it.
            save: has the drive know last uses, by record.
            tick_s: how often to look.
            patience_s: a call that takes longer is taken for one that hangs.
        """
        self._drive = drive
        self._calls = calls
        self._save = save
        self._tick_s = tick_s
        self._patience_s = patience_s
        self._uses: dict[bytes, int] = {}

    async def answers(self) -> None:
        """Look whether the drive answers, until it does not.

        Raises:
            TierUnavailableError: not for a long time.
        """
        while True:
            await asyncio.sleep(self._tick_s)
            begun = self._calls.oldest()
            if begun is not None and now() - begun > self._patience_s:
                raise TierUnavailableError(TIER, f"{self._drive.directory}: no answer for {now() - begun:.0f} s")

    async def stays(self) -> None:
        """Look whether the drive is where it was, until it is not; save the last uses now and then.

        Raises:
            TierUnavailableError: it is gone, another is there, or it failed.
        """
        place = _place(self._drive.directory)
        where = await self._calls.look(place)
        save_at = now() + _SAVE_USES_S
        while True:
            await asyncio.sleep(self._tick_s)
            if await self._calls.look(place) != where:
                raise TierUnavailableError(TIER, f"{self._drive.directory}: it, or a file in it, is another now")
            if now() >= save_at:
                with suppress(TierFullError):
                    await self._save(self.take_uses())
                save_at = now() + _SAVE_USES_S

    def touch(self, key: BlockKey, at: float) -> None:
        """Note a use of a block; one that is not here is ignored."""
        drive = self._drive
        for shard in drive.books.placement.shards(key):
            entry = drive.books.entries.get(record_id(key, shard))
            if entry is not None:
                # Those that build on it count as used a little earlier: they are to go first, on whichever drive.
                # Readers say when: that moves no clock of the budget's.
                elapsed = drive.budget.elapsed_s(now()) + at - now()
                time = max(0.0, elapsed - _EARLIER_BY_DEPTH_S * entry.depth)
                drive.books.placement.touch(key, time)
                self._uses[entry.record] = int(time * NS)

    def take_uses(self) -> dict[bytes, int]:
        """The last uses of blocks since they were taken last, as many as are worth their writing."""
        newest = heapq.nlargest(_USES_MAX, self._uses, key=self._uses.__getitem__)
        uses = {record: self._uses[record] for record in newest if record in self._drive.books.entries}
        self._uses.clear()
        return uses


def _place(directory: Path) -> Callable[[], list[tuple[int, int]]]:
    def place() -> list[tuple[int, int]]:
        with drive_errors(directory, "look at the directory"):
            found = [path.stat() for path in (directory, directory / DATA_FILE, directory / INDEX)]
        return [(one.st_dev, one.st_ino) for one in found]

    return place

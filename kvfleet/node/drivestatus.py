"""What a node says of its drives."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from kvfleet.core.writebudget import WriteBudget
from kvfleet.node.drive import Drive

__all__ = ["DriveCounts", "DriveReport", "DriveStatus"]


@dataclass(slots=True)
class DriveCounts:
    """What was done with a drive since the manager started.

    Attributes:
        written_blocks: stored; `written_bytes` of their slots.
        read_blocks: read and verified; `read_bytes` of them.
        evicted_blocks: that made room for others, or for a smaller cap.
        corrupt_blocks: found not to be what they should, and dropped.
        dropped_writes: blocks that were not stored: no room, no budget, or the drive failed.
    """

    written_blocks: int = 0
    written_bytes: int = 0
    read_blocks: int = 0
    read_bytes: int = 0
    evicted_blocks: int = 0
    corrupt_blocks: int = 0
    dropped_writes: int = 0


@dataclass(frozen=True, slots=True)
class DriveStatus:
    """One drive at a moment.

    Attributes:
        directory: as it was configured.
        works: it can be read, and written unless it is full, slow or its budget is spent.
        problem: why it does not work, or what else is wrong with it; else "".
        tried: it was opened, or could not be; False right after the start of its manager.
        slow: much slower than the others: it is not written but for a probe now and then.
        direct: False if its filesystem does no direct I/O, so that all goes through the page cache.
        capacity_bytes: of its slots; 0 if it is not open.
        used_bytes: of the slots that are taken.
        blocks: that can be read.
        queued_bytes: on their way to it.
        day_bytes: what may be written to it a day.
        today_bytes: what was written today.
        total_bytes: what was written since it was first used.
        life_days: until it has had the writes it is rated for, if it goes on like this; may be infinite.
        pressure: of the write budget: at 0 it takes all, at 1 nothing.
        counts: since the manager started.
    """

    directory: str
    works: bool
    problem: str
    tried: bool = True
    slow: bool = False
    direct: bool = True
    capacity_bytes: int = 0
    used_bytes: int = 0
    blocks: int = 0
    queued_bytes: int = 0
    day_bytes: int = 0
    today_bytes: int = 0
    total_bytes: int = 0
    life_days: float = math.inf
    pressure: float = 0.0
    counts: DriveCounts = field(default_factory=DriveCounts)

    def with_drive(self, drive: Drive, queued_bytes: int) -> DriveStatus:
        """With what an open drive has, and gets."""
        slabs = drive.books.slabs
        return replace(
            self,
            direct=drive.direct,
            capacity_bytes=slabs.capacity_bytes,
            used_bytes=slabs.used_bytes,
            blocks=len(drive.books.entries),
            queued_bytes=queued_bytes,
        )

    def with_budget(self, budget: WriteBudget, now: float) -> DriveStatus:
        """With what was written."""
        return replace(
            self,
            day_bytes=budget.day_bytes,
            today_bytes=budget.today_bytes(now),
            total_bytes=budget.total_bytes,
            life_days=budget.life_days(now),
            pressure=budget.pressure(now),
        )


@dataclass(frozen=True, slots=True)
class DriveReport:
    """What a drive was found to hold, when all of it was read.

    Attributes:
        directory: as it was configured.
        problem: why it could not be looked at to the end, or "".
        blocks: read.
        num_bytes: of them on the drive.
        corrupt: record ids, in hex, of blocks that are not what they should be.
        findings: where books, index and slots do not agree.
        repaired: blocks that were dropped, or forgotten by the index, because of that.
    """

    directory: str
    problem: str = ""
    blocks: int = 0
    num_bytes: int = 0
    corrupt: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    repaired: int = 0

"""How a node's drives are doing, and whether their indexes and their media say the same."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvfleet.explain import show_bytes
from kvfleet.node.drivestatus import DriveReport, DriveStatus
from kvfleet.node.hostchecks import Check, State, check_drive_mount
from kvfleet.node.landing import settle

if TYPE_CHECKING:
    from kvfleet.node.node import Node

__all__ = ["check_drives"]


async def check_drives(node: Node, *, repair: bool) -> list[Check]:
    """Look at each drive, and read all of it.

    Args:
        node: whose drives they are.
        repair: drop what is damaged, and have index and books agree.
    """
    if node.nvme is None:
        return []
    notes = [await settle(None, partial(_notes, status)) for status in node.nvme.status()]
    reports = await node.nvme.doctor(repair=repair)
    return [_check(report, said, repair=repair) for report, said in zip(reports, notes, strict=True)]


def _notes(status: DriveStatus) -> list[str]:
    """What is not as it could be with a drive that works, and where it is mounted."""
    if not status.works:
        return []
    notes = [check_drive_mount(Path(os.path.expandvars(status.directory)).expanduser())]
    if status.problem:
        notes.append(status.problem)
    if status.slow:
        notes.append("is much slower than the others: nothing is written to it")
    if not status.direct:
        notes.append("its filesystem refuses O_DIRECT: all goes through the page cache")
    if status.pressure >= 1:
        notes.append("has had its writes for today: nothing is written to it")
    return [note for note in notes if note]


def _check(report: DriveReport, notes: list[str], *, repair: bool) -> Check:
    """One line for a drive: what came of reading it, and what else there is to say."""
    state, text = _read(report, repair=repair)
    return Check(f"drive {report.directory}", "note" if notes and state == "ok" else state, "; ".join([text, *notes]))


def _read(report: DriveReport, *, repair: bool) -> tuple[State, str]:
    """What came of reading a drive."""
    wrong = [*report.findings, *(f"{record} is damaged" for record in report.corrupt)]
    if report.problem:
        return "bad", "; ".join([report.problem, *wrong[:3]])
    if not report.blocks and not wrong:
        return "ok", "it holds no blocks"
    if not wrong:
        read = "1 block" if report.blocks == 1 else f"all {report.blocks:,} blocks"
        return "ok", f"{read}, {show_bytes(report.num_bytes)}, read and sound"
    more = f" and {len(wrong) - 3:,} more" if len(wrong) > 3 else ""
    text = f"of {report.blocks:,} blocks {'; '.join(wrong[:3])}{more}"
    if not repair:
        return "bad", f"{text}; --repair drops them"
    return "note" if report.repaired else "bad", f"{text}; {report.repaired:,} were dropped"

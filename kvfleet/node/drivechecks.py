"""How a node's drives are doing, and whether their indexes and their media say the same."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvfleet.explain import show_bytes
from kvfleet.node.drivestatus import DriveReport, DriveStatus
from kvfleet.node.hostchecks import Check, check_drive_mount
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
    checks: list[Check] = []
    for status in node.nvme.status():
        checks += await settle(None, partial(_state, status))
    return checks + [_read(report, repair=repair) for report in await node.nvme.doctor(repair=repair)]


def _state(status: DriveStatus) -> list[Check]:
    """What a drive says of itself, and where it is mounted."""
    name = f"drive {status.directory}"
    if not status.works:
        return [Check(name, "bad", status.problem)]
    notes = [check_drive_mount(Path(os.path.expandvars(status.directory)).expanduser())]
    if status.problem:
        notes.append(status.problem)
    if status.slow:
        notes.append("is much slower than the others: nothing is written to it")
    if not status.direct:
        notes.append("its filesystem refuses O_DIRECT: all goes through the page cache")
    if status.pressure >= 1:
        notes.append("has had its writes for today: nothing is written to it")
    return [Check(name, "note", note) for note in notes if note]


def _read(report: DriveReport, *, repair: bool) -> Check:
    """What came of reading a drive."""
    name = f"drive {report.directory}"
    wrong = [*report.findings, *(f"{record} is damaged" for record in report.corrupt)]
    if report.problem:
        return Check(name, "bad", "; ".join([report.problem, *wrong[:3]]))
    if not wrong:
        return Check(name, "ok", f"{report.blocks:,} blocks, {show_bytes(report.num_bytes)}, were read: all sound")
    more = f" and {len(wrong) - 3:,} more" if len(wrong) > 3 else ""
    text = f"of {report.blocks:,} blocks {'; '.join(wrong[:3])}{more}"
    if not repair:
        return Check(name, "bad", f"{text}; --repair drops them")
    return Check(name, "note" if report.repaired else "bad", f"{text}; {report.repaired:,} were dropped")

"""Failing the calls of the NVMe tier to the system, one at a time."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lmdb
import pytest

from kvfleet.config import KIB, MIB
from kvfleet.errors import TierUnavailableError
from kvfleet.node.driveindex import DriveIndex
from tests.drives import attempt, drive_directories, key_of, play, running, settings

CALLS = [
    "fdatasync",
    "fstatvfs",
    "fsync",
    "ftruncate",
    "listdir",
    "mkdir",
    "open",
    "posix_fallocate",
    "preadv",
    "pwrite",
    "pwritev",
    "replace",
    "statvfs",
    "unlink",
    "write",
]
TRANSFERS = {"preadv", "pwritev"}
TRANSACTIONS = ["apply", "touch"]
SIZE = 300 * KIB + 5
BLOCKS = 10
CAPS = (8 * MIB, 7 * MIB)  # 6 blocks, and 3


class Faults:
    """Fails call number `at` of those in `CALLS`, of locks, and of the index's opening and transactions.

    Args:
        how: the error's number; "torn" does half of a transfer, or all of a transaction, and then fails; "short" does
            half of a transfer and says so.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, how: int | str) -> None:
        self.how = how
        self.calls, self.at = 0, -1
        for name in CALLS:
            if isinstance(how, int) or name in TRANSFERS:
                monkeypatch.setattr(os, name, self.system_call(getattr(os, name), transfers=name in TRANSFERS))
        if isinstance(how, int):
            monkeypatch.setattr(fcntl, "flock", self.system_call(fcntl.flock))
            monkeypatch.setattr(lmdb, "open", self.opening(lmdb.open))
        for name in TRANSACTIONS:
            if how != "short":
                monkeypatch.setattr(DriveIndex, name, self.transaction(getattr(DriveIndex, name)))

    def due(self) -> bool:
        self.calls += 1
        return self.calls - 1 == self.at

    def system_call(self, call: Callable[..., Any], *, transfers: bool = False) -> Callable[..., Any]:
        def wrapped(*args, **kwargs):
            if not self.due():
                return call(*args, **kwargs)
            number = self.how if isinstance(self.how, int) else errno.EIO
            if transfers and not isinstance(self.how, int):
                fd, (first, *_), offset = args
                moved = call(fd, [first[: len(first) // 8192 * 4096]], offset)
                if self.how == "short":
                    return moved
            raise OSError(number, os.strerror(number))

        return wrapped

    def opening(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args, **kwargs):
            if self.due():
                raise (lmdb.DiskError if self.how == errno.ENOSPC else lmdb.Error)(f"{args[0]}: no")
            return call(*args, **kwargs)

        return wrapped

    def transaction(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args, **kwargs):
            due = self.due()
            if not due or self.how == "torn":
                done = call(*args, **kwargs)
            if due:
                raise TierUnavailableError("nvme", "the index failed")
            return done

        return wrapped


async def scenario(directory: Path) -> None:
    """Two lives of a drive, the second one with a smaller cap."""
    for cap in CAPS:
        async with running(settings([directory], max_bytes=cap, heartbeat_s=50.0)) as rig:
            for start in range(0, BLOCKS, 5):
                await asyncio.gather(*(attempt(rig.write(number, SIZE)) for number in range(start, start + 5)))
            rig.tier.drop(key_of(7))
            await attempt(rig.read(BLOCKS - 1, SIZE))
            await asyncio.sleep(400)  # last uses are saved, a drive that failed has come back
            await attempt(rig.write(20, SIZE))
            for number in range(BLOCKS):
                await attempt(rig.read(number, SIZE))
            rig.check_books()


def fail_each_call(root: Path, monkeypatch: pytest.MonkeyPatch, how: int | str, *, first: int, step: int) -> None:
    """Fail call `first`, then `first + step` and so on, each in a life of its own, until one comes through.

    Afterwards every block is right or missing, the books agree with the medium, and the drive works.
    """
    faults = Faults(monkeypatch, how)
    at, reached = first, True
    while reached:
        (directory,) = drive_directories(root)
        faults.calls, faults.at = 0, at
        play(partial(scenario, directory))
        reached = faults.calls > at
        faults.at = -1
        play(partial(_afterwards, directory))
        shutil.rmtree(directory)
        at += step
    assert at > (10 if how == "short" else 30), "there were calls to fail"


async def _afterwards(directory: Path) -> None:
    async with running(settings([directory], max_bytes=CAPS[0])) as rig:
        assert rig.tier.status()[0].works, rig.tier.status()
        await rig.check(range(BLOCKS), SIZE)
        (report,) = await rig.tier.doctor(repair=False)
        assert (report.corrupt, report.findings) == ((), ())
        assert await rig.write(21, SIZE)

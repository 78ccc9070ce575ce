"""Killing a process that stores to a drive, and looking at what is left."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvfleet.config import MIB
from tests.drives import disk_bytes, key_of, play, running, settings
from tests.fault import drive_process
from tests.fault.drive_process import CAP, SMALLER_CAP, size_of

_REPOSITORY = Path(__file__).parents[1]
_NUMBERS = range(200)


class Killer:
    """Plays roles in children of a process that has all imported."""

    def __init__(self, process: subprocess.Popen[str], output: Path) -> None:
        self._process = process
        self._output = output

    def run(self, role: str, directory: Path, point: int, seed: int) -> tuple[list[tuple[str, list[int]]], int]:
        """Play a role until it is killed, or to the end. Returns what it said, by sign, and its exit status."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{role} {directory} {point} {seed} {self._output}\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        lines = self._output.read_text().splitlines()
        return [(line[0], [int(number) for number in line[1:].split(",")]) for line in lines], status


@contextmanager
def killing(directory: Path) -> Iterator[Killer]:
    command = [sys.executable, drive_process.__file__]
    with subprocess.Popen(
        command, cwd=_REPOSITORY, env={"PYTHONPATH": str(_REPOSITORY)}, stdin=-1, stdout=-1, text=True
    ) as process:
        yield Killer(process, directory / "said")
        assert process.stdin is not None
        process.stdin.close()


def points(killer: Killer, role: str, directory: Path, seed: int, count: int) -> list[int]:
    """Points at which to kill, from a run to the end.

    One in four is in mid-write, one anywhere, and two are at lines of the source drawn with equal chances, so that
    those that are executed once have their turn too.
    """
    rng = random.Random(seed)
    said, status = killer.run(role, directory, 0, seed)
    assert status == 0
    lines, writes, *executed = said[-1][1]
    assert min(lines, writes) > 0
    chosen = [[-rng.randint(1, writes), rng.randint(1, lines), *rng.sample(executed, 2)] for _ in range(count // 4)]
    return [point for four in chosen for point in four]


def check_sound(directory: Path, max_bytes: int) -> set[int]:
    """All blocks are whole, nothing else is taken, and the cap holds. Returns their numbers."""
    assert disk_bytes(directory) <= CAP
    there: set[int] = set()

    async def look() -> None:
        async with running(settings([directory], max_bytes=max_bytes)) as rig:
            (status,) = rig.tier.status()
            assert status.works, status.problem
            assert status.counts.corrupt_blocks == 0
            numbers = {key_of(number): number for number in _NUMBERS}
            for key, _ in list(rig.told):
                number = numbers[key]
                assert await rig.read(number, size_of(number))
                there.add(number)
            (report,) = await rig.tier.doctor(repair=False)
            assert (report.corrupt, report.findings) == ((), ())
            rig.check_books()
            slots = sum(entry.slot_bytes for entry in rig.tier._bays[0].at_work.drive.books.entries.values())
            assert status.used_bytes == slots <= status.capacity_bytes
            assert disk_bytes(directory) <= max_bytes
            for number in there:
                rig.tier.drop(key_of(number))
            whole = status.capacity_bytes // MIB
            assert all([await rig.write(300 + 3 * n + 2, MIB) for n in range(whole)])  # no slot is lost
            assert len(rig.told) == whole

    play(look)
    return there


def kill_in_a_store(root: Path, seed: int, count: int) -> None:
    """After a kill anywhere in a store, all that could be read is there, whole."""
    directory = root / "drive"
    killed = 0
    with killing(root) as killer:
        directory.mkdir(mode=0o700)
        for point in points(killer, "store", directory, seed, count):
            shutil.rmtree(directory)
            directory.mkdir(mode=0o700)
            said, status = killer.run("store", directory, point, seed)
            assert status in {0, -signal.SIGKILL}, point  # threads do not run the same way twice
            killed += status != 0
            assert told(said) <= check_sound(directory, CAP), point
    assert killed >= 0.9 * count


def told(said: list[tuple[str, list[int]]]) -> set[int]:
    """The numbers of blocks that could be read at the end, and so have to be there."""
    there: set[int] = set()
    for sign, numbers in said:
        if sign == "+":
            there.update(numbers)
        elif sign == "-":
            there.difference_update(numbers)
    return there


def kill_while_it_shrinks(root: Path, seed: int, count: int) -> None:
    """After a kill anywhere in an opening with a smaller cap, the next one goes on with the blocks used last."""
    full, directory = root / "full", root / "drive"
    full.mkdir(mode=0o700)
    numbers: list[int] = []

    async def fill() -> None:
        async with running(settings([full], max_bytes=CAP)) as rig:
            while rig.tier.status()[0].counts.evicted_blocks == 0:
                numbers.append(1 + 3 * len(numbers))
                assert await rig.write(numbers[-1], size_of(1))

    play(fill)
    with killing(root) as killer:
        shutil.copytree(full, directory)
        for point in points(killer, "shrink", directory, seed, count):
            shutil.rmtree(directory)
            shutil.copytree(full, directory)
            _, status = killer.run("shrink", directory, point, seed)
            assert status in {0, -signal.SIGKILL}, point
            there = check_sound(directory, SMALLER_CAP)
            assert there == set(numbers[-len(there) :]), point
            assert len(there) > 5

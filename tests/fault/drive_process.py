"""The other process of the drive's kill tests: `python drive_process.py`.

It imports what is needed once, and forks a child for each line `ROLE DIRECTORY POINT SEED OUTPUT` that it reads. A
child counts the lines of the drive's modules that its threads execute and kills itself before line POINT, or, for a
negative one, in the middle of write -POINT to the data file. What it has been told it writes to OUTPUT: "+" and "-"
lines with the numbers of blocks that can be read from now on, or no longer. If it gets to the end, it writes the
counts of lines and writes, and one point for each line of the source that was executed. The parent writes the child's
exit status.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import threading
from pathlib import Path

from kvfleet.config import MIB
from kvfleet.node import drive as drive_module
from tests.drives import key_of, running, settings

CAP = 8 * MIB
SMALLER_CAP = 7 * MIB
SIZES = [30_000, 100_001, 300_000]
WATCHED = (str(Path(drive_module.__file__).with_suffix("")), str(Path(drive_module.__file__).with_name("nvme")))


def size_of(number: int) -> int:
    return SIZES[number % len(SIZES)]


def parent_of(number: int) -> int | None:
    """Blocks come in prefixes of five."""
    return number - 1 if number % 5 else None


class Fate:
    """Dies at a point."""

    def __init__(self, point: int) -> None:
        self.point = point
        self.lines = self.writes = 0
        self.executed: dict[tuple[str, int], tuple[int, int]] = {}  # how often, and at which of these points
        self.rng = random.Random(0)
        self.pwritev = os.pwritev

    def trace(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(WATCHED):
            return None
        if event == "line":
            self.lines += 1
            line = frame.f_code.co_filename, frame.f_lineno
            times, at = self.executed.get(line, (0, 0))
            self.executed[line] = times + 1, self.lines if self.rng.random() * (times + 1) < 1 else at
            if self.lines == self.point:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.trace

    def write(self, fd, pieces, offset):
        self.writes += 1
        if self.writes == -self.point:
            self.pwritev(fd, [pieces[0][: len(pieces[0]) // 8192 * 4096]], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return self.pwritev(fd, pieces, offset)


async def store(directory: Path, seed: int, say) -> None:
    """Store more than fits, drop some, close and open. Says what can be read from now on, and no longer."""
    rng = random.Random(seed)
    numbers = {key_of(number): number for number in range(200)}
    number = 0
    for _ in range(2):
        config = settings([directory], max_bytes=CAP, nvme_codec=rng.choice(["raw", "zstd"]))
        async with running(config, lambda key, present: say("+" if present else "-", [numbers[key]])) as rig:
            for _ in range(5):
                batch = range(number, number + rng.randrange(1, 8))
                number = batch[-1] + 1
                await asyncio.gather(*(rig.write(n, size_of(n), parent=parent_of(n)) for n in batch))
                for each in rng.sample(range(number), min(number, rng.randrange(0, 4))):
                    rig.tier.drop(key_of(each))
                for each in rng.sample(range(number), min(number, 3)):
                    await rig.read(each, size_of(each))


async def shrink(directory: Path, _seed: int, say) -> None:
    """Open with a smaller cap."""
    async with running(settings([directory], max_bytes=SMALLER_CAP)) as rig:
        say("+", [len(rig.told)])


def child(role: str, directory: str, point: int, seed: int, output: str) -> None:
    fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

    def say(sign: str, numbers: list[int]) -> None:
        if numbers:
            os.write(fd, f"{sign}{','.join(map(str, numbers))}\n".encode())

    fate = Fate(point)
    setattr(os, "pwritev", fate.write)  # noqa: B010 - its signature is narrower
    if fate.point >= 0:
        threading.settrace(fate.trace)
        sys.settrace(fate.trace)
    asyncio.run({"store": store, "shrink": shrink}[role](Path(directory), seed, say))
    sys.settrace(None)
    say("=", [fate.lines, fate.writes, *(at for _, at in fate.executed.values())])


def main() -> None:
    for line in sys.stdin:
        role, directory, point, seed, output = line.split()
        pid = os.fork()
        if not pid:
            status = 1
            try:
                child(role, directory, int(point), int(seed), output)
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(pid, 0)
        os.write(1, f"{os.waitstatus_to_exitcode(status)}\n".encode())


if __name__ == "__main__":
    main()

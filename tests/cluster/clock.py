"""A clock that a test puts forward, for all processes of a fleet: hours go by between two requests."""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path
from typing import Any

__all__ = ["Clock", "install"]

_AHEAD = struct.Struct("=q")  # nanoseconds
_PATH = "KVFLEET_TEST_CLOCK"


class Clock:
    """What makes the processes of a Ray job see another time: that of the machine, and so much more.

    Args:
        path: of a file for it.
    """

    def __init__(self, path: Path) -> None:
        path.write_bytes(_AHEAD.pack(0))
        self._path = path

    @property
    def runtime_env(self) -> dict[str, Any]:
        """For `ray.init`: its workers have this clock."""
        return {"worker_process_setup_hook": f"{__name__}.install", "env_vars": {_PATH: str(self._path)}}

    def put(self, seconds: float) -> None:
        """Have it show so many monotonic seconds now, more than it has shown yet."""
        ahead = _AHEAD.pack(int(seconds * 1e9) - time.monotonic_ns())
        with self._path.open("r+b") as file:
            assert _AHEAD.unpack(ahead) >= _AHEAD.unpack(file.read()), "a clock never goes back"
            file.seek(0)
            file.write(ahead)


def install() -> None:
    """Run in a worker, before anything else: have it use the clock. Event loops ask `time.monotonic` too."""
    with Path(os.environ[_PATH]).open("rb") as file:
        shared = mmap.mmap(file.fileno(), _AHEAD.size, access=mmap.ACCESS_READ)
    real = time.monotonic_ns
    time.monotonic_ns = lambda: real() + _AHEAD.unpack(shared)[0]
    time.monotonic = lambda: time.monotonic_ns() / 1e9

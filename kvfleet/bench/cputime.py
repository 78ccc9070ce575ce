"""Counting what benchmarks cost in CPU time, beside how long they take."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

__all__ = ["CpuTimes"]


class CpuTimes:
    """CPU seconds of all threads of this process, and bytes moved for them, by case.

    Args:
        warmups: runs of each case and size that do not count.
    """

    def __init__(self, warmups: int) -> None:
        self._warmups = warmups
        self._runs: Counter[tuple[str, int]] = Counter()
        self._spent_s: dict[str, float] = {}
        self._moved_bytes: Counter[str] = Counter()

    def timed(self, name: str, num_bytes: int, work: Callable[[], object]) -> float:
        """Do work that moves so many bytes once. Returns the seconds it takes."""
        started, spent = time.perf_counter(), time.process_time()
        work()
        seconds, spent = time.perf_counter() - started, time.process_time() - spent
        self._runs[name, num_bytes] += 1
        if self._runs[name, num_bytes] > self._warmups:
            self._spent_s[name] = self._spent_s.get(name, 0.0) + spent
            self._moved_bytes[name] += num_bytes
        return seconds

    def text(self) -> str:
        """CPU seconds per GB of each case, for reading."""
        return ", ".join(f"{name} {1e9 * self._spent_s[name] / moved:.2f}" for name, moved in self._moved_bytes.items())

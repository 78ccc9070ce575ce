"""Work beside vLLM's scheduling thread, handed over at the price of a queue's `put`."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["Background", "Job"]

T = TypeVar("T")


class Job(Generic[T]):
    """A piece of work.

    Attributes:
        done: whether it has ended.
        result: what it answered, or None; before it has ended, what it has told so far.
    """

    __slots__ = ("_work", "done", "result")

    def __init__(self, work: Callable[[Job[T]], T | None]) -> None:
        self._work = work
        self.result: T | None = None
        self.done = False

    def run(self) -> None:
        """Do it."""
        self.result = self._work(self)


class Background:
    """Some threads that do what they are given, in order.

    A ThreadPoolExecutor does the same, but handing over takes the scheduling thread three times as long.

    Args:
        threads: how many.
        name: of the threads.
        failed: told what failed, with the error.
    """

    def __init__(self, threads: int, name: str, failed: Callable[[str, Exception], None]) -> None:
        self._failed = failed
        self._jobs: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[Job[T]], T | None]) -> Job[T]:
        """Have a piece of work done; it is given its job. Never waits."""
        job = Job(work)
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """End the threads when they have done what they were given."""
        for _ in self._threads:
            self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job.run()
            except Exception as error:  # noqa: BLE001  the thread has to live
                self._failed("lookup", error)
            job.done = True

"""Blocking functions with a time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeVar

__all__ = ["TimedThreads"]

_T = TypeVar("_T")


class TimedThreads:
    """Runs blocking functions with a time limit, each in a daemon thread of its own.

    A pool would not do: its threads are joined at exit, and one that hangs in a dead mount would keep the process.
    """

    def __init__(self, threads_max: int, name: str = "kvfleet-shared") -> None:
        self._name = name
        self._free = threading.BoundedSemaphore(threads_max)

    def run(self, function: Callable[[], _T], timeout_s: float) -> _T:
        """Return what `function` returns, raise what it raises, or TimeoutError: also if no thread is to be had."""
        deadline = time.monotonic() + timeout_s
        if timeout_s <= 0 or not self._free.acquire(timeout=timeout_s):
            raise TimeoutError
        future: Future[_T] = Future()

        def work() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                future.set_exception(error)
            finally:
                self._free.release()

        try:
            threading.Thread(target=work, name=self._name, daemon=True).start()
        except RuntimeError as error:
            self._free.release()
            raise TimeoutError("no more threads") from error
        try:
            return future.result(max(0.0, deadline - time.monotonic()))
        except FutureTimeoutError as error:  # before Python 3.11 not the built-in one
            if future.done():
                raise
            raise TimeoutError from error

"""What blocking code waits with, in virtual time: stand-ins for `time`, `threading`, `queue` and thread pools.

Each waits by switching from its fiber to the loop.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

import greenlet
from typing_extensions import Self

from kvfleet.testing.loop import VirtualLoop

__all__ = ["Pool", "QueueModule", "ThreadingModule", "TimeModule", "pause", "wait"]

T = TypeVar("T")
_WALL_NS = 1_800_000_000_000_000_000  # when a run begins, for what is told to others


def pause(loop: VirtualLoop, seconds: float) -> None:
    """Wait so long; outside of fibers everything waits."""
    fiber = greenlet.getcurrent()
    if fiber is loop.hub:
        loop.stall(seconds)
    else:
        loop.call_later(seconds, fiber.switch)
        _switch(loop)


def wait(loop: VirtualLoop, future: asyncio.Future[Any], timeout_s: float | None) -> bool:
    """Wait until a future is done. False: not within `timeout_s`."""
    if future.done() or (timeout_s is not None and timeout_s <= 0):
        return future.done()
    fiber = greenlet.getcurrent()
    assert fiber is not loop.hub, "only fibers can block"
    waits = [True]

    def wake(_: object = None) -> None:
        if waits.pop():
            waits.append(False)
            fiber.switch()
        else:
            waits.append(False)

    future.add_done_callback(wake)
    timer = None if timeout_s is None else loop.call_later(timeout_s, wake)
    _switch(loop)
    future.remove_done_callback(wake)
    if timer is not None:
        timer.cancel()
    return future.done()


def _switch(loop: VirtualLoop) -> None:
    if loop.is_closed():
        raise greenlet.GreenletExit
    loop.hub.switch()


class Pool:
    """In place of `ThreadPoolExecutor`."""

    def __init__(self, threads_max: int = 1 << 30, name: str = "") -> None:
        self._free = threads_max
        self._name = name
        self._jobs: deque[tuple[VirtualLoop, asyncio.Future[Any], Callable[[], Any]]] = deque()
        self._running = 0
        self._idle: list[asyncio.Future[None]] = []

    def begin(self, loop: VirtualLoop, function: Callable[[], Any]) -> asyncio.Future[Any]:
        """Call a function in a fiber, when one is free."""
        future = loop.create_future()
        self._jobs.append((loop, future, function))
        self._next()
        return future

    def _next(self) -> None:
        while self._free and self._jobs:
            loop, future, function = self._jobs.popleft()
            self._free -= 1
            self._running += 1

            loop.call_later(loop.hand_over_s(), loop.spawn, partial(self._work, future, function))
        if not self._running:
            idle, self._idle = self._idle, []
            for future in idle:
                future.set_result(None)

    def _work(self, future: asyncio.Future[Any], function: Callable[[], Any]) -> None:
        if not future.cancelled():
            try:
                result = function()
            except Exception as error:  # noqa: BLE001  raised again where the result is awaited
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)
        self._free += 1
        self._running -= 1
        self._next()

    def map(self, function: Callable[[Any], T], items: Iterable[Any]) -> Iterator[T]:
        """One after the other."""
        return map(function, items)

    def shutdown(self) -> None:
        """Wait until nothing is left to do."""
        if self._running or self._jobs:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            idle = loop.create_future()
            self._idle.append(idle)
            wait(loop, idle, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


class TimeModule:
    """In place of the module `time`."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._start = loop.time()
        self._wall = time.time()  # ages of real files are counted by it

    def monotonic(self) -> float:
        """Virtual seconds."""
        return self._loop.time()

    def monotonic_ns(self) -> int:
        """Virtual nanoseconds."""
        return int(self._loop.time() * 1e9)

    perf_counter = monotonic
    perf_counter_ns = monotonic_ns

    def time(self) -> float:
        """Seconds of the real clock at the start, and virtual ones since."""
        return self._wall + self._loop.time() - self._start

    def time_ns(self) -> int:
        """Virtual nanoseconds since a fixed day: the same in each run."""
        return _WALL_NS + int((self._loop.time() - self._start) * 1e9)

    def sleep(self, seconds: float) -> None:
        """Wait."""
        pause(self._loop, seconds)


class _Lock:
    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._taken = False
        self._waiters: deque[asyncio.Future[None]] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it."""
        if not self._taken:
            self._taken = True
            return True
        turn = self._loop.create_future()
        self._waiters.append(turn)
        if wait(self._loop, turn, None if blocking and timeout < 0 else timeout if blocking else 0.0):
            return True
        self._waiters.remove(turn)
        return False

    def release(self) -> None:
        """Give it to the next one."""
        assert self._taken
        if self._waiters:
            self._waiters.popleft().set_result(None)
        else:
            self._taken = False

    def locked(self) -> bool:
        """Whether somebody has it."""
        return self._taken

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Event:
    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._future = loop.create_future()

    def set(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    def clear(self) -> None:
        if self._future.done():
            self._future = self._loop.create_future()

    def is_set(self) -> bool:
        return self._future.done()

    def wait(self, timeout: float | None = None) -> bool:
        return wait(self._loop, self._future, timeout)


class _Thread:
    """A fiber of the process that starts it."""

    def __init__(self, loop: VirtualLoop, target: Callable[..., object], name: str, args: tuple[object, ...]) -> None:
        self._loop = loop
        self._target = target
        self._args = args
        self._ended = loop.create_future()
        self.name = name

    def start(self) -> None:
        self._loop.spawn(self._work)

    def _work(self) -> None:
        self._target(*self._args)
        self._ended.set_result(None)

    def join(self, timeout: float | None = None) -> None:
        wait(self._loop, self._ended, timeout)

    def is_alive(self) -> bool:
        return not self._ended.done()


class ThreadingModule:
    """In place of the module `threading`."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def Lock(self) -> _Lock:  # noqa: N802  as in threading
        """A lock."""
        return _Lock(self._loop)

    def Event(self) -> _Event:  # noqa: N802
        """An event."""
        return _Event(self._loop)

    def Thread(  # noqa: N802
        self, *, target: Callable[..., object], name: str = "", args: tuple[object, ...] = (), daemon: bool = True
    ) -> _Thread:
        """A thread."""
        assert daemon
        return _Thread(self._loop, target, name, args)

    current_thread = staticmethod(threading.current_thread)


class _SimpleQueue:
    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._items: deque[Any] = deque()
        self._getters: deque[asyncio.Future[None]] = deque()

    def put(self, item: object) -> None:
        self._items.append(item)
        if self._getters:
            self._getters.popleft().set_result(None)

    def get(self) -> Any:  # noqa: ANN401  what was put
        while not self._items:
            turn = self._loop.create_future()
            self._getters.append(turn)
            wait(self._loop, turn, None)
        return self._items.popleft()


class QueueModule:
    """In place of the module `queue`."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def SimpleQueue(self) -> _SimpleQueue:  # noqa: N802
        """A queue."""
        return _SimpleQueue(self._loop)

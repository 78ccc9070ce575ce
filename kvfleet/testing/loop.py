"""One thread, virtual time: an event loop, the processes that share it, and code that blocks.

Time stands still while something runs, but for a microsecond a callback, and jumps to the next timer when nothing is
left to run. Every callback belongs to the process in whose context it was scheduled; the callbacks of a process that
was killed never run, as after `kill -9`: no `finally` of it is seen. Blocking code runs in greenlets (*fibers*), which
wait by switching to the loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import random
import sys
import warnings
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import greenlet
from typing_extensions import override

from kvfleet.testing.processes import Handle, Process, SimulationError, process_of

__all__ = ["Fiber", "VirtualLoop"]

T = TypeVar("T")
_CALLBACK_S = 1e-6  # what a callback takes
_START_S = 1000.0
_HANDS_OVER_S = 0.0002  # mean time until a thread of a pool begins


class Fiber(greenlet.greenlet):
    """Code that may block, on a stack of its own. It belongs to the process that started it."""

    def __init__(self, loop: VirtualLoop, function: Callable[[], object]) -> None:
        super().__init__(self._work, loop.hub)
        self._loop = loop
        self._function = function
        self.gr_context = contextvars.copy_context()

    def _work(self) -> None:
        try:
            self._function()
        except greenlet.GreenletExit:
            pass
        except BaseException as error:  # noqa: BLE001  told to whoever runs the loop
            self._loop.call_exception_handler({"message": "a fiber failed", "exception": error})
        self._loop.fibers.pop(self, None)


class VirtualLoop(asyncio.AbstractEventLoop):
    """The loop. What it calls, and when, depends on the seed alone.

    Args:
        seed: of the times that threads take to begin.
        steps_max: callbacks in a run; more are taken for a loop without end.
    """

    def __init__(self, seed: int, steps_max: int = 5_000_000) -> None:
        self.hub = greenlet.getcurrent()
        self.fibers: dict[Fiber, None] = {}
        self.random = random.Random(f"threads {seed}")
        self.problems: list[str] = []
        self._cause: BaseException | None = None
        self.steps = 0
        self._steps_max = steps_max
        self._now = _START_S
        self._ready: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._serial = 0
        self._closed = False
        self._graves: list[asyncio.Task[Any]] = []

    # time

    @override
    def time(self) -> float:
        return self._now

    def stall(self, seconds: float) -> None:
        """Let time pass while nothing runs."""
        self._now += seconds

    # scheduling

    @override
    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: object, context: contextvars.Context | None = None
    ) -> Handle:
        handle = Handle(callback, args, context or contextvars.copy_context(), self._now)
        if not self._closed:
            self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    @override
    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: object, context: contextvars.Context | None = None
    ) -> Handle:
        return self.call_at(self._now + max(0.0, delay), callback, *args, context=context)

    @override
    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: object, context: contextvars.Context | None = None
    ) -> Handle:
        handle = Handle(callback, args, context or contextvars.copy_context(), when)
        self._serial += 1
        if not self._closed:
            heapq.heappush(self._timers, (when, self._serial, handle))
        return handle

    def again(self, handle: Handle) -> None:
        """Run a callback that was kept."""
        self._ready.append(handle)

    @override
    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    @override
    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        if self._closed:
            coro.close()
            raise RuntimeError("the run is over")
        make = partial(asyncio.Task, coro, loop=self, name=name)
        return make() if context is None else context.run(make)

    @override
    def run_in_executor(self, executor: object, func: Callable[..., Any], *args: object) -> asyncio.Future[Any]:
        from kvfleet.testing.blocking import Pool

        pool = executor if isinstance(executor, Pool) else Pool(1 << 30)
        return pool.begin(self, lambda: func(*args))

    # running

    def run(self, function: Callable[[], T]) -> T:
        """Run a function in a fiber until it returns, and everything else meanwhile.

        Raises:
            SimulationError: a rule was broken, or the function raised it.
        """
        assert greenlet.getcurrent() is self.hub, "the loop is running already"
        results: list[T] = []
        fiber = self.spawn(lambda: results.append(function()))
        events._set_running_loop(self)
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(finalizer=self._finalize)
        try:
            while fiber in self.fibers:
                self._step()
        finally:
            sys.set_asyncgen_hooks(*hooks)
            events._set_running_loop(None)
        if self.problems:
            raise SimulationError("; ".join(self.problems)) from self._cause
        return results[0]

    def _finalize(self, generator: Any) -> None:  # noqa: ANN401  any asynchronous generator
        """A generator was dropped in the middle: it is closed by a task, as any event loop does it."""
        if not self._closed:
            self.create_task(generator.aclose())

    def _step(self) -> None:
        timers, ready = self._timers, self._ready
        if timers and (not ready or timers[0][0] <= self._now):
            self._now = max(self._now, timers[0][0])
            ready.append(heapq.heappop(timers)[2])
        assert ready, "everybody waits for ever"
        handle = ready.popleft()
        if handle.callback is None:
            return
        process = process_of(handle.context)
        if process is not None and not process.admits(handle):
            return
        self._now += _CALLBACK_S
        self.steps += 1
        try:
            handle.context.run(handle.callback, *handle.args)
        except Exception as error:  # noqa: BLE001  told to whoever runs the loop
            self.call_exception_handler({"message": "a callback failed", "exception": error})
        if self.problems:
            raise SimulationError("; ".join(self.problems)) from self._cause
        if self.steps > self._steps_max:
            raise SimulationError(f"no end after {self.steps} callbacks")

    def spawn(self, function: Callable[[], object]) -> Fiber:
        """Start a fiber of the current process."""
        fiber = Fiber(self, function)
        self.fibers[fiber] = None
        self.call_soon(fiber.switch)
        return fiber

    def hand_over_s(self) -> float:
        """How long a thread takes to begin."""
        return self.random.expovariate(1 / _HANDS_OVER_S)

    @override
    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._closed:
            error = context.get("exception")
            self._cause = self._cause or error
            self.problems.append(
                str(error) if isinstance(error, SimulationError) else f"{context['message']}: {error!r}"
            )

    @override
    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)

    @override
    def get_debug(self) -> bool:
        return False

    @override
    def is_running(self) -> bool:
        return not self._closed

    @override
    def is_closed(self) -> bool:
        return self._closed

    # the dead

    def bury(self, process: Process) -> None:
        """Keep what a dead process was doing until the end: if it were collected, its `finally` blocks would run.

        Fibers are kept anyway; tasks do not tell whose they are, so that all of them are kept.
        """
        assert not process.alive
        self._graves += asyncio.all_tasks(self)

    @override
    def close(self) -> None:
        """End whatever is left, without a word."""
        self._closed = True
        self._ready.clear()
        self._timers.clear()
        events._set_running_loop(self)
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None  # what will not be closed says so
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for fiber in list(self.fibers):
                    with suppress(BaseException):
                        fiber.throw(greenlet.GreenletExit)
                for task in asyncio.all_tasks(self):
                    _end(task)
                self.fibers.clear()
                self._graves.clear()
        finally:
            sys.unraisablehook = hook
            events._set_running_loop(None)


def _end(task: asyncio.Task[Any]) -> None:
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    coroutine = task.get_coro()
    assert isinstance(coroutine, (Coroutine, Generator))
    with suppress(BaseException):
        coroutine.close()

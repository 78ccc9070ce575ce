"""Processes of a simulated fleet, and the callbacks that belong to them."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from kvfleet.testing.loop import VirtualLoop

__all__ = ["Handle", "Process", "SimulationError", "current_process", "process_of"]

T = TypeVar("T")


class SimulationError(AssertionError):
    """A rule was broken in a simulated run."""


class Process:
    """One life of a process.

    Attributes:
        name: for the trace.
        host: where it runs.
        alive: False once it was killed.
    """

    def __init__(self, loop: VirtualLoop, name: str, host: str) -> None:
        self.loop = loop
        self.name = name
        self.host = host
        self.alive = True
        self._parked: list[Handle] | None = None
        self._context = contextvars.Context()
        self._context.run(_process.set, self)

    def run(self, function: Callable[..., T], *args: object) -> T:
        """Call a function as this process."""
        return self._context.copy().run(function, *args)

    def kill(self) -> None:
        """Nothing of this process runs from here on."""
        self.alive = False
        self.loop.bury(self)

    def stop(self) -> None:
        """Halt, as SIGSTOP does."""
        if self._parked is None:
            self._parked = []

    def resume(self) -> None:
        """Go on, as after SIGCONT."""
        parked, self._parked = self._parked, None
        for handle in parked or ():
            self.loop.again(handle)

    @property
    def stopped(self) -> bool:
        """Whether it is halted."""
        return self._parked is not None

    def admits(self, handle: Handle) -> bool:
        """Whether a callback of this process runs now; one of a halted process is kept."""
        if self._parked is not None and self.alive:
            self._parked.append(handle)
            return False
        return self.alive


_process: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


def current_process() -> Process | None:
    """Whose code is running."""
    return _process.get()


class Handle:
    """A scheduled callback."""

    __slots__ = ("_when", "args", "callback", "context")

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: contextvars.Context, when: float
    ) -> None:
        self.callback: Callable[..., object] | None = callback
        self.args = args
        self.context = context
        self._when = when

    def cancel(self) -> None:
        """Do not call it."""
        self.callback, self.args = None, ()

    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self.callback is None

    def when(self) -> float:
        """When it is due."""
        return self._when


def process_of(context: contextvars.Context) -> Process | None:
    """Whose a context is."""
    return context.get(_process)

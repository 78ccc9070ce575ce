"""Time as the deterministic parts see it: handed in, never asked for."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Clock"]


class Clock(Protocol):
    """A source of monotonic time."""

    def now(self) -> float:
        """Seconds since an arbitrary, fixed moment; never decreases."""
        ...

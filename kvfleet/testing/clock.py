"""A clock that is set by hand."""

from __future__ import annotations

from typing_extensions import override

from kvfleet.core.clock import Clock

__all__ = ["ManualClock"]


class ManualClock(Clock):
    """Stands still until it is moved on."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    @override
    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move on by `seconds`, which is not negative."""
        assert seconds >= 0, "time does not go back"
        self._now += seconds

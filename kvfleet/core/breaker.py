"""Circuit breakers: who asks a service that is known not to answer loses no time with it."""

from __future__ import annotations

import math

__all__ = ["Breaker", "ProbedBreaker"]

_FIRST_PART = 10  # of the interval of probes: a failure that was nothing is over soon
_RELAPSE_INTERVALS = 1.5


class Breaker:
    """Open after a failure; then, after a pause that doubles with each failure, one caller tries again.

    Times are passed in, in seconds. Threads: any; two callers that ask at once may both try.
    """

    def __init__(self, pause_s: float, pause_max_s: float) -> None:
        """Start closed.

        Args:
            pause_s: after a first failure.
            pause_max_s: after many.
        """
        assert 0 < pause_s <= pause_max_s
        self._first_s = self._pause_s = pause_s
        self._max_s = pause_max_s
        self._open = False
        self._probing = False
        self._retry_at = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the last answer was a failure."""
        return self._open

    def allows(self, now: float) -> bool:
        """Whether to ask. Whoever does reports by `worked` or `failed`; if not, another may after a pause."""
        if not self._open:
            return True
        if now < self._retry_at:
            return False
        self._probing, self._retry_at = True, now + self._pause_s
        return True

    def worked(self) -> None:
        """The service answered."""
        self._open = self._probing = False
        self._pause_s = self._first_s

    def failed(self, now: float) -> None:
        """The service did not answer. Of several that asked before it was known, only the first counts."""
        if self._open and not self._probing:
            return
        self._pause_s = min(self._max_s, 2 * self._pause_s) if self._open else self._first_s
        self._open, self._probing, self._retry_at = True, False, now + self._pause_s


class ProbedBreaker:
    """Open after a failure; probes in the background close it again, so that no request has to try.

    A request that failed in a way that may be its own fault leaves the breaker closed, and has a probe made at once:
    that decides. Probes come soon after a failure, then after pauses that double up to the interval, counted from
    start to start: a service that is back is used again within two intervals. One that answers probes, and then fails
    before it has done anything that was asked of it, is left alone for one and a half.

    Times are passed in, in seconds. Threads: none of its own; calls must not overlap.
    """

    def __init__(self, interval_s: float, *, proven: bool) -> None:
        """Start closed, or if it is not proven open, with a probe due.

        Args:
            interval_s: between probes, at most.
            proven: whether the service is believed to work.
        """
        assert interval_s > 0
        self._interval_s = interval_s
        self._pause_s = interval_s / _FIRST_PART
        self._open = not proven
        self._due: float | None = None if proven else -math.inf
        self._probe_began: float | None = None
        self._sound_at = -math.inf  # when it was last known to work
        self._recovering = False  # it has answered a probe, and nothing else yet

    @property
    def is_open(self) -> bool:
        """Whether not to ask."""
        return self._open

    @property
    def due(self) -> float:
        """When a probe is to be made; infinite if none is, or while one is under way."""
        return math.inf if self._due is None or self._probe_began is not None else self._due

    def worked(self, now: float) -> None:
        """A request had its answer. What was asked before it opened does not close it: a probe does."""
        self._sound_at = now
        self._recovering = False

    def failed(self, begun: float, now: float) -> None:
        """A request that began at `begun` had no answer, or waited too long.

        If another had one meanwhile, it is the request's own trouble, or is soon found out by a probe.
        """
        if self._open:
            return
        if self._sound_at >= begun:
            self.doubted(now)
            return
        self._open = True
        if self._recovering:
            self._due = now + _RELAPSE_INTERVALS * self._interval_s
        else:
            self._pause_s = self._interval_s / _FIRST_PART
            self._due = now + self._pause_s

    def doubted(self, now: float) -> None:
        """A request failed, maybe by its own fault."""
        if not self._open and self._due is None:
            self._due = max(now, self._sound_at + self._interval_s / _FIRST_PART)

    def begin(self, now: float) -> None:
        """A probe begins, which is told by `answered` or `unanswered`."""
        assert self._probe_began is None, "one probe at a time"
        self._probe_began = now

    def answered(self, now: float) -> None:
        """The service has answered the probe."""
        assert self._probe_began is not None, "a probe was begun"
        self._recovering, self._open = self._recovering or self._open, False
        self._probe_began = self._due = None
        self._pause_s = self._interval_s / _FIRST_PART
        self._sound_at = now

    def unanswered(self, now: float) -> None:
        """The service has not answered the probe: it is not asked until it answers one."""
        assert self._probe_began is not None, "a probe was begun"
        self._open = True
        self._due = max(now, self._probe_began + self._pause_s)
        self._pause_s = min(self._interval_s, 2 * self._pause_s)
        self._probe_began = None

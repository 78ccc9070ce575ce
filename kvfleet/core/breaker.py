"""A circuit breaker: who asks a service that is known not to answer loses no time with it."""

from __future__ import annotations

__all__ = ["Breaker"]


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

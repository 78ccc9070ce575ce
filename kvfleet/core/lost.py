"""Records whose copy in the shared tier was found to be gone or bad a short while ago."""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["LostCopies"]


class LostCopies:
    """Whoever says that the shared tier has one of these may not have heard yet: it is to be written again.

    Bounded: of more records than `records_max` the first are forgotten; each is after `seconds`.

    Threads: none of its own; calls must not overlap. Times are passed in, in seconds.
    """

    def __init__(self, records_max: int, seconds: float) -> None:
        """Start empty."""
        assert records_max > 0
        self._max = records_max
        self._seconds = seconds
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def add(self, record: bytes, now: float) -> None:
        """Its copy is gone or bad."""
        self._until[record] = now + self._seconds
        self._until.move_to_end(record)
        if len(self._until) > self._max:
            self._until.popitem(last=False)

    def discard(self, record: bytes) -> None:
        """It was written anew."""
        self._until.pop(record, None)

    def has(self, record: bytes, now: float) -> bool:
        """Whether its copy was found to be gone or bad, and not written since."""
        return self._until.get(record, now) > now

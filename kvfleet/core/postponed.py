"""Records that could not be saved just now, and when each is tried again."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

__all__ = ["Postponed"]

_FIRST_S = 1.0
_PAUSE_MAX_S = 60.0
_TRIES_MAX = 8
_REST_S = 600.0
_SOON_TRIES = 3
_MAX = 100_000
_ELSEWHERE_S = 2.0


@dataclass(slots=True)
class _Wait:
    """Of one record.

    Attributes:
        due: seconds; until then it is not tried.
        tries: that failed.
        elsewhere: another node is writing it, or has said so.
    """

    due: float
    tries: int = 0
    elsewhere: bool = False

    @property
    def soon(self) -> bool:
        """Whether it is worth waiting for."""
        return self.due > 0 and (self.elsewhere or self.tries < _SOON_TRIES)


class Postponed:
    """A record that failed waits for 1 s, then twice as long each time, up to a minute; after 8 tries it has its rest.

    One at rest is tried again only after 10 minutes, if it is used then.

    Bounded: of more than 100,000 the first are forgotten, and may be tried as if they were new.

    Threads: none of its own; calls must not overlap. Times are passed in, in seconds.

    Attributes:
        num_soon: records that wait, of which another node may tell soon, or which failed less than three times.
    """

    def __init__(self) -> None:
        self._waits: dict[bytes, _Wait] = {}
        self._queue: list[tuple[float, bytes]] = []
        self.num_soon = 0

    def __len__(self) -> int:
        return len(self._waits)

    @property
    def num_waiting(self) -> int:
        """Records that are not to be tried now. Some may be gone meanwhile."""
        return len(self.waiting)

    def failed(self, record: bytes, now: float) -> None:
        """It was tried in vain."""
        wait = self._waits.get(record)
        tries = 1 + (0 if wait is None else wait.tries)
        pause_s = min(_PAUSE_MAX_S, _FIRST_S * 2.0 ** (tries - 1)) if tries < _TRIES_MAX else _REST_S
        self._put(record, _Wait(now + pause_s, tries))

    def elsewhere(self, record: bytes, now: float) -> None:
        """Another node is at it: see in a while whether that has come to anything."""
        wait = self._waits.get(record)
        self._put(record, _Wait(now + _ELSEWHERE_S, 0 if wait is None else wait.tries, elsewhere=True))

    def waits(self, record: bytes) -> bool:
        """Whether it is not to be tried now."""
        return record in self._waits and self._waits[record].due > 0

    @property
    def waiting(self) -> list[bytes]:
        """The records that are not to be tried now."""
        return [record for record, wait in self._waits.items() if wait.due > 0]

    def take_due(self, now: float) -> list[bytes]:
        """Those whose time has come, which are to be tried again. Until the outcome is told, their tries count on."""
        due = []
        while self._queue and self._queue[0][0] <= now:
            at, record = heapq.heappop(self._queue)
            wait = self._waits.get(record)
            if wait is None or wait.due != at:
                continue
            if wait.tries >= _TRIES_MAX:
                self.done(record)
            else:
                self.num_soon -= wait.soon
                wait.due, wait.elsewhere = 0.0, False
                due.append(record)
        return due

    def done(self, record: bytes) -> None:
        """It is saved, or gone."""
        wait = self._waits.pop(record, None)
        self.num_soon -= wait is not None and wait.soon

    def clear(self) -> None:
        """All may be tried at once, and as often as if they were new."""
        self._waits.clear()
        self._queue.clear()
        self.num_soon = 0

    def _put(self, record: bytes, wait: _Wait) -> None:
        self.done(record)
        if len(self._waits) >= _MAX:
            self.done(next(iter(self._waits)))
        self._waits[record] = wait
        self.num_soon += wait.soon
        heapq.heappush(self._queue, (wait.due, record))

"""The shared tier as a node gets along with it: one circuit breaker for all reads and writes, closed by probes."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Literal

from kvfleet.config import FleetConfig
from kvfleet.core.breaker import ProbedBreaker
from kvfleet.core.lost import LostCopies
from kvfleet.errors import TierError, TierFullError
from kvfleet.node.drivecalls import DaemonThreads
from kvfleet.node.landing import settle
from kvfleet.node.shared import SharedTier
from kvfleet.node.waiting import now, within

__all__ = ["SharedEndpoint", "Way"]

_log = logging.getLogger(__name__)
_IDLE_S = 60.0
_RECOVERS_INTERVALS = 2
_PROBE_TIMEOUT_MIN_S = 2.0  # the first request also finds credentials and connects
_LOST_MAX = 10_000
_LOST_S = 60.0  # by then the directory has told everyone

Way = Literal["read", "write"]


class SharedEndpoint:
    """Whether to ask the shared tier.

    A request that failed at once has a probe made: that decides whether only the object is in trouble, or the tier. One
    that had no answer for long, or found no space, closes its way to all, until a probe has an answer. There is a
    breaker for each way, because storage may be read that cannot be written; what looks bad on one has the other
    probed as well.

    Threads: the manager's event loop; probes run in threads of its own, so that no hung request keeps them waiting.

    Attributes:
        shared: the tier.
        tried: set once it was tried out.
        works: set once that was successful.
        counts: what became of blocks. Those to be read: `read`, `absent` (though it was said to be there), `corrupt`,
            `layout_refused`, `read_failed`, `not_asked` (the way was closed). Those to be written: `written`, `known`
            (by another node, before), `elsewhere` (another node is at it), `write_failed`, `write_full`. And how often
            a way was closed: `read_outages`, `write_outages`.
        recovers_s: after so long storage that works again is known to.
        on_well: called when a way is open again.
        on_lost: called with a record whose copy was found to be gone or bad.
    """

    def __init__(self, shared: SharedTier, config: FleetConfig) -> None:
        self.shared = shared
        self.tried = asyncio.Event()
        self.works = asyncio.Event()
        self._problems: dict[Way, str] = {"read": "", "write": ""}
        self.counts: Counter[str] = Counter()
        self.on_well: Callable[[Way], None] = lambda _: None
        self.on_lost: Callable[[bytes], None] = lambda _: None
        self._patience_s = min(config.holder_timeout_s, config.shared_timeout_s)
        self._probe_timeout_s = max(_PROBE_TIMEOUT_MIN_S, min(config.holder_timeout_s, config.shared_probe_s))
        self._breakers: dict[Way, ProbedBreaker] = {
            "read": ProbedBreaker(config.shared_probe_s, proven=True),
            "write": ProbedBreaker(config.shared_probe_s, proven=False),
        }
        self.recovers_s = _RECOVERS_INTERVALS * config.shared_probe_s + self._probe_timeout_s
        self._lost = LostCopies(_LOST_MAX, _LOST_S)
        self._executor = DaemonThreads(len(self._breakers), "kvfleet-probe")
        self._wake = asyncio.Event()

    @property
    def problem(self) -> str:
        """Why the last request of a kind failed, or ""."""
        return next(filter(None, self._problems.values()), "")

    def allows(self, way: Way) -> bool:
        """Whether to ask."""
        return not self._breakers[way].is_open

    def worked(self, way: Way) -> None:
        """A request had an answer: also that there is no such object."""
        self._breakers[way].worked(now())
        if self.allows(way):
            self._problems[way] = ""

    def failed(self, way: Way, error: TierError, begun: float) -> None:
        """A request that began at `begun` did not have its answer."""
        self._problems[way] = str(error)
        full = isinstance(error, TierFullError)
        self.counts[f"{way}_full" if full else f"{way}_failed"] += 1
        if full or now() - begun >= self._patience_s:
            self.gave_up(way, begun, str(error))
        else:
            self._breakers[way].doubted(now())
            self._wake.set()

    def gave_up(self, way: Way, begun: float, problem: str) -> None:
        """Somebody has waited for a request for long enough."""
        self._problems[way] = problem
        was_open = self._breakers[way].is_open
        self._breakers[way].failed(begun, now())
        self._note(way, was_open)
        for breaker in self._breakers.values():
            breaker.doubted(now())
        self._wake.set()

    def lost(self, record: bytes) -> None:
        """The copy of a record, of which somebody has said that it is there, is gone or bad."""
        self._lost.add(record, now())
        self.on_lost(record)

    def has_lost(self, record: bytes) -> bool:
        """Whether what says that a record is in the shared tier may be out of date."""
        return self._lost.has(record, now())

    def has_written(self, record: bytes) -> None:
        """There is a good copy of a record."""
        self._lost.discard(record)

    async def run(self) -> None:
        """Probe what has failed. Runs until cancelled."""
        probes: set[asyncio.Task[None]] = set()
        try:
            while True:
                self._wake.clear()
                for way, breaker in self._breakers.items():
                    if breaker.due <= now():
                        breaker.begin(now())
                        probe = asyncio.create_task(self._probe(way))
                        probes.add(probe)
                        probe.add_done_callback(probes.discard)
                next_due = min(breaker.due for breaker in self._breakers.values())
                with suppress(asyncio.TimeoutError):
                    await within(min(_IDLE_S, max(0.0, next_due - now())), self._wake.wait())
        finally:
            for probe in probes:
                probe.cancel()
            await asyncio.gather(*probes, return_exceptions=True)

    async def _probe(self, way: Way) -> None:
        breaker, answered = self._breakers[way], False
        try:
            await settle(self._executor, partial(self._asker(way), self._probe_timeout_s))
            answered = True
        except TierError as error:
            if not self.works.is_set() and self._problems[way] != str(error):
                _log.warning("the shared tier does not work: %s", error)
            self._problems[way] = str(error)
        finally:
            was_open = breaker.is_open
            (breaker.answered if answered else breaker.unanswered)(now())
            self._note(way, was_open)
            self._wake.set()
        if way == "write":
            self.tried.set()
            if answered:
                self.works.set()
        if answered and was_open:
            self.on_well(way)

    def _asker(self, way: Way) -> Callable[[float], None]:
        if way == "read":
            return self.shared.probe_reads
        return self.shared.probe_writes if self.works.is_set() else self.shared.check

    def _note(self, way: Way, was_open: bool) -> None:
        """Tell of a way that was closed or opened."""
        if not self.allows(way) and not was_open:
            self.counts[f"{way}_outages"] += 1
            _log.warning("no more %ss of the shared tier until it answers: %s", way, self._problems[way])
        elif self.allows(way) and was_open:
            _log.info("the shared tier answers: %ss go on", way)
            self._problems[way] = ""

    async def close(self) -> None:
        """Wait for probes under way."""
        await asyncio.to_thread(self._executor.shutdown)

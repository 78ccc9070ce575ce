"""How fast sources and an engine are, learned from what they did: recent times count most.

Both follow a line with two parameters, neither below 0, fitted by least squares over exponentially weighted moments
(recursive least squares with forgetting: Ljung, System Identification, section 11.2; we solve two unknowns outright and
clamp at 0). A source takes `latency_s + num_bytes / bytes_per_s`; an engine takes a time for each token, and one for
each token and token of context before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["PEER", "Line", "PrefillSpeed", "SourceSpeeds", "Speed"]

PEER = "peer:"
"""Before a node's id. "peer" alone is the mean of them all, for those not measured yet."""

_SOURCES_MAX = 1024  # measured at once; those not read longest are forgotten
_KEEP = 0.7  # of an older load's weight: the last three or four count

_LOOKS_S = (5.0, 30.0)  # first and longest pause between looks at a source that is not used

_SAME = 1e-9  # share of the product of the squares below which all points lie in one direction


class Line:
    """`seconds = first * x + second * y`, fitted to what was seen; O(1) a point.

    Args:
        keep: share of its weight that an older point keeps when a new one comes, in (0, 1).
    """

    __slots__ = ("_keep", "_xs", "_xx", "_xy", "_ys", "_yy", "num_points")

    def __init__(self, keep: float) -> None:
        assert 0 < keep < 1
        self._keep = keep
        self._xx = self._xy = self._yy = self._xs = self._ys = 0.0
        self.num_points = 0

    def add(self, x: float, y: float, seconds: float, weight: float = 1.0) -> None:
        """Take a point in. All values are at least 0."""
        assert min(x, y, seconds) >= 0
        assert weight > 0
        keep = self._keep
        self._xx = keep * self._xx + weight * x * x
        self._xy = keep * self._xy + weight * x * y
        self._yy = keep * self._yy + weight * y * y
        self._xs = keep * self._xs + weight * x * seconds
        self._ys = keep * self._ys + weight * y * seconds
        self.num_points += 1

    def solve(self) -> tuple[float, float]:
        """`(first, second)`. Where the points do not tell them apart, `first` explains all it can."""
        xx, xy, yy, xs, ys = self._xx, self._xy, self._yy, self._xs, self._ys
        only_first = (xs / xx if xx else 0.0, 0.0 if xx or not yy else ys / yy)
        determinant = xx * yy - xy * xy
        if determinant <= _SAME * xx * yy:
            return only_first
        first, second = (xs * yy - ys * xy) / determinant, (ys * xx - xs * xy) / determinant
        if second < 0:
            return only_first
        return (0.0, ys / yy) if first < 0 else (first, second)


@dataclass(frozen=True, slots=True)
class Speed:
    """Of a source.

    Attributes:
        latency_s: until the first bytes come.
        bytes_per_s: from then on; infinity where only the latency counts.
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        assert self.latency_s >= 0
        assert self.bytes_per_s > 0

    def seconds(self, num_bytes: int) -> float:
        """How long so many bytes take."""
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class PrefillSpeed:
    """Of an engine that computes a prompt.

    Attributes:
        token_s: seconds a token takes whatever stands before it.
        context_s: seconds a token takes for each token before it: attention.
    """

    token_s: float
    context_s: float = 0.0

    def __post_init__(self) -> None:
        assert self.token_s >= 0
        assert self.context_s >= 0

    def seconds(self, context_tokens: int, num_tokens: int) -> float:
        """How long `num_tokens` take behind `context_tokens`."""
        return num_tokens * (self.token_s + self.context_s * (context_tokens + num_tokens / 2))


class _Source:
    """What is known of one source."""

    def __init__(self) -> None:
        self.line = Line(_KEEP)
        self.told: Speed | None = None
        self.stalled = False
        self.wanted = False
        self.read = False
        self.look_at = 0.0
        self.look_pause_s = _LOOKS_S[0]

    def speed(self) -> Speed | None:
        if self.line.num_points:
            rate, latency_s = self.line.solve()
            return Speed(latency_s, 1 / rate if rate else float("inf"))
        return self.told


class SourceSpeeds:
    """What is known of each source. Bounded. Threads: none of its own; calls must not overlap."""

    def __init__(self) -> None:
        self._sources: dict[str, _Source] = {}  # the one read last is last

    def observe(self, source: str, num_bytes: int, seconds: float, first_s: float | None = None) -> None:
        """A source was read.

        Args:
            source: "dram", "nvme", "shared" or "peer:<node>".
            num_bytes: that came; 0 if none did before the load was given up: then it is not asked again until a read
                of it is observed, or it is forgotten.
            seconds: from the request on.
            first_s: until the first of them came, in seconds from the request on; None if they came as one.
        """
        assert num_bytes >= 0
        for name in _names(source):
            found = self._source(name)
            if not num_bytes:
                found.stalled = True
                continue
            found.stalled, found.read = False, True
            if first_s is not None:
                found.line.add(0.0, 1.0, min(first_s, seconds))
            found.line.add(float(num_bytes), 1.0, seconds)

    def tell(self, source: str, speed: Speed) -> None:
        """What another has measured of a source; used as long as nothing is measured here."""
        found = self._source(source)
        found.told = speed

    def wanted(self, source: str) -> None:
        """A plan has looked at a source."""
        if source in self._sources:
            self._sources[source].wanted = True

    def used(self, source: str, now: float) -> None:
        """A plan loads from a source: that tells enough of it for now."""
        found = self._sources.get(source)
        if found is not None:
            found.look_pause_s = _LOOKS_S[0]
            found.look_at = now + found.look_pause_s

    def look(self, sources: Iterable[str], now: float) -> bool:
        """Whether sources that a plan does not use are to be looked at now.

        Soon after they were used; then the more seldom the longer they are not. What a look brings is computed as well.
        """
        found = [self._source(name) for name in sources]
        if any(now < source.look_at for source in found):
            return False
        for source in found:
            source.look_at = now + source.look_pause_s
            source.look_pause_s = min(2 * source.look_pause_s, _LOOKS_S[1])
        return True

    def forget_unread(self) -> None:
        """Forget sources that were wanted since the last call and not read: what made them slow may be over."""
        self._sources = {name: found for name, found in self._sources.items() if found.read or not found.wanted}
        for found in self._sources.values():
            found.wanted = found.read = False

    def forget(self) -> None:
        """Forget all sources."""
        self._sources.clear()

    def _source(self, name: str) -> _Source:
        found = self._sources.pop(name, None) or _Source()
        self._sources[name] = found
        if len(self._sources) > _SOURCES_MAX:
            del self._sources[next(iter(self._sources))]
        return found

    def speed(self, source: str) -> Speed | None:
        """Of a source; None if it is not known. A peer that is not known is taken for the mean of the others."""
        for name in _names(source):
            found = self._sources.get(name)
            if found is not None and (speed := found.speed()) is not None:
                return speed
        return None

    def stalled(self, source: str) -> bool:
        """Whether the last load of a source brought nothing in its time."""
        found = self._sources.get(source)
        return found is not None and found.stalled

    def speeds(self) -> dict[str, Speed]:
        """Of all sources that are known."""
        found = {name: source.speed() for name, source in self._sources.items()}
        return {name: speed for name, speed in found.items() if speed is not None}


def _names(source: str) -> tuple[str, ...]:
    return (source, PEER[:-1]) if source.startswith(PEER) else (source,)

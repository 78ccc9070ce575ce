"""The ways to start a prompt whose KV is in the cache in part, and what each takes: see `planner`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvfleet.core.speeds import PrefillSpeed, SourceSpeeds

__all__ = ["Leg", "Piece", "Plan", "Route"]

_GRACE = 0.03  # of the time without the cache: what a load may lose
_LATENCY_SLACK = 1.25  # times the latency that a measured source is waited for
_WORTH = 1.02  # a plan must be faster by this factor: below it, loading is all risk


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a hit.

    Attributes:
        start: its first block.
        stop: the block after its last.
        sources: who is said to have it: "dram", "nvme", "shared", "peer:<node>".
    """

    start: int
    stop: int
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Leg:
    """Blocks [start, stop) to be loaded in one go, and how long that may take.

    Attributes:
        grace_s: what the load may be behind computing.
        pace_s: what a block that came is worth, seconds of computing. The load ends as soon as more than `grace_s` and
            `pace_s` for each block that came have passed. Infinite: it is not paced.
        predicted_s: what the load will take; None if a source is not measured yet.
        spare_s: of `grace_s`, what a source that sends nothing leaves to the next one that may have the blocks.
    """

    start: int
    stop: int
    grace_s: float = float("inf")
    pace_s: float = float("inf")
    predicted_s: float | None = None
    spare_s: float = 0.0

    def __post_init__(self) -> None:
        assert self.start <= self.stop

    @property
    def num_blocks(self) -> int:
        """How many blocks."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Plan:
    """What to load of a hit.

    Attributes:
        head: loaded before the engine computes; starts at the hit's first block, empty if nothing is.
        tail: loaded while the engine computes the blocks between; None if there is none. Its grace includes the time
            that these take.
        sources: the cheapest source of each piece that is loaded, as far as they are measured.
        predicted_load_s: of all loads; None if a source is not measured.
        predicted_ttft_s: until the whole prompt is computed or loaded; None if something is not measured.
        recompute_s: the same without the cache; None if the engine is not measured.
        reason: why not all of the hit is loaded before computing, or "": in words.
    """

    head: Leg
    tail: Leg | None = None
    sources: tuple[str, ...] = ()
    predicted_load_s: float | None = None
    predicted_ttft_s: float | None = None
    recompute_s: float | None = None
    reason: str = ""

    @property
    def num_blocks(self) -> int:
        """Blocks that are loaded."""
        return self.head.num_blocks + (self.tail.num_blocks if self.tail else 0)


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to start a prompt: load up to `head`, compute up to `tail` while the blocks up to `stop` are loaded."""

    head: int
    tail: int
    stop: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class _Compute:
    """Seconds of computing whole blocks [start, stop) of a prompt, or to its end."""

    prefill: PrefillSpeed
    block_tokens: int
    prompt_tokens: int

    def __call__(self, start: int, stop: int | None = None) -> float:
        first = start * self.block_tokens
        end = self.prompt_tokens if stop is None else stop * self.block_tokens
        assert first <= end
        return self.prefill.seconds(first, end - first)


class _Costs:
    """A piece with the cheapest of its sources that is known; of those not known, the best is expected."""

    def __init__(self, speeds: SourceSpeeds, piece: Piece, block_bytes: int) -> None:
        self.start, self.stop = piece.start, piece.stop
        for name in piece.sources:
            speeds.wanted(name)
        usable = [name for name in piece.sources if not speeds.stalled(name)]
        self.num_usable = len(usable)
        known = [(name, speed) for name in usable if (speed := speeds.speed(name)) is not None]
        num_bytes = (piece.stop - piece.start) * block_bytes
        name, speed = min(known, key=lambda one: one[1].seconds(num_bytes), default=("", None))
        self.known = speed is not None
        self.name = name or next(iter((*usable, *piece.sources)), "")
        self.latency_s = speed.latency_s if speed else 0.0
        self.block_s = block_bytes / speed.bytes_per_s if speed else 0.0

    @property
    def usable(self) -> bool:
        """Whether there is anybody to ask."""
        return self.num_usable > 0

    def assume(self, compute_s: _Compute) -> None:
        """Take a source that is not known to be as fast as computing; this node's memory is faster than that."""
        if not self.known and self.name != "dram":
            self.block_s = compute_s(self.start, self.stop) / (self.stop - self.start)


class Route:
    """The pieces of one hit, and what each way to start its prompt takes."""

    def __init__(
        self, speeds: SourceSpeeds, pieces: Sequence[Piece], block_bytes: int, block_tokens: int, prompt_tokens: int
    ) -> None:
        self._costs = [_Costs(speeds, piece, block_bytes) for piece in pieces]
        self._block_tokens = block_tokens
        self._prompt_tokens = prompt_tokens
        self._start, self._stop = pieces[0].start, pieces[-1].stop
        assert self._stop * block_tokens <= prompt_tokens

    def _parts(self, start: int, stop: int) -> Iterator[tuple[_Costs, int]]:
        """The pieces that blocks [start, stop) are of, each with how many of them."""
        for cost in self._costs:
            size = min(stop, cost.stop) - max(start, cost.start)
            if size > 0:
                yield cost, size

    def names(self, start: int, stop: int) -> tuple[str, ...]:
        """The sources of blocks [start, stop), one a piece."""
        return tuple(cost.name for cost, _ in self._parts(start, stop))

    def load_s(self, start: int, stop: int) -> float | None:
        """What their load takes; None if a source is not known."""
        parts = list(self._parts(start, stop))
        if not all(cost.known for cost, _ in parts):
            return None
        return sum(cost.latency_s + size * cost.block_s for cost, size in parts)

    def _hoped_s(self, start: int, stop: int) -> float:
        """What their load takes: no time where the source is not known, nor assumed."""
        parts = self._parts(start, stop)
        return sum((cost.latency_s + size * cost.block_s if cost.usable else float("inf")) for cost, size in parts)

    def best(self, prefill: PrefillSpeed, *, can_split: bool) -> Plan:
        """The fastest way, as a plan.

        A source that is not known is tried: within a load's grace; or, if the engine can split, with a tail that
        nobody waits for, since blocks that do not come while those before them are computed are computed as well.
        """
        compute_s = _Compute(prefill, self._block_tokens, self._prompt_tokens)
        if can_split:
            for cost in self._costs:
                cost.assume(compute_s)
        recompute_s = compute_s(self._start)
        nothing = _Way(self._start, self._start, self._start, recompute_s)
        best = min((nothing, *self._ways(compute_s, can_split=can_split)), key=lambda way: way.ttft_s)
        return self._plan(nothing if best.ttft_s * _WORTH >= recompute_s else best, compute_s)

    def whole(self, prefill: PrefillSpeed) -> Plan:
        """All of it, as a plan."""
        compute_s = _Compute(prefill, self._block_tokens, self._prompt_tokens)
        ttft_s = self._hoped_s(self._start, self._stop) + compute_s(self._stop)
        return self._plan(_Way(self._stop, self._stop, self._stop, ttft_s), compute_s)

    def _plan(self, best: _Way, compute_s: _Compute) -> Plan:
        recompute_s = compute_s(self._start)
        head = self._leg(self._start, best.head, compute_s, 0.0, recompute_s)
        between_s = compute_s(best.head, best.tail)
        tail = self._leg(best.tail, best.stop, compute_s, between_s, recompute_s) if best.stop > best.tail else None
        load_s = _sum(leg.predicted_s for leg in (head, tail) if leg is not None)
        loads = ((self._start, best.head), (best.tail, best.stop))
        return Plan(
            head=head,
            tail=tail,
            sources=tuple(name for start, stop in loads for name in self.names(start, stop)),
            predicted_load_s=load_s,
            predicted_ttft_s=None if load_s is None else best.ttft_s,
            recompute_s=recompute_s,
            reason=self._reason(best, compute_s),
        )

    def _ways(self, compute_s: _Compute, *, can_split: bool) -> Iterator[_Way]:
        """Those that load something. The time saved is convex within a piece, so a load stops where one ends."""
        bounds = [cost.start for cost in self._costs] + [self._stop]
        for stop in bounds[1:]:
            yield _Way(stop, stop, stop, self._hoped_s(self._start, stop) + compute_s(stop))
        if not can_split:
            return
        for at, head in enumerate(bounds):
            first_s = self._hoped_s(self._start, head)
            for stop in bounds[at + 1 :]:
                split = self._split(head, stop, compute_s)
                for tail in range(max(head + 1, split - 1), min(split + 1, stop)):
                    together_s = max(compute_s(head, tail), self._hoped_s(tail, stop))
                    yield _Way(head, tail, stop, first_s + together_s + compute_s(stop))

    def _split(self, head: int, stop: int, compute_s: _Compute) -> int:
        """The first block from which on the load is done when the engine has computed those before it."""
        low, high = head, stop
        while low < high:
            middle = (low + high) // 2
            if self._hoped_s(middle, stop) > compute_s(head, middle):
                low = middle + 1
            else:
                high = middle
        return low

    def _leg(self, start: int, stop: int, compute_s: _Compute, meanwhile_s: float, recompute_s: float) -> Leg:
        if start == stop:
            return Leg(start, stop, predicted_s=0.0)
        predicted_s, parts = self.load_s(start, stop), [cost for cost, _ in self._parts(start, stop)]
        loses_s = _GRACE * recompute_s
        grace_s = meanwhile_s + loses_s
        pace_s = compute_s(start, start + 1)  # the cheapest of them: computing gets slower with the context
        if predicted_s is not None:
            grace_s += _LATENCY_SLACK * sum(cost.latency_s for cost in parts)
            pace_s = compute_s(start, stop) / (stop - start)
        elif meanwhile_s:  # over when the engine is through, even if all blocks come in the time that they have
            grace_s = loses_s = meanwhile_s / 2
            pace_s = grace_s / (stop - start)
        several = any(cost.num_usable > 1 for cost in parts)
        spare_s = loses_s / 2 if several else 0.0
        assert 0 <= spare_s <= grace_s
        return Leg(start, stop, grace_s, pace_s, predicted_s, spare_s)

    def _reason(self, best: _Way, compute_s: _Compute) -> str:
        """Why not all is loaded first, in words."""
        if best.head == self._stop:
            return ""
        if best.stop == self._stop:
            return f"blocks {best.head} to {best.tail - 1} are computed while those behind them are loaded"
        cost = next(cost for cost in self._costs if cost.stop > best.stop)
        start = max(cost.start, best.stop)
        name = _words(cost.name)
        if not cost.usable:
            return f"{name} brought nothing in its time when it was last asked"
        if not cost.known:
            return f"{name} was not measured yet, and there are too few blocks to compute some meanwhile"
        load_s = cost.latency_s + (cost.stop - start) * cost.block_s
        computed_s = compute_s(start, cost.stop)
        return f"loading from {name} takes {load_s * 1e3:.0f} ms, computing {computed_s * 1e3:.0f} ms"


def _words(source: str) -> str:
    """A source, for reading."""
    name, _, node = source.partition(":")
    return f"{name} {node[:8]}" if node else name or "nobody"


def _sum(values: Iterable[float | None]) -> float | None:
    found = list(values)
    return None if any(value is None for value in found) else sum(value for value in found if value is not None)

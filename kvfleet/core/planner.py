"""Load or recompute: what of a hit is worth loading, from where, and how long a load may go on.

Each source has a measured latency and bandwidth, the engine a measured speed of prefill by context length. A prompt
without the cache takes `recompute_s`. Of the ways to start it, the planner takes the fastest: load the first blocks and
compute the rest; or, where an engine can, compute the first blocks while later ones are loaded, then the rest. No block
behind a hole is of use to an engine otherwise, so the choice is where a load begins and stops.

An estimate may be wrong, or a source not measured yet. A load is therefore paced: it goes on as long as it keeps ahead
of computing the same blocks, but for a grace. What it can cost is bounded by that grace, whatever the estimates say.
Where an engine can split a prompt, a source that is not measured yet costs no grace: half of what it is said to have is
computed at once, while the other half is loaded, and nobody waits for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from kvfleet.core.routes import Leg, Piece, Plan, Route
from kvfleet.core.speeds import PEER, Line, PrefillSpeed, SourceSpeeds, Speed

__all__ = ["PEER", "Leg", "Piece", "Plan", "Planner"]

_LOOK_BLOCKS = 4
_KEEP_PREFILL = 0.98  # a block or a step is a small part of a prompt: about fifty count


class Planner:
    """The estimates of one client and what follows from them. Bounded; no call takes longer than a few runs of a hit.

    Threads: none of its own; calls must not overlap.
    """

    def __init__(self) -> None:
        self.sources = SourceSpeeds()
        self._prefill = Line(_KEEP_PREFILL)
        self._prefill_told: PrefillSpeed | None = None

    # what is measured

    def observe(self, source: str, num_bytes: int, seconds: float, first_s: float | None = None) -> None:
        """A source was read; see `SourceSpeeds.observe`."""
        self.sources.observe(source, num_bytes, seconds, first_s)

    def observe_prefill(self, context_tokens: int, num_tokens: int, seconds: float) -> None:
        """The engine computed `num_tokens` behind `context_tokens`."""
        assert num_tokens > 0
        assert context_tokens >= 0
        self._prefill.add(num_tokens, num_tokens * (context_tokens + num_tokens / 2), seconds, 1 / num_tokens)

    def tell(self, source: str, speed: Speed) -> None:
        """What another has measured of a source; used as long as nothing is measured here."""
        self.sources.tell(source, speed)

    def tell_prefill(self, speed: PrefillSpeed) -> None:
        """What is assumed of the engine until it is measured."""
        self._prefill_told = speed

    # what is known

    def prefill(self) -> PrefillSpeed | None:
        """Of the engine; None if it is not known."""
        return PrefillSpeed(*self._prefill.solve()) if self._prefill.num_points else self._prefill_told

    def prefill_s(self, context_tokens: int, num_tokens: int) -> float | None:
        """How long the engine computes `num_tokens` behind `context_tokens`; None if its speed is not known."""
        speed = self.prefill()
        return None if speed is None else speed.seconds(context_tokens, num_tokens)

    # what follows

    def whole(self, pieces: Sequence[Piece], block_bytes: int, block_tokens: int, prompt_tokens: int) -> Plan:
        """All of a hit that has blocks, as a plan; see `plan`."""
        assert pieces
        assert all(piece.stop == after.start for piece, after in pairwise(pieces)), "pieces leave no gap"
        route, prefill = Route(self.sources, pieces, block_bytes, block_tokens, prompt_tokens), self.prefill()
        if prefill is not None:
            return route.whole(prefill)
        start, stop = pieces[0].start, pieces[-1].stop
        load_s = route.load_s(start, stop)
        return Plan(Leg(start, stop, predicted_s=load_s), None, route.names(start, stop), load_s)

    def plan(
        self, pieces: Sequence[Piece], block_bytes: int, block_tokens: int, prompt_tokens: int, *, can_split: bool
    ) -> Plan:
        """What to load of a hit.

        Args:
            pieces: the runs of the hit, one behind another; the engine has what is before the first.
            block_bytes: of a block.
            block_tokens: tokens in a block.
            prompt_tokens: of the whole prompt.
            can_split: the engine can compute blocks while later ones are loaded.

        Returns:
            The fastest. All of the hit, not paced, if the engine's speed is not known.
        """
        assert all(piece.stop == after.start for piece, after in pairwise(pieces)), "pieces leave no gap"
        if not pieces:
            return Plan(Leg(0, 0), recompute_s=self.prefill_s(0, prompt_tokens))
        prefill = self.prefill()
        if prefill is None:
            return self.whole(pieces, block_bytes, block_tokens, prompt_tokens)
        route = Route(self.sources, pieces, block_bytes, block_tokens, prompt_tokens)
        return route.best(prefill, can_split=can_split)

    def look(self, plan: Plan, pieces: Sequence[Piece], now: float) -> range | None:
        """A few blocks to load besides, to learn how fast a source is that a plan does not use; None mostly.

        Args:
            plan: of these pieces. A tail is use enough.
            pieces: the runs of the hit.
            now: seconds.
        """
        for name in plan.sources:
            self.sources.used(name, now)
        first = plan.head.stop
        piece = next((piece for piece in pieces if piece.stop > first), None)
        if piece is None or plan.tail is not None or not self.sources.look(piece.sources, now):
            return None
        return range(first, min(piece.stop, first + _LOOK_BLOCKS))

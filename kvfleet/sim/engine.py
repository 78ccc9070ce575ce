"""The engine of a simulated node: how long it computes, and what it plans to load."""

from __future__ import annotations

from collections.abc import Sequence

from kvfleet.core.planner import Leg, Piece, Planner
from kvfleet.planning import FORGET_S
from kvfleet.sim.config import SimConfig

__all__ = ["SimEngine"]


class SimEngine:
    """Computes one prompt after the other.

    Attributes:
        planner: the production code; it knows the engine's speed.
        free_at: when all that was begun is computed, seconds.
    """

    def __init__(self, config: SimConfig, block_tokens: int) -> None:
        self._config = config.engine
        self._block_bytes = config.block_bytes
        self._block_tokens = block_tokens
        self._forget_at = FORGET_S
        self._due: Leg | None = None
        self.planner = Planner()
        self.planner.tell_prefill(config.engine.prefill)
        self.free_at = 0.0

    def busy_s(self, now: float) -> float:
        """Seconds of work that wait."""
        return max(0.0, self.free_at - now)

    def plan(self, pieces: Sequence[Piece], prompt_tokens: int, now: float) -> tuple[Leg, Leg | None]:
        """What to load of a hit before the engine computes, and while it does."""
        if not self._config.planned or not pieces:
            return Leg(0, pieces[-1].stop if pieces else 0), None
        if now >= self._forget_at:
            self._forget_at = now + FORGET_S
            self.planner.sources.forget_unread()
        plan = self.planner.plan(
            pieces, self._block_bytes, self._block_tokens, prompt_tokens, can_split=self._config.can_split
        )
        look = self.planner.look(plan, pieces, now)
        self._due = None if look is None else Leg(look.start, look.stop)
        return plan.head, plan.tail

    def due(self) -> Leg | None:
        """A few blocks to load besides, to learn how fast a source is that is not used; told once."""
        due, self._due = self._due, None
        return due

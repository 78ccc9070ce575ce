"""What is counted while a fleet is simulated."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from kvfleet.core.outcomes import Miss, Outcome, Source

__all__ = ["Tally"]


@dataclass(slots=True)
class Tally:
    """Totals of a simulation.

    Attributes:
        requests: so far.
        blocks: by what became of them; all whole blocks of all prompts are in one of them.
        looks: the same of blocks that nobody waited for, loaded to learn how fast a source is.
        prompt_tokens: of all prompts.
        loaded_tokens: of these, that were not computed.
        ttft_s: of each request, from its arrival to the end of its prompt.
        prefill_s: that engines computed.
        recompute_s: that they would have computed without the cache.
        stored: blocks that were written to an arena by engines.
        calls: remote calls, by name.
        first_s: when the first request came.
        last_s: when the last prompt was computed.
    """

    requests: int = 0
    blocks: Counter[Outcome] = field(default_factory=Counter)
    looks: Counter[Outcome] = field(default_factory=Counter)
    prompt_tokens: int = 0
    loaded_tokens: int = 0
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    prefill_s: float = 0.0
    recompute_s: float = 0.0
    stored: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    first_s: float = float("inf")
    last_s: float = 0.0

    def count(self, outcomes: Sequence[Outcome], num_found: int, asked: int, missing: Miss | None) -> None:
        """Count the blocks of a request, each once, as `kvfleet.counts` does.

        Args:
            outcomes: of those that were to be loaded; only the last may be a miss.
            num_found: how many a lookup found; what of them has no outcome was not loaded.
            asked: how many there are.
            missing: why those behind the found ones are missing, if there are any.
        """
        for outcome, alike in groupby(outcomes):
            self.blocks[outcome] += len(list(alike))
        left = num_found - len(outcomes)
        assert 0 <= left <= asked, "what was loaded had been found"
        if left:
            cut = bool(outcomes) and isinstance(outcomes[-1], Miss)
            self.blocks[Miss.BEHIND_MISS if cut else Miss.SLOWER_THAN_COMPUTE] += left
        if num_found < asked:
            assert missing is not None, "what is missing has a reason"
            self.blocks[missing] += asked - num_found

    @property
    def hits(self) -> int:
        """Blocks that came."""
        return sum(count for outcome, count in self.blocks.items() if isinstance(outcome, Source))

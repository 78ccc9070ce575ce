"""What the scheduler's half knows of speeds: of the engine, by its steps, and of the fleet, by how long loads take.

The loads run in the workers; what counts for a request is when vLLM hears of their end, and that is seen here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvfleet.core.planner import Plan
from kvfleet.hits import PrefixHit
from kvfleet.planning import Planning

__all__ = ["LoadPlans"]

_PREFILL_TOKENS_MIN = 16  # of one request in a step; fewer may be a decode that guesses ahead
_STEP_TOKENS_MIN = 64  # below it a step takes as long as an empty one
_WARMUPS = 2  # steps that compile
_STEPS_MAX = 8  # under way; more are none of ours to pair


@dataclass(slots=True)
class _Step:
    """A step under way, and the prompt tokens it computes."""

    began_s: float
    context_tokens: int
    num_tokens: int


class LoadPlans:
    """Plans loads, and measures. Threads: vLLM's scheduling thread. Blocking: never.

    Args:
        block_tokens: tokens in a block.
        now: monotonic seconds.
    """

    def __init__(self, block_tokens: int, now: Callable[[], float] = time.monotonic) -> None:
        self._block_tokens = block_tokens
        self._now = now
        self._planning: Planning | None = None
        self._steps: deque[_Step] = deque(maxlen=_STEPS_MAX)
        self._ended_s = 0.0
        self._warmups = _WARMUPS
        self._loads: dict[str, tuple[PrefixHit, float]] = {}

    def start(self, planning: Planning) -> None:
        """The fleet is there. Until this is called, all that is found is loaded.

        Args:
            planning: of a client, with which those of all scopes learn.
        """
        self._planning = planning

    def plan(self, hit: PrefixHit, prompt_tokens: int, planning: Planning | None) -> Plan | None:
        """What of a hit is worth loading; None: all of it.

        Args:
            hit: what was found.
            prompt_tokens: of the whole prompt.
            planning: of the client that found it.
        """
        return None if planning is None else planning.plan(hit, max(prompt_tokens, hit.num_tokens))

    def narrowed(self, plan: Plan | None, hit: PrefixHit | None, prompt_tokens: int) -> Plan | None:
        """A plan for the part of its hit that vLLM has room for."""
        if plan is None or hit is None or self._planning is None:
            return None
        return self._planning.narrowed(plan, hit, max(prompt_tokens, hit.num_tokens))

    # how long it takes

    def step(self, scheduled: Mapping[str, int], computed: Mapping[str, int]) -> None:
        """A step begins.

        Args:
            scheduled: tokens of each request in it.
            computed: tokens that each has behind it.
        """
        prompts = {request: tokens for request, tokens in scheduled.items() if tokens >= _PREFILL_TOKENS_MIN}
        tokens, others = sum(prompts.values()), len(scheduled) - len(prompts)
        if tokens < _STEP_TOKENS_MIN or 4 * others > tokens:
            tokens = 0
        context = sum(size * computed.get(request, 0) for request, size in prompts.items()) // max(1, tokens)
        if scheduled:
            self._steps.append(_Step(self._now(), context, tokens))

    def stepped(self) -> None:
        """The oldest step under way has ended."""
        if not self._steps:
            return
        step, now = self._steps.popleft(), self._now()
        seconds, self._ended_s = now - max(step.began_s, self._ended_s), now
        if not step.num_tokens or self._planning is None:
            return
        if self._warmups:
            self._warmups -= 1
        else:
            self._planning.computed(step.context_tokens, step.num_tokens, seconds)

    def began(self, request_id: str, hit: PrefixHit) -> None:
        """The workers are told of a load."""
        self._loads[request_id] = (hit, self._now())

    def dropped(self, request_id: str) -> None:
        """A request has left the engine: a load that is cut short for that tells nothing of its source."""
        self._loads.pop(request_id, None)

    def ended(self, request_id: str, good_tokens: int | None = None) -> None:
        """A load has ended.

        Args:
            request_id: whose it was.
            good_tokens: where in the prompt it stopped short; None: it did not.
        """
        hit, began_s = self._loads.pop(request_id, (None, 0.0))
        if hit is None or self._planning is None:
            return
        stop = hit.num_blocks if good_tokens is None else max(hit.start_block, good_tokens // self._block_tokens)
        self._planning.took(hit, stop, self._now() - began_s)

"""What the scheduler's half of the connector tells the workers' half in a step."""

from __future__ import annotations

from dataclasses import dataclass

from kvfleet.connectors.vllm.scopes import Scope
from kvfleet.core.hints import NO_HINTS, Hints
from kvfleet.core.planner import Plan as LoadPlan
from kvfleet.hits import PrefixHit

__all__ = ["Load", "Plan", "Save"]


@dataclass(frozen=True, slots=True)
class Load:
    """Engine blocks of a request to be filled from the fleet.

    Attributes:
        request_id: of vLLM.
        scope: whose blocks they are.
        hit: the blocks that cover them; None if they cannot be had, so that the load has to fail.
        first: index in the prompt of the first engine block to fill; it may lie inside a block of the fleet.
        engine_blocks: vLLM's ids of the engine blocks to fill, in order.
        plan: how the load of the hit is paced; None: it is not.
    """

    request_id: str
    scope: Scope
    hit: PrefixHit | None
    first: int
    engine_blocks: tuple[int, ...]
    plan: LoadPlan | None = None


@dataclass(frozen=True, slots=True)
class Save:
    """Blocks of a request that are computed when this step is; none, if there is only what its hints say to tell.

    Attributes:
        request_id: of vLLM.
        scope: whose blocks they are.
        keys: of all blocks of the prefix up to the last of these, packed.
        start_block: the first of these.
        engine_blocks: vLLM's ids of their engine blocks, in order.
        hints: of the request.
    """

    request_id: str
    scope: Scope
    keys: bytes
    start_block: int
    engine_blocks: tuple[int, ...]
    hints: Hints = NO_HINTS


@dataclass(frozen=True, slots=True)
class Plan:
    """All of one step."""

    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()

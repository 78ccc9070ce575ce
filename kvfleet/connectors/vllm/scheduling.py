"""The scheduler's half of the connector: what to load and what to save, in terms of vLLM's requests.

Every method is called on vLLM's scheduling thread and never waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from kvfleet.connectors.vllm.loadplans import LoadPlans
from kvfleet.connectors.vllm.lookups import Lookups
from kvfleet.connectors.vllm.plan import Load, Save
from kvfleet.connectors.vllm.prompts import EngineRequest, Prompt
from kvfleet.connectors.vllm.requesthints import HINTS, RequestHints
from kvfleet.connectors.vllm.scopes import Scope
from kvfleet.core.hints import NO_HINTS, Hints
from kvfleet.core.planner import Plan
from kvfleet.hits import PrefixHit

__all__ = ["Scheduling", "StepOutput"]

# What prefill tells decode: how many blocks it stores.
_EXPECTED = "kvfleet_blocks"


class StepOutput(Protocol):
    """What is used of what the workers answer after a step."""

    finished_recving: Collection[str] | None
    invalid_block_ids: Collection[int]


@dataclass(slots=True)
class _Tracked:
    """A request in the engine.

    Attributes:
        refused: a load failed: never ask again for this request.
        lost: what it computes may be of other weights than we know: neither load nor save.
        saved: blocks before this one need not be saved any more.
        told: its hints went to the workers, if only for what was loaded.
        table: its engine blocks.
        plan: what to load of what was found last; None: all.
        hints: of the request.
    """

    prompt: Prompt
    refused: bool = False
    lost: bool = False
    saved: int = 0
    told: bool = False
    table: list[int] = field(default_factory=list)
    plan: Plan | None = None
    hints: Hints = NO_HINTS


class Scheduling:
    """Follows the requests of one engine.

    Args:
        lookups: of the same engine.
        engine_block_tokens: tokens in a vLLM block.
        block_tokens: tokens in a block of the fleet; a multiple of it.
        saves: whether this engine stores what it computes. One that does not tells hints of what it has loaded.
    """

    def __init__(self, lookups: Lookups, engine_block_tokens: int, block_tokens: int, *, saves: bool = True) -> None:
        assert block_tokens % engine_block_tokens == 0
        self._lookups = lookups
        self._engine_block_tokens = engine_block_tokens
        self._block_tokens = block_tokens
        self._per_block = block_tokens // engine_block_tokens
        self._saves = saves
        self._step_blocks_max = 1 << 30
        self.plans = LoadPlans(block_tokens)
        self.hints = RequestHints()
        self._requests: dict[str, _Tracked] = {}
        self._loading: dict[str, Load] = {}
        self._loads: list[Load] = []

    def limit(self, step_blocks_max: int) -> None:
        """How many blocks the workers can take in a step; more wait for the next, as long as their request lives."""
        self._step_blocks_max = step_blocks_max

    # what to load

    def matched_tokens(self, request: EngineRequest, computed_tokens: int) -> int | None:
        """How many tokens the fleet has behind those that the engine has; None if that is not known yet.

        Args:
            request: a waiting one; asked again until it is scheduled.
            computed_tokens: that the engine has; whole engine blocks.
        """
        tracked = self._tracked(request)
        nothing = computed_tokens // self._block_tokens >= self._lookups.num_blocks(request)
        refused = tracked.refused or tracked.lost or request.skip_reading_prefix_cache
        if refused or nothing or not self._lookups.started:
            return 0
        if not self._lookups.find(tracked.prompt, computed_tokens):
            return None
        hit = tracked.prompt.hit
        if hit is None:
            return 0
        tracked.plan = self.plans.plan(hit, request.num_tokens, self._lookups.planning(tracked.prompt))
        stop = hit.num_tokens if tracked.plan is None else tracked.plan.head.stop * self._block_tokens
        return max(0, stop - computed_tokens)

    def _tracked(self, request: EngineRequest) -> _Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            expected = (request.kv_transfer_params or {}).get(_EXPECTED, 0)
            prompt = self._lookups.prompt(request, expected if type(expected) is int else 0)
            hints = self.hints.of(request.kv_transfer_params)
            tracked = self._requests[request.request_id] = _Tracked(prompt, hints=hints)
        return tracked

    def allocated(self, request: EngineRequest, engine_blocks: Sequence[int], external_tokens: int) -> None:
        """VLLM schedules a request: it has reserved engine blocks for what is to be loaded.

        Args:
            request: for which `matched_tokens` had answered.
            engine_blocks: the request's whole table.
            external_tokens: how many tokens to load, behind those that the engine has.
        """
        tracked = self._tracked(request)
        prompt = tracked.prompt
        self._lookups.count(prompt, tracked.plan)
        if external_tokens <= 0:
            return
        first = prompt.computed_tokens // self._engine_block_tokens
        stop = (prompt.computed_tokens + external_tokens) // self._engine_block_tokens
        hit = None
        if prompt.hit is not None:
            hit = _part(prompt.hit, first // self._per_block, -(-stop // self._per_block), self._block_tokens)
            tracked.saved = max(tracked.saved, hit.num_blocks)
        plan = self.plans.narrowed(tracked.plan, hit, request.num_tokens)
        scope, blocks = prompt.scope or Scope(), tuple(engine_blocks[first:stop])
        self._add(Load(request.request_id, scope, hit, first, blocks, plan))
        self._lookups.forget(prompt)

    def give_up(self, request_id: str, engine_blocks: Sequence[int], external_tokens: int) -> None:
        """Have a load that could not be planned fail: vLLM waits for it. Takes what `allocated` takes."""
        count = external_tokens // self._engine_block_tokens
        if count > 0:
            self._add(Load(request_id, Scope(), None, 0, tuple(engine_blocks[-count:])))

    def _add(self, load: Load) -> None:
        self._loads.append(load)
        self._loading[load.request_id] = load

    def sources(self, request: EngineRequest, external_tokens: int) -> dict[str, int]:
        """Where the tokens of a load that was just allocated are said to be: "host", "disk", "p2p" or "shared"."""
        load = self._loading.get(request.request_id)
        if load is None or load.hit is None:
            return {}
        start = load.first * self._engine_block_tokens
        tokens: Counter[str] = Counter()
        for run in load.hit.runs:
            place = "host" if run.local or run.pending else "disk" if run.nvme else "p2p" if run.nodes else "shared"
            first, stop = run.start * self._block_tokens, run.stop * self._block_tokens
            tokens[place] += max(0, min(stop, start + external_tokens) - max(first, start))
        return dict(+tokens)

    def take_loads(self) -> tuple[Load, ...]:
        """The loads that the workers have not been told of."""
        loads, self._loads = tuple(self._loads), []
        for load in loads:
            if load.hit is not None:
                self.plans.began(load.request_id, load.hit)
        return loads

    # what to save

    def saves(self, step: Any) -> tuple[Save, ...]:  # noqa: ANN401  vLLM's SchedulerOutput
        """What to save when a step is computed. To be called for every step."""
        computed = self._follow(step)
        self.plans.step(step.num_scheduled_tokens, computed)
        # Another connector's load in the step itself may fail, which is known when it is over.
        if not self._lookups.started or getattr(step, "has_sync_kv_loads", False):
            return ()
        saves: list[Save] = []
        room = self._step_blocks_max
        for request_id, tokens in step.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            blocks, here = self._fitting(tracked, (computed[request_id] + tokens) // self._block_tokens, room)
            if (blocks > tracked.saved or _untold(tracked)) and (save := self._save(tracked, blocks)) is not None:
                saves.append(save)
                room -= max(0, len(save.engine_blocks) // self._per_block - here)
        return tuple(saves)

    def _fitting(self, tracked: _Tracked, blocks: int, room: int) -> tuple[int, int]:
        """Up to which block a request can be saved, and how many of those to save are here already: they take no room.

        What vLLM had cached mostly is. If it took room, an answer behind a long prompt would come too late.
        """
        if not self._saves:
            return tracked.saved, 0
        blocks = min(blocks, self._lookups.num_blocks(tracked.prompt.request))
        if blocks <= tracked.saved + room:
            return blocks, 0
        here = self._lookups.here(tracked.prompt, tracked.saved, blocks)
        return min(blocks, tracked.saved + here + room), here

    def _follow(self, step: Any) -> dict[str, int]:  # noqa: ANN401  vLLM's SchedulerOutput
        """Keep the requests' tables; the tokens that each has behind it, by request id."""
        computed = {}
        for new in step.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            if (tracked := self._requests.get(new.req_id)) is not None:
                tracked.table = list(new.block_ids[0])
        cached = step.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            computed[request_id] = cached.num_computed_tokens[index]
            blocks = cached.new_block_ids[index]
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            if request_id in cached.resumed_req_ids:
                tracked.table = list(blocks[0])  # after a preemption it starts anew
            elif blocks is not None:
                tracked.table.extend(blocks[0])
        return computed

    def _save(self, tracked: _Tracked, blocks: int) -> Save | None:
        """Save what is whole by the end of this step; what follows the tokens known so far has no hash yet."""
        prompt, start = tracked.prompt, tracked.saved
        stop = max(start, min(blocks, self._lookups.num_blocks(prompt.request)))
        scope = self._lookups.scope(prompt)
        if stop == (0 if _untold(tracked) else start) or scope is None or tracked.lost:
            return None
        engine_blocks = tuple(tracked.table[start * self._per_block : stop * self._per_block])
        assert len(engine_blocks) == (stop - start) * self._per_block
        tracked.saved, tracked.told = stop, True
        keys = self._lookups.keys(prompt, stop)
        return Save(prompt.request.request_id, scope, keys, start, engine_blocks, tracked.hints)

    # what became of it

    def output(self, output: StepOutput) -> None:
        """What the workers did in a step."""
        self.plans.stepped()
        invalid = frozenset(output.invalid_block_ids or ())
        if invalid:
            for load in self._loading.values():
                self._check(load, invalid)
        for request_id in output.finished_recving or ():
            self._loading.pop(request_id, None)
            self.plans.ended(request_id)

    def _check(self, load: Load, invalid: frozenset[int]) -> None:
        """Never ask again for a request whose load failed; what it computes instead is to be saved."""
        bad = next((i for i, block in enumerate(load.engine_blocks) if block in invalid), None)
        tracked = self._requests.get(load.request_id)
        if bad is not None:
            self.plans.ended(load.request_id, (load.first + bad) * self._engine_block_tokens)
        if bad is not None and tracked is not None:
            tracked.refused = True
            tracked.saved = min(tracked.saved, (load.first + bad) // self._per_block)

    def finished(self, request: EngineRequest) -> dict[str, Any] | None:
        """A request has ended, however. What another engine may be told that goes on with it."""
        tracked = self._requests.pop(request.request_id, None)
        self.plans.dropped(request.request_id)
        params = request.kv_transfer_params
        if tracked is None or not params or not params.get("do_remote_decode"):
            return None
        stored = 0 if tracked.lost else tracked.saved
        hints = {name: value for name, value in params.items() if name.split("_")[0] == HINTS}
        return hints | {"do_remote_prefill": True, "do_remote_decode": False, _EXPECTED: stored}

    def reset(self, word: str) -> None:
        """Have nothing in common with what was stored before; requests in the engine neither load nor save any more.

        Args:
            word: random; part of the identity of what is stored from now on.
        """
        self._lookups.reset(word)
        for tracked in self._requests.values():
            tracked.lost = True


def _untold(tracked: _Tracked) -> bool:
    """Whether a request has hints that a save has to tell, even one of no blocks."""
    return tracked.hints.lasting and not tracked.told


def _part(hit: PrefixHit, start: int, stop: int, block_tokens: int) -> PrefixHit:
    """Blocks [start, stop) of a hit."""
    start, stop = max(start, hit.start_block), min(stop, hit.num_blocks)
    runs = tuple(
        replace(run, start=max(run.start, start), stop=min(run.stop, stop))
        for run in hit.runs
        if run.start < stop and run.stop > start
    )
    return replace(hit, num_tokens=stop * block_tokens, num_blocks=stop, runs=runs, start_block=start)

"""A client whose fleet is a dict in this process."""

from __future__ import annotations

import numpy as np

from kvfleet import copying
from kvfleet.core.block import TokenIds, split
from kvfleet.core.hints import NO_HINTS, Hints
from kvfleet.core.layout import ModelSpec
from kvfleet.core.planner import Leg, Plan
from kvfleet.hits import HitRun, Loaded, PrefixHit, StoreResult
from kvfleet.loads import Meanwhile
from kvfleet.node.messages import Miss, Outcome, Source
from kvfleet.planning import Planning
from kvfleet.storing import StoreTask


class MemoryClient:
    """Stands in for `kvfleet.Client` in tests of connectors: the same calls, the same copies, no node.

    Attributes:
        blocks: what the fleet holds, by key.
        fail_from: loads miss from this block on, although lookups promise it.
        planning: makes plans as a real client's, of what a test tells it.
        plans: of the loads so far.
        ready_s: what was said of the prompts so far.
        hints: of the lookups and stores so far.
        hinted: keys and hints of the calls of `hint`.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.blocks: dict[bytes, np.ndarray] = {}
        self.fail_from: int | None = None
        self.planning = Planning(spec.layout)
        self.plans: list[Plan] = []
        self.ready_s: list[float] = []
        self.hints: list[Hints] = []
        self.hinted: list[tuple[bytes, Hints]] = []

    def lookup(self, token_ids: TokenIds, *, hints: Hints = NO_HINTS) -> PrefixHit:
        self.hints.append(hints)
        keys = self.spec.keys(token_ids)
        asked = split(keys)
        held = next((i for i, key in enumerate(asked) if key not in self.blocks), len(asked))
        runs = (HitRun(0, held, local=True),) if held else ()
        return PrefixHit(held * self.spec.block_tokens, held, len(asked), keys, runs)

    def load(self, hit: PrefixHit, into: object, *, plan: Plan, meanwhile: Meanwhile) -> Loaded:
        copying.check_fits(copying.as_array(into), into, self.spec.layout, hit.num_blocks)
        self.plans.append(plan)
        outcomes = self._leg(hit, plan.head, into)
        if plan.tail is not None:
            meanwhile(sum(isinstance(outcome, Source) for outcome in outcomes))
            outcomes += [Miss.SLOWER_THAN_COMPUTE] * (plan.tail.start - len(outcomes))
            outcomes += self._leg(hit, plan.tail, into)
        outcomes += [Miss.SLOWER_THAN_COMPUTE] * (hit.num_blocks - len(outcomes))
        return Loaded.of(outcomes, self.spec.layout)

    def _leg(self, hit: PrefixHit, leg: Leg, into: object) -> list[Outcome]:
        target, keys = copying.as_array(into), split(hit.keys)
        stop = leg.stop if self.fail_from is None else max(leg.start, min(self.fail_from, leg.stop))
        for index in range(leg.start, stop):
            copying.copy_out(copying.block_slice(target, self.spec.layout, index), self.blocks[keys[index]])
        missed = [Miss.UNREACHABLE, *[Miss.BEHIND_MISS] * hit.num_blocks][: leg.stop - stop]
        return [*[Source.DRAM] * (stop - leg.start), *missed]

    def started(self, loaded: Loaded, seconds: float) -> None:
        self.ready_s.append(seconds)

    def hint(self, keys: bytes, hints: Hints) -> StoreTask:
        self.hinted.append((keys, hints))
        task = StoreTask()
        task.finish(StoreResult())
        return task

    def store_keys(self, keys: bytes, kv: object, *, start_block: int = 0, hints: Hints = NO_HINTS) -> StoreTask:
        self.hints.append(hints)
        layout = self.spec.layout
        new = split(keys)[start_block:]
        source = copying.as_array(kv)
        copying.check_fits(source, kv, layout, len(new))
        for index, key in enumerate(new):
            slot = np.empty(layout.block_bytes, np.uint8)
            copying.copy_in(slot, copying.block_slice(source, layout, index))
            self.blocks.setdefault(key, slot)
        task = StoreTask()
        task.finish(StoreResult(stored=len(new), num_bytes=len(new) * layout.block_bytes))
        return task

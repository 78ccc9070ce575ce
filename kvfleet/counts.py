"""What one client has asked for, got and given: counted once, told without a call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from kvfleet.core.block import KEY_BYTES
from kvfleet.core.layout import BlockLayout
from kvfleet.core.outcomes import Miss, Outcome, Source
from kvfleet.core.planner import Plan
from kvfleet.core.totals import BYTES_OF, INDEX, OUTCOME, UNCLAIMED, dropped_index
from kvfleet.hits import Loaded, PrefixHit, StoreResult
from kvfleet.node.tallies import Request, Tally

__all__ = ["ClientStats", "Stats", "request_of"]


@dataclass(frozen=True, slots=True)
class ClientStats:
    """Totals of one client since it was made.

    Attributes:
        lookups: of prompts; `asked_blocks` asked for, `hit_blocks` said to be there.
        blocks: blocks by what became of them: where they came from, or why they did not.
        unclaimed: blocks of hits that were not loaded, less those that were and that another client had looked up.
        num_bytes: bytes loaded by source.
        stored_blocks: blocks written by stores; `stored_bytes` likewise; `already_blocks` were there.
        dropped_blocks: blocks that stores gave up, by reason.
        faults: failed waits by reason, whatever they cost.
        calls: remote calls made, by name.
    """

    lookups: int
    asked_blocks: int
    hit_blocks: int
    blocks: Mapping[Outcome, int]
    unclaimed: int
    num_bytes: Mapping[Source, int]
    stored_blocks: int
    stored_bytes: int
    already_blocks: int
    dropped_blocks: Mapping[str, int]
    faults: Mapping[Miss, int]
    calls: Mapping[str, int]

    @property
    def outcomes(self) -> dict[str, int]:
        """`blocks` and `unclaimed`, by name. Their sum is `asked_blocks`, always."""
        named = {outcome.value: n for outcome, n in self.blocks.items()}
        return named | ({UNCLAIMED: self.unclaimed} if self.unclaimed else {})


class Stats:
    """Counts behind `ClientStats`. Threads: any.

    Attributes:
        tally: what this node's manager sees of them.
    """

    def __init__(self, layout: BlockLayout, tally: Tally) -> None:
        self.tally = tally
        self._layout = layout
        self._unclaimed = 0
        self._dropped: Counter[str] = Counter()
        self._faults: Counter[Miss] = Counter()
        self._calls: Counter[str] = Counter()

    def _add(self, name: str, number: int) -> None:
        self.tally.counts[INDEX[name]] += number

    def looked_up(self, hit: PrefixHit, plan: Plan | None = None) -> None:
        """A lookup was answered: what is not to be loaded has its outcome now, the rest when it is."""
        asked, found = hit.asked_blocks - hit.start_block, hit.num_blocks - hit.start_block
        planned = found if plan is None else plan.num_blocks
        request = request_of(hit, self._layout, plan=plan)
        with self.tally.lock:
            self._add("lookups", 1)
            self._add("asked", asked)
            self._add("hit", found)
            if found < asked:
                self.tally.counts[OUTCOME[hit.missing or Miss.UNKNOWN]] += asked - found
            if planned < found:
                self.tally.counts[OUTCOME[Miss.SLOWER_THAN_COMPUTE]] += found - planned
            self._unclaimed += planned
            if hit.fault is not None:
                self._faults[hit.fault] += 1
            self.tally.note(request)
        hit.claim.give()

    def loaded(self, loaded: Loaded, shard: int) -> None:
        """A load ended. One of a hit that nobody has counted, or that was loaded before, asks for its blocks itself."""
        hit = loaded.hit
        assert hit is not None
        mine = hit.shard == shard and hit.claim.take()
        request = request_of(hit, self._layout, loaded)
        with self.tally.lock:
            counts = self.tally.counts
            self._add("loads", 1)
            if mine:
                self._unclaimed -= len(loaded.outcomes)
            else:
                self._add("asked", len(loaded.outcomes))
                self._add("hit", len(loaded.outcomes))
            for outcome, number in loaded.counts.items():
                counts[OUTCOME[outcome]] += number
            for source, num_bytes in loaded.bytes_by_source.items():
                counts[BYTES_OF[source]] += num_bytes
            self.tally.note(request)

    def started(self, loaded: Loaded) -> None:
        """The engine has the whole prompt of a load."""
        assert loaded.hit is not None
        request = request_of(loaded.hit, self._layout, loaded)
        with self.tally.lock:
            self.tally.note(request)

    def stored(self, result: StoreResult) -> None:
        """A store ended."""
        with self.tally.lock:
            self._add("stored", result.stored)
            self._add("stored_bytes", result.num_bytes)
            self._add("already", result.already)
            if result.dropped:
                self._dropped[result.reason] += result.dropped
                self.tally.counts[dropped_index(result.reason)] += result.dropped

    def called(self, *names: str) -> None:
        """Remote calls were made."""
        if names:
            with self.tally.lock:
                self._calls.update(names)

    def snapshot(self) -> ClientStats:
        """The counts now."""
        with self.tally.lock:
            counts = self.tally.counts.tolist()
            return ClientStats(
                lookups=counts[INDEX["lookups"]],
                asked_blocks=counts[INDEX["asked"]],
                hit_blocks=counts[INDEX["hit"]],
                blocks={outcome: counts[index] for outcome, index in OUTCOME.items() if counts[index]},
                unclaimed=self._unclaimed,
                num_bytes={source: counts[index] for source, index in BYTES_OF.items() if counts[index]},
                stored_blocks=counts[INDEX["stored"]],
                stored_bytes=counts[INDEX["stored_bytes"]],
                already_blocks=counts[INDEX["already"]],
                dropped_blocks=dict(self._dropped),
                faults=dict(self._faults),
                calls=dict(self._calls),
            )


def request_of(hit: PrefixHit, layout: BlockLayout, loaded: Loaded | None = None, plan: Plan | None = None) -> Request:
    """What is remembered of a request once it is looked up, and once it is loaded."""
    local = nvme = pending = remote = shared = 0
    for run in hit.runs:  # each is counted where it is nearest
        size = run.stop - run.start
        if run.local:
            local += size
        elif run.nvme:
            nvme += size
        elif run.pending:
            pending += size
        elif run.nodes:
            remote += size
        else:
            shared += size
    came = loaded.counts if loaded is not None else {}
    plan = loaded.plan if loaded is not None else plan
    refused = plan is not None and plan.num_blocks < hit.num_blocks - hit.start_block
    return Request(
        asked_ns=hit.asked_ns,
        label=hit.label,
        block_tokens=layout.block_tokens,
        block_bytes=layout.block_bytes,
        start_block=hit.start_block,
        asked_blocks=hit.asked_blocks,
        hit_blocks=hit.num_blocks,
        local=local,
        nvme=nvme,
        remote=remote,
        shared=shared,
        pending=pending,
        missing=hit.missing,
        lookup_s=hit.lookup_s,
        loaded=loaded is not None,
        from_dram=came.get(Source.DRAM, 0),
        from_nvme=came.get(Source.NVME, 0),
        from_peer=came.get(Source.PEER, 0),
        from_shared=came.get(Source.SHARED, 0),
        miss=loaded.miss if loaded is not None else Miss.SLOWER_THAN_COMPUTE if refused else None,
        load_s=loaded.load_s if loaded is not None else 0.0,
        planned_blocks=plan.num_blocks if plan is not None else 0,
        predicted_load_s=(plan.predicted_load_s or 0.0) if plan is not None else 0.0,
        predicted_ready_s=(plan.predicted_ttft_s or 0.0) if plan is not None else 0.0,
        recompute_s=(plan.recompute_s or 0.0) if plan is not None else 0.0,
        ready_s=(loaded.ready_s or 0.0) if loaded is not None else 0.0,
        reason=plan.reason if plan is not None else "",
        first_key=hit.keys[:KEY_BYTES],
        last_key=hit.keys[-KEY_BYTES:],
    )

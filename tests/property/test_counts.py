"""Every block asked for has one outcome, whatever is looked up and loaded, by whom, how often, and in what order."""

from __future__ import annotations

import pickle

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvfleet.core.block import KEY_BYTES
from kvfleet.core.outcomes import Miss, Outcome, Source
from kvfleet.core.totals import Totals
from kvfleet.counts import Stats
from kvfleet.hits import HitRun, Loaded, PrefixHit
from kvfleet.node.tallies import Tally
from tests.workload import model

LAYOUT = model().layout
REASONS = st.sampled_from(sorted(set(Miss) - {Miss.BEHIND_MISS}))


class Clients(RuleBasedStateMachine):
    """Three clients that look up and load; the third is of another shard."""

    def __init__(self) -> None:
        super().__init__()
        self.stats = [Stats(LAYOUT, Tally()) for _ in range(3)]
        self.hits: list[PrefixHit] = []
        self.asked = 0
        self.taken: set[int] = set()
        self.open = 0
        self.time = 0

    @rule(
        client=st.integers(0, 1),
        sizes=st.tuples(*[st.integers(0, 5)] * 3),
        reason=REASONS,
        counted=st.booleans(),
        sent=st.booleans(),
    )
    def look_up(self, client: int, sizes: tuple[int, int, int], reason: Miss, counted: bool, sent: bool) -> None:
        start, found, missing = sizes
        asked, stop = sum(sizes), start + found
        runs = (HitRun(start, stop, local=True),) if found else ()
        self.time += 1
        hit = PrefixHit(
            stop * 16, stop, asked, bytes(asked * KEY_BYTES), runs, start_block=start,
            missing=reason if missing else None, asked_ns=self.time,
        )  # fmt: skip
        if counted:
            self.stats[client].looked_up(hit)
            self.asked += found + missing
            self.open += found
        self.hits.append(pickle.loads(pickle.dumps(hit)) if sent else hit)
        if not counted:
            self.taken.add(len(self.hits) - 1)

    @rule(client=st.integers(0, 2), which=st.integers(0, 1000), good=st.integers(0, 5), reason=REASONS)
    def load(self, client: int, which: int, good: int, reason: Miss) -> None:
        if not self.hits:
            return
        which %= len(self.hits)
        hit, shard = self.hits[which], client // 2
        found = hit.num_blocks - hit.start_block
        outcomes: list[Outcome] = [Source.PEER] * min(good, found)
        outcomes += ([reason] + [Miss.BEHIND_MISS] * found)[: found - len(outcomes)]
        loaded = Loaded.of(outcomes, LAYOUT)
        loaded.hit = hit
        self.stats[client].loaded(loaded, shard)
        if shard or which in self.taken:
            self.asked += found
        else:
            self.taken.add(which)
            self.open -= found

    @invariant()
    def each_has_one_outcome(self) -> None:
        snapshots = [stats.snapshot() for stats in self.stats]
        for stats, snapshot in zip(self.stats, snapshots, strict=True):
            assert sum(snapshot.outcomes.values()) == snapshot.asked_blocks
            totals = Totals.of(stats.tally.counts.tolist())
            assert dict(totals.outcomes) == snapshot.outcomes
        assert sum(snapshot.asked_blocks for snapshot in snapshots) == self.asked
        assert sum(snapshot.unclaimed for snapshot in snapshots) == self.open >= 0


Clients.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestClients = Clients.TestCase

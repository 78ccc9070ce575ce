"""What vLLM's scheduler is told of a hit once speeds are known, and how they become known."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvfleet.connectors.vllm.identity import AdapterRef
from kvfleet.connectors.vllm.loadplans import LoadPlans
from kvfleet.connectors.vllm.scopes import Scope
from kvfleet.core.directory import NodeId
from kvfleet.core.layout import BlockLayout
from kvfleet.core.speeds import Speed
from kvfleet.hits import HitRun, PrefixHit
from kvfleet.planning import Planning
from tests.unit.test_vllm_scheduling import BLOCK, ENGINE_BLOCK, PER, Clock, Request, Rig, hashes, keys, step

PEER = "peer:" + "b" * 56
LAYOUT = BlockLayout.opaque(block_tokens=BLOCK, block_bytes=1_000_000, inner_order="test")
TOKEN_S = 1e-3


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def planning():
    return Planning(LAYOUT)


@pytest.fixture
def plans(clock, planning):
    plans = LoadPlans(BLOCK, clock)
    plans.start(planning)
    return plans


@pytest.fixture
def probed(planning):
    probed = []
    planning.probe = probed.append
    return probed


@pytest.fixture
def rig(plans, planning):
    rig = Rig().start()
    rig.scheduling.plans = plans
    rig.client.planning = planning
    return rig


def compute(plans: LoadPlans, clock: Clock, scheduled: dict[str, int], seconds: float, computed: int = 0) -> None:
    """A step of the engine."""
    plans.step(scheduled, dict.fromkeys(scheduled, computed))
    clock.now += seconds
    plans.stepped()


def learn(plans: LoadPlans, clock: Clock) -> None:
    """Steps of prompts, a millisecond a token."""
    for _ in range(4):
        compute(plans, clock, {"x": 512}, 512 * TOKEN_S)


# steps


def test_steps_tell_the_speed_of_prefill(plans, clock, planning):
    for context in (0, 0, 0, 512, 1024, 2048):
        compute(plans, clock, {"a": 256, "b": 256}, 512 * (TOKEN_S + 1e-6 * (context + 256)), context)
    found = planning.prefill()
    assert (found.token_s, found.context_s) == (pytest.approx(TOKEN_S), pytest.approx(1e-6))


@pytest.mark.parametrize(
    "scheduled", [{}, {"a": 1}, {"a": 8, "b": 8}, {"a": 63}, {"a": 64} | {str(i): 1 for i in range(17)}]
)
def test_steps_of_other_work_do_not(plans, clock, planning, scheduled):
    for _ in range(5):
        compute(plans, clock, scheduled, 1.0)
    assert planning.prefill() is None


def test_the_first_steps_of_an_engine_do_not_count(plans, clock, planning):
    compute(plans, clock, {"a": 512}, 60.0)
    compute(plans, clock, {"a": 512}, 60.0)
    assert planning.prefill() is None
    compute(plans, clock, {"a": 512}, 512 * TOKEN_S)
    assert planning.prefill().token_s == pytest.approx(TOKEN_S)


def test_a_step_that_waits_for_the_one_before_it_is_not_charged_for_that(plans, clock, planning):
    learn(plans, clock)
    plans.step({"a": 512}, {"a": 0})
    plans.step({"a": 512}, {"a": 512})
    for _ in range(2):
        clock.now += 512 * TOKEN_S
        plans.stepped()
    assert planning.prefill().token_s == pytest.approx(TOKEN_S)


# loads


def allocated(rig: Rig, request: Request, tokens: int) -> None:
    rig.scheduling.allocated(request, list(range(len(request.block_hashes))), tokens)


def test_before_the_engine_has_computed_all_is_loaded(rig, planning):
    planning.tell({PEER: Speed(9.0, 1.0)})
    request = Request("r", hashes(12))
    rig.client.elsewhere.update(keys(request))
    assert rig.scheduling.matched_tokens(request, 0) == 3 * BLOCK
    allocated(rig, request, 3 * BLOCK)
    (load,) = rig.scheduling.take_loads()
    assert load.plan.head.grace_s == float("inf")


def test_what_is_slower_than_computing_is_not_asked_for(rig, plans, clock, planning):
    learn(plans, clock)
    planning.tell({PEER: Speed(0.0, 1e6), "dram": Speed(0.0, 1e9)})  # a block: 1 s, 1 ms; computing: 64 ms
    request = Request("r", hashes(12))
    rig.client.here.update(keys(request)[:1])
    rig.client.elsewhere.update(keys(request)[1:])
    assert rig.scheduling.matched_tokens(request, 0) == BLOCK
    allocated(rig, request, BLOCK)
    (load,) = rig.scheduling.take_loads()
    assert (load.hit.num_blocks, load.engine_blocks) == (1, tuple(range(PER)))
    assert (load.plan.head.start, load.plan.head.stop) == (0, 1)
    assert rig.client.counted == [(0, 3, 3)]
    assert [plan.num_blocks for plan in rig.client.plans] == [1]
    assert "loading from peer bbbbbbbb takes 2000 ms" in load.plan.reason


def test_a_refused_hit_is_counted_with_its_plan(rig, plans, clock, planning, probed):
    learn(plans, clock)
    planning.tell({PEER: Speed(9.0, 1e6)})
    request = Request("r", hashes(12))
    rig.client.elsewhere.update(keys(request))
    assert rig.scheduling.matched_tokens(request, 0) == 0
    allocated(rig, request, 0)
    assert rig.scheduling.take_loads() == ()
    assert [plan.num_blocks for plan in rig.client.plans] == [0]
    assert [(hit.start_block, hit.num_blocks) for hit in probed] == [(0, 3)], "the source is looked at again, seldom"


def test_a_source_is_looked_at_by_the_client_of_the_blocks_scope(rig, plans, clock, planning, probed):
    learn(plans, clock)
    planning.tell({PEER: Speed(9.0, 1e6)})
    rig.adapters["/a"], scope = "1", Scope(AdapterRef(name="a", revision="1"))
    own: list[PrefixHit] = []
    other = Planning(LAYOUT)
    other.share(planning)
    other.probe = own.append
    rig.clients.clients[scope] = replace(rig.client, planning=other)
    lora = SimpleNamespace(lora_name="a", lora_path="/a", lora_int_id=1)
    request = Request("r", hashes(12), lora_request=lora)
    rig.client.elsewhere.update(keys(request, scope))
    assert rig.scheduling.matched_tokens(request, 0) == 0
    assert [(hit.start_block, hit.num_blocks) for hit in own] == [(0, 3)]
    assert probed == []
    other.took(hit_of(RUNS["peer"]), 3, 0.3)
    assert planning.speeds()[PEER] == Speed(0.0, 1e7), "what one learns the others know"


def test_a_part_of_a_plan_expects_what_the_part_takes(rig, plans, clock, planning):
    learn(plans, clock)
    planning.tell({PEER: Speed(0.01, 1e8)})  # a block: 10 ms; computing: 64 ms
    request = Request("r", hashes(12))
    rig.client.elsewhere.update(keys(request))
    assert rig.scheduling.matched_tokens(request, 0) == 3 * BLOCK
    allocated(rig, request, 2 * BLOCK)
    (load,) = rig.scheduling.take_loads()
    assert (load.plan.head.start, load.plan.head.stop, load.plan.sources) == (0, 2, (PEER,))
    assert load.plan.head.predicted_s == load.plan.predicted_load_s == pytest.approx(0.03)
    assert load.plan.predicted_ttft_s == pytest.approx(0.03 + (BLOCK + 1) * TOKEN_S)
    assert [plan.predicted_load_s for plan in rig.client.plans] == [pytest.approx(0.04)], "as it was found"


def test_loads_tell_the_speed_of_their_source(rig, plans, clock, planning):
    request = Request("r", hashes(12))
    rig.client.elsewhere.update(keys(request))
    allocated(rig, request, rig.scheduling.matched_tokens(request, 0))
    rig.scheduling.take_loads()
    clock.now += 1.5
    rig.scheduling.output(SimpleNamespace(finished_recving={"r"}, invalid_block_ids=set()))
    assert planning.speeds()[PEER].seconds(1_000_000) == pytest.approx(0.5)


@pytest.mark.parametrize(("bad", "known"), [(0, False), (PER, True)])
def test_a_load_that_stopped_short_tells_too(rig, plans, clock, planning, bad, known):
    learn(plans, clock)
    request = Request("r", hashes(12))
    rig.client.elsewhere.update(keys(request))
    allocated(rig, request, rig.scheduling.matched_tokens(request, 0))
    rig.scheduling.take_loads()
    clock.now += 4.0
    rig.scheduling.output(SimpleNamespace(finished_recving={"r"}, invalid_block_ids=set(range(bad, 12))))
    assert (planning.speeds().get(PEER) == Speed(0.0, 0.25e6)) is known
    other = Request("o", hashes(12, seed=1))
    rig.client.elsewhere.update(keys(other))
    assert rig.scheduling.matched_tokens(other, 0) == 0


def test_a_load_of_a_request_that_was_aborted_tells_nothing(rig, plans, clock, planning):
    learn(plans, clock)
    request, other = Request("r", hashes(12)), Request("o", hashes(12, seed=1))
    for one in (request, other):
        rig.client.elsewhere.update(keys(one))
    allocated(rig, request, rig.scheduling.matched_tokens(request, 0))
    rig.scheduling.take_loads()
    rig.scheduling.finished(request)
    clock.now += 1.0
    rig.scheduling.output(SimpleNamespace(finished_recving={"r"}, invalid_block_ids=set(range(12))))
    assert rig.scheduling.matched_tokens(other, 0) == 3 * BLOCK


def test_steps_are_seen_by_the_scheduler(rig, clock, planning):
    request = Request("r", hashes(64))
    rig.scheduling.matched_tokens(request, 0)
    for computed in (0, 256, 512, 768):
        new = {"new": [("r", 0, list(range(16)))]} if not computed else {"cached": [("r", computed, list(range(16)))]}
        rig.scheduling.saves(step(**new, scheduled={"r": 256}))
        clock.now += 256 * TOKEN_S
        rig.scheduling.output(SimpleNamespace(finished_recving=None, invalid_block_ids=None))
    assert planning.prefill().seconds(0, 1000) == pytest.approx(1.0)
    assert request.num_tokens == 64 * ENGINE_BLOCK + 1


RUNS = {
    "pending": HitRun(0, 3, local=False, pending=True),
    "dram": HitRun(0, 3, local=True),
    "peer": HitRun(0, 3, local=False, nodes=(NodeId("b" * 56),)),
    "both": HitRun(0, 3, local=False, nodes=(NodeId("b" * 56),), shared=True),
}


def hit_of(run: HitRun) -> PrefixHit:
    return PrefixHit(3 * BLOCK, 3, 3, bytes(48), (run,))


@pytest.mark.parametrize("name", ["pending", "dram"])
def test_what_is_here_is_never_taken_for_a_source_that_stalled(planning, name):
    planning.computed(0, 1000, 1.0)
    planning.took(hit_of(RUNS[name]), 0, 1.0)
    assert planning.plan(hit_of(RUNS[name]), 3 * BLOCK).num_blocks == 3
    assert planning.speeds() == {}


@pytest.mark.parametrize("name", ["peer", "both"])
def test_a_source_that_stalled_is_tried_again_though_no_look_at_it_tells(monkeypatch, clock, name):
    monkeypatch.setattr("kvfleet.planning.time", SimpleNamespace(monotonic=clock))
    planning, hit = Planning(LAYOUT), hit_of(RUNS[name])
    planning.tell({"shared": Speed(0.0, 1e12)})
    planning.computed(0, 1000, 1.0)
    planning.took(hit, 0, 1.0)
    planning.plan(hit, 3 * BLOCK)
    assert planning.nearest(hit).runs[0].nodes == (() if name == "both" else hit.runs[0].nodes)
    clock.now += 61.0
    assert planning.plan(hit, 3 * BLOCK).num_blocks == 3
    assert planning.nearest(hit) == hit

"""Loads as planned: paced, split, looked at again; and what is told of them."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvfleet.client import Client
from kvfleet.core.directory import NodeId
from kvfleet.core.planner import Leg, Plan
from kvfleet.core.speeds import Speed
from kvfleet.explain import words
from kvfleet.hits import HitRun, PrefixHit
from kvfleet.node.messages import Miss, Source
from kvfleet.planning import Planning
from tests.conftest import wait_for
from tests.rig import Rig, hanging
from tests.workload import empty, kv, model, prompt, store

SPEC = model()
TOKENS = SPEC.block_tokens
SLOWER = Miss.SLOWER_THAN_COMPUTE


@pytest.fixture
def rig(arena_root):
    with Rig(arena_root, 2, holder_timeout_s=0.5) as rig:
        yield rig


def found(rig: Rig, blocks: int = 8) -> tuple[Client, PrefixHit]:
    """A client of a node that has nothing, and what it found on the other."""
    store(rig.client(SPEC), prompt(blocks))
    client = rig.client(SPEC, 1)
    hit = client.lookup(prompt(blocks), label="r")
    assert hit.num_blocks == blocks
    return client, hit


def warm(rig: Rig, blocks: int) -> None:
    """Have another client bring the first blocks of the prompt to node 1."""
    other = rig.client(SPEC, 1)
    other.load(other.lookup(prompt(blocks)), empty(SPEC, 8))


def right(target: Any, start: int, stop: int) -> bool:
    """Whether blocks [start, stop) are those of the prompt."""
    expected = kv(SPEC, prompt(8))
    tokens = slice(start * TOKENS, stop * TOKENS)
    return np.array_equal(target[:, :, :, tokens], expected[:, :, :, tokens])


def test_without_a_computed_prompt_all_is_loaded(rig):
    client, hit = found(rig)
    plan = client.planning.plan(hit, 8 * TOKENS, can_split=True)
    assert plan == Plan(Leg(0, 8), sources=(f"peer:{rig.node_id(0)}",))
    assert client.load(hit, empty(SPEC, 8), plan=plan).outcomes == (Source.PEER,) * 8


def test_a_fleet_may_load_all_it_finds(arena_root):
    with Rig(arena_root, 2, plan_loads=False) as rig:
        client, hit = found(rig)
        client.planning.computed(0, 10**9, 1e-9)
        assert client.planning.plan(hit, 8 * TOKENS) == Plan(Leg(0, 8))


@pytest.mark.parametrize("came", [0, 2])
def test_a_load_that_falls_behind_computing_ends(rig, came):
    client, hit = found(rig)
    warm(rig, came)
    rig.faults["0.window"] = hanging
    plan = Plan(Leg(0, 8, grace_s=0.05, pace_s=0.01))
    target = empty(SPEC, 8)
    loaded = client.load(hit, target, plan=plan)
    assert loaded.outcomes == (Source.DRAM,) * came + (SLOWER,) * (8 - came)
    assert loaded.miss is SLOWER
    assert right(target, 0, came)
    assert client.stats().outcomes[SLOWER.value] == 8 - came
    rig.faults.clear()


def test_a_manager_that_says_nothing_is_not_waited_for_longer_than_computing_takes(rig):
    client, hit = found(rig)
    rig.faults["1.step"] = hanging
    plan = Plan(Leg(0, 8, grace_s=0.1, pace_s=0.01))
    began = time.monotonic()
    assert client.load(hit, empty(SPEC, 8), plan=plan) == 0
    assert time.monotonic() - began < 5
    rig.faults.clear()


def test_another_node_goes_on_where_one_sends_nothing(arena_root):
    with Rig(arena_root, 3, holder_timeout_s=20.0) as rig:
        found(rig)
        warm(rig, 8)
        client = rig.client(SPEC, 2)
        wait_for(lambda: len(client.lookup(prompt(8)).runs[0].nodes) == 2, "both nodes are known")
        first = rig.part(2).peers.holders.order([rig.node_id(0), rig.node_id(1)])[0]
        rig.faults[f"{int(first, 16)}.window"] = hanging
        plan = Plan(Leg(0, 8, grace_s=2.0, pace_s=0.01, spare_s=1.9))
        target = empty(SPEC, 8)
        loaded = client.load(client.lookup(prompt(8)), target, plan=plan)
        assert loaded.outcomes == (Source.PEER,) * 8
        assert right(target, 0, 8)
        assert rig.part(2).peers.holders.avoided == set(), "it may only be slow: it is asked whether it lives"
        rig.faults.clear()


def test_one_that_keeps_ahead_does_not(rig):
    client, hit = found(rig)
    plan = Plan(Leg(0, 8, grace_s=10.0, pace_s=0.0))
    assert client.load(hit, empty(SPEC, 8), plan=plan).outcomes == (Source.PEER,) * 8


def test_only_what_is_planned_is_loaded(rig):
    client, hit = found(rig)
    loaded = client.load(hit, empty(SPEC, 8), plan=Plan(Leg(0, 3), reason="because"))
    assert loaded.outcomes == (Source.PEER,) * 3 + (SLOWER,) * 5
    assert int(loaded) == 3 * TOKENS
    assert client.stats().outcomes == {"peer": 3, SLOWER.value: 5}
    assert rig.part(1).loader.num_bytes == {Source.PEER: 3 * SPEC.layout.block_bytes}
    assert client.load(hit, empty(SPEC, 8), plan=Plan(Leg(0, 0))).outcomes == (SLOWER,) * 8


def test_the_tail_comes_while_the_head_is_computed(rig):
    client, hit = found(rig)
    target, began = empty(SPEC, 8), []
    plan = Plan(Leg(0, 2), Leg(5, 7))
    loaded = client.load(hit, target, plan=plan, meanwhile=began.append)
    assert began == [2]
    assert loaded.outcomes == (*(Source.PEER,) * 2, *(SLOWER,) * 3, *(Source.PEER,) * 2, SLOWER)
    assert (int(loaded), loaded.miss, loaded.counts) == (4 * TOKENS, SLOWER, {Source.PEER: 4, SLOWER: 4})
    assert right(target, 0, 2)
    assert right(target, 5, 7)
    assert client.stats().outcomes == {"peer": 4, SLOWER.value: 4}
    assert [(part.start, part.stop, part.outcome) for part in client.explain(loaded).parts] == [
        (0, 2, Source.PEER), (2, 5, SLOWER), (5, 7, Source.PEER), (7, 8, SLOWER),
    ]  # fmt: skip


def test_a_head_that_falls_short_is_computed_from_there(rig):
    client, hit = found(rig)
    warm(rig, 1)
    rig.faults["0.window"] = hanging
    began: list[int] = []

    def compute(first: int) -> None:
        began.append(first)
        rig.faults.clear()

    plan = Plan(Leg(0, 4, 0.02, 0.0), Leg(6, 8, 20.0, 0.0))
    loaded = client.load(hit, empty(SPEC, 8), plan=plan, meanwhile=compute)
    assert began == [1]
    assert loaded.outcomes[:6] == (Source.DRAM, *(SLOWER,) * 5)
    assert int(loaded) // TOKENS == 1 + sum(outcome is Source.PEER for outcome in loaded.outcomes[6:])


@pytest.mark.parametrize(("block_s", "fault"), [(0.05, hanging), (10.0, None)])
def test_a_source_that_is_not_known_is_tried_beside_computing(rig, block_s, fault):
    client, hit = found(rig)
    client.planning.computed(0, TOKENS, block_s)
    plan = client.planning.plan(hit, 8 * TOKENS, can_split=True)
    assert (plan.head.num_blocks, plan.tail.start, plan.tail.stop) == (0, 4, 8)
    rig.faults |= {"0.window": fault} if fault else {}
    began: list[int] = []
    loaded = client.load(hit, empty(SPEC, 8), plan=plan, meanwhile=began.append)
    assert began == [0]
    assert loaded.outcomes == (*[SLOWER] * 4, *[SLOWER if fault else Source.PEER] * 4)
    rig.faults.clear()
    after = client.planning.plan(hit, 8 * TOKENS, can_split=True)
    assert after.head.num_blocks == (0 if fault else 8), "it is known now"
    assert after.tail is None


def test_an_engine_that_fails_meanwhile_is_heard(rig):
    client, hit = found(rig)

    def fail(first: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        client.load(hit, empty(SPEC, 8), plan=Plan(Leg(0, 2), Leg(5, 8)), meanwhile=fail)
    assert not [thread for thread in threading.enumerate() if thread.name == "kvfleet-tail"]


def test_a_tail_needs_somebody_who_computes(rig):
    client, hit = found(rig)
    assert client.load(hit, empty(SPEC, 8), plan=Plan(Leg(0, 2), Leg(5, 8))).outcomes[2:] == (SLOWER,) * 6


def test_loads_teach_the_planner(rig):
    client, hit = found(rig)
    client.load(hit, empty(SPEC, 8))
    client.load(client.lookup(prompt(8)), empty(SPEC, 8))
    assert client.planning.speeds().keys() == {f"peer:{rig.node_id(0)}", "peer", "dram"}
    client.planning.computed(0, TOKENS, 100.0)
    plan = client.planning.plan(client.lookup(prompt(8)), 8 * TOKENS)
    assert (plan.head.stop, plan.sources, plan.reason) == (8, ("dram",), "")
    assert plan.recompute_s == pytest.approx(800.0)
    assert 0 < plan.predicted_load_s < 1


def test_a_new_client_knows_what_its_node_has_measured(rig):
    client, hit = found(rig)
    client.load(hit, empty(SPEC, 8))
    other = rig.client(SPEC, 1)
    other.attach()
    assert other.planning.speeds().keys() == {f"peer:{rig.node_id(0)}", "peer"}


def test_a_source_that_is_not_used_is_looked_at_again(rig):
    client, hit = found(rig)
    peer = f"peer:{rig.node_id(0)}"
    client.planning.tell({peer: Speed(1000.0, 1.0)})
    client.planning.computed(0, TOKENS, 1.0)
    plan = client.planning.plan(hit, 8 * TOKENS)
    assert (plan.num_blocks, plan.predicted_ttft_s) == (0, pytest.approx(8.0))
    assert "loading from peer" in plan.reason
    assert client.load(hit, empty(SPEC, 8), plan=plan).outcomes == (SLOWER,) * 8
    wait_for(lambda: client.planning.speeds()[peer].latency_s < 1000, "the source is read in the background")
    assert client.planning.plan(hit, 8 * TOKENS).num_blocks == 8
    wait_for(lambda: client.lookup(prompt(8)).runs[0].local, "what was read stays")
    assert client.stats().blocks == {SLOWER: 8}, "it is nobody's request"


def test_a_source_that_brought_nothing_is_not_asked_for_a_while(rig):
    client, hit = found(rig)
    rig.faults["0.window"] = hanging
    client.planning.computed(0, TOKENS, 0.05)
    plan = client.planning.plan(hit, 8 * TOKENS)
    assert client.load(hit, empty(SPEC, 8), plan=plan).outcomes == (SLOWER,) * 8
    assert client.planning.plan(hit, 8 * TOKENS).num_blocks == 0
    rig.faults.clear()


def test_a_caller_without_time_says_nothing_of_a_source(rig):
    client, hit = found(rig)
    rig.faults["0.window"] = hanging
    client.planning.computed(0, TOKENS, 0.05)
    assert client.load(hit, empty(SPEC, 8), timeout_s=0.05).outcomes[0] is Miss.DEADLINE
    assert client.planning.plan(hit, 8 * TOKENS).num_blocks == 8
    rig.faults.clear()


@pytest.mark.parametrize(
    ("speeds", "kept"),
    [
        ({"peer:a": 1.0, "peer:b": 1.5, "shared": 9.0}, ("a", "b")),
        ({"peer:a": 1.0, "peer:b": 3.0, "shared": 9.0}, ("a",)),
        ({"peer:a": 3.0, "peer:b": 3.0, "shared": 1.0}, ()),
        ({"shared": 1.0}, ("a", "b")),
        ({}, ("a", "b")),
    ],
)
def test_holders_that_are_much_slower_than_another_source_are_not_asked(speeds, kept):
    planning = Planning(SPEC.layout)
    planning.tell({name: Speed(seconds, 1e12) for name, seconds in speeds.items()})
    runs = (HitRun(0, 1, local=True), HitRun(1, 3, False, (NodeId("a"), NodeId("b")), shared=True))
    near = planning.nearest(PrefixHit(3 * TOKENS, 3, 3, bytes(48), runs))
    assert near.runs == (runs[0], replace(runs[1], nodes=kept))
    alone = PrefixHit(TOKENS, 1, 1, bytes(16), (HitRun(0, 1, False, (NodeId("a"),)),))
    assert planning.nearest(alone) == alone


def test_prediction_and_outcome_are_remembered(rig):
    client, hit = found(rig)
    plan = Plan(Leg(0, 3), None, (), 0.25, 1.5, 2.0, "loading is slow")
    loaded = client.load(hit, empty(SPEC, 8), plan=plan)
    client.started(loaded, 1.75)
    (request,) = rig.part(1).tallies.requests("r", 9)
    assert (request.planned_blocks, request.predicted_load_s, request.predicted_ready_s) == (3, 0.25, 1.5)
    assert (request.recompute_s, request.ready_s, request.reason) == (2.0, 1.75, "loading is slow")
    assert request.miss is SLOWER
    text = str(client.explain(loaded))
    assert "plan: 3 blocks to load: loading is slow" in text
    assert "prompt: ready after 1.75 s, 1.50 s expected, 2.00 s without the cache" in text
    assert "250.00 ms expected" in text
    assert words(SLOWER) in text

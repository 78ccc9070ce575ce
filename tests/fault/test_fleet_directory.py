"""What the directory makes of managers that evict, refuse, die and drift: holders, and why there are none."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from kvfleet.config import MIB
from kvfleet.core.block import split
from kvfleet.core.directory import NodeId
from kvfleet.core.outcomes import Miss
from kvfleet.core.rows import Rows
from kvfleet.metrics import Meter, Sink
from kvfleet.node import directory as directory_module
from kvfleet.node.dram import record_id
from tests.conftest import wait_for
from tests.rig import Rig
from tests.workload import kv, load, model, prompt, store

SPEC = model(64)


def located(rig: Rig, tokens: Any) -> tuple[int, Miss | None]:
    """How many blocks somebody has, and why nobody has the next one."""
    answer = rig.run(rig.at_directory("locate", SPEC.keys(tokens), 0, 1))
    return (answer.runs[-1].stop if answer.runs else 0), answer.missing


def rows(rig: Rig) -> Rows:
    assert rig.directory is not None
    return rig.directory._directory._rows


def spoken(rig: Rig) -> None:
    """All managers have told the directory everything, and it knows which nodes live."""
    for number in rig.managers:
        assert rig.run(rig.part(number).publisher.flush(10))
    assert rig.directory is not None
    directory = rig.directory._directory
    wait_for(lambda: directory._spoken._expected is not None, "Ray has said which nodes live")


def test_it_says_why_a_block_is_missing(arena_root, wait_for_condition):
    with Rig(arena_root, 2, dram_bytes=2 * MIB) as rig:
        spoken(rig)
        client, other = rig.client(SPEC), rig.client(SPEC, 1)
        assert located(rig, prompt(4)) == (0, Miss.NEVER_STORED)
        store(client, prompt(4))
        assert located(rig, prompt(5)) == (4, Miss.NEVER_STORED)
        assert located(rig, prompt(4)) == (4, None)
        for number in range(1, 9):
            store(client, prompt(6, number))
        assert located(rig, prompt(4))[1] is Miss.EVICTED
        store(other, prompt(5, 99))
        rig.kill(1)
        rig.dead.add(rig.node_id(1))
        wait_for_condition(lambda: located(rig, prompt(5, 99)) == (0, Miss.HOLDER_LOST), "node 1's blocks are lost")
        assert located(rig, prompt(5, 77)) == (0, Miss.NEVER_STORED)


def test_what_found_no_room_is_told(arena_root):
    with Rig(arena_root, dram_bytes=2 * MIB) as rig:
        spoken(rig)
        client, keys = rig.client(SPEC), split(SPEC.keys(prompt(100)))
        result = client.store(prompt(100), kv(SPEC, prompt(100))).wait(20)
        assert 0 < result.stored < 100
        spoken(rig)
        found, why = located(rig, prompt(100))
        assert (found, why) == (result.stored, Miss.NOT_ADMITTED)
        assert {rows(rig).why(record_id(key, 0)) for key in keys[found + 1 :]} <= {Miss.NOT_ADMITTED, None}


def test_a_manager_that_comes_back_with_another_arena_has_lost_its_blocks(arena_root):
    with Rig(arena_root) as rig:
        spoken(rig)
        store(rig.client(SPEC), prompt(5))
        rig.kill(0)
        next(arena_root.glob("kvfleet-*/*-0*0/arena")).unlink()
        rig.start(0)
        spoken(rig)
        assert located(rig, prompt(5)) == (0, Miss.HOLDER_LOST)


def test_a_directory_that_starts_again_does_not_know_what_was_before(arena_root):
    with Rig(arena_root) as rig:
        store(rig.client(SPEC), prompt(5))
        rig.start_directory()
        assert located(rig, prompt(5)) == (0, Miss.UNKNOWN)
        spoken(rig)
        assert located(rig, prompt(5)) == (5, None)
        assert located(rig, prompt(5, 1)) == (0, Miss.UNKNOWN)


def test_a_node_that_has_not_spoken_yet_may_hold_it(arena_root):
    with Rig(arena_root, 2) as rig:
        store(rig.client(SPEC, 1), prompt(5))
        rig.kill(1)  # its node lives, and so does its arena
        rig.start_directory()
        spoken(rig)
        assert located(rig, prompt(5)) == (0, Miss.UNKNOWN)
        rig.start(1)
        spoken(rig)
        assert located(rig, prompt(5)) == (5, None)


def test_a_node_without_a_manager_is_not_waited_for(arena_root, wait_for_condition, monkeypatch):
    monkeypatch.setattr(directory_module, "_FIRST_WORD_S", 0.0)
    monkeypatch.setattr(directory_module, "_FIRST_WORD_HEARTBEATS", 1)
    with Rig(arena_root) as rig:
        rig.live.add(rig.node_id(1))
        rig.start_directory()
        spoken(rig)
        wait_for_condition(lambda: located(rig, prompt(5)) == (0, Miss.NEVER_STORED), "node 1 has no manager")


def test_rows_that_changed_by_themselves_are_put_right(arena_root, wait_for_condition):
    with Rig(arena_root, 2) as rig:
        client, keys = rig.client(SPEC), split(SPEC.keys(prompt(5)))
        store(client, prompt(4))
        spoken(rig)
        assert rig.directory is not None
        held = rig.directory._directory._nodes[rig.node_id(0)].held
        assert held is not None
        resyncs = [rig.status(number).resyncs for number in (0, 1)]

        async def drift() -> None:
            lost, ghost = record_id(keys[0], 0), record_id(keys[4], 0)
            held.note(rows(rig).remove(lost, held.bit), -1)
            held.note(rows(rig).add(ghost, held.bit)[0], 1)

        rig.run(drift())
        assert located(rig, prompt(5))[0] == 0
        wait_for_condition(lambda: located(rig, prompt(5))[0] == 4, "a heartbeat's digest showed it")
        assert [rig.status(number).resyncs for number in (0, 1)] == [resyncs[0] + 1, resyncs[1]]
        assert load(rig.client(SPEC, 1), prompt(4)) == 64


def test_a_node_that_ray_reports_dead_holds_nothing_one_heartbeat_later(arena_root, wait_for_condition):
    with Rig(arena_root, 2) as rig:
        store(rig.client(SPEC), prompt(4))
        store(rig.client(SPEC, 1), prompt(2))
        assert rig.directory is not None
        rig.kill(0)
        rig.dead.add(rig.node_id(0))
        asked = 0

        def live() -> frozenset[Any]:
            nonlocal asked
            asked += 1
            return frozenset({rig.node_id(1)})

        rig.directory._live_nodes = live
        wait_for_condition(lambda: located(rig, prompt(4))[0] == 2, "node 0 is out")
        assert asked <= 2
        assert [node.node for node in rig.run(rig.at_directory("status")).stats.nodes] == [rig.node_id(1)]


class BrokenSink(Sink):
    """Takes no metrics."""

    told = 0

    @override
    def set(self, name: str, labels: Mapping[str, str], number: float) -> None:
        self.told += 1
        raise RuntimeError("no metrics today")


def test_a_node_is_dropped_whatever_goes_wrong_besides(arena_root, wait_for_condition):
    with Rig(arena_root, 2) as rig:
        store(rig.client(SPEC), prompt(4))
        assert rig.directory is not None
        rig.directory._meter = Meter(sink := BrokenSink(), {})
        wait_for_condition(lambda: sink.told, "metrics have failed")
        rig.kill(0)
        rig.dead.add(rig.node_id(0))
        wait_for_condition(lambda: located(rig, prompt(4))[0] == 0, "node 0 is out")


def test_ray_that_does_not_answer_is_asked_once(arena_root, wait_for_condition, monkeypatch):
    monkeypatch.setattr(directory_module, "_RAY_TIMEOUT_S", 0.01)
    with Rig(arena_root, 2) as rig:
        store(rig.client(SPEC), prompt(4))
        spoken(rig)
        assert rig.directory is not None
        asked, answers = 0, threading.Event()

        def live() -> frozenset[NodeId]:
            nonlocal asked
            asked += 1
            assert answers.wait(30)
            nodes: frozenset[NodeId] = frozenset(rig.live) - rig.dead
            return nodes

        rig.directory._live_nodes = live
        rig.directory._meter = Meter(sink := BrokenSink(), {})
        try:
            wait_for_condition(lambda: asked, "Ray is asked")
            before = sink.told
            wait_for_condition(lambda: sink.told > before + 3, "the directory goes on")
            assert asked == 1
            rig.kill(0)
            rig.dead.add(rig.node_id(0))
            assert located(rig, prompt(4))[0] == 4
        finally:
            answers.set()
        wait_for_condition(lambda: located(rig, prompt(4))[0] == 0, "Ray has answered")

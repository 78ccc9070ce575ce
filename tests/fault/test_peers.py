"""Holders that fail or hang: each costs one wait, and is used again when it answers. And why blocks are missed."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from kvfleet.config import KIB, MIB
from kvfleet.core.block import split
from kvfleet.core.directory import Run
from kvfleet.errors import TierUnavailableError
from kvfleet.node.landing import BlockSlots
from kvfleet.node.messages import LoadRequest, Located, Miss, Source
from kvfleet.node.startup import NodePlace
from tests.conftest import wait_for
from tests.rig import Rig, failing, hanging
from tests.workload import block, empty, kv, load, load_request, model, namespace, prompt, store

SPEC = model()
QUICK: dict[str, Any] = {
    "window_bytes_min": 128 * KIB, "window_bytes_max": 256 * KIB, "holder_timeout_s": 0.3, "shared_timeout_s": 1.0,
}  # fmt: skip
AWAY = failing(TierUnavailableError("dram", "away"))
NO_ANSWER = {"lost": (AWAY, Miss.UNREACHABLE), "hanging": (hanging, Miss.TOO_SLOW)}


def avoided(rig: Rig, number: int) -> tuple[str, ...]:
    return tuple(rig.status(number).avoided)


def first_asked(rig: Rig) -> int:
    """Which of nodes 0 and 1 node 2 asks first."""
    return int(rig.part(2).peers.holders.order([rig.node_id(0), rig.node_id(1)])[0], 16)


@pytest.mark.parametrize("kind", NO_ANSWER)
def test_a_bad_holder_is_asked_once_and_used_again_when_it_answers(arena_root, kind):
    fault, miss = NO_ANSWER[kind]
    with Rig(arena_root, 2, **QUICK) as rig:
        prompts = [prompt(4, number) for number in range(6)]
        for tokens in prompts:
            store(rig.client(SPEC), tokens)
        reader = rig.client(SPEC, 1)
        rig.faults["0.window"] = rig.faults["0.ping"] = fault
        assert load(reader, prompts[0]).miss is miss
        assert avoided(rig, 1) == (rig.node_id(0),)
        for tokens in prompts[1:]:
            assert load(reader, tokens).miss is Miss.UNREACHABLE
        assert rig.calls["0.fetch"] == 1
        wait_for(lambda: rig.calls["0.ping"] >= 2, "it is probed again and again")
        rig.faults.clear()
        wait_for(lambda: not avoided(rig, 1), "it answers")
        for tokens in prompts:
            assert load(reader, tokens) == len(tokens)


def test_a_node_whose_object_store_is_full_asks_nobody_to_send(arena_root, monkeypatch):
    """Others' objects would be spilled for it. What the shared tier has comes all the same."""
    used = dict.fromkeys(range(2), 0)
    place = NodePlace
    numbers = iter(range(2))

    def placed(*arguments: Any) -> Any:
        number = next(numbers)
        return place(*arguments, object_store_used=lambda: used[number])

    monkeypatch.setattr("tests.rig.NodePlace", placed)
    with Rig(arena_root, 2, **QUICK) as rig:
        store(rig.client(SPEC), prompt(4))
        reader = rig.client(SPEC, 1)
        used[1] = 60 * MIB  # of 64
        assert load(reader, prompt(4)).miss is Miss.NO_ROOM
        assert (rig.calls["0.fetch"], avoided(rig, 1)) == (0, ())
        used[1] = 0
        wait_for(lambda: load(reader, prompt(4)) == 64, "it asks again")


def test_loads_that_wait_for_a_bad_holder_give_up_together(arena_root):
    """Room for one stream only: the others would each wait for the holder in turn."""
    with Rig(arena_root, 2, object_store_fraction=0.01, **QUICK) as rig:
        prompts = [prompt(14, number) for number in range(6)]
        for tokens in prompts:
            store(rig.client(SPEC), tokens)
        assert rig.part(1).peers.transport._budget.capacity_bytes == MIB
        rig.faults["0.window"] = rig.faults["0.ping"] = hanging
        readers = [rig.client(SPEC, 1) for _ in prompts]
        with ThreadPoolExecutor(len(prompts)) as pool:
            got = list(pool.map(load, readers, prompts))
        assert sorted(loaded.miss for loaded in got) == [Miss.TOO_SLOW, *[Miss.UNREACHABLE] * 5]
        assert rig.calls["0.fetch"] <= 2  # the room that the first one leaves is taken just before it is told why


def test_a_deadline_shorter_than_the_holders_time_tells_of_it_too(arena_root):
    with Rig(arena_root, 2, **{**QUICK, "holder_timeout_s": 1.0}) as rig:
        tokens = prompt(4)
        store(rig.client(SPEC), tokens)
        reader = rig.client(SPEC, 1)
        rig.faults["0.window"] = rig.faults["0.ping"] = hanging
        assert load(reader, tokens, timeout_s=0.2).miss is Miss.DEADLINE
        wait_for(lambda: bool(avoided(rig, 1)), "a probe has shown that it does not answer")
        assert load(reader, tokens).miss is Miss.UNREACHABLE
        assert rig.calls["0.fetch"] == 1


def test_a_dead_manager_is_avoided_until_its_next_life(arena_root):
    with Rig(arena_root, 2, **QUICK) as rig:
        tokens = prompt(8)
        store(rig.client(SPEC), tokens)
        reader = rig.client(SPEC, 1)
        hit = reader.lookup(tokens)
        rig.kill(0)
        assert reader.load(hit, empty(SPEC, 8)).miss is Miss.UNREACHABLE
        assert avoided(rig, 1) == (rig.node_id(0),)
        rig.start(0)
        wait_for(lambda: not avoided(rig, 1), "its next life answers")
        assert load(reader, tokens) == len(tokens)


def test_a_holder_without_the_block_or_with_wrong_bytes_is_not_avoided(arena_root):
    with Rig(arena_root, 2, delta_interval_s=2.0, **QUICK) as rig:
        tokens = prompt(6)
        store(rig.client(SPEC), tokens)
        reader = rig.client(SPEC, 1)
        hit = reader.lookup(tokens)
        arena = rig.part(0).home.arena
        record = next(record for record in arena.records.live() if record.depth == 2)
        arena.slot_view(record.offset, record.length)[77] ^= 1
        assert load(reader, tokens).outcomes[:3] == (Source.PEER, Source.PEER, Miss.CORRUPT)
        arena.slot_view(record.offset, record.length)[77] ^= 1

        async def drop():
            for key in split(SPEC.keys(tokens))[4:]:
                rig.part(0).dram.drop(key)

        rig.run(drop())
        got = reader.load(hit, empty(SPEC, 6))
        assert got.outcomes == (*(Source.DRAM,) * 2, *(Source.PEER,) * 2, Miss.EVICTED, Miss.BEHIND_MISS)
        assert avoided(rig, 1) == ()


def test_good_blocks_in_a_window_with_a_bad_one_came(arena_root):
    with Rig(arena_root, 2, window_bytes_min=4 * MIB) as rig:
        tokens = prompt(6)
        store(rig.client(SPEC), tokens)
        reader = rig.client(SPEC, 1)
        arena = rig.part(0).home.arena
        record = next(record for record in arena.records.live() if record.depth == 4)
        arena.slot_view(record.offset, record.length)[77] ^= 1
        got = load(reader, tokens)
        assert rig.calls["0.window"] <= 2, "one window, and its end"
        assert got.outcomes == (*(Source.PEER,) * 4, Miss.CORRUPT, Miss.BEHIND_MISS)
        arena.slot_view(record.offset, record.length)[77] ^= 1


def test_the_less_busy_of_two_holders_is_asked(arena_root):
    with Rig(arena_root, 3, **QUICK) as rig:
        prompts = [prompt(4, number) for number in range(2)]
        for number in (0, 1):
            for tokens in prompts:
                store(rig.client(SPEC, number), tokens)
        readers = [rig.client(SPEC, 2) for _ in prompts]
        go_on = threading.Event()

        async def gate():
            assert await asyncio.to_thread(go_on.wait, 20)

        first = first_asked(rig)
        rig.faults[f"{first}.window"] = gate
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(load, readers[0], prompts[0])
            wait_for(lambda: rig.calls[f"{first}.fetch"] == 1, "the first load waits")
            assert load(readers[1], prompts[1]) == 64
            go_on.set()
            assert waiting.result(20) == 64
        assert rig.calls[f"{1 - first}.fetch"] >= 1


# --- why


def test_blocks_of_another_size_are_refused(arena_root):
    with Rig(arena_root, 2, **QUICK) as rig:
        tokens = prompt(2)
        store(rig.client(SPEC), tokens)
        request = load_request(rig.client(SPEC, 1), tokens, 5.0)
        request = dataclasses.replace(request, num_bytes=2 * request.num_bytes)

        async def run() -> list[Any]:
            return [progress.outcomes async for progress in rig.part(1).loader.load(request)]

        assert [outcomes for outcomes in rig.run(run()) if outcomes] == [(Miss.LAYOUT_REFUSED,)]
        assert avoided(rig, 1) == ()


@pytest.mark.parametrize("miss", [Miss.NEVER_STORED, Miss.NOT_ADMITTED, Miss.EVICTED, Miss.HOLDER_LOST, Miss.UNKNOWN])
def test_the_directory_says_why_nobody_has_a_block(arena_root, miss):
    with Rig(arena_root, 2, **QUICK) as rig:
        tokens = prompt(6)
        store(rig.client(SPEC), tokens)
        reader = rig.client(SPEC, 1)
        hit = reader.lookup(tokens)

        async def drop():
            for key in split(SPEC.keys(tokens))[4:]:
                rig.part(0).dram.drop(key)

        async def locate(keys, shard, num_shards):
            return Located((), miss)

        rig.run(drop())
        rig.directory.locate = locate
        got = reader.load(hit, empty(SPEC, 6))
        assert got.outcomes == (*(Source.PEER,) * 4, miss, Miss.BEHIND_MISS)


def test_what_only_avoided_nodes_have_is_unreachable_whoever_else_is_named(arena_root):
    with Rig(arena_root, 3, **QUICK) as rig:
        tokens = prompt(2)
        store(rig.client(SPEC), tokens)
        rig.faults["0.window"] = rig.faults["0.ping"] = hanging
        reader = rig.client(SPEC, 2)
        assert load(reader, tokens).miss is Miss.TOO_SLOW
        request = load_request(reader, tokens, 5.0)
        both = Run(0, 2, (rig.node_id(0), rig.node_id(1)), shared=False)
        request = dataclasses.replace(request, runs=(both,))

        async def run() -> list[Any]:
            return [progress.outcomes async for progress in rig.part(2).loader.load(request)]

        assert [outcomes for outcomes in rig.run(run()) if outcomes] == [(Miss.UNREACHABLE,)]


def test_a_shared_tier_that_hangs_is_left_alone(arena_root, monkeypatch):
    with Rig(arena_root, 1, shared_url=f"file://{arena_root / 'shared'}", **QUICK) as rig:
        client, prompts = rig.client(SPEC), [prompt(2, number) for number in range(4)]
        for tokens in prompts:
            store(client, tokens)
        assert rig.run(rig.managers[0].flush(10)) == 0
        dram, go_on, opened = rig.part(0).dram, threading.Event(), []

        async def drop():
            for tokens in prompts:
                for key in split(SPEC.keys(tokens)):
                    dram.drop(key)

        def hang(*args, **kwargs):
            opened.append(args)
            go_on.wait(20)
            raise OSError("the mount is gone")

        rig.run(drop())
        with monkeypatch.context() as patch:
            patch.setattr(rig.part(0).shared._objects._fs, "open", hang)
            assert load(client, prompts[0]).miss is Miss.STORAGE_FAILED
            assert avoided(rig, 0) == ("shared",)
            for tokens in prompts[1:]:
                assert load(client, tokens).miss is Miss.STORAGE_FAILED
            assert len(opened) <= 4  # what the first load had asked for at once, and probes
            go_on.set()
        wait_for(lambda: not avoided(rig, 0), "it answers")
        for tokens in prompts:
            assert load(client, tokens).outcomes == (Source.SHARED,) * 2


# --- deadlines and room


def test_the_deadline_travels_as_what_is_left_of_it(arena_root):
    with Rig(arena_root, 3, shared_url=f"file://{arena_root / 'shared'}", **QUICK) as rig:
        tokens = prompt(4)
        for number in (0, 1):
            store(rig.client(SPEC, number), tokens)
        assert rig.run(rig.managers[0].flush(10)) == 0
        seconds: dict[str, float] = {}
        first = first_asked(rig)

        def told(name: str, owner: Any, method: str, timeout_of: Any) -> None:
            real = getattr(owner, method)

            def call(*args: Any, **kwargs: Any) -> Any:
                seconds.setdefault(name, timeout_of(args, kwargs))
                return real(*args, **kwargs)

            setattr(owner, method, call)

        told("load", rig.managers[2], "load", lambda args, _: args[0].timeout_s)
        for number in (0, 1):
            told(f"fetch {number}", rig.managers[number], "fetch", lambda args, _: args[0].timeout_s)
            rig.faults[f"{number}.window"] = hanging
        told("read", rig.part(2).shared, "read", lambda _, kwargs: kwargs["timeout_s"])
        assert load(rig.client(SPEC, 2), tokens, timeout_s=5.0).outcomes == (Source.SHARED,) * 4
        steps = ["load", f"fetch {first}", f"fetch {1 - first}", "read"]
        assert seconds.keys() == set(steps)
        assert 5.0 >= seconds[steps[0]] >= seconds[steps[1]]
        for earlier, later in pairwise(steps[1:]):
            assert seconds[later] <= seconds[earlier] - QUICK["holder_timeout_s"] + 0.01


def test_two_nodes_that_load_from_each_other_through_tiny_arenas(arena_root):
    """Room for one stream each way and 16 blocks a node: loads, stores and sends wait for each other, none for ever."""
    with Rig(arena_root, 2, dram_bytes=MIB, object_store_fraction=0.01, **QUICK) as rig:
        clients = {(node, number): rig.client(SPEC, node) for node in (0, 1) for number in range(3)}
        for (node, number), client in clients.items():
            store(client, prompt(5, 10 * node + number))

        def work(node: int, number: int) -> set[Any]:
            client, mine = clients[node, number], prompt(5, 10 * node + number)
            outcomes: set[Any] = set()
            for turn in range(6):
                outcomes.update(load(client, prompt(5, 10 * (1 - node) + (number + turn) % 3), 10.0).outcomes)
                client.store(mine, kv(SPEC, mine)).wait(20)
            return outcomes

        with ThreadPoolExecutor(len(clients)) as pool:
            outcomes = set().union(*pool.map(work, *zip(*clients, strict=True)))
        assert Source.PEER in outcomes
        assert Miss.DEADLINE not in outcomes


@pytest.mark.parametrize("where", ["peer", "shared"])
def test_a_client_that_stops_copying_stops_nobody_else(arena_root, where):
    """It keeps a quarter of the arena, and the blocks behind are brought for whoever else wants them."""
    shared_url = f"file://{arena_root / 'shared'}" if where == "shared" else None
    with Rig(arena_root, 1, shared_url=shared_url, **QUICK) as rig:
        prompts = [prompt(20, number) for number in range(2)]
        for tokens in prompts:
            store(rig.client(SPEC), tokens)
        if where == "shared":
            assert rig.run(rig.managers[0].flush(10)) == 0
        rig.config = dataclasses.replace(rig.config, dram_bytes=MIB)  # 16 blocks
        rig.start(1)
        if where == "shared":
            rig.kill(0)
        stopped, other = rig.client(SPEC, 1), rig.client(SPEC, 1)
        copying, go_on = threading.Event(), threading.Event()

        def take(index: int, view: Any) -> None:
            copying.set()
            assert go_on.wait(20)

        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(lambda: stopped.load(stopped.lookup(prompts[0]), take))
            assert copying.wait(10)
            wait_for(lambda: len(rig.part(1).dram.placement._holds) == 4, "it holds what it may")
            for tokens in (prompts[1], prompts[0]):  # another prefix, and the same
                assert load(other, tokens) == 20 * 16
            store(other, prompt(8, 9))
            assert not loading.done()
            go_on.set()
            assert loading.result(20) == 20 * 16


def test_a_load_that_is_late_while_its_client_has_enough_to_copy_ends(arena_root):
    """It must not go round and round in the manager's loop, where nothing else would run."""
    spec = model(1024)  # one block is a quarter of the arena
    with Rig(arena_root, 2, dram_bytes=4 * MIB) as rig:
        store(rig.client(spec), prompt(1))
        keys = spec.keys(prompt(3))
        runs = (Run(0, 3, (rig.node_id(1),), shared=False),)
        request = LoadRequest(namespace(spec), keys, b"", 0, 0, spec.layout.block_bytes, runs, 0.0)

        async def outcomes() -> list[Any]:
            return [outcome async for step in rig.managers[0].load(request) for outcome in step.outcomes]

        assert rig.run(outcomes(), 10)[-1] is Miss.DEADLINE


def test_a_stuck_writer_costs_one_load_one_wait(arena_root, monkeypatch):
    waits: list[int] = []
    settled: Any = BlockSlots.settled

    async def counted(slots: BlockSlots, index: int, timeout_s: float) -> Any:
        waits.append(index)
        return await settled(slots, index, timeout_s)

    monkeypatch.setattr(BlockSlots, "settled", counted)
    with Rig(arena_root, **QUICK) as rig:
        writer, reader, tokens = rig.client(SPEC), rig.client(SPEC), prompt(4)
        keys = split(SPEC.keys(tokens))
        writing, go_on = threading.Event(), threading.Event()

        def fill(index: int, view: Any) -> None:
            np.copyto(view, block(SPEC, keys[index]))
            writing.set()
            assert go_on.wait(20)

        task = writer.store(tokens, fill)
        assert writing.wait(10)
        for _ in range(3):
            assert load(reader, tokens).miss is Miss.TOO_SLOW
        assert waits == [0]
        go_on.set()
        assert task.wait(10).stored == 4
        assert load(reader, tokens) == len(tokens)

"""Processes of a fleet die or freeze at bad moments: no wrong byte, no hang, nothing lost for good, nothing leaked."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import ray

from kvfleet import Fleet
from kvfleet.node.messages import Miss, Source
from kvfleet.operating import join
from tests.cluster.conftest import check_books
from tests.cluster.engine_process import (
    MODEL,
    Answer,
    Engine,
    RemoteEngine,
    directory_process,
    elsewhere,
    here,
    manager_process,
    new_seed,
    node_status,
    prompt,
)
from tests.conftest import wait_for

SETTINGS = {"holder_timeout_s": 1.0, "load_timeout_s": 5.0, "store_timeout_s": 5.0}
GRACE_S = 10.0  # the machine may be busy


@pytest.fixture(autouse=True)
def _books(fleet: Fleet) -> Iterator[None]:
    yield
    check_books(fleet)


def epoch(fleet: Fleet, node: str) -> int:
    """How often a node's manager has started; 0 if it does not answer."""
    status = node_status(fleet, node)
    return 0 if status is None else status.epoch


@contextmanager
def killed_manager(fleet: Fleet, node: str) -> Iterator[None]:
    """Kill a manager; at the end wait until it is back."""
    life = epoch(fleet, node)
    assert life
    os.kill(manager_process(fleet.config.name, node), signal.SIGKILL)
    yield
    wait_for(lambda: epoch(fleet, node) > life, "the manager is back")


def reserved_blocks(fleet: Fleet, node: str) -> int | None:
    status = node_status(fleet, node)
    return None if status is None else status.reserved_blocks


def wait_for_all(load: Callable[..., Answer], seed: int, num_blocks: int) -> None:
    """Wait until a load brings everything; no byte may be wrong on the way."""

    def came() -> bool:
        answer = load(seed, num_blocks)
        assert not answer.wrong, answer
        return answer.num_blocks == num_blocks

    wait_for(came, f"all {num_blocks} blocks of prompt {seed} come")


@contextmanager
def frozen(process: int) -> Iterator[None]:
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


# writers and readers


def test_a_killed_writers_slots_come_back(fleet, engine, engine_on):
    writer, seed = engine_on(fleet, here()), new_seed()
    writer.begin("begin_store", seed, 16, pause_before=4)
    writer.wait_until_paused()
    assert reserved_blocks(fleet, here()) == 16
    os.kill(writer.process, signal.SIGKILL)
    wait_for(lambda: reserved_blocks(fleet, here()) == 0, "the slots are free")
    assert engine.lookup(seed, 16).num_blocks == 0
    assert engine.store(seed, 16).stored == 16
    answer = engine.load(seed, 16)
    assert (answer.num_blocks, answer.wrong) == (16, ())


def test_a_killed_reader_holds_nothing(fleet, engine, other, engine_on):
    seed, next_seed = new_seed(), new_seed()
    engine.store(seed, 48)
    reader = engine_on(fleet, elsewhere())
    reader.begin("load", seed, 48, pause_before=2)
    reader.wait_until_paused()
    os.kill(reader.process, signal.SIGKILL)
    # Only when nothing of the abandoned load is held any more is there room for this.
    wait_for(lambda: other.store(next_seed, 60).dropped == 0, "the arena can be filled with other blocks")
    answer = other.load(next_seed, 60)
    assert (answer.num_blocks, answer.wrong, answer.sources) == (60, (), {Source.DRAM: 60})


# the manager dies


def test_contents_survive_their_manager(fleet, engine, other):
    seed, next_seed = new_seed(), new_seed()
    engine.store(seed, 8)
    before = node_status(fleet, here())
    with killed_manager(fleet, here()):
        answer = engine.load(seed, 8)  # needs no manager
        assert (answer.num_blocks, answer.wrong, answer.sources) == (8, (), {Source.DRAM: 8})
    after = node_status(fleet, here())
    assert before is not None
    assert after is not None
    assert (after.blocks, after.used_bytes) == (before.blocks, before.used_bytes)
    wait_for_all(other.load, seed, 8)
    assert engine.store(next_seed, 8).stored == 8
    assert engine.load(seed, 8).sources == {Source.DRAM: 8}


def test_a_writer_outlives_its_manager(fleet, engine, other, engine_on):
    """The slots of a writer in mid-copy are not given to others by the manager's next life."""
    writer, seed = engine_on(fleet, here()), new_seed()
    writer.begin("begin_store", seed, 16, pause_before=8)
    writer.wait_until_paused()
    with killed_manager(fleet, here()):
        pass
    assert reserved_blocks(fleet, here()) == 16
    for _ in range(8):
        engine.store(new_seed(), 16)
    writer.begin("resume")
    result = ray.get(writer.begin("end_store"), timeout=60)
    assert (result.stored, result.dropped, result.published) == (16, 0, True)
    for load in (engine.load, writer.load, other.load):
        answer = load(seed, 16)
        assert (answer.num_blocks, answer.wrong) == (16, ())


@pytest.mark.parametrize("victim", ["reader's", "holder's"])
def test_a_manager_dies_in_mid_load(fleet, engine, other, victim):
    seed = new_seed()
    engine.store(seed, 48)
    pending = other.begin("load", seed, 48, pause_before=2)
    other.wait_until_paused()
    with killed_manager(fleet, elsewhere() if victim == "reader's" else here()):
        other.begin("resume")
        answer = ray.get(pending, timeout=fleet.config.load_timeout_s + GRACE_S)
        assert answer.wrong == ()
        assert answer.num_blocks >= 2
    wait_for_all(other.load, seed, 48)


# the directory dies


def test_the_directory_refills_itself(fleet, engine, other):
    mine, its = new_seed(), new_seed()
    engine.store(mine, 8)
    other.store(its, 8)
    os.kill(directory_process(fleet.config.name), signal.SIGKILL)
    hit = engine.lookup(mine, 12)
    assert (hit.num_blocks, hit.fault) == (8, Miss.DIRECTORY_UNAVAILABLE)
    answer = engine.load_hit(mine, hit)
    assert (answer.num_blocks, answer.wrong, answer.sources) == (8, (), {Source.DRAM: 8})
    wait_for(lambda: other.lookup(mine, 8).num_blocks == 8, "the first node's blocks are known again")
    wait_for(lambda: engine.lookup(its, 8).num_blocks == 8, "the second node's blocks are known again")
    for load, seed in ((other.load, mine), (engine.load, its)):
        answer = load(seed, 8)
        assert (answer.num_blocks, answer.wrong, answer.sources) == (8, (), {Source.PEER: 8})


# frozen processes


def avoided(fleet: Fleet, node: str) -> tuple[str, ...]:
    status = node_status(fleet, node)
    return () if status is None else status.avoided


def test_a_frozen_holder(fleet, engine, other):
    seeds = [new_seed() for _ in range(4)]
    for seed in seeds:
        engine.store(seed, 8)
    with frozen(manager_process(fleet.config.name, here())):
        answer = other.load(seeds[0], 8)
        assert (answer.num_blocks, answer.outcomes[0]) == (0, Miss.TOO_SLOW)
        assert answer.seconds < fleet.config.load_timeout_s + GRACE_S
        for seed in seeds[1:]:
            answer = other.load(seed, 8)
            assert (answer.num_blocks, answer.outcomes[0]) == (0, Miss.UNREACHABLE)
    wait_for(lambda: avoided(fleet, elsewhere()) == (), "the node answers again", 60.0)
    for seed in seeds:
        wait_for_all(other.load, seed, 8)


def test_a_frozen_local_manager(fleet, engine, other):
    mine, its, new = new_seed(), new_seed(), new_seed()
    engine.store(mine, 8)
    other.store(its, 8)
    with frozen(manager_process(fleet.config.name, here())):
        assert engine.load(mine, 8).sources == {Source.DRAM: 8}
        answer = engine.load(its, 8, timeout_s=1.0)
        assert (answer.num_blocks, answer.outcomes[0]) == (0, Miss.DEADLINE)
        assert answer.seconds < 1.0 + GRACE_S
        assert engine.store(new, 8).dropped == 8
        asked = engine.client.stats().calls
        result = engine.store(new, 8)
        assert (result.dropped, result.reason, result.published) == (8, "manager_unavailable", False)
        assert engine.client.stats().calls == asked
    wait_for_all(engine.load, its, 8)
    wait_for(lambda: engine.store(new, 8).dropped == 0, "stores go through again")


def test_a_fleet_of_which_half_is_frozen_is_looked_at(fleet, other):
    name = fleet.config.name
    with frozen(manager_process(name, here())), frozen(directory_process(name)):
        found = join(name).status()
    assert ([node.node_id for node in found.nodes], found.silent, found.directory) == ([elsewhere()], (here(),), None)


def test_a_frozen_directory(fleet, engine):
    seed = new_seed()
    engine.store(seed, 8)
    with frozen(directory_process(fleet.config.name)):
        hit = engine.lookup(seed, 12)
        assert (hit.num_blocks, hit.fault) == (8, Miss.DIRECTORY_UNAVAILABLE)
        assert engine.load_hit(seed, hit).sources == {Source.DRAM: 8}


# the shared tier


def finds(engine: RemoteEngine, seed: int, num_blocks: int) -> bool:
    return engine.lookup(seed, 3).num_blocks == num_blocks


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "deleted":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "flipped":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def test_damaged_shared_objects_are_gone_for_everyone(make_fleet, engine_here, engine_on, tmp_path):
    settings = {"name": "damaged", "shared_url": f"file://{tmp_path}"}
    seeds = {"deleted": (1, Miss.OBJECT_LOST), "truncated": (2, Miss.CORRUPT), "flipped": (3, Miss.CORRUPT)}
    fleet = make_fleet(**settings)
    engine: Engine = engine_here(fleet)
    for seed, _ in seeds.values():
        engine.store(seed, 3)
    fleet.stop()
    fleet = make_fleet(**settings)
    assert fleet.wait_for_shared(30.0)
    engine = engine_here(fleet)
    other: RemoteEngine = engine_on(fleet, elsewhere())
    for how, (seed, miss) in seeds.items():
        key = MODEL.keys(prompt(seed, 3))[16:32].hex()
        (path,) = tmp_path.rglob(f"{key}.*")
        assert other.lookup(seed, 3).num_blocks == 3
        damage(path, how)
        answer = engine.load(seed, 3)
        assert (answer.num_blocks, answer.wrong) == (1, ())
        assert answer.outcomes == (Source.SHARED, miss, Miss.BEHIND_MISS)
        assert not path.exists()
        wait_for(partial(finds, other, seed, 1), f"the {how} block is known to be gone")
        assert engine.store(seed, 3).stored >= 1
        wait_for_all(other.load, seed, 3)

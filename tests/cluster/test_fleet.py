"""A fleet on two raylets: it starts, serves, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import kvfleet
from kvfleet import ConfigError, KvFleetError
from kvfleet.calls import ManagerCalls
from kvfleet.node.messages import Source
from tests.cluster.engine_process import (
    BLOCK_BYTES,
    MIB,
    Answer,
    Engine,
    elsewhere,
    fleet_actors,
    here,
    new_seed,
    on,
    spilled_bytes,
)
from tests.conftest import wait_for

pytestmark = pytest.mark.usefixtures("ray_cluster")

SETTINGS = {"dram_bytes": 800 * MIB}


# serving


def test_bytes_come_from_the_other_node(fleet, engine, engine_on):
    """The second node's manager starts with its first client."""
    assert set(fleet_actors(fleet.config.name)) == {"directory", f"tier-manager-{here()}"}
    other, seed = engine_on(fleet, elsewhere()), new_seed()
    stored = engine.store(seed, 12)
    assert (stored.stored, stored.dropped, stored.published) == (12, 0, True)
    assert other.lookup(seed, 12).num_blocks == 12
    first, again = other.load(seed, 12), other.load(seed, 12)
    assert (first.num_blocks, first.wrong, first.sources) == (12, (), {Source.PEER: 12})
    assert (again.num_blocks, again.wrong, again.sources) == (12, (), {Source.DRAM: 12})
    assert other.stats().calls == {"attach": 1, "locate": 2, "load": 1}
    nodes = {node.node_id: node for node in fleet.status().nodes}
    assert nodes[here()].sent_bytes == 12 * BLOCK_BYTES
    assert nodes[elsewhere()].loaded_bytes == {"peer": 12 * BLOCK_BYTES}


def test_a_local_hit_makes_no_call(fleet, engine_here):
    engine, seed = engine_here(fleet), new_seed()
    engine.store(seed, 8)
    before = engine.stats().calls
    assert before == {"attach": 1, "reserve": 1, "commit": 1}
    for _ in range(3):
        answer = engine.load(seed, 8)
        assert (answer.num_blocks, answer.wrong, answer.sources) == (8, (), {Source.DRAM: 8})
    assert engine.stats().calls == before


def test_nothing_spills(engine, other):
    """Half as much again as the object stores hold goes through them, both ways at once."""
    mine, its = new_seed(), new_seed()
    assert engine.store(mine, 384).stored == 384
    assert other.store(its, 384).stored == 384
    spilled = spilled_bytes()
    pending = other.begin("load", mine, 384)
    for answer in (engine.load(its, 384), ray.get(pending, timeout=120)):
        assert (answer.num_blocks, answer.wrong, answer.sources) == (384, (), {Source.PEER: 384})
    assert spilled_bytes() == spilled


class AsyncServer:
    """An engine with an event loop: it calls from threads, and the loop goes on meanwhile."""

    async def start(self, fleet: str) -> None:
        self.engine = await asyncio.to_thread(Engine, fleet)

    async def load(self, seed: int, num_blocks: int) -> tuple[Answer, int]:
        turns = 0
        load = asyncio.ensure_future(asyncio.to_thread(self.engine.load, seed, num_blocks))
        while not load.done():
            await asyncio.sleep(0)
            turns += 1
        return load.result(), turns


def test_in_an_asynchronous_actor(fleet, engine):
    seed = new_seed()
    engine.store(seed, 16)
    server: Any = ray.remote(AsyncServer).options(**on(elsewhere())).remote()
    ray.get(server.start.remote(fleet.config.name), timeout=60)
    answer, turns = ray.get(server.load.remote(seed, 16), timeout=60)
    assert (answer.num_blocks, answer.wrong, answer.sources) == (16, (), {Source.PEER: 16})
    assert turns > 1
    ray.kill(server)


def test_a_working_set_larger_than_all_arenas(make_fleet, engine_here, engine_on, tmp_path):
    """1 GiB through two arenas of 64 MiB and the shared tier."""
    fleet = make_fleet(shared_url=f"file://{tmp_path}")
    engine, other = engine_here(fleet), engine_on(fleet, elsewhere())
    for seed in range(32):
        result = engine.store(seed, 32)
        assert (result.stored, result.dropped) == (32, 0), result
    for seed in range(32):
        answer = other.load(seed, 32)
        assert (answer.num_blocks, answer.wrong) == (32, ()), answer
    for node in fleet.status().nodes:
        assert node.used_bytes <= node.capacity_bytes <= 64 * MIB
        assert node.lost_blocks == 0


def test_a_prefix_larger_than_the_arena(make_fleet, engine_here, engine_on, tmp_path):
    fleet = make_fleet(shared_url=f"file://{tmp_path}")
    engine, other = engine_here(fleet), engine_on(fleet, elsewhere())
    assert engine.store(1, 48).stored == 48
    assert engine.store(2, 60).stored == 60
    assert engine.store(1, 96, start_block=48).stored == 48
    for reader in (other.load, engine.load):
        answer = reader(1, 96)
        assert (answer.num_blocks, answer.wrong) == (96, ()), answer


# starting and joining


def test_start_joins_connect_joins_and_others_are_refused(fleet, make_fleet):
    actors = fleet_actors(fleet.config.name)
    assert kvfleet.start(fleet.config).config == fleet.config
    assert kvfleet.connect(fleet.config.name).config == fleet.config
    with pytest.raises(ConfigError, match="runs with other settings"):
        make_fleet(name=fleet.config.name, dram_bytes=32 * MIB)
    with pytest.raises(ConfigError, match="no fleet 'nowhere' is running"):
        kvfleet.connect("nowhere")
    assert fleet_actors(fleet.config.name) == actors
    assert fleet_actors("nowhere") == {}


def test_up_starts_all_managers_and_fleets_do_not_see_each_other(fleet, engine, make_fleet, engine_here):
    second = make_fleet()
    assert [node.node_id for node in second.status().nodes] == [here()]
    epochs = [{node.node_id: node.epoch for node in second.up().nodes} for _ in range(2)]
    assert epochs[0].keys() == {here(), elsewhere()}
    assert epochs[0] == epochs[1]
    seed = new_seed()
    engine.store(seed, 4)
    assert engine_here(second).lookup(seed, 4).num_blocks == 0
    assert engine_here(fleet).lookup(seed, 4).num_blocks == 4


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """A memory file system of 40 MiB."""
    with tempfile.TemporaryDirectory(prefix="kvfleet-small-") as path:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", path], check=True)
        yield Path(path)
        # Lazily: a manager that was killed may still have its arena mapped.
        subprocess.run(["umount", "--lazy", path], check=True)


def arenas(root: Path) -> list[Path]:
    return list(root.glob("kvfleet-*/*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_too_little_memory(make_fleet, small_memory):
    with pytest.raises(ConfigError, match=r"an arena of 0.0\d+ GiB does not fit into .* are free"):
        make_fleet(name="small", dram_bytes=64 * MIB, arena_root=str(small_memory))
    assert fleet_actors("small") == {}
    assert arenas(small_memory) == []
    # Room for one node, not for two.
    fleet = make_fleet(name="small", dram_bytes=24 * MIB, arena_root=str(small_memory))
    start = ray.remote(lambda: kvfleet.start(fleet.config)).options(**on(elsewhere()))
    with pytest.raises(ConfigError, match="does not fit"):
        ray.get(start.remote(), timeout=60)
    with pytest.raises(ConfigError, match=f"node {elsewhere()[:8]}: .*does not fit"):
        fleet.up()
    status = {node.node_id: node for node in fleet.status().nodes}
    assert status[here()].problem == ""
    assert len(arenas(small_memory)) == 1
    fleet.stop()
    wait_for(lambda: not arenas(small_memory), "the arenas are gone")


# stopping


def test_a_stopped_fleet_stays_stopped_and_clients_find_the_next(make_fleet, engine_here, engine_on):
    fleet = make_fleet(name="again")
    other = engine_on(fleet, elsewhere())
    engine_here(fleet).store(1, 4)
    assert other.load(1, 4).num_blocks == 4
    fleet.stop()
    fleet.stop()
    # What the client has mapped can still be read; nothing else comes, and no manager comes back.
    assert other.load(1, 4).num_blocks == 4
    assert other.load(2, 4).num_blocks == 0
    assert other.store(2, 4).dropped == 4
    assert fleet_actors("again") == {}

    fleet = make_fleet(name="again", dram_bytes=32 * MIB)
    engine_here(fleet).store(3, 4)
    # The first load finds that the client's arena is an old one, the next one is right.
    assert (other.load(3, 4).num_blocks, other.load(3, 4).num_blocks) == (0, 4)
    assert other.store(4, 4).stored == 4
    assert {node.capacity_bytes for node in fleet.status().nodes} == {32 * MIB}


def test_a_client_that_comes_while_the_fleet_stops_starts_no_manager(make_fleet, monkeypatch):
    fleet, collect, late = make_fleet(name="stopping"), kvfleet.actors.collect, []

    def collect_and_attach(calls: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        answers: dict[str, Any] = collect(calls, timeout_s)
        try:
            late.append(ManagerCalls(fleet.config, elsewhere()).attach(10.0).problem)
        except KvFleetError as error:
            late.append(str(error))
        return answers

    monkeypatch.setattr("kvfleet.actors.collect", collect_and_attach)
    fleet.stop()
    assert late[0] == ""  # while blocks are saved the fleet still lives
    assert late[-1] != ""
    assert fleet_actors("stopping") == {}


def test_the_shared_tier_outlives_the_fleet(make_fleet, engine_here, tmp_path):
    settings = {"name": "lasting", "shared_url": f"file://{tmp_path}"}
    fleet = make_fleet(**settings)
    engine_here(fleet).store(1, 8)
    assert fleet.stop() == 0
    fleet = make_fleet(**settings)
    assert fleet.wait_for_shared(30.0)
    answer = engine_here(fleet).load(1, 8)
    assert (answer.num_blocks, answer.wrong, answer.sources) == (8, (), {Source.SHARED: 8})


SCRIPT = """
import os, sys
import numpy as np
import ray
import kvfleet
sys.path.insert(0, {tests!r})
from tests.cluster.engine_process import Engine, fleet_actors

config = kvfleet.FleetConfig(name="script", dram_bytes=32 << 20, arena_root={arena_root!r})
fleet = kvfleet.start(config)
engine = Engine("script")
assert engine.store(1, 4).stored == 4
assert engine.load(1, 4).num_blocks == 4
assert fleet.stop() == 0
print("Ray goes on" if ray.is_initialized() else "Ray is gone")
assert fleet.stop() == 0
"""


@pytest.mark.parametrize("own", [True, False])
def test_a_process_without_ray(ray_cluster, arena_root, tmp_path, own):
    """`start` in a fresh process starts a Ray and ends it, or uses the one that RAY_ADDRESS names."""
    script = SCRIPT.format(tests=str(Path(__file__).parents[2]), arena_root=str(arena_root))
    with tempfile.TemporaryDirectory(prefix="kvr") as ray_directory:
        environment = {**os.environ, "RAY_TMPDIR": ray_directory}
        if not own:
            environment["RAY_ADDRESS"] = ray_cluster.address
        done = subprocess.run(
            [sys.executable, "-c", script], check=False, env=environment, capture_output=True, text=True, timeout=200
        )
    assert (done.returncode, done.stdout) == (0, "Ray is gone\n" if own else "Ray goes on\n"), done.stderr
    assert "Traceback" not in done.stderr
    assert arenas(arena_root) == []

"""Nodes of a fleet are lost, join, leave and are replaced; a node's object store is full."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray._private.state import available_resources_per_node

import kvfleet
from kvfleet import DriveConfig, Fleet, FleetConfig
from kvfleet.node.messages import Miss, Source
from tests.cluster.engine_process import (
    MIB,
    Answer,
    Engine,
    elsewhere,
    fleet_actors,
    here,
    manager_process,
    node_status,
    on,
    spilled_bytes,
)
from tests.conftest import wait_for


def start_on(node: str, settings: dict[str, Any]) -> None:
    """Start a fleet from another node: its directory runs there."""

    def start() -> None:
        kvfleet.start(FleetConfig(**settings))

    task: Any = ray.remote(start).options(**on(node))
    ray.get(task.remote(), timeout=120)


def saved(fleet: Fleet) -> bool:
    return fleet.config.shared_url is None or all(node.unsaved_blocks == 0 for node in fleet.status().nodes)


def has_directory(name: str) -> bool:
    return "directory" in fleet_actors(name)


def test_a_lost_node(fresh_cluster, arena_root, make_fleet, engine_here, engine_on, tmp_path):
    """Two fleets, one with a shared tier, whose directories are on the node that dies."""
    gone = elsewhere()
    engines: dict[str, Engine] = {}
    for shared_url in (None, f"file://{tmp_path}"):
        name = "saving" if shared_url else "plain"
        settings = {"name": name, "dram_bytes": 64 * MIB, "arena_root": str(arena_root), "shared_url": shared_url}
        start_on(gone, settings)
        fleet = make_fleet(**settings)
        engine, other = engine_here(fleet), engine_on(fleet, gone)
        assert other.store(1, 8).published
        assert engine.store(2, 8).published
        wait_for(partial(saved, fleet), "all blocks are saved")
        assert engine.lookup(1, 8).num_blocks == 8
        engines[name] = engine
    stale = engines["plain"].lookup(1, 8)

    (lost,) = (node for node in fresh_cluster.list_all_nodes() if node.node_id == gone)
    fresh_cluster.remove_node(lost, allow_graceful=False)

    answer = engines["plain"].load_hit(1, stale)
    assert (answer.num_blocks, answer.wrong) == (0, ())
    for name, engine in engines.items():
        answer = engine.load(2, 8)
        assert (answer.num_blocks, answer.wrong, answer.sources) == (8, (), {Source.DRAM: 8})
        wait_for(partial(has_directory, name), "the directory is up on this node", 60.0)
    plain, saving = engines["plain"], engines["saving"]
    wait_for(lambda: plain.lookup(1, 8).fault is None, "the directory answers", 60.0)
    wait_for(lambda: plain.lookup(1, 8).num_blocks == 0, "nobody is said to hold them", 60.0)
    assert saving.fleet.wait_for_shared(60.0)
    answer = saving.load(1, 8)
    assert (answer.num_blocks, answer.wrong, answer.sources) == (8, (), {Source.SHARED: 8})
    for engine in engines.values():
        assert [node.node_id for node in engine.fleet.status().nodes] == [here()]
        assert engine.store(3, 8).published

    # The next manager that starts on the machine frees the lost node's memory.
    os.kill(manager_process("plain", here()), signal.SIGKILL)
    wait_for(lambda: not list(arena_root.glob(f"kvfleet-*/*-{gone}")), "its arenas are gone", 60.0)
    wait_for(lambda: not plain.fleet.status().silent, "the manager is back")


class Hoard:
    """Objects that somebody else keeps in Ray's object store."""

    def __init__(self) -> None:
        self.refs: list[Any] = []

    def put(self, num_objects: int) -> None:
        """Keep so many objects of 16 MiB, all of them in memory."""
        self.refs = [ray.put(np.ones(16 * MIB, np.uint8)) for _ in range(num_objects)]
        assert all(ray.get(ref)[-1] == 1 for ref in self.refs)


def test_others_objects_are_not_spilled_for_us(ray_cluster, make_fleet, engine_here, engine_on):
    """A node whose object store others have filled to 75 % sends nothing, and is asked again when there is room."""
    fleet = make_fleet(load_timeout_s=10.0)
    engine, other = engine_here(fleet), engine_on(fleet, elsewhere())
    assert engine.store(1, 48).published
    hoard: Any = ray.remote(Hoard).options(**on(here())).remote()
    spilled = spilled_bytes()
    ray.get(hoard.put.remote(12), timeout=60)  # 192 of 256 MiB
    wait_for(lambda: available_resources_per_node()[here()]["object_store_memory"] < 65 * MIB, "Ray says so")
    answer = other.load(1, 48)
    assert (answer.num_blocks, answer.outcomes[0]) == (0, Miss.UNREACHABLE)
    assert spilled_bytes() == spilled
    ray.get(hoard.put.remote(0), timeout=60)

    def came() -> bool:
        answer: Answer = other.load(1, 48)
        return answer.num_blocks == 48

    wait_for(came, "the node sends again")
    assert spilled_bytes() == spilled
    ray.kill(hoard)


def drive_has(fleet: Fleet, node: str, num_blocks: int) -> bool:
    """Whether the one drive of a node is open and has so many blocks."""
    status = node_status(fleet, node)
    return status is not None and (status.drives[0].problem, status.drives[0].blocks) == ("", num_blocks)


def test_nodes_join_leave_and_are_replaced(fresh_cluster, make_fleet, engine_here, engine_on, tmp_path, monkeypatch):
    """Those that join have a drive, the same one: what the first of them has left on it the second one serves."""
    drives = (DriveConfig(directory="$KVFLEET_DRIVE", max_bytes=64 * MIB),)
    fleet = make_fleet(name="moving", shared_url=f"file://{tmp_path}/shared", nvme=drives)
    engine, arenas = engine_here(fleet), Path(fleet.config.arena_root)
    assert engine.store(1, 8).published
    gone: list[str] = []
    (tmp_path / "drive").mkdir()
    monkeypatch.setenv("KVFLEET_DRIVE", str(tmp_path / "drive"))
    for turn in (0, 1):
        raylet = fresh_cluster.add_node(num_cpus=2, object_store_memory=256 * MIB, include_dashboard=False)
        node = raylet.node_id
        joined = engine_on(fleet, node)
        answer = joined.load(98, 8)  # the node's manager starts with its first client
        assert (answer.num_blocks, answer.wrong) == (0, ())
        wait_for(partial(drive_has, fleet, node, 24 * turn), "its drive is open")
        for seed, sources in ((1, {Source.PEER: 8}), (10, {}), (11, {})):
            answer = joined.load(seed, 8)
            assert (answer.wrong, answer.sources) == ((), {Source.NVME: 8} if turn else sources)
        assert not [name for name in gone if list(arenas.glob(f"kvfleet-*/*-{name}"))]
        seeds = [10 * turn + number for number in (10, 11)]
        for seed in seeds:
            assert joined.store(seed, 8).published
        assert engine.load(seeds[0], 8).sources == {Source.PEER: 8}
        status = node_status(fleet, node)
        assert status is not None
        assert (status.blocks, status.draining, status.audit) == (24 + 16 * turn, False, ())
        wait_for(partial(drive_has, fleet, node, 24 + 16 * turn), "its drive has all of them")

        assert fleet.drain(node[:16]).left_blocks == 0
        assert joined.store(99, 8).reason == "draining"
        fresh_cluster.remove_node(raylet)
        gone.append(node)

        def from_shared(seed: int = seeds[1]) -> bool:
            answer: Answer = engine.load(seed, 8)
            assert not answer.wrong
            return answer.sources.get(Source.SHARED) == 8

        wait_for(from_shared, "what only the node had comes from the shared tier", 60.0)
        assert engine.load(seeds[0], 8).sources == {Source.DRAM: 8}

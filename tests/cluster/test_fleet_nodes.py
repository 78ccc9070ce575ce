"""A whole node of a fleet is lost."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import ray

import kvfleet
from kvfleet import Fleet, FleetConfig
from kvfleet.node.messages import Source
from tests.cluster.engine_process import MIB, Engine, elsewhere, fleet_actors, here, manager_process, on
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

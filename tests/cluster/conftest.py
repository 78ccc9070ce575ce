"""Fleets and engine processes for the cluster tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import kvfleet
from kvfleet import Fleet, FleetConfig
from tests.cluster.engine_process import MIB, Engine, RemoteEngine, fleet_actors, running


def check_books(fleet: Fleet) -> None:
    """Nothing is wrong in any manager's books, and nothing is left of what was under way."""
    status = fleet.status()
    assert status.silent == ()
    for node in status.nodes:
        assert (node.problem, node.audit, node.reserved_blocks) == ("", (), 0), node
        assert node.used_bytes <= node.capacity_bytes
        assert node.used_bytes == node.blocks * MIB, node


@pytest.fixture
def make_fleet(arena_root: Path, wait_for_condition: Callable[..., None]) -> Iterator[Callable[..., Fleet]]:
    """`make_fleet(**settings)`: a fleet of the test's own, on the cluster this process is connected to.

    At the end its books are checked and it is stopped, and nothing of it may be left.
    """
    fleets: list[Fleet] = []

    def make(**settings: Any) -> Fleet:
        name = f"{arena_root.name}-{len(fleets)}"
        settings = {"name": name, "dram_bytes": 64 * MIB, "arena_root": str(arena_root)} | settings
        fleets.append(kvfleet.start(FleetConfig(**settings)))
        return fleets[-1]

    yield make
    for fleet in fleets:
        name = fleet.config.name
        processes = fleet_actors(name).values()
        if processes:
            check_books(fleet)
        fleet.stop()
        assert fleet_actors(name) == {}
        wait_for_condition(lambda p=processes: not running(p), "the fleet's processes have ended")
        left = [path for path in arena_root.glob(f"kvfleet-*/{name}-*") if path.name.rpartition("-")[2] in _live()]
        assert not left


def _live() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


@pytest.fixture
def engine_on(make_fleet: object) -> Iterator[Callable[[Fleet, str], RemoteEngine]]:
    """`engine_on(fleet, node)`: an engine process on a node."""
    engines: list[RemoteEngine] = []

    def make(fleet: Fleet, node: str) -> RemoteEngine:
        engines.append(RemoteEngine(fleet.config.name, node))
        return engines[-1]

    yield make
    for engine in engines:
        engine.kill()


@pytest.fixture
def engine_here(make_fleet: object) -> Iterator[Callable[[Fleet], Engine]]:
    """`engine_here(fleet)`: an engine in this process."""
    engines: list[Engine] = []

    def make(fleet: Fleet) -> Engine:
        engines.append(Engine(fleet.config.name))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()

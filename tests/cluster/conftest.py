"""Fleets and engine processes for the cluster tests."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

import kvfleet
from kvfleet import Fleet, FleetConfig
from tests.cluster.engine_process import MIB, Engine, RemoteEngine, elsewhere, fleet_actors, have_ended
from tests.conftest import SHARED_MEMORY, wait_for


def books(fleet: Fleet) -> list[str]:
    """What is wrong in the managers' books, or left of what was under way."""
    status = fleet.status()
    findings = [f"{node} does not answer" for node in status.silent]
    for node in status.nodes:
        if node.problem or node.audit or node.reserved_blocks or node.used_bytes != node.blocks * MIB:
            findings.append(str(node))
        assert node.used_bytes <= node.capacity_bytes
    return findings


def check_books(fleet: Fleet) -> None:
    """Wait until all managers answer and nothing is under way; then nothing may be wrong."""
    wait_for(lambda: not books(fleet), "the books of all managers are in order")


@contextmanager
def running_fleet(settings: dict[str, Any]) -> Iterator[Fleet]:
    """A fleet with arenas of 64 MiB. At the end its books are checked, it is stopped, and nothing of it may be left."""
    with tempfile.TemporaryDirectory(prefix="kvfleet-test-", dir=SHARED_MEMORY) as root:
        defaults: dict[str, Any] = {"name": secrets.token_hex(4), "dram_bytes": 64 * MIB, "arena_root": root}
        fleet = kvfleet.start(FleetConfig(**(defaults | settings)))
        yield fleet
        name, arenas = fleet.config.name, Path(fleet.config.arena_root)
        processes = fleet_actors(name).values()
        if processes:
            check_books(fleet)
        assert fleet.stop() == 0
        assert fleet_actors(name) == {}
        wait_for(partial(have_ended, processes), "the fleet's processes have ended")
        live = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        assert not [path for path in arenas.glob(f"kvfleet-*/{name}-*") if path.name.rpartition("-")[2] in live]


@pytest.fixture
def make_fleet() -> Iterator[Callable[..., Fleet]]:
    """`make_fleet(**settings)`: a fleet of the test's own, on the cluster this process is connected to."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(running_fleet(settings))


@pytest.fixture(scope="module")
def fleet(request: pytest.FixtureRequest, ray_cluster: object) -> Iterator[Fleet]:
    """A fleet that the tests of a module share, with the module's `SETTINGS`."""
    with running_fleet(request.module.SETTINGS) as running:
        yield running


@pytest.fixture(scope="module")
def engine(fleet: Fleet) -> Iterator[Engine]:
    """An engine of that fleet in this process."""
    engine = Engine(fleet.config.name)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def other(fleet: Fleet) -> Iterator[RemoteEngine]:
    """An engine of that fleet on the other node."""
    engine = RemoteEngine(fleet.config.name, elsewhere())
    yield engine
    engine.kill()


@pytest.fixture
def engine_on() -> Iterator[Callable[[Fleet, str], RemoteEngine]]:
    """`engine_on(fleet, node)`: an engine process on a node."""
    engines: list[RemoteEngine] = []

    def make(fleet: Fleet, node: str) -> RemoteEngine:
        engines.append(RemoteEngine(fleet.config.name, node))
        return engines[-1]

    yield make
    for engine in engines:
        engine.kill()


@pytest.fixture
def engine_here() -> Iterator[Callable[[Fleet], Engine]]:
    """`engine_here(fleet)`: an engine in this process."""
    engines: list[Engine] = []

    def make(fleet: Fleet) -> Engine:
        engines.append(Engine(fleet.config.name))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()

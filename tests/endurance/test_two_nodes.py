"""The simulator and a fleet of two nodes, given the same requests: the same hits by tier, block for block."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from kvfleet import DriveConfig, Fleet
from kvfleet.core.block import BlockKey
from kvfleet.core.outcomes import Outcome
from kvfleet.core.speeds import PrefillSpeed, Speed
from kvfleet.sim.config import EngineConfig, SimConfig, SimDrives
from kvfleet.sim.fleet import SimFleet
from kvfleet.sim.trace import Request
from tests.cluster.engine_process import BLOCK_TOKENS, MIB, elsewhere, here, on
from tests.cluster.replaying import RemoteReplayer, keys_of, raylet
from tests.conftest import wait_for

pytestmark = pytest.mark.usefixtures("ray_cluster")

DRAM = 16 * MIB
DRIVE = 28 * MIB
AT_ONCE = Speed(0.0, float("inf"))
PREFILL_S = 1e-6  # a token: prompts are given as many as their store took microseconds


def conversations(seed: int, num_requests: int) -> list[tuple[int, ...]]:
    """Requests of a few conversations that begin alike, grow, and end; each block id names its whole prefix."""
    rng = random.Random(seed)
    ids = iter(range(10, 10_000))
    start = (next(ids), next(ids))
    going: list[tuple[int, ...]] = []
    requests = []
    for _ in range(num_requests):
        if len(going) < 4 or rng.random() < 0.3:
            going.append((*start, *(next(ids) for _ in range(rng.randint(1, 4)))))
            blocks = going[-1]
        else:
            number = rng.randrange(len(going))
            blocks = going[number] = (*going[number], *(next(ids) for _ in range(rng.randint(1, 3))))
            if len(blocks) > 14:
                del going[number]
        requests.append(blocks)
    return requests


class Simulated:
    """The simulator beside the fleet: told of each request when it is done, with the times it had."""

    def __init__(self, policy: str) -> None:
        self.keys: dict[int, BlockKey] = {}
        config = SimConfig(
            num_nodes=2,
            block_bytes=MIB,
            dram_bytes=DRAM,
            drives=SimDrives(max_bytes=DRIVE, rated_bytes=1 << 40, read=AT_ONCE, write_bytes_per_s=float("inf")),
            shared=AT_ONCE,
            dram=AT_ONCE,
            network=AT_ONCE,
            engine=EngineConfig(prefill=PrefillSpeed(PREFILL_S), planned=False),
            router="round-robin",
            policy=policy,
        )
        self.fleet = SimFleet(config, BLOCK_TOKENS, key=self.keys.__getitem__)
        self.outcomes: tuple[str, ...] = ()
        self.fleet.on_answer = self._answered

    def _answered(self, request: Request, number: int, outcomes: list[Outcome]) -> None:
        self.outcomes = tuple(outcome.value for outcome in outcomes)

    def serve(self, blocks: tuple[int, ...], read_s: float, stored_s: float) -> tuple[str, ...]:
        """What it says became of the blocks."""
        self.keys.update(zip(blocks, keys_of(blocks), strict=True))
        begun = read_s or stored_s
        self.fleet.run([Request(begun, blocks, 0, 0)])
        return self.outcomes

    def holdings(self, number: int) -> tuple[frozenset[BlockKey], frozenset[BlockKey]]:
        """Keys of what a node has in memory, and on its drives."""
        node = self.fleet.nodes[number]
        assert node.drive is not None
        memory, drives = (
            frozenset(record.key for record in placement.records())
            for placement in (node.arena.placement, node.drive.placement)
        )
        return memory, drives


def drives_of(root: Path) -> DriveConfig:
    """A drive of its own for each raylet of this machine."""
    for node in (here(), elsewhere()):
        root.joinpath(ray.get(raylet.options(**on(node)).remote(), timeout=60)).mkdir(mode=0o755)
    return DriveConfig(directory=f"{root}/$RAY_RAYLET_PID", max_bytes=DRIVE, rated_bytes=1 << 40)


def has(engine: RemoteReplayer, expected: tuple[frozenset[BlockKey], frozenset[BlockKey]]) -> bool:
    """Whether a node holds these blocks in memory, and those on its drives."""
    return engine.holdings() == expected


def works(fleet: Fleet, node: str) -> bool:
    """Whether a node is up, drive and all."""
    found = next((one for one in fleet.status().nodes if one.node_id == node), None)
    return found is not None and any(drive.works for drive in found.drives)


@pytest.mark.parametrize("policy", ["lru", "hold-turn"])
def test_the_simulator_says_what_the_fleet_does(make_fleet: Callable[..., Fleet], tmp_path: Path, policy: str) -> None:
    settings: dict[str, Any] = {"nvme": (drives_of(tmp_path),), "shared_url": f"file://{tmp_path}/shared"}
    fleet = make_fleet(dram_bytes=DRAM, policy=policy, heartbeat_s=20.0, **settings)
    nodes = (here(), elsewhere())
    engines = [RemoteReplayer(fleet.config.name, node) for node in nodes]
    wait_for(lambda: all(works(fleet, node) for node in nodes), "both nodes have opened their drives")
    simulated = Simulated(policy)
    seen: set[str] = set()
    for number, blocks in enumerate(conversations(1, 36)):
        served = engines[number % 2].serve(blocks)
        assert simulated.serve(blocks, served.read_s, served.stored_s) == served.outcomes, f"request {number}"
        seen.update(served.outcomes)
        for place, engine in enumerate(engines):
            expected = simulated.holdings(place)
            with suppress(AssertionError):  # what differs says more than that it was waited for
                wait_for(partial(has, engine, expected), "it holds what the simulator says", 5)
            names = {key: name for name, key in simulated.keys.items()}
            found = [sorted(names[key] for key in tier) for tier in engine.holdings()]
            assert found == [sorted(names[key] for key in tier) for tier in expected], f"node {place}, request {number}"
    assert seen >= {"dram", "nvme", "peer", "shared"}
    for engine in engines:
        engine.kill()

"""The simulator and a fleet of two nodes, given the same requests: the same hits by tier, block for block."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from kvfleet import DriveConfig, Fleet
from kvfleet.core.block import BlockKey
from kvfleet.core.outcomes import Outcome
from kvfleet.core.speeds import PrefillSpeed, Speed
from kvfleet.sim.config import EngineConfig, SimConfig, SimDrives
from kvfleet.sim.fleet import SimFleet
from kvfleet.sim.trace import Request
from tests.cluster.clock import Clock
from tests.cluster.engine_process import BLOCK_TOKENS, MIB, elsewhere, here, on
from tests.cluster.replaying import RemoteReplayer, Served, keys_of, raylet
from tests.conftest import wait_for

AT_ONCE = Speed(0.0, float("inf"))
PREFILL_S = 1e-6  # a token: prompts are given as many as microseconds went by from their load to their store
STEP_S = 20.0  # from a request to the next: far more than one takes
HEARTBEAT_S = 3600.0  # none comes between: what managers do then, the simulator does with the next store


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


def learned(seed: int) -> list[tuple[int, ...]]:
    """Requests from which a policy learns what comes back, and some that show what it makes of that.

    Two long prompts, together more than there is room for, are continued again and again, each time in another way;
    those between are asked once. Each stores something: a load alone is told to the directory a little later.
    """
    rng = random.Random(seed)
    ids = iter(range(10, 10_000))
    start = (next(ids), next(ids))
    again = [(*start, *(next(ids) for _ in range(12))) for _ in range(2)]
    requests: list[tuple[int, ...]] = []
    for number in range(26):  # a pair each: one of each node
        for node in range(2):
            known = () if number % 4 == 3 else again[(number - number // 4 + node) % 2]
            requests.append((*known, *(next(ids) for _ in range(rng.randint(1, 2)))))
    going: list[tuple[int, ...]] = []
    for _ in range(16):
        kind = rng.random()
        if kind < 0.25:
            requests.append(tuple(next(ids) for _ in range(rng.randint(2, 4))))
        elif kind < 0.5:
            requests.append((*rng.choice(again), next(ids)))
        elif len(going) < 3:
            going.append((*start, next(ids)))
            requests.append(going[-1])
        else:
            number = rng.randrange(3)
            going[number] = (*going[number], next(ids))
            requests.append(going[number])
    return requests


@dataclass(frozen=True)
class Case:
    """What both are given.

    Attributes:
        policy: of all nodes.
        dram: bytes of a node's arena.
        drive: bytes of its drive, with a shared tier below; 0 for neither.
        requests: that come in turn.
        outcomes: that blocks have had by the end.
        declines: some were not worth their room in memory, and no tier below took them.
    """

    policy: str
    dram: int
    drive: int
    requests: list[tuple[int, ...]]
    outcomes: frozenset[str]
    declines: bool


ALL = frozenset({"dram", "nvme", "peer", "shared"})
CASES = {
    "lru": Case("lru", 16 * MIB, 28 * MIB, conversations(1, 36), ALL, declines=False),
    "hold-turn": Case("hold-turn", 20 * MIB, 32 * MIB, learned(1), ALL, declines=False),
    "memory-alone": Case("hold-turn", 24 * MIB, 0, learned(1), frozenset({"dram", "peer"}), declines=True),
}


class Simulated:
    """The simulator beside the fleet: told of each request when it is done, with the times it had."""

    def __init__(self, case: Case) -> None:
        self.keys: dict[int, BlockKey] = {}
        drives = SimDrives(max_bytes=case.drive, rated_bytes=1 << 40, read=AT_ONCE, write_bytes_per_s=float("inf"))
        config = SimConfig(
            num_nodes=2,
            block_bytes=MIB,
            dram_bytes=case.dram,
            drives=drives,
            shared=AT_ONCE if case.drive else None,
            dram=AT_ONCE,
            network=AT_ONCE,
            engine=EngineConfig(prefill=PrefillSpeed(PREFILL_S), planned=False),
            router="round-robin",
            policy=case.policy,
        )
        self.fleet = SimFleet(config, BLOCK_TOKENS, key=self.keys.__getitem__)
        self.outcomes: tuple[str, ...] = ()
        self.fleet.on_answer = self._answered

    def _answered(self, request: Request, number: int, outcomes: list[Outcome]) -> None:
        self.outcomes = tuple(outcome.value for outcome in outcomes)

    def serve(self, blocks: tuple[int, ...], served: Served) -> tuple[str, ...]:
        """What it says became of the blocks."""
        self.keys.update(zip(blocks, keys_of(blocks), strict=True))
        begun = served.read_s or served.asked_s
        self.fleet.run([Request(begun, blocks, round((served.asked_s - begun) / PREFILL_S), 0)])
        return self.outcomes

    def holdings(self, number: int) -> tuple[frozenset[BlockKey], frozenset[BlockKey]]:
        """Keys of what a node has in memory, and on its drives."""
        node = self.fleet.nodes[number]
        memory = frozenset(record.key for record in node.arena.placement.records())
        records = node.drive.placement.records() if node.drive is not None else []
        return memory, frozenset(record.key for record in records)


def settings_of(case: Case, root: Path) -> dict[str, Any]:
    """Of a fleet, with a drive of its own for each raylet of this machine if there is one."""
    settings: dict[str, Any] = {"dram_bytes": case.dram, "policy": case.policy, "heartbeat_s": HEARTBEAT_S}
    if case.drive:
        for node in (here(), elsewhere()):
            root.joinpath(ray.get(raylet.options(**on(node)).remote(), timeout=60)).mkdir(mode=0o755)
        drive = DriveConfig(directory=f"{root}/$RAY_RAYLET_PID", max_bytes=case.drive, rated_bytes=1 << 40)
        settings |= {"nvme": (drive,), "shared_url": f"file://{root}/shared"}
    return settings


def has(engine: RemoteReplayer, expected: tuple[frozenset[BlockKey], frozenset[BlockKey]]) -> bool:
    """Whether a node holds these blocks in memory, and those on its drives."""
    return engine.holdings() == expected


def works(fleet: Fleet, node: str) -> bool:
    """Whether a node is up, drive and all."""
    found = next((one for one in fleet.status().nodes if one.node_id == node), None)
    return found is not None and all(drive.works for drive in found.drives)


@pytest.fixture
def clock(ray_cluster: Cluster, tmp_path: Path) -> Iterator[Clock]:
    """That of the processes which this one starts on the cluster."""
    clock = Clock(tmp_path / "clock")
    ray.shutdown()
    ray.init(address=ray_cluster.address, runtime_env=clock.runtime_env)
    yield clock
    ray.shutdown()
    ray.init(address=ray_cluster.address)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_simulator_says_what_the_fleet_does(
    clock: Clock, make_fleet: Callable[..., Fleet], tmp_path: Path, case: Case
) -> None:
    fleet = make_fleet(**settings_of(case, tmp_path))
    nodes = (here(), elsewhere())
    engines = [RemoteReplayer(fleet.config.name, node) for node in nodes]
    wait_for(lambda: all(works(fleet, node) for node in nodes), "both nodes have opened their drives")
    simulated = Simulated(case)
    seen: set[str] = set()
    declined = False
    # Far from where times are rounded to, so that it does not matter how long a request takes.
    start_s = (time.monotonic() // STEP_S + 2.25) * STEP_S
    for number, blocks in enumerate(case.requests):
        clock.put(start_s + number * STEP_S)
        served = engines[number % 2].serve(blocks)
        assert simulated.serve(blocks, served) == served.outcomes, f"request {number}"
        seen.update(served.outcomes)
        for place, engine in enumerate(engines):
            expected = simulated.holdings(place)
            with suppress(AssertionError):  # what differs says more than that it was waited for
                wait_for(partial(has, engine, expected), "it holds what the simulator says", 5)
            names = {key: name for name, key in simulated.keys.items()}
            found = [sorted(names[key] for key in tier) for tier in engine.holdings()]
            assert found == [sorted(names[key] for key in tier) for tier in expected], f"node {place}, request {number}"
        declined = declined or not simulated.holdings(number % 2)[0].issuperset(keys_of(blocks))
    assert seen >= case.outcomes
    assert declined == case.declines
    for engine in engines:
        engine.kill()

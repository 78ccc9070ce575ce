"""What an agent is asked of the cluster and the fleet it is in."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import ray

from kvfleet.core.block import split
from kvfleet.fleet import FleetStatus
from tests.cluster.engine_process import Engine, fleet_actors
from tests.hosts.worker import BLOCK_TOKENS, MODEL, tokens
from tests.workload import content

__all__ = [
    "StoreUse",
    "actor_processes",
    "bring",
    "live_nodes",
    "put",
    "start_managers",
    "status",
    "stop_fleet",
    "store_use",
]


def live_nodes(_: Engine) -> dict[str, list[str]]:
    """Ray node ids of the nodes that Ray takes for live, by their address.

    A node that has been killed is among them for some seconds, beside the one that has taken its place.
    """
    found: dict[str, list[str]] = {}
    for node in ray.nodes():
        if node["Alive"]:
            found.setdefault(node["NodeManagerAddress"], []).append(node["NodeID"])
    return found


def actor_processes(engine: Engine) -> dict[str, int]:
    """Process ids of the fleet's actors, by name; 0 of those that are starting."""
    return fleet_actors(engine.fleet.config.name)


def start_managers(engine: Engine) -> None:
    """On all nodes."""
    engine.fleet.up()


def status(engine: Engine) -> FleetStatus:
    """Of the fleet."""
    return engine.fleet.status()


def stop_fleet(engine: Engine) -> int:
    """Stop the fleet."""
    return engine.fleet.stop()


@dataclass(frozen=True)
class StoreUse:
    """What is in the object stores of all live nodes, and how much they have written to disk since they started."""

    used_bytes: int
    spilled_bytes: int


def store_use(_: Engine) -> StoreUse:
    """See `StoreUse`."""
    from ray._private.internal_api import node_stats

    used = spilled = 0
    for node in ray.nodes():
        if node["Alive"]:
            stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)
            used += stats.store_stats.object_store_bytes_used
            spilled += stats.store_stats.spilled_bytes_total
    return StoreUse(used, spilled)


def put(engine: Engine, number: int, num_blocks: int) -> None:
    """Store a prompt of the workers' model."""
    client, prompt = engine.fleet.client(MODEL), tokens(number, num_blocks)
    keys = split(MODEL.keys(prompt))

    def fill(index: int, view: np.ndarray) -> None:
        view[:] = content(keys[index], view.nbytes)

    result = client.store(prompt, fill).wait(60.0)
    client.close()
    assert result.stored == num_blocks, result
    assert result.published


def bring(engine: Engine, number: int, num_blocks: int) -> dict[str, int]:
    """Look such a prompt up, load it, and count its blocks by outcome; no byte may be wrong."""
    client, prompt = engine.fleet.client(MODEL), tokens(number, num_blocks)
    keys = split(MODEL.keys(prompt))
    right: dict[int, bool] = {}

    def take(index: int, view: np.ndarray) -> None:
        right[index] = bool((view == content(keys[index], view.nbytes)).all())

    loaded = client.load(client.lookup(prompt), take)
    client.close()
    assert all(right[index] for index in range(loaded // BLOCK_TOKENS))
    return dict(Counter(outcome.value for outcome in loaded.outcomes))

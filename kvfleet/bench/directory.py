"""Asking the directory actor, idle and while inventories come in, beside an actor that answers without looking."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle

from kvfleet.actors import directory_actor
from kvfleet.bench.report import Row, median_interval
from kvfleet.config import FleetConfig
from kvfleet.core.block import KEY_BYTES
from kvfleet.core.directory import RECORD_BYTES, Applied, InventoryPage, NodeId, Run
from kvfleet.node.messages import Located

__all__ = ["CALLS", "MEASURES", "Site", "rows", "running_directory"]

MEASURES = (
    "locate: a prefix of {blocks} blocks, all there, asked of the fleet's directory actor with {records:,} records; "
    "callers are async tasks in two actors on one machine, each with one call under way. Inventories: meanwhile a node "
    "sends all its records over and over, page after page. Floor: the same call and answer, of an actor that does "
    "nothing."
)

_SEED = 20250101
_TIMEOUT_S = 120.0
_PREFIXES = 64
_CALLER_ACTORS = 2
_WARMUPS = 1
CALLS = 800  # of all callers in a round


class _Nothing:
    """The floor: takes the directory's calls, and has its answer ready."""

    def __init__(self, answer: Located) -> None:
        self._answer = answer

    async def locate(self, keys: bytes, shard: int, num_shards: int) -> Located:
        return self._answer


class _Node:
    """The node that holds everything: tells it once, or over and over."""

    def __init__(self, directory: ActorHandle[Any], node: NodeId, num_records: int, page_records: int) -> None:
        self._directory = directory
        self._node = node
        table = _records(num_records)
        self._pages = [table[at : at + page_records].tobytes() for at in range(0, num_records, page_records)]
        self._goes_on = False

    async def tell(self) -> None:
        for number, records in enumerate(self._pages):
            page = InventoryPage(self._node, 1, 0, number, number == len(self._pages) - 1, records)
            assert await self._directory.inventory.remote(page) is Applied.OK

    async def go_on(self) -> int:
        """Tell it until stopped. Returns how many records that were."""
        self._goes_on, told = True, 0
        while self._goes_on:
            await self.tell()
            told += 1
        return told

    async def stop(self) -> None:
        self._goes_on = False


@dataclass(frozen=True, slots=True)
class _Burst:
    """What callers did. Times are monotonic seconds, the same clock for all processes of a machine."""

    started: float
    ended: float
    cpu_s: float
    latencies: tuple[float, ...]


class _Callers:
    """Some callers in one process."""

    def __init__(self, num_records: int, num_blocks: int) -> None:
        keys = _records(num_records)[:, :KEY_BYTES]
        starts = range(0, num_records - num_blocks + 1, num_blocks)
        self._prefixes = [keys[start : start + num_blocks].tobytes() for start in starts[:_PREFIXES]]

    async def ask(self, target: ActorHandle[Any], num_callers: int, calls: int) -> _Burst:
        started, cpu = time.monotonic(), time.process_time()
        latencies = await asyncio.gather(*(self._caller(target, number, calls) for number in range(num_callers)))
        cpu_s = time.process_time() - cpu
        return _Burst(started, time.monotonic(), cpu_s, tuple(one for caller in latencies for one in caller))

    async def _caller(self, target: ActorHandle[Any], number: int, calls: int) -> list[float]:
        latencies = []
        for call in range(calls):
            keys = self._prefixes[(number + call) % len(self._prefixes)]
            started = time.perf_counter()
            located = await target.locate.remote(keys, 0, 1)
            latencies.append(time.perf_counter() - started)
            assert located.missing is None, located
        return latencies


def _records(count: int) -> Any:  # noqa: ANN401  an array
    """Random records of shard 0, uint8, shape `(count, 18)`; the same for the same count."""
    table = np.random.default_rng(_SEED).integers(0, 256, (count, RECORD_BYTES), np.uint8)
    table[:, KEY_BYTES:] = 0
    return table


@dataclass(frozen=True, slots=True)
class Site:
    """The actors of a benchmark."""

    directory: ActorHandle[Any]
    nothing: ActorHandle[_Nothing]
    node: ActorHandle[_Node]
    callers: tuple[ActorHandle[_Callers], ...]
    num_blocks: int


@contextmanager
def running_directory(address: str | None, num_records: int, num_blocks: int) -> Iterator[Site]:
    """A directory that knows so many records, the actors that ask it for prefixes of so many blocks, and no fleet."""
    assert num_records >= num_blocks > 0
    config = FleetConfig(name=f"bench-directory-{os.getpid()}", directory_keys_max=2 * num_records)
    joins = not ray.is_initialized()
    if joins:
        ray.init(address=address, include_dashboard=False, log_to_driver=False, configure_logging=False)
    here = ray.get_runtime_context().get_node_id()
    directory = directory_actor(config)
    node = _start(_Node, directory, NodeId(here), num_records, config.inventory_page_records)
    nothing = _start(_Nothing, Located((Run(0, num_blocks, (NodeId(here),), False),), None))
    callers = tuple(_start(_Callers, num_records, num_blocks) for _ in range(_CALLER_ACTORS))
    try:
        ray.get(node.tell.remote(), timeout=_TIMEOUT_S)
        yield Site(directory, nothing, node, callers, num_blocks)
    finally:
        for actor in (directory, node, nothing, *callers):
            ray.kill(actor)
        if joins:
            ray.shutdown()


def _start(cls: type, *args: object) -> ActorHandle[Any]:
    remote: Any = ray.remote(cls)
    actor: ActorHandle[Any] = remote.options(num_cpus=0, max_concurrency=64).remote(*args)
    return actor


def rows(site: Site, num_callers: int, calls: int, repeats: int) -> tuple[list[Row], float]:
    """Measure one number of callers, each making so many calls a round.

    Returns:
        The rows, and the CPU seconds that a call costs its caller.
    """
    bursts: dict[str, list[list[_Burst]]] = {"nothing": [], "locate": [], "locate, inventories": []}
    for _ in range(_WARMUPS + repeats):
        bursts["nothing"].append(_burst(site, site.nothing, num_callers, calls))
        bursts["locate"].append(_burst(site, site.directory, num_callers, calls))
        going = site.node.go_on.remote()
        bursts["locate, inventories"].append(_burst(site, site.directory, num_callers, calls))
        ray.get(site.node.stop.remote(), timeout=_TIMEOUT_S)
        ray.get(going, timeout=_TIMEOUT_S)
    counted = {name: rounds[_WARMUPS:] for name, rounds in bursts.items()}
    cpu_s = sum(burst.cpu_s for rounds in counted["nothing"] for burst in rounds)
    walls = {name: [_wall_s(burst) for burst in rounds] for name, rounds in counted.items()}
    shown = []
    for name, rounds in counted.items():
        ratios = [floor / wall for floor, wall in zip(walls["nothing"], walls[name], strict=True)]
        shown.append(
            Row(
                name=name,
                block_bytes=0,
                num_blocks=num_callers,
                moved_bytes=0,
                seconds=tuple(one for bursts in rounds for burst in bursts for one in burst.latencies),
                of_floor=statistics.median(ratios),
                of_floor_95=median_interval(ratios),
                calls_per_s=num_callers * calls / statistics.median(walls[name]),
                keys_per_call=site.num_blocks,
            )
        )
    return shown, cpu_s / (repeats * num_callers * calls)


def _burst(site: Site, target: ActorHandle[Any], num_callers: int, calls: int) -> list[_Burst]:
    shares = [len(range(number, num_callers, len(site.callers))) for number in range(len(site.callers))]
    asked = [actor.ask.remote(target, share, calls) for actor, share in zip(site.callers, shares, strict=True) if share]
    return ray.get(asked, timeout=_TIMEOUT_S)


def _wall_s(bursts: list[_Burst]) -> float:
    return max(burst.ended for burst in bursts) - min(burst.started for burst in bursts)

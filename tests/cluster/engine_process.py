"""An engine process, as the cluster tests use it, and what they ask of Ray itself.

Every byte an engine stores follows from the block's key, and every byte it loads is compared with that.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import kvfleet
from kvfleet import BlockLayout, ModelSpec, PrefixHit
from kvfleet.actors import directory_namespace
from kvfleet.core.block import KEY_BYTES
from kvfleet.counts import ClientStats
from kvfleet.hits import StoreResult
from kvfleet.node.manager import NodeStatus
from kvfleet.node.messages import Outcome, Source
from kvfleet.storing import StoreTask
from tests.workload import content

MIB = 1 << 20
BLOCK_TOKENS = 16
BLOCK_BYTES = MIB
MODEL = ModelSpec(
    model_id="test",
    weight_revision="1",
    layout=BlockLayout.opaque(block_bytes=BLOCK_BYTES, block_tokens=BLOCK_TOKENS, inner_order="words"),
)


_seeds = itertools.count(1)


def new_seed() -> int:
    """Of a prompt that nobody has stored yet."""
    return next(_seeds)


def prompt(seed: int, num_blocks: int) -> npt.NDArray[np.uint32]:
    """Token ids of `num_blocks` whole blocks and a little more. Prompts of other seeds share no prefix."""
    ids = np.arange(num_blocks * BLOCK_TOKENS + 3, dtype=np.uint32)
    ids[0] += np.uint32(seed << 16)
    return ids


@dataclass(frozen=True)
class Answer:
    """How a load went.

    Attributes:
        num_blocks: loaded.
        wrong: indexes of those whose bytes are not right.
        outcomes: of all blocks of the hit.
        sources: blocks by where they came from.
    """

    num_blocks: int
    wrong: tuple[int, ...]
    outcomes: tuple[Outcome, ...]
    sources: dict[Source, int]
    seconds: float


class Engine:
    """Stores and loads prompts, named by a seed and a number of blocks. Runs in any process of the cluster."""

    def __init__(self, fleet: str) -> None:
        self.fleet = kvfleet.connect(fleet)
        self.client = self.fleet.client(MODEL)
        self.client.attach()
        self.paused = False
        self.pause_before: int | None = None
        self.go_on = threading.Event()
        self.task: StoreTask | None = None

    def pid(self) -> int:
        return os.getpid()

    def close(self) -> None:
        self.fleet.close()

    def stats(self) -> ClientStats:
        return self.client.stats()

    def _keys(self, seed: int, num_blocks: int) -> list[bytes]:
        packed = MODEL.keys(prompt(seed, num_blocks))
        return [packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)]

    def _pass(self, index: int) -> None:
        """Pause before a block if told so."""
        if index == self.pause_before:
            self.paused = True
            assert self.go_on.wait(60.0)
            self.paused = False

    # stores

    def begin_store(self, seed: int, num_blocks: int, start_block: int = 0, pause_before: int | None = None) -> None:
        """Start a store of blocks from `start_block` on; it pauses before writing a block until `resume`."""
        keys = self._keys(seed, num_blocks)
        self.pause_before = pause_before
        self.go_on.clear()

        def put(index: int, view: npt.NDArray[np.uint8]) -> None:
            self._pass(index)
            view[:] = content(keys[index], view.nbytes)

        self.task = self.client.store(prompt(seed, num_blocks), put, start_block=start_block)

    def end_store(self, timeout_s: float = 60.0) -> StoreResult:
        assert self.task is not None
        return self.task.wait(timeout_s)

    def store(self, seed: int, num_blocks: int, start_block: int = 0) -> StoreResult:
        self.begin_store(seed, num_blocks, start_block)
        return self.end_store()

    def is_paused(self) -> bool:
        """Whether the store or load under way waits for `resume`."""
        return self.paused

    def resume(self) -> None:
        self.go_on.set()

    # loads

    def lookup(self, seed: int, num_blocks: int) -> PrefixHit:
        return self.client.lookup(prompt(seed, num_blocks))

    def load(
        self, seed: int, num_blocks: int, timeout_s: float | None = None, pause_before: int | None = None
    ) -> Answer:
        """Look up and load; pauses before taking a block until `resume`."""
        return self.load_hit(seed, self.lookup(seed, num_blocks), timeout_s, pause_before)

    def load_hit(
        self, seed: int, hit: PrefixHit, timeout_s: float | None = None, pause_before: int | None = None
    ) -> Answer:
        keys = self._keys(seed, hit.asked_blocks)
        right: dict[int, bool] = {}  # by index: one that went during its copy is taken again from elsewhere
        self.pause_before = pause_before
        self.go_on.clear()

        def take(index: int, view: npt.NDArray[np.uint8]) -> None:
            self._pass(index)
            right[index] = bool((view == content(keys[index], view.nbytes)).all())

        started = time.monotonic()
        loaded = self.client.load(hit, take, timeout_s)
        seconds = time.monotonic() - started
        num_blocks = loaded // BLOCK_TOKENS
        wrong = tuple(index for index in range(num_blocks) if not right[index])
        sources = {source: n // BLOCK_BYTES for source, n in loaded.bytes_by_source.items()}
        return Answer(num_blocks, wrong, loaded.outcomes, sources, seconds)


class RemoteEngine:
    """An `Engine` in a process of its own on a given node; its methods wait for the answer."""

    def __init__(self, fleet: str, node: str) -> None:
        self._actor: Any = ray.remote(Engine).options(max_concurrency=4, **on(node)).remote(fleet)
        self.process: int = ray.get(self.begin("pid"), timeout=60)

    def wait_until_paused(self) -> None:
        """Wait until the store or load under way waits for `resume`."""
        from tests.conftest import wait_for  # not in engine processes: it sets up the environment of a test run

        wait_for(lambda: bool(ray.get(self.begin("is_paused"), timeout=60)), "the engine is in the middle of its work")

    def begin(self, method: str, *arguments: object, **options: object) -> ray.ObjectRef[Any]:
        reference: ray.ObjectRef[Any] = getattr(self._actor, method).remote(*arguments, **options)
        return reference

    def store(self, seed: int, num_blocks: int) -> StoreResult:
        result: StoreResult = ray.get(self.begin("store", seed, num_blocks), timeout=120)
        return result

    def lookup(self, seed: int, num_blocks: int) -> PrefixHit:
        hit: PrefixHit = ray.get(self.begin("lookup", seed, num_blocks), timeout=60)
        return hit

    def load(self, seed: int, num_blocks: int, timeout_s: float | None = None) -> Answer:
        answer: Answer = ray.get(self.begin("load", seed, num_blocks, timeout_s), timeout=120)
        return answer

    def stats(self) -> ClientStats:
        stats: ClientStats = ray.get(self.begin("stats"), timeout=60)
        return stats

    def kill(self) -> None:
        ray.kill(self._actor)


# what Ray knows


def on(node: str) -> dict[str, Any]:
    """Options of what is to run on a node."""
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


def here() -> str:
    node: str = ray.get_runtime_context().get_node_id()
    return node


def elsewhere() -> str:
    """A live node that this process is not on."""
    node: str = next(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here())
    return node


def fleet_actors(fleet: str) -> dict[str, int]:
    """Process ids of a fleet's actors, by name."""
    from ray._private.state import actors

    namespace = directory_namespace(fleet)
    names = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == namespace]
    ids = {name: ray.get_actor(name, namespace=namespace)._actor_id.hex() for name in names}
    return {name: actors(actor_id)["Pid"] for name, actor_id in ids.items()}


def manager_process(fleet: str, node: str) -> int:
    return fleet_actors(fleet)[f"tier-manager-{node}"]


def directory_process(fleet: str) -> int:
    return fleet_actors(fleet)["directory"]


def have_ended(processes: Iterable[int]) -> bool:
    """Whether none of the processes runs any more."""
    for process in processes:
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            return False
    return True


def node_status(fleet: kvfleet.Fleet, node: str) -> NodeStatus | None:
    """Of one node's manager, None if it does not answer."""
    return next((status for status in fleet.status().nodes if status.node_id == node), None)


def spilled_bytes() -> int:
    """Bytes that all nodes of the cluster have spilled to disk so far."""
    from ray._private.internal_api import node_stats

    total = 0
    for node in ray.nodes():
        if node["Alive"]:
            stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)
            total += stats.store_stats.spilled_bytes_total
    return total

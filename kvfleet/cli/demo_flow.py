"""The demo's course of events, and the places it writes to."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from rich.console import Console

import kvfleet
from kvfleet.cli import demo_model, demo_worker
from kvfleet.cli.console import show_bytes
from kvfleet.cli.demo_cluster import OBJECT_STORE_BYTES, DemoCluster, demo_cluster
from kvfleet.cli.demo_screen import Row, Screen, Step, same_everywhere, sources
from kvfleet.cli.demo_worker import Answer, Event, Filled, Plan, Progress
from kvfleet.config import MIB, FleetConfig
from kvfleet.core.block import KEY_BYTES, BlockKey
from kvfleet.errors import ConfigError, KvFleetError
from kvfleet.node.shared import SharedTier

__all__ = ["Demo", "Places", "scratch"]

_FLEET = "demo"
_SHARED_MEMORY = Path("/dev/shm")
_ARENA_BYTES_MIN = 32 * MIB
_SPARE_BLOCKS = 4  # that fit into an arena besides the prompt's
_THREADS_MAX = 8
_LISTING_TIMEOUT_S = 30.0
_STORAGE_TIMEOUT_S = 15.0
_RECORDS_MAX = 1_000_000
_RECORD_BYTES = KEY_BYTES + 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Places:
    """What the demo writes to and removes at its end.

    Attributes:
        disk: directory on disk.
        memory: directory in shared memory.
        shared_url: of the shared tier.
        borrowed: the shared tier is the user's: only the blocks of `namespaces` are removed from it.
    """

    disk: Path
    memory: Path
    shared_url: str
    borrowed: bool
    namespaces: list[bytes] = field(default_factory=list)


@contextlib.contextmanager
def scratch(shared_url: str | None) -> Iterator[Places]:
    """Places for one run of the demo.

    Args:
        shared_url: the user's storage, or None for a directory of our own.

    Raises:
        ConfigError: the nodes' processes could not share such storage.
    """
    if shared_url is not None and urlsplit(shared_url).scheme in ("", "memory"):
        raise ConfigError("--shared", f"must be a URL of storage that processes can share, is {shared_url!r}")
    # Ray keeps sockets there, and the path of a socket may have 107 characters: a long TMPDIR would not do.
    disk = Path(tempfile.mkdtemp(prefix="kvfleet-", dir="/tmp"))
    memory = Path(tempfile.mkdtemp(prefix="kvfleet-demo-", dir=_SHARED_MEMORY))
    places = Places(disk, memory, shared_url or f"file://{disk}/shared", shared_url is not None)
    try:
        yield places
    finally:
        try:
            if places.borrowed:
                _delete_blocks(places.shared_url, places.namespaces)
        finally:
            for directory in (disk, memory):
                shutil.rmtree(directory, ignore_errors=True)


def _delete_blocks(url: str, namespaces: list[bytes]) -> None:
    """Take the demo's blocks out of the user's storage."""
    tier = SharedTier(url, {}, _STORAGE_TIMEOUT_S)
    try:
        for namespace in namespaces:
            for page in tier.list(_RECORDS_MAX, [namespace]):
                for start in range(0, len(page), _RECORD_BYTES):
                    tier.delete(namespace, 1, BlockKey(page[start : start + KEY_BYTES]), 0)
    finally:
        tier.close()


class Demo:
    """One run of the demo."""

    def __init__(self, places: Places, document: str, question: str, num_nodes: int, model: Path | None) -> None:
        self._screen = Screen(Console())
        self._places = places
        self._document = document
        self._question = question
        self._num_nodes = num_nodes
        self._model = model
        self._num_threads = max(1, min(_THREADS_MAX, len(os.sched_getaffinity(0)) // 2))
        self._rows: list[Row] = []

    def show(self, notes: list[str]) -> bool:
        """Run all steps. Returns whether all runs of the model gave the same answer.

        Raises:
            KvFleetError: something cannot work, and what.
        """
        self._check_model()
        self._screen.say("[bold]kvfleet demo[/bold]: one question about one document, asked again and again")
        for note in notes:
            self._screen.note(note)
        with self._cluster() as cluster:
            plan = self._prepare(cluster)
            fleet = self._start_fleet(plan)
            self._ask(cluster, plan, 0, "nowhere yet")
            self._ask(cluster, plan, 0, "on the same node")
            for node in range(1, self._num_nodes):
                self._ask(cluster, plan, node, "on another node")
            self._evict(cluster, plan)
            self._ask(cluster, plan, self._num_nodes - 1, "evicted to shared storage")
            self._stop_fleet(fleet)
        with self._cluster() as cluster:
            fleet = self._start_fleet(plan)
            with self._screen.step("Finding out what the shared storage holds"):
                fleet.wait_for_shared(_LISTING_TIMEOUT_S)
            self._ask(cluster, plan, 0, "in shared storage, all else restarted")
            self._stop_fleet(fleet)
        self._screen.conclude(self._question, self._rows)
        return same_everywhere(self._rows)

    def _check_model(self) -> None:
        if self._model is None:
            demo_model.check_smollm2(self._model_root())
        elif not self._model.joinpath("config.json").is_file():
            raise ConfigError("--model", f"{self._model} is not the directory of a model as transformers saves it")

    def _model_root(self) -> Path:
        """Where the copy of SmolLM2 is kept; if the user has no place for it, only as long as the demo runs."""
        try:
            root = demo_model.cache_directory()
            root.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError):
            return self._places.disk
        return root if os.access(root, os.W_OK) else self._places.disk

    @contextlib.contextmanager
    def _cluster(self) -> Iterator[DemoCluster]:
        settings = {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(self._num_threads),
            "RAY_worker_niceness": "0",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        with contextlib.ExitStack() as stack:
            with self._screen.step(f"Starting {_count(self._num_nodes, 'Ray node')} on this machine"):
                cluster = stack.enter_context(demo_cluster(self._num_nodes, self._places.disk, settings))
            yield cluster

    def _prepare(self, cluster: DemoCluster) -> Plan:
        with self._screen.step("Preparing model and prompt") as step:
            work = cluster.run(
                0, demo_worker.prepare, _FLEET, self._document, self._question,
                model=self._model and self._model.resolve(), model_root=self._model_root(),
                num_threads=self._num_threads, salt=secrets.token_hex(8),
            )  # fmt: skip
            plan = _follow(step, work, Plan)
            step.result = (
                f"{len(plan.prompt):,} tokens; {_count(plan.num_blocks, 'block')} of {plan.spec.block_tokens} tokens, "
                f"{show_bytes(plan.prompt_bytes)} of KV in {plan.spec.layout.dtype}"
            )
        for note in plan.notes:
            self._screen.note(note)
        self._places.namespaces[:] = [plan.spec.namespace_id, demo_worker.filler_of(plan).namespace_id]
        return plan

    def _start_fleet(self, plan: Plan) -> kvfleet.Fleet:
        dram_bytes = self._arena_bytes(plan)
        # Where shared memory is scarce, as in containers by default, files on disk have to do.
        needed = self._num_nodes * dram_bytes
        roomy = shutil.disk_usage(self._places.memory).free > needed + self._num_nodes * OBJECT_STORE_BYTES
        root = self._places.memory if roomy else self._places.disk / "arenas"
        root.mkdir(mode=0o700, exist_ok=True)
        config = FleetConfig(
            name=_FLEET, dram_bytes=dram_bytes, arena_root=str(root), shared_url=self._places.shared_url
        )
        with self._screen.step("Starting the fleet") as step:
            fleet = kvfleet.start(config)
            fleet.up()
            step.result = f"{show_bytes(dram_bytes)} of cache on each node, shared storage {config.shared_url}"
        if not roomy:
            self._screen.note(f"{_SHARED_MEMORY} is small: the nodes' caches are files in {root}")
        return fleet

    @staticmethod
    def _arena_bytes(plan: Plan) -> int:
        """Room for the prompt and a little more, so that it does not take much to push it out."""
        return max(_ARENA_BYTES_MIN, plan.prompt_bytes * 5 // 4 + _SPARE_BLOCKS * plan.spec.layout.block_bytes)

    def _ask(self, cluster: DemoCluster, plan: Plan, node: int, where: str) -> None:
        """One run of the model, in a new process."""
        name = _name(node)
        with self._screen.step(f"Asking on node {name}, the document's KV is {where}") as step:
            answer = _follow(step, cluster.run(node, demo_worker.answer, plan), Answer)
            moved = f" from {sources(answer)}" if answer.bytes_by_source else ""
            step.result = f"{answer.reused_tokens:,} tokens reused{moved}, first token after {answer.ttft_s:.2f} s"
        self._rows.append(Row(where, name, answer))

    def _evict(self, cluster: DemoCluster, plan: Plan) -> None:
        with self._screen.step("Storing other KV on all nodes, until the document's is evicted") as step:
            filled = [
                _follow(step, cluster.run(node, demo_worker.evict, plan, self._arena_bytes(plan), node), Filled)
                for node in range(self._num_nodes)
            ]
            step.result = f"{show_bytes(sum(each.num_bytes for each in filled))} stored"
        left = sum(each.left_blocks for each in filled)
        if left:
            self._screen.note(f"{_count(left, 'block')} of the document could not be evicted")

    def _stop_fleet(self, fleet: kvfleet.Fleet) -> None:
        with self._screen.step("Stopping the fleet and Ray: only shared storage stays"):
            unsaved = fleet.stop()
        if unsaved:
            self._screen.note(f"{_count(unsaved, 'block')} could not be saved to shared storage")


def _follow(step: Step, work: Iterator[Event], result: type[T]) -> T:
    """Show the progress of some work and return its result, the last thing it yields."""
    last: Event | None = None
    for last in work:  # noqa: B007 - the last one counts
        if isinstance(last, Progress):
            step.show(last)
    if not isinstance(last, result):
        raise KvFleetError("a process of the demo ended without a result")
    return last


def _name(node: int) -> str:
    return "ABCD"[node]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

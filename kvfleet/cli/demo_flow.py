"""The demo's course of events, and the places it writes to."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar
from urllib.parse import urlsplit

from rich.console import Console

import kvfleet
from kvfleet.cli import demo_model, demo_worker
from kvfleet.cli.console import show_bytes
from kvfleet.cli.demo_cluster import OBJECT_STORE_BYTES, DemoCluster, demo_cluster
from kvfleet.cli.demo_messages import Answer, Event, Filled, Plan, Progress, Request
from kvfleet.cli.demo_screen import Row, Screen, Step, sources
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
    with contextlib.ExitStack() as stack:

        def directory(prefix: str, parent: Path) -> Path:
            return Path(stack.enter_context(TemporaryDirectory(None, prefix, parent, ignore_cleanup_errors=True)))

        # Ray keeps sockets there, and the path of a socket may have 107 characters: a long TMPDIR would not do.
        disk = directory("kvfleet-", Path("/tmp"))
        memory = directory("kvfleet-demo-", _SHARED_MEMORY) if os.access(_SHARED_MEMORY, os.W_OK) else disk
        places = Places(disk, memory, shared_url or f"file://{disk}/shared", shared_url is not None)
        try:
            yield places
        finally:
            if places.borrowed and places.namespaces:
                _delete_blocks(places.shared_url, places.namespaces)


def _delete_blocks(url: str, namespaces: list[bytes]) -> None:
    """Take the demo's blocks out of the user's storage, or say that they are still there."""
    tier = SharedTier(url, {}, _STORAGE_TIMEOUT_S)
    try:
        for namespace in namespaces:
            for page in tier.list(_RECORDS_MAX, [namespace]):
                for start in range(0, len(page), _RECORD_BYTES):
                    tier.delete(namespace, 1, BlockKey(page[start : start + KEY_BYTES]), 0)
    except KvFleetError as error:
        left = " and ".join(namespace.hex() for namespace in namespaces)
        Console(stderr=True).print(f"Not all of {left} could be deleted from {url}: {error}", markup=False)
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

    def show(self, notes: list[str]) -> list[Row]:
        """Run all steps, then show and return what the runs of the model gave.

        Raises:
            KvFleetError: something cannot work, and what.
        """
        self._check_model()
        self._screen.say("[bold]kvfleet demo[/bold]: one question about one document, asked again and again")
        for note in notes:
            self._screen.note(note)
        last = self._num_nodes - 1
        with contextlib.ExitStack() as stack:
            cluster = self._start_cluster(stack)
            plan = self._prepare(cluster)
            fleet = self._start_fleet(plan)
            rows = [
                self._ask(cluster, plan, 0, "recompute", "nothing is cached yet"),
                self._ask(cluster, plan, 0, "same node", "again, in a new process"),
                *(
                    self._ask(cluster, plan, node, "other node", "has never seen the document")
                    for node in range(1, self._num_nodes)
                ),
            ]
            self._evict(cluster, plan)
            rows.append(self._ask(cluster, plan, last, "evicted", "again, after the eviction"))
            self._stop(fleet, stack, left="only the shared storage")
        with contextlib.ExitStack() as stack:
            cluster = self._start_cluster(stack)
            fleet = self._start_fleet(plan)
            with self._screen.step("Listing the shared storage"):
                fleet.wait_for_shared(_LISTING_TIMEOUT_S)
            rows.append(self._ask(cluster, plan, 0, "restarted", "again, after the restart"))
            self._stop(fleet, stack, left="nothing")
        self._screen.conclude(self._question, len(plan.prompt), rows)
        return rows

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

    def _start_cluster(self, stack: contextlib.ExitStack) -> DemoCluster:
        settings = {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(self._num_threads),
            "RAY_worker_niceness": "0",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        with self._screen.step(f"Starting {_count(self._num_nodes, 'Ray node')} on this machine"):
            return stack.enter_context(demo_cluster(self._num_nodes, self._places.disk, settings))

    def _prepare(self, cluster: DemoCluster) -> Plan:
        with self._screen.step("Preparing model and prompt") as step:
            request = Request(
                fleet=_FLEET,
                document=self._document,
                question=self._question,
                model=self._model and self._model.resolve(),
                model_root=self._model_root(),
                num_threads=self._num_threads,
                salt=secrets.token_hex(8),
            )
            plan = _follow(step, cluster.run(0, demo_worker.prepare, request), Plan)
            step.result = (
                f"{len(plan.prompt):,} tokens; {_count(plan.num_blocks, 'block')} of {plan.spec.block_tokens} tokens, "
                f"{show_bytes(plan.prompt_bytes)} of KV in {plan.spec.layout.dtype}"
            )
        for note in plan.notes:
            self._screen.note(note)
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
            self._places.namespaces[:] = [plan.spec.namespace_id, demo_worker.filler_of(plan).namespace_id]
            fleet.up()
            step.result = f"{show_bytes(dram_bytes)} of cache on each node, shared storage {config.shared_url}"
        if not roomy:
            self._screen.note(f"{_SHARED_MEMORY} is small: the nodes' caches are files in {root}")
        return fleet

    @staticmethod
    def _arena_bytes(plan: Plan) -> int:
        """Room for the prompt and a little more, so that it does not take much to push it out."""
        return max(_ARENA_BYTES_MIN, plan.prompt_bytes * 5 // 4 + _SPARE_BLOCKS * plan.spec.layout.block_bytes)

    def _ask(self, cluster: DemoCluster, plan: Plan, node: int, title: str, situation: str) -> Row:
        """One run of the model, in a new process."""
        name = _name(node)
        with self._screen.step(f"Node {name}, {situation}") as step:
            answer = _follow(step, cluster.run(node, demo_worker.answer, plan), Answer)
            moved = f", {show_bytes(answer.num_bytes)} from {sources(answer)}" if answer.num_bytes else ""
            step.result = (
                f"{answer.reused_tokens:,} of {len(plan.prompt):,} tokens reused{moved}; "
                f"first token after {answer.ttft_s:.2f} s"
            )
        return Row(title, name, answer)

    def _evict(self, cluster: DemoCluster, plan: Plan) -> None:
        with self._screen.step("Storing other KV everywhere, until the document's is evicted") as step:
            filled = [
                _follow(step, cluster.run(node, demo_worker.evict, plan, self._arena_bytes(plan), node), Filled)
                for node in range(self._num_nodes)
            ]
            step.result = f"{show_bytes(sum(each.num_bytes for each in filled))} stored"
        left = sum(each.left_blocks for each in filled)
        if left:
            self._screen.note(f"{_count(left, 'block')} of the document could not be evicted")

    def _stop(self, fleet: kvfleet.Fleet, cluster: contextlib.ExitStack, *, left: str) -> None:
        with self._screen.step(f"Stopping the fleet and Ray: {left} stays"):
            unsaved = fleet.stop()
            cluster.close()
        if unsaved:
            self._screen.note(f"{_count(unsaved, 'block')} could not be saved to the shared storage")


def _follow(step: Step, work: Iterator[Event], result: type[T]) -> T:
    """Show the progress of some work and return its result, the last thing it yields."""
    last: Event | None = None
    for last in work:
        if isinstance(last, Progress):
            step.show(last)
    if not isinstance(last, result):
        raise KvFleetError("a process of the demo ended without a result")
    return last


def _name(node: int) -> str:
    return "ABCD"[node]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

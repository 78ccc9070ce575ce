"""Ray Serve with real vLLM engines on two Ray nodes of this machine. Needs `ray[serve]`, vLLM, and SmolLM2 prepared.

Engines start slowly, so each module starts one application and its tests share it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve import Application

import kvfleet
from kvfleet import Fleet, FleetConfig
from kvfleet.cli.demo_model import cache_directory, prepare_smollm2
from kvfleet.node.manager import NodeStatus
from tests.conftest import MIB, SHARED_MEMORY, wait_for

MODEL = str(prepare_smollm2(cache_directory()))
ENGINE = {"max_model_len": 2048, "dtype": "float32", "block_size": 32, "engine_kwargs": {"enforce_eager": True}}
RULES = "".join(f"Rule {i}: be brief and precise when somebody asks about place number {i}. " for i in range(50))
START_TIMEOUT_S = 600.0  # of the test that has the engines started; alone on two cores it takes 100 s
_ANSWER_TIMEOUT_S = 240.0
# A replica takes two: one on each node, beside the ingress on one of them.
_CPUS = 3

# Inherited by Ray's processes, and by the engines.
os.environ.update(
    {
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
)


@dataclass(frozen=True)
class Answer:
    """What came of a request.

    Attributes:
        chunks: of the text, as they came.
        usage: as vLLM counted it.
    """

    chunks: tuple[str, ...]
    usage: dict[str, Any]

    @property
    def text(self) -> str:
        return "".join(self.chunks)


@dataclass(frozen=True)
class Serving:
    """A cluster of two nodes with Serve on it, and one fleet."""

    cluster: Cluster
    port: int
    fleet: Fleet
    started: list[_Started] = field(default_factory=list)

    def note_processes(self) -> None:
        """Remember what runs now, to be cleared away at the end. To be called before engines are ended."""
        self.started.extend(_grandchildren())

    @property
    def nodes(self) -> list[str]:
        """Ray node ids."""
        return [node.node_id for node in self.cluster.list_all_nodes()]

    def ask(self, prompt: str, **more: object) -> Answer:
        """Answer a prompt, streamed."""
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": 12,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **more,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        chunks: list[str] = []
        usage: dict[str, Any] = {}
        with urllib.request.urlopen(request, timeout=_ANSWER_TIMEOUT_S) as response:
            assert response.headers["Content-Type"].startswith("text/event-stream")
            for event in _events(response):
                chunks += [choice["text"] for choice in event["choices"] if choice["text"]]
                usage = event.get("usage") or usage
        return Answer(tuple(chunks), usage)

    def node(self, node: str) -> NodeStatus:
        return next(found for found in self.fleet.status().nodes if found.node_id == node)

    def from_peers(self, node: str) -> int:
        """Bytes that a node has loaded from other nodes."""
        return (self.node(node).loaded_bytes or {}).get("peer", 0)

    def findable(self, node: str) -> int:
        """Blocks on a node that the whole fleet can find."""
        directory = self.fleet.status().directory
        assert directory is not None
        return next(found.records for found in directory.stats.nodes if found.node == node)


def _events(response: Any) -> Iterator[dict[str, Any]]:
    """Server-sent events, up to the one that says that it is over."""
    for line in response:
        data = line.decode().removeprefix("data:").strip()
        if data == "[DONE]":
            return
        if data:
            yield json.loads(data)
    raise AssertionError("the stream broke off")


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    """Two nodes, Serve, and a fleet that runs; the module deploys what it likes."""
    cluster = Cluster()
    serving = None
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=_CPUS, object_store_memory=256 * MIB, include_dashboard=False)
        ray.init(address=cluster.address, log_to_driver=False)
        port = _free_port()
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        name = f"serve-{secrets.token_hex(4)}"
        fleet = kvfleet.start(FleetConfig(name=name, dram_bytes=256 * MIB, plan_loads=False))
        fleet.up()
        serving = Serving(cluster, port, fleet)
        yield serving
        serving.note_processes()
        serve.shutdown()
        assert fleet.stop() == 0
    finally:
        started = [*(serving.started if serving is not None else ()), *_grandchildren()]
        ray.shutdown()
        cluster.shutdown()
        _clear_away(started)


def deploy(application: Application, name: str) -> None:
    """Deploy an application, and wait until it runs."""
    try:
        serve.run(application, name=name)
    except RuntimeError as error:
        raise AssertionError(str(serve.status().applications[name])) from error


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


# --- leaving nothing behind: an engine that is killed leaves children and shared memory


@dataclass(frozen=True)
class _Started:
    """A process of ours: its start time tells it from a later one with the same number."""

    pid: int
    since: str
    shared_memory: frozenset[Path]

    def runs(self) -> bool:
        found = _stat(self.pid)
        return found is not None and found[19] == self.since and found[0] not in "ZX"


def _stat(pid: int) -> list[str] | None:
    """The fields of `/proc/<pid>/stat` from the process's state on; None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _grandchildren() -> list[_Started]:
    """What descends from this process's children. The children themselves are Ray's servers, which it ends."""
    stats = {int(path.name): _stat(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    parents = {pid: int(stat[1]) for pid, stat in stats.items() if stat is not None}

    def depth(pid: int) -> int:
        """Generations below this process; 0 if it does not descend from it."""
        generations = 0
        while pid in parents and pid != os.getpid():
            pid, generations = parents[pid], generations + 1
        return generations if pid == os.getpid() else 0

    return [_Started(pid, stat[19], _mapped(pid)) for pid, stat in stats.items() if stat is not None and depth(pid) > 1]


def _mapped(pid: int) -> frozenset[Path]:
    """Message queues and semaphores of vLLM in shared memory that a process uses."""
    found = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            path = Path(line.split(maxsplit=5)[-1])
            if path.parent == SHARED_MEMORY and path.name.startswith(("psm_", "sem.mp-")):
                found.add(path)
    return frozenset(found)


def _clear_away(started: list[_Started]) -> None:
    with contextlib.suppress(AssertionError):
        wait_for(lambda: not any(process.runs() for process in started), "all have ended by themselves", 30.0)
    for process in started:
        if process.runs():
            os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: not any(process.runs() for process in started), "all have ended")
    for path in frozenset().union(*(process.shared_memory for process in started)):
        path.unlink(missing_ok=True)

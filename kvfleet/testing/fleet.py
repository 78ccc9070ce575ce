"""`LocalFleet`: a whole fleet in one thread, under virtual time, the same for the same seed.

It runs kvfleet's own code, unchanged: managers, the directory, clients with their store threads, and their calls. What
is simulated is the world around it: Ray (`actors`), the network, the clock, threads, drives, the shared tier's storage.
Arenas are real files.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import Self

from kvfleet import actors
from kvfleet.calls import DirectoryCalls, ManagerCalls
from kvfleet.client import Client
from kvfleet.config import KIB, MIB, FleetConfig
from kvfleet.core.directory import NodeId
from kvfleet.core.layout import ModelSpec
from kvfleet.node.arenadir import FileLock, directory_for
from kvfleet.node.directory import DirectoryService
from kvfleet.node.manager import TierManager
from kvfleet.node.startup import NodePlace
from kvfleet.testing.actors import Actor, Cluster
from kvfleet.testing.blocking import pause
from kvfleet.testing.drives import Media
from kvfleet.testing.loop import VirtualLoop
from kvfleet.testing.network import Network, Weather
from kvfleet.testing.processes import Process
from kvfleet.testing.stage import DIRECTORY, manager_name, staged
from kvfleet.testing.storage import Storage

__all__ = ["LocalClient", "LocalFleet", "LocalNode"]

T = TypeVar("T")
_TRACE_LINES = 200

# Small, so that everything is short of room, and quick, so that a run is.
SETTINGS: dict[str, Any] = {
    "dram_bytes": MIB,
    "lookup_timeout_s": 0.5,
    "load_timeout_s": 4.0,
    "store_timeout_s": 6.0,
    "attach_timeout_s": 3.0,
    "holder_timeout_s": 1.0,
    "shared_timeout_s": 2.0,
    "window_bytes_min": 24 * KIB,
    "window_bytes_max": 96 * KIB,
    "save_inflight_max": 2,
    "load_inflight_max": 2,
    "inventory_page_records": 10,
    "manifest_interval_s": 1.0,
}


class LocalNode:
    """One node: its manager, its arena, its clients.

    Attributes:
        number: from 0; a node that replaces a lost one has a number of its own.
        manager: its actor.
        alive: False once the node was lost.
    """

    def __init__(self, number: int, root: Path, config: FleetConfig, manager: Actor) -> None:
        self.number = number
        self.node_id = NodeId(f"{number:032x}")
        self.host = manager.host
        self.root = root
        self.config = dataclasses.replace(config, arena_root=str(root))
        self.manager = manager
        self.clients: list[LocalClient] = []
        self.alive = True

    @property
    def tier(self) -> Any:  # noqa: ANN401  the parts of a TierManager are its own
        """The parts of the running manager; None while it is away or has no arena."""
        return None if self.manager.instance is None else self.manager.instance._node


class LocalClient:
    """A client process of a node."""

    def __init__(self, node: LocalNode, process: Process, client: Client) -> None:
        self.node = node
        self.process = process
        self.client = client

    def start(self, work: Callable[[Client], T]) -> asyncio.Future[T]:
        """Run something as this client; its result comes later, and never if the client is killed."""
        loop = self.process.loop
        future: asyncio.Future[T] = loop.create_future()
        self.process.run(loop.spawn, lambda: future.set_result(work(self.client)))
        return future

    def kill(self) -> None:
        """As `kill -9` does: its lock is free, nothing else is cleaned up."""
        self.process.kill()
        self.node.clients.remove(self)
        _unlock(self.client._node._client_lock)


class LocalFleet:
    """A running fleet. Use it as a context manager; one at a time in a process.

    Attributes:
        seed: decides everything that is left to chance.
        problems: rules that were broken, beside those that raised.
    """

    def __init__(self, seed: int, num_nodes: int = 3, *, weather: Weather | None = None, **settings: Any) -> None:  # noqa: ANN401
        self.seed = seed
        self.loop = VirtualLoop(seed)  # type: ignore[abstract]
        self.network = Network(self.loop, seed, weather or Weather())
        self.storage = Storage(self.loop, seed)
        self.media = Media(self.loop, seed)
        self.cluster = Cluster(self.network, self.note, self.loop.problems.append, self._serve)
        self.trace: deque[str] = deque(maxlen=_TRACE_LINES)
        self._digest = hashlib.blake2b()
        self._end = ExitStack()
        self._root = Path(tempfile.mkdtemp(prefix="kvfleet-sim-", dir="/dev/shm"))
        self._end.callback(shutil.rmtree, self._root, ignore_errors=True)
        self._end.enter_context(staged(self.cluster, self.storage, self.media, seed))
        self._end.callback(self.loop.close)
        self.config = FleetConfig(name="simulated", **{"shared_url": "memory://blocks", **SETTINGS, **settings})
        self.nodes: list[LocalNode] = []
        self.live_nodes: set[NodeId] = set()
        self.directory = self.cluster.actor(DIRECTORY, "directory")
        self.on_served: list[Callable[[Any, str, tuple[Any, ...]], Callable[[Any], None]]] = []
        self._num_clients = 0
        self._num_nodes = num_nodes
        try:
            self.run(self._start)
        except BaseException:
            self._end.close()
            raise

    def _start(self) -> None:
        self.start_directory()
        for _ in range(self._num_nodes):
            self.add_node()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything, and leave nothing behind."""
        for node in self.nodes:
            if node.alive:
                self.lose(node, notice_s=0.0)
        self._end.close()

    # running

    def run(self, function: Callable[[], T]) -> T:
        """Run a function that may block, and the fleet with it, until it returns."""
        return self.loop.run(function)

    def sleep(self, seconds: float) -> None:
        """Let the fleet go on for some virtual seconds; inside of `run`."""
        pause(self.loop, seconds)

    @property
    def now(self) -> float:
        """Virtual seconds."""
        return self.loop.time()

    def note(self, *what: object) -> None:
        """A line of the trace."""
        line = f"{self.loop.time():.6f} {' '.join(map(str, what))}"
        self.trace.append(line)
        self._digest.update(line.encode())

    @property
    def digest(self) -> str:
        """Of the trace so far: two runs with one digest went the same way."""
        return self._digest.hexdigest()[:32]

    async def _serve(self, instance: Any, method: str, args: tuple[Any, ...]) -> Any:  # noqa: ANN401
        after = [look(instance, method, args) for look in self.on_served]
        result = await getattr(instance, method)(*args)
        for see in after:
            see(result)
        return result

    # the directory

    def start_directory(self) -> None:
        """Start the directory, empty."""
        self.note("start directory")
        self.directory.start(lambda: DirectoryService(self.config, lambda: frozenset(self.live_nodes)))

    def kill_directory(self) -> None:
        """It is gone until it is started again."""
        self.note("kill directory")
        self.directory.kill()

    # nodes

    def add_node(self) -> LocalNode:
        """A new node joins, with an empty arena."""
        number = len(self.nodes)
        root = self._root / str(number)
        root.mkdir()
        manager = self.cluster.actor(manager_name(f"{number:x}"), f"host {number}")
        node = LocalNode(number, root, self.config, manager)
        self.nodes.append(node)
        self.live_nodes.add(node.node_id)
        self.start_manager(node)
        return node

    def start_manager(self, node: LocalNode) -> None:
        """Start a node's manager, on the arena that is there if there is one."""
        self.note("start", node.manager.name)
        place = NodePlace(node.node_id, os.getpid(), 4 * MIB, lambda _: True)
        node.manager.start(
            lambda: TierManager(
                node.config, place, actors._DirectoryLink(self.config.name), partial(actors._transport, node.config)
            )
        )

    def kill_manager(self, node: LocalNode) -> None:
        """It is gone until it is started again; the arena stays."""
        self.note("kill", node.manager.name)
        tier = node.tier
        node.manager.kill()
        if tier is not None:
            _unlock(tier.home.lock)

    def lose(self, node: LocalNode, notice_s: float) -> None:
        """A node is gone for good, with its arena, its drive and its clients; Ray knows it after a time."""
        self.note("lose node", node.number)
        for client in list(node.clients):
            client.kill()
        if node.manager.process is not None:
            self.kill_manager(node)
        node.alive = False
        del self.cluster.actors[node.manager.name]
        shutil.rmtree(node.root)
        self.loop.call_later(notice_s, self.live_nodes.discard, node.node_id)

    def wipe(self, node: LocalNode) -> None:
        """The arena of a node whose manager is away is gone: its memory was cleared. Its drive is as it was."""
        assert node.manager.process is None
        self.note("wipe arena of", node.number)
        shutil.rmtree(directory_for(node.root, self.config.name, node.node_id))

    @property
    def alive(self) -> list[LocalNode]:
        """Nodes that are not lost; their managers may be away."""
        return [node for node in self.nodes if node.alive]

    # clients

    def client(self, node: LocalNode, spec: ModelSpec, shard: int = 0) -> LocalClient:
        """A new client process on a node."""
        self._num_clients += 1
        process = Process(self.loop, f"client {self._num_clients}", node.host)
        made = process.run(
            lambda: Client(
                spec,
                ManagerCalls(node.config, node.node_id),
                DirectoryCalls(self.config.name),
                node.config,
                shard=shard,
            )
        )
        client = LocalClient(node, process, made)
        node.clients.append(client)
        return client


def _unlock(lock: FileLock | None) -> None:
    if lock is not None:
        lock.release()

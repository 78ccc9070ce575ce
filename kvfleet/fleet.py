"""Starting, joining, watching and stopping a fleet."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray._private import worker
from ray.exceptions import RayError

from kvfleet import actors
from kvfleet.calls import DirectoryCalls, ManagerCalls, running_config
from kvfleet.client import Client
from kvfleet.config import FleetConfig
from kvfleet.core.directory import NodeId
from kvfleet.core.layout import ModelSpec
from kvfleet.core.totals import Totals
from kvfleet.errors import ConfigError, KvFleetError, TierUnavailableError
from kvfleet.node.directory import DirectoryStatus
from kvfleet.node.draining import Drained
from kvfleet.node.status import NodeStatus
from kvfleet.node.tallies import Request

__all__ = ["Fleet", "FleetStatus", "connect", "start"]

_log = logging.getLogger(__name__)
_CALL_TIMEOUT_S = 10.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """A fleet at a moment.

    Attributes:
        nodes: those that answered; nodes without a manager are not among them.
        silent: Ray node ids of managers that did not answer.
        directory: None if it did not answer.
    """

    name: str
    nodes: tuple[NodeStatus, ...]
    silent: tuple[str, ...]
    directory: DirectoryStatus | None

    @property
    def totals(self) -> Totals:
        """What engines of all nodes that answered asked for and got."""
        return Totals.sum(node.totals for node in self.nodes)


class Fleet:
    """A running fleet, as seen from one process of it. Get one from `start` or `connect`."""

    def __init__(self, config: FleetConfig, *, owns_ray: bool, node_id: str | None = None) -> None:
        self.config = config
        self._owns_ray = owns_ray
        self._node_id = node_id
        self._clients: list[Client] = []

    def client(self, model: ModelSpec, *, shard: int = 0) -> Client:
        """A client for one model on this node. The node's manager is started if there is none.

        Args:
            model: which model's KV, and its layout.
            shard: tensor-parallel rank, below the layout's `num_shards`.
        """
        calls = ManagerCalls(self.config, self._node_id or _here())
        client = Client(model, calls, DirectoryCalls(self.config.name), self.config, shard=shard)
        self._clients = [other for other in self._clients if not other.closed]
        self._clients.append(client)
        return client

    def up(self) -> FleetStatus:
        """Start a manager on every node that has none, and wait until all have their arena.

        Raises:
            ConfigError: nodes that cannot have one, and why. The others are up.
        """
        managers = {node: actors.manager_actor(self.config, node) for node in sorted(actors.live_nodes())}
        problems = []
        calls = {node: manager.attach.remote() for node, manager in managers.items()}
        deadline = time.monotonic() + self.config.attach_timeout_s
        for node, call in calls.items():
            attachment = actors.answer(call, deadline)
            problem = "its manager does not answer" if attachment is None else attachment.problem
            if problem:
                problems.append(f"node {node[:8]}: {problem}")
        if problems:
            raise ConfigError("fleet", "; ".join(problems))
        return self.status()

    def status(self) -> FleetStatus:
        """Ask the directory and all managers. Takes at most some seconds, whoever does not answer."""
        calls = {node: manager.status.remote() for node, manager in self._managers().items()}
        nodes: list[NodeStatus] = []
        silent: list[str] = []
        deadline = time.monotonic() + _CALL_TIMEOUT_S
        for node, call in calls.items():
            answer = actors.answer(call, deadline)
            if answer is None:
                silent.append(node)
            else:
                nodes.append(answer)
        return FleetStatus(self.config.name, tuple(nodes), tuple(silent), self._directory_status())

    def requests(self, wanted: str = "", limit: int = 20) -> list[tuple[NodeId, Request]]:
        """The newest requests of engines that are in the fleet, and their nodes; newest first.

        Args:
            wanted: beginning of a request's label, or of its first or last key in hex; "" for all.
            limit: at most so many.
        """
        calls = {node: manager.requests.remote(wanted, limit) for node, manager in self._managers().items()}
        deadline = time.monotonic() + _CALL_TIMEOUT_S
        answers = {node: actors.answer(call, deadline) or [] for node, call in calls.items()}
        found = [(node, request) for node, requests in answers.items() for request in requests]
        return sorted(found, key=lambda pair: pair[1].asked_ns, reverse=True)[:limit]

    def _managers(self) -> dict[NodeId, Any]:
        found = {node: actors.find_manager(self.config.name, node) for node in sorted(actors.live_nodes())}
        return {node: manager for node, manager in found.items() if manager is not None}

    def _directory_status(self) -> DirectoryStatus | None:
        directory = actors.find_directory(self.config.name)
        if directory is None:
            return None
        status: DirectoryStatus | None = actors.answer(directory.status.remote(), time.monotonic() + _CALL_TIMEOUT_S)
        return status

    def drain(self, node: str, *, timeout_s: float = 60.0, bytes_max: int | None = None) -> Drained:
        """Prepare a node to leave: it takes no more stores, and saves what the shared tier lacks, the best first.

        Loads from it go on. It stays like this until `resume`, or until the node is gone.

        Args:
            node: Ray node id, or a beginning of it that no other node has.
            timeout_s: no write begins after it.
            bytes_max: of blocks written; None for no limit.

        Raises:
            ConfigError: no node, or several, begin like that, or it has no manager. Nothing was done.
            TierUnavailableError: the manager did not answer; the node may be draining.
        """
        drained: Drained = self._ask(node, "leave", timeout_s, timeout_s, bytes_max)
        return drained

    def resume(self, node: str) -> None:
        """Have a node that was drained take stores again. Raises as `drain` does."""
        self._ask(node, "stay", 0.0)

    def _ask(self, node: str, method: str, timeout_s: float, *args: object) -> Any:  # noqa: ANN401  what it returns
        found = {full: manager for full, manager in self._managers().items() if full.startswith(node)}
        if len(found) != 1:
            raise ConfigError("node", f"{len(found)} nodes with a manager begin with {node!r}")
        (manager,) = found.values()
        try:
            return ray.get(getattr(manager, method).remote(*args), timeout=timeout_s + _CALL_TIMEOUT_S)
        except (RayError, TimeoutError) as error:
            raise TierUnavailableError("dram", f"node {node}: {actors.first_line(error)}") from error

    def wait_for_shared(self, timeout_s: float) -> bool:
        """Wait until the contents of the shared tier are known after a start. False: not within `timeout_s`.

        Lookups need not wait for this; before it, blocks that only the shared tier has may be missed.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            status = self._directory_status()
            if status is not None and status.shared_listed:
                return True
            time.sleep(_POLL_S)
        return False

    def close(self) -> None:
        """Finish this process's clients. The fleet goes on."""
        for client in self._clients:
            client.close()
        self._clients.clear()

    def stop(self, *, drain_timeout_s: float = 60.0) -> int:
        """End the fleet: save what the shared tier does not have yet, then stop all its actors and free the arenas.

        Ray goes on, unless `start` had started it. Stopping twice is fine.

        Args:
            drain_timeout_s: longest time for saving.

        Returns:
            How many blocks could not be saved; 0 without a shared tier.
        """
        if not ray.is_initialized():
            return 0  # the Ray that we had started is gone, and the fleet with it
        self.close()
        managers = self._managers()
        # Tried again while a manager restarts: both calls may be made twice.
        drains = [m.drain.options(max_task_retries=3).remote(drain_timeout_s) for m in managers.values()]
        unsaved: int = sum(actors.gather(drains, drain_timeout_s))
        directory = actors.find_directory(self.config.name)
        if directory is not None:
            ray.kill(directory, no_restart=True)  # first: without it no client starts another manager
        managers = self._managers()
        actors.gather([m.shutdown.options(max_task_retries=3).remote() for m in managers.values()], _CALL_TIMEOUT_S)
        for manager in managers.values():
            ray.kill(manager, no_restart=True)
        self._wait_until_gone()
        if self._owns_ray:
            ray.shutdown()
        return unsaved

    def _wait_until_gone(self) -> None:
        """Ray takes a moment to forget killed actors: whoever starts the fleet again must not find them."""
        deadline = time.monotonic() + _CALL_TIMEOUT_S
        while self._managers() or actors.find_directory(self.config.name) is not None:
            if time.monotonic() > deadline:
                _log.warning("Ray still names actors of fleet %s", self.config.name)
                return
            time.sleep(_POLL_S)


def _here() -> str:
    node: str = ray.get_runtime_context().get_node_id()
    return node


def _join_ray(address: str | None) -> bool:
    """Connect to Ray, unless this process is. Returns whether a new Ray was started for that."""
    if ray.is_initialized():
        return False
    ray.init(address=address, include_dashboard=False, log_to_driver=False, configure_logging=False)
    node = worker._global_node  # nothing public tells whether it is ours
    return node is not None and node.head


def start(config: FleetConfig | None = None, *, address: str | None = None) -> Fleet:
    """Start a fleet, and this node's manager with it. Managers of other nodes start with their first client, or `up`.

    A fleet of that name and with those settings that runs already is joined.

    Args:
        config: settings; they hold for the whole fleet until it is stopped.
        address: of a Ray cluster. None: the one this process is connected to, else the one that RAY_ADDRESS or
            `ray start` on this machine names, else a new one on this machine.

    Raises:
        ConfigError: a fleet of that name runs already with other settings; or this node cannot have an arena, and
            why. A new fleet is gone again then; one that ran before goes on without this node.
        KvFleetError: the actors did not start within `attach_timeout_s`. Likewise.
        ConnectionError: there is no Ray at `address`.
    """
    config = config or FleetConfig()
    fleet = Fleet(config, owns_ray=_join_ray(address))
    joins = actors.find_directory(config.name) is not None
    actors.directory_actor(config)
    try:
        if running_config(config.name, config.attach_timeout_s) != config:
            joins = True  # if not before, then another process was faster just now
            problem = f"a fleet {config.name!r} runs with other settings: connect to it, or stop it first"
            raise ConfigError("name", problem)
        attachment = ManagerCalls(config, _here()).attach(config.attach_timeout_s)
        if attachment.problem:
            raise ConfigError("fleet", attachment.problem)
    except KvFleetError:
        if not joins:
            fleet.stop(drain_timeout_s=0.0)
        raise
    return fleet


def connect(name: str = "default", *, address: str | None = None, node_id: str | None = None) -> Fleet:
    """Join a running fleet from any process of its Ray cluster.

    Args:
        name: of the fleet.
        address: of the Ray cluster. None: the one this process is connected to, else any that runs here.
        node_id: of the Ray node whose arena clients use, in hex. None: the one this process hangs on. For children of
            Ray workers on machines that run several Ray nodes: they may hang on another than their parent. A Ray
            worker uses its own in any case.

    Raises:
        ConfigError: there is no such fleet.
        DirectoryUnavailableError: it does not answer.
        ConnectionError: there is no Ray at `address`.
    """
    _join_ray(address or "auto")
    if worker.global_worker.mode == ray.WORKER_MODE:
        node_id = None
    return Fleet(running_config(name, _CALL_TIMEOUT_S), owns_ray=False, node_id=node_id)

"""Starting, joining and using a fleet."""

from __future__ import annotations

import time
from collections.abc import Callable

import ray
from ray._private import worker
from typing_extensions import override

from kvfleet import actors
from kvfleet.arguments import check_kind, check_timeout
from kvfleet.calls import DirectoryCalls, ManagerCalls, running_config
from kvfleet.client import Client
from kvfleet.config import FleetConfig
from kvfleet.core.layout import ModelSpec
from kvfleet.errors import ConfigError, KvFleetError
from kvfleet.node.directory import DirectoryStatus
from kvfleet.operating import CALL_TIMEOUT_S, POLL_S, FleetStatus, Operator, join_ray

__all__ = ["Fleet", "FleetStatus", "connect", "start"]

_TIERS_TIMEOUT_S = 10.0  # a drive or storage that takes longer is shown as not tried yet


class Fleet(Operator):
    """A running fleet, as seen from one process of it. Get one from `start` or `connect`.

    `stop` ends Ray as well if `start` had started it.
    """

    def __init__(self, config: FleetConfig, *, owns_ray: bool, node_id: str | None = None) -> None:
        super().__init__(config.name)
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

        Then until they have tried their drives and the shared tier, at most 10 s.

        Raises:
            ConfigError: nodes that cannot have one, and why. The others are up.
        """
        managers = {node: actors.manager_actor(self.config, node) for node in sorted(actors.live_nodes())}
        problems = []
        calls = {node: manager.attach.remote() for node, manager in managers.items()}
        attachments = actors.collect(calls, self.config.attach_timeout_s)
        for node in calls:
            attachment = attachments.get(node)
            problem = "its manager does not answer" if attachment is None else attachment.problem
            if problem:
                problems.append(f"node {node[:8]}: {problem}")
        if problems:
            raise ConfigError("", "; ".join(problems))
        deadline = time.monotonic() + _TIERS_TIMEOUT_S
        while True:
            found = self.status()
            tried = [node.shared_tried and all(drive.tried for drive in node.drives) for node in found.nodes]
            if all(tried) or time.monotonic() > deadline:
                return found
            time.sleep(POLL_S)

    def wait_for_shared(self, timeout_s: float) -> bool:
        """Wait until the contents of the shared tier are known after a start. False: not within `timeout_s`.

        Lookups need not wait for this; before it, blocks that only the shared tier has may be missed.
        """
        check_timeout(timeout_s, optional=False)
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            directory = actors.find_directory(self.name)
            if directory is not None:
                status: DirectoryStatus | None = actors.collect({"": directory.status.remote()}, left).get("")
                if status is not None and status.shared_listed:
                    return True
            time.sleep(POLL_S)
        return False

    def close(self) -> None:
        """Finish this process's clients. The fleet goes on."""
        for client in self._clients:
            client.close()
        self._clients.clear()

    @override
    def stop(self, *, drain_timeout_s: float = 60.0, on_progress: Callable[[int], None] | None = None) -> int:
        if not ray.is_initialized():
            return 0  # the Ray that we had started is gone, and the fleet with it
        self.close()
        unsaved = super().stop(drain_timeout_s=drain_timeout_s, on_progress=on_progress)
        if self._owns_ray:
            ray.shutdown()
        return unsaved


def _here() -> str:
    node: str = ray.get_runtime_context().get_node_id()
    return node


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
    config = FleetConfig() if config is None else config
    check_kind(config, "config", FleetConfig)
    fleet = Fleet(config, owns_ray=join_ray(address))
    joins = actors.find_directory(config.name) is not None
    actors.directory_actor(config)
    try:
        if running_config(config.name, config.attach_timeout_s) != config:
            joins = True  # if not before, then another process was faster just now
            problem = f"a fleet {config.name!r} runs with other settings: connect to it, or stop it first"
            raise ConfigError("", problem)
        attachment = ManagerCalls(config, _here()).attach(config.attach_timeout_s)
        if attachment.problem:
            raise ConfigError("", attachment.problem)
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
    join_ray(address or "auto")
    if worker.global_worker.mode == ray.WORKER_MODE:
        node_id = None
    return Fleet(running_config(name, CALL_TIMEOUT_S), owns_ray=False, node_id=node_id)

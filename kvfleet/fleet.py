"""Starting, joining, watching and stopping a fleet."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from kvfleet import actors
from kvfleet.client import Client
from kvfleet.config import FleetConfig
from kvfleet.core.directory import NodeId
from kvfleet.core.layout import ModelSpec
from kvfleet.errors import ConfigError, DirectoryUnavailableError
from kvfleet.node.directory import DirectoryStatus
from kvfleet.node.manager import NodeStatus

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


class Fleet:
    """A running fleet, as seen from one process of it. Get one from `start` or `connect`."""

    def __init__(self, config: FleetConfig, *, owns_ray: bool) -> None:
        self.config = config
        self._owns_ray = owns_ray
        self._clients: list[Client] = []

    def client(self, model: ModelSpec, *, shard: int = 0) -> Client:
        """A client for one model on this node. The node's manager is started if there is none.

        Args:
            model: which model's KV, and its layout.
            shard: tensor-parallel rank, below the layout's `num_shards`.
        """
        calls = actors.ManagerCalls(self.config, _here())
        client = Client(model, calls, actors.DirectoryCalls(self.config.name), self.config, shard=shard)
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
            attachment = _answer(call, deadline)
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
            answer = _answer(call, deadline)
            if answer is None:
                silent.append(node)
            else:
                nodes.append(answer)
        return FleetStatus(self.config.name, tuple(nodes), tuple(silent), self._directory_status())

    def _managers(self) -> dict[NodeId, Any]:
        found = {node: actors.find_manager(self.config.name, node) for node in sorted(actors.live_nodes())}
        return {node: manager for node, manager in found.items() if manager is not None}

    def _directory_status(self) -> DirectoryStatus | None:
        try:
            directory = actors.get_directory(self.config.name)
            status: DirectoryStatus = ray.get(directory.status.remote(), timeout=_CALL_TIMEOUT_S)
        except (RayError, ValueError):
            return None
        return status

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

        Ray goes on, unless `start` had started it.

        Args:
            drain_timeout_s: longest time for saving.

        Returns:
            How many blocks could not be saved; 0 without a shared tier.
        """
        self.close()
        managers = self._managers()
        unsaved: int = sum(_gather([m.drain.remote(drain_timeout_s) for m in managers.values()], drain_timeout_s))
        _gather([m.shutdown.remote() for m in managers.values()], _CALL_TIMEOUT_S)
        for manager in managers.values():
            ray.kill(manager, no_restart=True)
        try:
            ray.kill(actors.get_directory(self.config.name), no_restart=True)
        except ValueError:
            _log.info("the directory was gone already")
        if self._owns_ray:
            ray.shutdown()
        return unsaved


def _gather(calls: list[Any], timeout_s: float) -> list[Any]:
    """Answers of those that answer in time."""
    deadline = time.monotonic() + timeout_s + 1.0
    answers = [_answer(call, deadline) for call in calls]
    return [answer for answer in answers if answer is not None]


def _answer(call: Any, deadline: float) -> Any:  # noqa: ANN401  whatever was called
    """The answer to a call; None if it fails or does not come before a monotonic time."""
    try:
        return ray.get(call, timeout=max(0.1, deadline - time.monotonic()))
    except RayError as error:
        _log.warning("no answer from a manager: %s", error)
        return None


def _here() -> str:
    node: str = ray.get_runtime_context().get_node_id()
    return node


def _join_ray(address: str | None) -> bool:
    """Connect to Ray. Returns whether we started it."""
    if ray.is_initialized():
        return False
    context = ray.init(address=address, include_dashboard=False, log_to_driver=False, configure_logging=False)
    return address is None and "started" in str(context)


def start(config: FleetConfig | None = None, *, address: str | None = None) -> Fleet:
    """Start a fleet, and this node's manager with it. Managers of other nodes start with their first client, or `up`.

    Args:
        config: settings; they hold for the whole fleet until it is stopped.
        address: of a Ray cluster. None: the one this process is connected to, else one found running, else a new
            one on this machine.

    Raises:
        ConfigError: a fleet of that name runs already with other settings; or this node cannot have an arena, and
            why. Nothing is left running.
    """
    config = config or FleetConfig()
    owns_ray = _join_ray(address)
    fleet = Fleet(config, owns_ray=owns_ray)
    directory = actors.directory_actor(config, _here())
    running: FleetConfig = ray.get(directory.config.remote(), timeout=config.attach_timeout_s)
    if running != config:
        raise ConfigError("name", f"a fleet {config.name!r} runs with other settings: connect to it, or stop it first")
    manager = actors.manager_actor(config, _here())
    attachment = ray.get(manager.attach.remote(), timeout=config.attach_timeout_s)
    if attachment.problem:
        fleet.stop(drain_timeout_s=0.1)
        raise ConfigError("fleet", attachment.problem)
    return fleet


def connect(name: str = "default", *, address: str | None = None) -> Fleet:
    """Join a running fleet from any process of its Ray cluster.

    Raises:
        ConfigError: there is no such fleet.
        DirectoryUnavailableError: it does not answer.
    """
    _join_ray(address or "auto")
    try:
        directory = actors.get_directory(name)
    except ValueError as error:
        raise ConfigError("name", f"no fleet {name!r} is running here; `kvfleet up` starts one") from error
    try:
        config: FleetConfig = ray.get(directory.config.remote(), timeout=_CALL_TIMEOUT_S)
    except RayError as error:
        raise DirectoryUnavailableError(str(error)) from error
    return Fleet(config, owns_ray=False)

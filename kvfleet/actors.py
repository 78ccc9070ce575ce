"""kvfleet's two kinds of Ray actors, and the calls to them.

Actors are named, detached, restarted without end and take no CPU. All errors of Ray are mapped here, once: to
callers they are `KvFleetError` kinds.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

import ray
from ray._private.state import available_resources_per_node  # nothing public tells it of one node
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from typing_extensions import override

from kvfleet.config import FleetConfig
from kvfleet.core.directory import Applied, Delta, InventoryPage, NodeId
from kvfleet.core.mailbox import ObjectPage
from kvfleet.errors import ConfigError, DirectoryUnavailableError, KvFleetError
from kvfleet.metrics import RaySink
from kvfleet.node.directory import DirectoryService
from kvfleet.node.directorylink import Claimed, DeltaReply, DirectoryLink, ObjectRequest
from kvfleet.node.manager import TierManager
from kvfleet.node.messages import Located
from kvfleet.node.startup import NodePlace
from kvfleet.node.transport import ObjectStoreTransport
from kvfleet.node.waiting import within
from kvfleet.node.windows import ByteBudget

__all__ = [
    "collect",
    "directory_actor",
    "directory_namespace",
    "find_directory",
    "find_manager",
    "first_line",
    "get_directory",
    "get_manager",
    "live_nodes",
    "manager_actor",
    "managers",
    "no_fleet",
    "successor",
]

K = TypeVar("K")
_log = logging.getLogger(__name__)
_DIRECTORY = "directory"
_HEAD = "node:__internal_head__"  # a resource that Ray gives its head node
_CONCURRENCY = 256  # calls at once in an actor, streams included; more wait their turn


def directory_namespace(fleet: str) -> str:
    """The Ray namespace of a fleet's actors."""
    return f"kvfleet-{fleet}"


def live_nodes() -> frozenset[NodeId]:
    """Ray node ids of all live nodes."""
    return frozenset(NodeId(node["NodeID"]) for node in _nodes() if node["Alive"])


def successor(node: str) -> NodeId:
    """A node itself, or if Ray knows it for dead, the one that lives at its address now."""
    nodes = _nodes()
    known = next((entry for entry in nodes if entry["NodeID"] == node and not entry["Alive"]), None)
    if known is not None:
        address = known["NodeManagerAddress"]
        for entry in nodes:
            if entry["Alive"] and entry["NodeManagerAddress"] == address:
                return NodeId(entry["NodeID"])
    return NodeId(node)


def _nodes() -> list[dict[str, Any]]:
    return ray.nodes()  # type: ignore[no-any-return]


class _DirectoryActor(DirectoryService):
    def __init__(self, config: FleetConfig) -> None:
        super().__init__(config, live_nodes, RaySink())


class _ManagerActor(TierManager):
    def __init__(self, config: FleetConfig) -> None:
        here = ray.get_runtime_context().get_node_id()
        resources: dict[str, float] = next((node["Resources"] for node in _nodes() if node["NodeID"] == here), {})
        store_bytes = int(resources.get("object_store_memory", 0))
        place = NodePlace(
            ray_node_id=here,
            raylet_pid=os.getppid(),
            object_store_bytes=store_bytes,
            alive=lambda node: NodeId(node) in live_nodes(),
            object_store_used=partial(_object_store_used, here, store_bytes),
        )
        super().__init__(config, place, _DirectoryLink(config.name), partial(_transport, config), RaySink())


def _object_store_used(node: str, capacity_bytes: int) -> int:
    """Bytes in use in a node's object store, as the control plane knows them, 0.1 s old. OSError: it does not."""
    try:
        free = available_resources_per_node()[node].get("object_store_memory", 0)  # what is used up is not named
    except (RayError, KeyError, RuntimeError) as error:
        raise OSError(f"resources of node {node}: {error!r}") from error
    return capacity_bytes - int(free)


def _transport(config: FleetConfig, budget: ByteBudget) -> ObjectStoreTransport:
    return ObjectStoreTransport(
        partial(get_manager, config.name),
        budget,
        holder_timeout_s=config.holder_timeout_s,
        windows_in_flight=config.windows_in_flight,
    )


def _remote(actor: type) -> Any:  # noqa: ANN401  Ray makes the class's methods at run time
    return ray.remote(actor)


def directory_actor(config: FleetConfig) -> ActorHandle[Any]:
    """The fleet's directory, started if there is none: on the head node, without which there is no cluster anyway."""
    options = _options(config.name, _DIRECTORY) | {"resources": {_HEAD: 0.001}}
    handle: ActorHandle[Any] = _remote(_DirectoryActor).options(**options).remote(config)
    return handle


def manager_actor(config: FleetConfig, node: str) -> ActorHandle[Any]:
    """The manager of a Ray node, started if there is none."""
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    options = _options(config.name, _manager_name(node)) | {"scheduling_strategy": strategy}
    handle: ActorHandle[Any] = _remote(_ManagerActor).options(**options).remote(config)
    return handle


def _options(fleet: str, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": directory_namespace(fleet),
        "get_if_exists": True,
        "lifetime": "detached",
        "max_restarts": -1,
        "num_cpus": 0,
        "max_concurrency": _CONCURRENCY,
    }


def _manager_name(node: str) -> str:
    return f"tier-manager-{node}"


def get_manager(fleet: str, node: NodeId) -> ActorHandle[Any]:
    """The handle of a running manager. ValueError: there is none."""
    return ray.get_actor(_manager_name(node), namespace=directory_namespace(fleet))


def find_manager(fleet: str, node: NodeId) -> ActorHandle[Any] | None:
    """The handle of a manager, None if there is none."""
    try:
        return get_manager(fleet, node)
    except ValueError:
        return None


def no_fleet(fleet: str) -> ConfigError:
    """The error of whoever asks for a fleet that does not run."""
    return ConfigError("", f"no fleet {fleet!r} is running here; `kvfleet up` starts one")


def managers(fleet: str) -> dict[NodeId, ActorHandle[Any]]:
    """The handles of all managers on live nodes, by node."""
    found = {node: find_manager(fleet, node) for node in sorted(live_nodes())}
    return {node: manager for node, manager in found.items() if manager is not None}


def find_directory(fleet: str) -> ActorHandle[Any] | None:
    """The handle of a directory, None if there is none."""
    try:
        return get_directory(fleet)
    except ValueError:
        return None


def get_directory(fleet: str) -> ActorHandle[Any]:
    """The handle of a running directory. ValueError: there is none."""
    return ray.get_actor(_DIRECTORY, namespace=directory_namespace(fleet))


class _DirectoryLink(DirectoryLink):
    """A manager's calls to the directory."""

    def __init__(self, fleet: str) -> None:
        self._fleet = fleet
        self._handle: ActorHandle[Any] | None = None

    @override
    async def apply(self, delta: Delta, timeout_s: float) -> DeltaReply:
        return await self._call("apply", timeout_s, delta)  # type: ignore[no-any-return]

    @override
    async def inventory(self, page: InventoryPage, timeout_s: float) -> Applied:
        return await self._call("inventory", timeout_s, page)  # type: ignore[no-any-return]

    @override
    async def claim(self, node: NodeId, records: bytes, timeout_s: float) -> Claimed:
        return await self._call("claim", timeout_s, node, records)  # type: ignore[no-any-return]

    @override
    async def listed(self, node: NodeId, life: int, timeout_s: float) -> bool:
        return await self._call("listed", timeout_s, node, life)  # type: ignore[no-any-return]

    @override
    async def objects(self, request: ObjectRequest, timeout_s: float) -> ObjectPage | None:
        return await self._call("objects", timeout_s, request)  # type: ignore[no-any-return]

    @override
    async def locate(self, keys: bytes, shard: int, num_shards: int, timeout_s: float) -> Located:
        return await self._call("locate", timeout_s, keys, shard, num_shards)  # type: ignore[no-any-return]

    async def _call(self, name: str, timeout_s: float, *args: object) -> Any:  # noqa: ANN401  what the method returns
        try:
            return await within(timeout_s, self._ask(name, *args))
        except KvFleetError:
            raise
        except (RayError, ValueError, asyncio.TimeoutError) as error:
            if isinstance(error, ActorDiedError):  # else it may only be late, or starting again
                self._handle = None
            raise DirectoryUnavailableError(f"{name}: {first_line(error)}") from error

    async def _ask(self, name: str, *args: object) -> Any:  # noqa: ANN401  what the method returns
        if self._handle is None:
            self._handle = await asyncio.to_thread(get_directory, self._fleet)
        return await getattr(self._handle, name).remote(*args)


def first_line(error: BaseException) -> str:
    """What an error says, without the remote traceback that Ray adds."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def collect(calls: Mapping[K, Any], timeout_s: float) -> dict[K, Any]:
    """The answers to those of some calls that end in time; None where a call failed."""
    ended, _ = ray.wait(list(calls.values()), num_returns=max(1, len(calls)), timeout=timeout_s)
    come = frozenset(ended)
    return {key: _answer(call) for key, call in calls.items() if call in come}


def _answer(call: Any) -> Any:  # noqa: ANN401  whatever was called
    try:
        return ray.get(call, timeout=1.0)
    except (RayError, KvFleetError) as error:
        _log.info("no answer: %s", first_line(error))
        return None

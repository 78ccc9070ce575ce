"""A client's calls to the actors of its fleet."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError
from typing_extensions import override

from kvfleet.actors import find_directory, find_manager, first_line, get_directory, manager_actor
from kvfleet.attachment import DirectoryPort, ManagerPort
from kvfleet.config import FleetConfig
from kvfleet.core.directory import NodeId, Run
from kvfleet.errors import ConfigError, DeadlineExceededError, DirectoryUnavailableError, TierUnavailableError
from kvfleet.node.messages import (
    Attachment,
    CommitReply,
    CommitRequest,
    LoadProgress,
    LoadRequest,
    ReserveReply,
    ReserveRequest,
)

__all__ = ["DirectoryCalls", "ManagerCalls", "running_config"]

_GRACE_S = 0.25  # what a call may take beyond the deadline it carries, for its answer to arrive


def running_config(fleet: str, timeout_s: float) -> FleetConfig:
    """The settings a running fleet was started with.

    Raises:
        ConfigError: there is no such fleet.
        DirectoryUnavailableError: its directory does not answer in time.
    """
    directory = find_directory(fleet)
    if directory is None:
        raise ConfigError("name", f"no fleet {fleet!r} is running here; `kvfleet up` starts one")
    try:
        config: FleetConfig = ray.get(directory.config.options(max_task_retries=3).remote(), timeout=timeout_s)
    except RayError as error:
        raise DirectoryUnavailableError(first_line(error)) from error
    return config


class ManagerCalls(ManagerPort):
    """A client's calls to the manager of its node, which it starts if need be, as long as the fleet runs."""

    def __init__(self, config: FleetConfig, node: str) -> None:
        self._config = config
        self._node = node
        self._handle: ActorHandle[Any] | None = None

    @override
    def attach(self, timeout_s: float) -> Attachment:
        return self._call("attach", (), timeout_s)  # type: ignore[no-any-return]

    @override
    def reserve(self, request: ReserveRequest, timeout_s: float) -> ReserveReply:
        return self._call("reserve", (request,), timeout_s)  # type: ignore[no-any-return]

    @override
    def commit(self, request: CommitRequest, timeout_s: float) -> CommitReply:
        return self._call("commit", (request,), timeout_s)  # type: ignore[no-any-return]

    @override
    def load(self, request: LoadRequest) -> Generator[LoadProgress, None, None]:
        deadline = time.monotonic() + request.timeout_s + _GRACE_S
        stream = None
        try:
            method = self._manager(request.timeout_s).load.options(
                num_returns="streaming", _generator_backpressure_num_objects=1
            )
            stream = method.remote(request)
            while True:
                ready, _ = ray.wait([stream], timeout=max(0.0, deadline - time.monotonic()), fetch_local=False)
                if not ready:
                    raise DeadlineExceededError("load", request.timeout_s)
                ref = next(stream, None)
                if ref is None:
                    stream = None
                    return
                yield ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
        except GetTimeoutError as error:
            raise DeadlineExceededError("load", request.timeout_s) from error
        except (RayError, ValueError) as error:
            self._handle = None
            raise TierUnavailableError("dram", f"load: {first_line(error)}") from error
        finally:
            if stream is not None:
                ray.cancel(stream)

    def _manager(self, timeout_s: float) -> ActorHandle[Any]:
        if self._handle is None:
            self._handle = find_manager(self._config.name, NodeId(self._node)) or manager_actor(
                running_config(self._config.name, timeout_s), self._node
            )
        return self._handle

    def _call(self, name: str, args: tuple[object, ...], timeout_s: float) -> Any:  # noqa: ANN401  what the method returns
        deadline = time.monotonic() + timeout_s + _GRACE_S
        try:
            answer = getattr(self._manager(timeout_s), name).remote(*args)
            return ray.get(answer, timeout=max(0.0, deadline - time.monotonic()))
        except GetTimeoutError as error:
            raise DeadlineExceededError(name, timeout_s) from error
        except (RayError, ValueError) as error:
            self._handle = None
            raise TierUnavailableError("dram", f"{name}: {first_line(error)}") from error


class DirectoryCalls(DirectoryPort):
    """A client's calls to the directory."""

    def __init__(self, fleet: str) -> None:
        self._fleet = fleet
        self._handle: ActorHandle[Any] | None = None

    @override
    def locate(self, keys: bytes, shard: int, num_shards: int, timeout_s: float) -> list[Run]:
        try:
            if self._handle is None:
                self._handle = get_directory(self._fleet)
            runs: list[Run] = ray.get(self._handle.locate.remote(keys, shard, num_shards), timeout=timeout_s)
        except (RayError, ValueError) as error:
            self._handle = None
            raise DirectoryUnavailableError(first_line(error)) from error
        return runs

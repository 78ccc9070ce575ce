"""A client's calls to the actors of its fleet."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError
from typing_extensions import override

from kvfleet.actors import (
    find_directory,
    find_manager,
    first_line,
    get_directory,
    manager_actor,
    no_fleet,
    successor,
)
from kvfleet.attachment import DirectoryPort, ManagerPort
from kvfleet.config import FleetConfig
from kvfleet.core.breaker import Breaker
from kvfleet.core.directory import NodeId
from kvfleet.errors import (
    DeadlineExceededError,
    DirectoryAvoidedError,
    DirectoryUnavailableError,
    ManagerAvoidedError,
    TierUnavailableError,
)
from kvfleet.node.arenadir import NODE_FILE
from kvfleet.node.messages import (
    Attachment,
    CommitReply,
    CommitRequest,
    HintRequest,
    HoldRequest,
    LoadProgress,
    LoadRequest,
    Located,
    ReserveReply,
    ReserveRequest,
)
from kvfleet.node.threads import TimedThreads
from kvfleet.pulse import Pulse

__all__ = ["DirectoryCalls", "ManagerCalls", "running_config"]

_HEARTBEATS_MISSED_MAX = 3
_DIRECTORY_PAUSE_S, _DIRECTORY_PAUSE_MAX_S = 1.0, 5.0
_SILENT = "the node's manager shows no sign of life"
_GRACE_S = 0.25  # what a call may take beyond the deadline it carries, for its answer to arrive
_FINDING = TimedThreads(
    4, "kvfleet-find"
)  # while Ray's control plane is away, the search for an actor has no end of its own


def running_config(fleet: str, timeout_s: float) -> FleetConfig:
    """The settings a running fleet was started with.

    Raises:
        ConfigError: there is no such fleet.
        DirectoryUnavailableError: its directory does not answer in time.
    """
    try:
        return _FINDING.run(lambda: _read_config(fleet, timeout_s), timeout_s + _GRACE_S)
    except TimeoutError as error:
        raise DirectoryUnavailableError(f"that of fleet {fleet!r} is not found within {timeout_s:g} s") from error


def _read_config(fleet: str, timeout_s: float) -> FleetConfig:
    directory = find_directory(fleet)
    if directory is None:
        raise no_fleet(fleet)
    try:
        config: FleetConfig = ray.get(directory.config.options(max_task_retries=3).remote(), timeout=timeout_s)
    except GetTimeoutError as error:
        raise DirectoryUnavailableError(f"that of fleet {fleet!r} gives no answer within {timeout_s:g} s") from error
    except RayError as error:
        raise DirectoryUnavailableError(first_line(error)) from error
    return config


class _Actor:
    """An actor, searched for when it is first called, and again only when it is known to have died for good.

    Args:
        find: finds or starts it, within about so many seconds or never.
    """

    def __init__(self, find: Callable[[float], ActorHandle[Any]]) -> None:
        self._find = find
        self._handle: ActorHandle[Any] | None = None

    def handle(self, timeout_s: float) -> ActorHandle[Any]:
        """The actor. TimeoutError: not found in time, but maybe for the next call."""
        return self._handle or _FINDING.run(lambda: self._found(timeout_s), timeout_s)

    def _found(self, timeout_s: float) -> ActorHandle[Any]:
        self._handle = self._find(timeout_s)
        return self._handle

    def failed(self, error: Exception) -> None:
        """A call failed. An actor that is late, restarting or out of reach keeps its handle."""
        if isinstance(error, ActorDiedError):
            self._handle = None


class ManagerCalls(ManagerPort):
    """A client's calls to the manager of its node, which it starts if need be, as long as the fleet runs.

    No load, store or hold waits for a manager that shows no sign of life: it costs the first request some heartbeats,
    those after it nothing.
    """

    def __init__(self, config: FleetConfig, node: str) -> None:
        self._config = config
        self._node = NodeId(node)
        self._manager = _Actor(self._find)
        self._pulse: Pulse | None = None

    def _find(self, timeout_s: float) -> ActorHandle[Any]:
        fleet = self._config.name
        self._node = successor(self._node)  # this process may outlive its raylet
        return find_manager(fleet, self._node) or manager_actor(_read_config(fleet, timeout_s), self._node)

    @override
    def attach(self, timeout_s: float) -> Attachment:
        attachment: Attachment = self._call("attach", (), timeout_s)
        if not attachment.problem:
            path = Path(attachment.arena_path).with_name(NODE_FILE)
            self._pulse = Pulse(path, _HEARTBEATS_MISSED_MAX * self._config.heartbeat_s)
        return attachment

    @override
    def reserve(self, request: ReserveRequest, timeout_s: float) -> ReserveReply:
        self._check_pulse("reserve")
        return self._watched("reserve", request, timeout_s)  # type: ignore[no-any-return]

    @override
    def commit(self, request: CommitRequest, timeout_s: float) -> CommitReply:
        return self._watched("commit", request, timeout_s)  # type: ignore[no-any-return]

    @override
    def hold(self, request: HoldRequest, timeout_s: float) -> int:
        self._check_pulse("hold")
        return self._call("hold", (request,), timeout_s)  # type: ignore[no-any-return]

    @override
    def release(self, client_id: int, number: int, timeout_s: float) -> None:
        with self._errors("release", timeout_s):
            self._manager.handle(timeout_s).release.remote(client_id, number)

    @override
    def hint(self, request: HintRequest, timeout_s: float) -> int:
        self._check_pulse("hint")
        return self._call("hint", (request,), timeout_s)  # type: ignore[no-any-return]

    @override
    def load(self, request: LoadRequest) -> Generator[LoadProgress, None, None]:
        deadline = time.monotonic() + request.timeout_s + _GRACE_S
        stream = None
        try:
            with self._errors("load", request.timeout_s):
                self._check_pulse("load")
                method = self._manager.handle(request.timeout_s).load.options(
                    num_returns="streaming", _generator_backpressure_num_objects=1
                )
                stream = method.remote(request)
                while True:
                    self._await(stream, deadline)
                    ref = next(stream, None)
                    if ref is None:
                        stream = None
                        return
                    yield ray.get(ref, timeout=_left(deadline))
        finally:
            if stream is not None:
                ray.cancel(stream)

    def _await(self, stream: ray.ObjectRefGenerator, deadline: float) -> None:
        """Wait for a stream's next item, as long as the manager lives."""
        while not ray.wait([stream], timeout=min(_left(deadline), self._config.heartbeat_s), fetch_local=False)[0]:
            if not _left(deadline):
                raise TimeoutError
            if not self._lives():
                raise TierUnavailableError("dram", f"load: {_SILENT}")

    def _lives(self) -> bool:
        return self._pulse is None or self._pulse.beats(time.monotonic())

    def _check_pulse(self, name: str) -> None:
        """Before a call is made."""
        if not self._lives():
            raise ManagerAvoidedError("dram", f"{name}: {_SILENT}")

    def _watched(self, name: str, request: object, timeout_s: float) -> Any:  # noqa: ANN401  what the method returns
        """Make a call, and wait for its answer as long as the manager lives.

        One that is dead is not waited for anyway, and may be back for the next call; one that hangs is not.
        """
        began = time.monotonic()
        deadline = began + timeout_s + _GRACE_S
        with self._errors(name, timeout_s):
            answer = getattr(self._manager.handle(timeout_s), name).remote(request)
            while True:
                try:
                    return ray.get(answer, timeout=min(_left(deadline), self._config.heartbeat_s))
                except GetTimeoutError:
                    if not _left(deadline):
                        raise
                if not self._lives():
                    raise DeadlineExceededError(name, time.monotonic() - began)

    def _call(self, name: str, args: tuple[object, ...], timeout_s: float) -> Any:  # noqa: ANN401  what the method returns
        deadline = time.monotonic() + timeout_s + _GRACE_S
        with self._errors(name, timeout_s):
            answer = getattr(self._manager.handle(timeout_s), name).remote(*args)
            return ray.get(answer, timeout=_left(deadline))

    @contextmanager
    def _errors(self, name: str, timeout_s: float) -> Iterator[None]:
        """Ray's errors in a call, as ours."""
        try:
            yield
        except DeadlineExceededError:
            raise
        except TimeoutError as error:  # Ray's GetTimeoutError is one
            raise DeadlineExceededError(name, timeout_s) from error
        except (RayError, ValueError) as error:
            self._manager.failed(error)
            raise TierUnavailableError("dram", f"{name}: {first_line(error)}") from error


class DirectoryCalls(DirectoryPort):
    """A client's calls to the directory. One that does not answer is left alone for a while, longer each time."""

    def __init__(self, fleet: str) -> None:
        self._directory = _Actor(lambda _: get_directory(fleet))
        self._breaker = Breaker(_DIRECTORY_PAUSE_S, _DIRECTORY_PAUSE_MAX_S)

    @override
    def locate(self, keys: bytes, shard: int, num_shards: int, timeout_s: float) -> Located:
        deadline = time.monotonic() + timeout_s
        if not self._breaker.allows(time.monotonic()):
            raise DirectoryAvoidedError("did not answer a moment ago")
        try:
            answer = self._directory.handle(timeout_s).locate.remote(keys, shard, num_shards)
            located: Located = ray.get(answer, timeout=_left(deadline))
        except (RayError, ValueError, TimeoutError) as error:
            self._directory.failed(error)
            self._breaker.failed(time.monotonic())
            raise DirectoryUnavailableError(first_line(error)) from error
        self._breaker.worked()
        return located


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())

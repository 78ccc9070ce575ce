"""Watching, draining and stopping a fleet: what takes no more of it than its name, whoever of it does not answer."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray._private import worker
from ray.exceptions import GetTimeoutError, RayError

from kvfleet import actors
from kvfleet.arguments import check_index, check_timeout
from kvfleet.core.directory import NodeId
from kvfleet.core.totals import Totals
from kvfleet.errors import ConfigError, TierUnavailableError
from kvfleet.node.directory import DirectoryStatus
from kvfleet.node.draining import Drained
from kvfleet.node.status import NodeStatus
from kvfleet.node.tallies import Request

__all__ = ["CALL_TIMEOUT_S", "POLL_S", "FleetStatus", "Operator", "join", "join_ray"]

_log = logging.getLogger(__name__)
CALL_TIMEOUT_S = 10.0
POLL_S = 0.1
_STATUS_TIMEOUT_S = 3.0  # somebody looks at the screen
_GRACE_S = 1.0  # for an answer that comes when a time is up
_ROUND_S = 2.0  # of saving, after which it is told how far it is
_ROUNDS_MISSED_MAX = 3  # by a manager that may be starting again


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


def join_ray(address: str | None) -> bool:
    """Connect to Ray, unless this process is. Returns whether a new Ray was started for that.

    Raises:
        ConnectionError: no Ray there lets us in, and what to do.
    """
    if ray.is_initialized():
        return False
    try:
        ray.init(address=address, include_dashboard=False, log_to_driver=False, configure_logging=False)
    except ConnectionError as error:
        problem = (
            f"no Ray cluster lets us in: {str(error).splitlines()[0]}. Start one with `ray start --head`, or give the "
            "address of one; for one with token authentication, Ray's default, set RAY_AUTH_MODE=token"
        )
        raise ConnectionError(problem) from None  # Ray's own traces are long, and say no more
    node = worker._global_node  # nothing public tells whether it is ours
    return node is not None and node.head


def join(name: str, *, address: str | None = None) -> Operator:
    """Look after a fleet that runs on a Ray cluster. Takes no answer of any of its actors.

    Args:
        name: of the fleet.
        address: of the Ray cluster. None: the one this process is connected to, else any that runs here.

    Raises:
        ConfigError: there is no such fleet.
        ConnectionError: there is no Ray at `address`.
    """
    join_ray(address or "auto")
    operator = Operator(name)
    if not operator.runs:
        raise actors.no_fleet(name)
    return operator


class Operator:
    """A fleet, seen by who looks after it.

    Attributes:
        name: of the fleet.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def runs(self) -> bool:
        """Whether any actor of the fleet is there, answering or not."""
        return actors.find_directory(self.name) is not None or bool(actors.managers(self.name))

    def status(self) -> FleetStatus:
        """Ask the directory and all managers. Takes at most some seconds, whoever does not answer."""
        calls: dict[str, Any] = {node: manager.status.remote() for node, manager in actors.managers(self.name).items()}
        managers = list(calls)
        directory = actors.find_directory(self.name)
        if directory is not None:
            calls[""] = directory.status.remote()
        answers = actors.collect(calls, _STATUS_TIMEOUT_S)
        nodes = tuple(answers[node] for node in managers if answers.get(node) is not None)
        silent = tuple(node for node in managers if answers.get(node) is None)
        return FleetStatus(self.name, nodes, silent, answers.get(""))

    def requests(self, wanted: str = "", limit: int = 20) -> list[tuple[NodeId, Request]]:
        """The newest requests of engines that are in the fleet, and their nodes; newest first.

        Args:
            wanted: beginning of a request's label, or of its first or last key in hex; "" for all.
            limit: at most so many.
        """
        calls = {node: manager.requests.remote(wanted, limit) for node, manager in actors.managers(self.name).items()}
        answers = actors.collect(calls, _STATUS_TIMEOUT_S)
        found = [(node, request) for node, requests in answers.items() for request in requests or ()]
        return sorted(found, key=lambda pair: pair[1].asked_ns, reverse=True)[:limit]

    def drain(self, node: str, *, timeout_s: float = 60.0, bytes_max: int | None = None) -> Drained:
        """Prepare a node to leave: it takes no more stores, and saves what the tiers below lack, the best first.

        Loads from it go on. It stays like this until `resume`, or until the node is gone.

        Args:
            node: Ray node id, or a beginning of it that no other node has.
            timeout_s: no write begins after it. The call may take 10 s longer.
            bytes_max: of blocks written; None for no limit.

        Raises:
            ConfigError: no node, or several, begin like that, or it has no manager. Nothing was done.
            TierUnavailableError: the manager did not answer; the node may be draining.
        """
        check_timeout(timeout_s, optional=False)
        if bytes_max is not None:
            check_index(bytes_max, "bytes_max")
        drained: Drained = self._ask(node, "drain", timeout_s, timeout_s, bytes_max)
        return drained

    def resume(self, node: str) -> None:
        """Have a node that was drained take stores again. Raises as `drain` does."""
        self._ask(node, "resume", 0.0)

    def _ask(self, node: str, method: str, timeout_s: float, *args: object) -> Any:  # noqa: ANN401  what it returns
        found = {full: manager for full, manager in actors.managers(self.name).items() if full.startswith(node)}
        if not found:
            raise ConfigError("", f"no node with a manager has an id that begins with {node!r}")
        if len(found) > 1:
            named = ", ".join(full[: len(node) + 8] for full in sorted(found))
            raise ConfigError("", f"several nodes have ids that begin with {node!r}: {named}")
        (manager,) = found.values()
        try:
            return ray.get(getattr(manager, method).remote(*args), timeout=timeout_s + CALL_TIMEOUT_S)
        except GetTimeoutError as error:
            raise TierUnavailableError("dram", f"node {node}: its manager does not answer") from error
        except (RayError, TimeoutError) as error:
            raise TierUnavailableError("dram", f"node {node}: {actors.first_line(error)}") from error

    def stop(self, *, drain_timeout_s: float = 60.0, on_progress: Callable[[int], None] | None = None) -> int:
        """End the fleet: save what the tiers below do not have yet, then stop all its actors and free the arenas.

        Ray goes on. Stopping twice is fine.

        Args:
            drain_timeout_s: longest time for saving; what follows takes seconds, at most 30.
            on_progress: told at the beginning, and then every few seconds, how many blocks are left to be saved.

        Returns:
            How many blocks could not be saved; 0 without a tier below.
        """
        check_timeout(drain_timeout_s, optional=False)
        unsaved = self._flush(drain_timeout_s, on_progress or (lambda left: None))
        directory = actors.find_directory(self.name)
        if directory is not None:
            ray.kill(directory, no_restart=True)  # first: without it no client starts another manager
        managers = actors.managers(self.name)
        # Tried again while a manager restarts: the call may be made twice.
        shutdowns = {node: m.shutdown.options(max_task_retries=3).remote() for node, m in managers.items()}
        actors.collect(shutdowns, CALL_TIMEOUT_S)
        for manager in managers.values():
            ray.kill(manager, no_restart=True)
        self._wait_until_gone()
        return unsaved

    def _flush(self, timeout_s: float, on_progress: Callable[[int], None]) -> int:
        """Have all managers save. Returns how many blocks are left, as far as they have told."""
        managers = actors.managers(self.name)
        left = self._unsaved(managers)
        on_progress(sum(left.values()))
        deadline = time.monotonic() + timeout_s + _GRACE_S
        # Tried again while a manager restarts: the call may be made twice.
        waiting = {node: m.flush.options(max_task_retries=3).remote(timeout_s) for node, m in managers.items()}
        missed: Counter[NodeId] = Counter()
        while waiting and time.monotonic() < deadline:
            ended = actors.collect(waiting, min(_ROUND_S, max(0.0, deadline - time.monotonic())))
            waiting = {node: call for node, call in waiting.items() if node not in ended}
            told = self._unsaved({node: managers[node] for node in waiting})
            left |= told | {node: n for node, n in ended.items() if n is not None}
            missed = Counter({node: missed[node] + 1 for node in waiting if node not in told})
            waiting = {node: call for node, call in waiting.items() if missed[node] < _ROUNDS_MISSED_MAX}
            on_progress(sum(left.values()))
        return sum(left.values())

    def _unsaved(self, managers: Mapping[NodeId, Any]) -> dict[NodeId, int]:
        """How many blocks of each node are unsaved, of those that answer."""
        told = actors.collect({node: manager.num_unsaved.remote() for node, manager in managers.items()}, _ROUND_S)
        return {node: n for node, n in told.items() if n is not None}

    def _wait_until_gone(self) -> None:
        """Ray takes a moment to forget killed actors: whoever starts the fleet again must not find them."""
        deadline = time.monotonic() + CALL_TIMEOUT_S
        while self.runs:
            if time.monotonic() > deadline:
                _log.warning("Ray still names actors of fleet %s", self.name)
                return
            time.sleep(POLL_S)

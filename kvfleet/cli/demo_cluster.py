"""A Ray cluster of several nodes on this machine, for as long as the demo runs."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import ray
from ray.cluster_utils import Cluster
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvfleet.config import MIB
from kvfleet.errors import KvFleetError

__all__ = ["DemoCluster", "demo_cluster"]

OBJECT_STORE_BYTES = 256 * MIB

P = ParamSpec("P")
T = TypeVar("T")


class DemoCluster:
    """Its nodes, numbered from 0. This process is connected to node 0."""

    def __init__(self, node_ids: list[str]) -> None:
        self._node_ids = node_ids

    def run(self, node: int, work: Callable[P, Iterator[T]], *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        """Run a generator in a new process on a node, and yield what it yields as it comes.

        Raises:
            KvFleetError: raised by `work`, or the process died.
        """
        # One call a process: nothing but what kvfleet keeps is left of it for the next one.
        options: dict[str, Any] = {
            "max_calls": 1,
            "max_retries": 0,
            "num_cpus": 1,
            "num_returns": "streaming",
            "scheduling_strategy": NodeAffinitySchedulingStrategy(self._node_ids[node], soft=False),
        }
        try:
            stream: Any = ray.remote(**options)(work).remote(*args, **kwargs)
            for ref in stream:
                yield ray.get(ref)
        except RayTaskError as error:
            if isinstance(error.cause, KvFleetError):
                raise error.cause from error
            raise
        except RayError as error:
            raise KvFleetError(f"a process of the demo died: {error}") from error


@contextlib.contextmanager
def demo_cluster(num_nodes: int, directory: Path, settings: Mapping[str, str]) -> Iterator[DemoCluster]:
    """Start the nodes and connect to the first. Ends all their processes at the end, whatever happened.

    Args:
        num_nodes: raylets.
        directory: for Ray's logs and sockets. Its path must be short: that of a socket may have 107 characters.
        settings: environment of the nodes' processes.
    """
    with _environment({"RAY_TMPDIR": str(directory), "RAY_USAGE_STATS_ENABLED": "0", **settings}):
        on_sigterm = signal.getsignal(signal.SIGTERM)
        cluster = Cluster(shutdown_at_exit=True)
        try:
            for _ in range(num_nodes):
                cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES, include_dashboard=False)
            ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray has set its own, which end this process at once
            first = ray.get_runtime_context().get_node_id()
            nodes: list[dict[str, Any]] = ray.nodes()
            others = (node["NodeID"] for node in nodes if node["NodeID"] != first)
            yield DemoCluster([first, *sorted(others)])
        finally:
            ray.shutdown()
            cluster.shutdown()


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, which processes started meanwhile inherit."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

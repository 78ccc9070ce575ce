"""Loading a prefix from another node, beside the bare object store and a TCP connection between the same nodes."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
from ray.actor import ActorHandle
from ray.util import get_node_ip_address
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvfleet.bench.report import Row, measure
from kvfleet.bench.workload import Prompts, kv_array, mapped_client, spec_of, zero_kv
from kvfleet.config import GIB
from kvfleet.errors import ConfigError
from kvfleet.fleet import Fleet, connect
from kvfleet.node.messages import Source
from kvfleet.node.windows import stream_share

__all__ = ["MEASURES", "Pair", "choose_pair", "rows", "two_nodes"]

MEASURES = (
    "fetch: `client.load` of a prefix that only another node's manager has, left in this node's arena: from arena to "
    "object store to arena, verified and committed. load: the same, and copied to a bfloat16 tensor (layers, 2, heads, "
    "tokens, dim), aligned to 64 bytes as torch's are. Floor: as many bytes through the bare object store, from an "
    "actor there to one here, in windows as large and as many in flight, copied to an array. TCP: sendall and "
    "recv_into, one connection. Everything touched before."
)

_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Pair:
    """Two Ray nodes: the bytes go from `holder` to `reader`. `object_store_bytes`: of the smaller object store."""

    holder: str
    reader: str
    object_store_bytes: int


@contextmanager
def two_nodes(address: str | None, object_store_bytes: int = GIB) -> Iterator[Pair]:
    """Two nodes of a Ray cluster; of a new one on this machine if there is no address.

    Raises:
        ConfigError: the cluster at `address` has only one node.
    """
    from ray.cluster_utils import Cluster

    cluster = None
    try:
        if address is None:
            # Else the first use of each page of the object store is what is measured.
            os.environ.setdefault("RAY_preallocate_plasma_memory", "1")
            cluster = Cluster()
            for _ in range(2):
                cluster.add_node(num_cpus=2, object_store_memory=object_store_bytes, include_dashboard=False)
            address = cluster.address
        ray.init(address=address, log_to_driver=False)
        yield choose_pair()
    finally:
        ray.shutdown()
        if cluster is not None:
            cluster.shutdown()


def choose_pair() -> Pair:
    """This process's node as reader, another one of its cluster as holder.

    Raises:
        ConfigError: there is no other one.
    """
    here = ray.get_runtime_context().get_node_id()
    nodes: list[dict[str, Any]] = ray.nodes()
    stores = {node["NodeID"]: int(node["Resources"]["object_store_memory"]) for node in nodes if node["Alive"]}
    there = next((node for node in stores if node != here), None)
    if there is None:
        raise ConfigError("address", "the cluster has one node, this takes two")
    return Pair(holder=there, reader=here, object_store_bytes=min(stores[here], stores[there]))


class _Holder:
    """On the one node: stores prefixes, and is the sending end of the floors."""

    def __init__(self, fleet: str, block_tokens: int, num_blocks: int) -> None:
        spec = spec_of(block_tokens)
        self._client = mapped_client(connect(fleet), spec)
        self._kv = kv_array(spec.layout, num_blocks)
        self._bytes = self._kv.view(np.uint8).reshape(-1)

    def store(self, tokens: npt.NDArray[np.uint32]) -> int:
        return self._client.store(tokens, self._kv).wait(_TIMEOUT_S).stored

    def window(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        return self._bytes[start:stop]

    def listen(self) -> tuple[str, int]:
        """Accept one connection, and send everything for each byte that comes over it."""
        server = socket.create_server((get_node_ip_address(), 0))
        threading.Thread(target=self._send, args=(server,), daemon=True).start()
        host, port = server.getsockname()
        return host, port

    def _send(self, server: socket.socket) -> None:
        with server:
            connection, _ = server.accept()
        with connection:
            while connection.recv(1):
                connection.sendall(self._bytes.data)


class _Reader:
    """On the other node: the receiving end of everything. All times are its own."""

    def __init__(self, fleet: str, block_tokens: int, num_blocks: int, holder: ActorHandle[_Holder]) -> None:
        spec = spec_of(block_tokens)
        self._client = mapped_client(connect(fleet), spec)
        self._kv = kv_array(spec.layout, num_blocks)
        self._target = zero_kv(spec.layout, num_blocks)
        self._bytes = self._target.view(np.uint8).reshape(-1)
        self._holder = holder
        host, port = ray.get(holder.listen.remote(), timeout=_TIMEOUT_S)
        self._connection = socket.create_connection((host, port), timeout=_TIMEOUT_S)

    def load(self, tokens: npt.NDArray[np.uint32]) -> float:
        self._target[..., 0] = 0
        seconds = self._load(tokens, self._target)
        assert np.array_equal(self._target, self._kv)
        return seconds

    def fetch(self, tokens: npt.NDArray[np.uint32]) -> float:
        return self._load(tokens, _take_nothing)

    def _load(self, tokens: npt.NDArray[np.uint32], into: object) -> float:
        hit = self._client.lookup(tokens)
        assert hit.num_tokens == len(tokens), hit
        started = perf_counter()
        loaded = self._client.load(hit, into, _TIMEOUT_S)
        seconds = perf_counter() - started
        assert loaded.bytes_by_source == {Source.PEER: self._kv.nbytes}, loaded.outcomes
        return seconds

    def object_store(self, window_bytes: int, in_flight: int) -> float:
        started = perf_counter()
        pending: list[Any] = []
        for start in range(0, len(self._bytes), window_bytes):
            if len(pending) == in_flight:
                pending = self._take(pending)
            pending.append(self._holder.window.remote(start, start + window_bytes))
        while pending:
            pending = self._take(pending)
        return perf_counter() - started

    def _take(self, pending: list[Any]) -> list[Any]:
        """Copy out one window; those behind it are on their way meanwhile."""
        (done,), rest = ray.wait(pending, num_returns=1, timeout=_TIMEOUT_S)
        data = ray.get(done, timeout=_TIMEOUT_S)
        np.copyto(self._bytes[: len(data)], data)
        return rest

    def tcp(self) -> float:
        view = self._bytes.data
        started = perf_counter()
        self._connection.sendall(b"\0")
        received = 0
        while received < len(view):
            received += self._connection.recv_into(view[received:])
        return perf_counter() - started


def _take_nothing(index: int, block: npt.NDArray[Any]) -> None:
    """Leave a loaded block in the arena."""


def rows(fleet: Fleet, pair: Pair, block_tokens: int, num_blocks: int, repeats: int) -> list[Row]:
    """Measure one size."""
    config, total = fleet.config, num_blocks * spec_of(block_tokens).layout.block_bytes
    name = config.name
    holder = _place(_Holder, pair.holder, name, block_tokens, num_blocks)
    reader = _place(_Reader, pair.reader, name, block_tokens, num_blocks, holder)
    prompts = Prompts("peer", num_blocks * block_tokens)

    def stored() -> npt.NDArray[np.uint32]:
        tokens = prompts.next()
        assert ray.get(holder.store.remote(tokens), timeout=_TIMEOUT_S) == num_blocks
        return tokens

    budget_bytes = int(pair.object_store_bytes * config.object_store_fraction) // 2  # in and out have one each
    window_bytes = stream_share(total, config.window_bytes_max, config.windows_in_flight, budget_bytes).window_bytes_max
    try:
        return measure(
            {
                "object store": lambda: _seconds(reader.object_store.remote(window_bytes, config.windows_in_flight)),
                "TCP": lambda: _seconds(reader.tcp.remote()),
                "fetch": lambda: _seconds(reader.fetch.remote(stored())),
                "load": lambda: _seconds(reader.load.remote(stored())),
            },
            block_bytes=total // num_blocks,
            num_blocks=num_blocks,
            moves=True,
            repeats=repeats,
        )
    finally:
        ray.kill(reader)
        ray.kill(holder)


def _place(cls: type, node: str, *args: object) -> ActorHandle[Any]:
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    remote: Any = ray.remote(cls)
    actor: ActorHandle[Any] = remote.options(num_cpus=0, max_concurrency=4, scheduling_strategy=strategy).remote(*args)
    return actor


def _seconds(call: ray.ObjectRef[float]) -> float:
    return ray.get(call, timeout=2 * _TIMEOUT_S)

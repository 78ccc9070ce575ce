"""A fleet in one process, without Ray: real managers, directory and clients, and calls that can be made to fail.

All managers and the directory run on one event loop in a thread. Calls have names: `directory.locate`, `0.reserve`,
`1.window`; each is counted in `Rig.calls` and passes `Rig.faults[name]` on its way, and `Rig.faults[name + ":reply"]`
on its way back. As with Ray, a caller that gives up waiting does not stop a call, only a stream.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import Self, override

from kvfleet.attachment import DirectoryPort, ManagerPort
from kvfleet.client import Client
from kvfleet.config import MIB, FleetConfig
from kvfleet.copying import checksum
from kvfleet.core.block import split
from kvfleet.core.directory import NodeId
from kvfleet.core.layout import BlockLayout, ModelSpec
from kvfleet.errors import DeadlineExceededError, DirectoryUnavailableError, TierError, TierUnavailableError
from kvfleet.node.directory import DirectoryService
from kvfleet.node.manager import TierManager
from kvfleet.node.messages import CommitRequest, FetchRequest, LoadProgress, LoadRequest, ReserveRequest, Window
from kvfleet.node.startup import NodePlace
from kvfleet.node.transport import Transport
from tests.conftest import wait_for

Fault = Callable[[], Awaitable[None]]

BLOCK_TOKENS = 16
GRACE_S = 0.25  # as in kvfleet.actors
FAST = {"heartbeat_s": 0.05, "delta_interval_s": 0.002, "load_timeout_s": 20.0, "store_timeout_s": 20.0}


def failing(error: Exception) -> Fault:
    """A call that does not arrive."""

    async def fault() -> None:
        raise error

    return fault


async def hanging() -> None:
    """A call that never arrives."""
    await asyncio.Event().wait()


def delayed(seconds: float) -> Fault:
    """A call that arrives late."""
    return lambda: asyncio.sleep(seconds)


def after(passing: int, fault: Fault) -> Fault:
    """Let some calls pass, then fault."""
    left = iter(range(passing))

    async def counted() -> None:
        if next(left, None) is None:
            await fault()

    return counted


# --- models and their KV: a block's bytes are derived from its key and shard, so that any mix-up shows


def model(block_kib: int = 64, *, dtype: str = "bfloat16", num_shards: int = 1, name: str = "m") -> ModelSpec:
    itemsize = 2 if dtype == "bfloat16" else 4
    head_dim = block_kib * 1024 // (2 * 2 * 2 * BLOCK_TOKENS * itemsize)
    layout = BlockLayout.kv(
        num_layers=2, num_kv_heads=2 * num_shards, head_dim=head_dim, dtype=dtype, block_tokens=BLOCK_TOKENS,
        num_shards=num_shards,
    )  # fmt: skip
    assert layout.block_bytes == block_kib * 1024
    return ModelSpec(model_id=name, weight_revision="1", layout=layout)


def prompt(num_blocks: int, number: int = 0) -> Any:
    """Token ids of a prompt of whole blocks that shares no prefix with those of other numbers."""
    return np.arange(num_blocks * BLOCK_TOKENS, dtype=np.uint32) + np.uint32(number << 20)


_PATTERN = np.arange(MIB // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def block(spec: ModelSpec, key: bytes, shard: int = 0) -> Any:
    """What a block holds, in the layout's shape, as unsigned integers."""
    words: np.ndarray = _PATTERN[: spec.layout.block_bytes // 8] ^ np.uint64(int.from_bytes(key[:8], "little") ^ shard)
    return words.view(f"u{spec.layout.itemsize}").reshape(spec.layout.shape)


def kv(spec: ModelSpec, tokens: np.ndarray, shard: int = 0) -> np.ndarray:
    """The KV of a prompt: shape of the layout with a longer token axis."""
    return np.concatenate([block(spec, key, shard) for key in split(spec.keys(tokens))], axis=3)


def empty(spec: ModelSpec, num_blocks: int) -> np.ndarray:
    """Where a prompt's KV can be loaded to."""
    shape = list(spec.layout.shape)
    shape[3] *= num_blocks
    return np.zeros(shape, f"u{spec.layout.itemsize}")


# --- the fleet


class Rig:
    """A running fleet; when left without an error it checks that nothing is amiss or left over."""

    def __init__(self, root: Path, num_nodes: int = 1, *, dram_bytes: int = 8 * MIB, **settings: Any) -> None:
        self.config = FleetConfig(arena_root=str(root), dram_bytes=dram_bytes, **{**FAST, **settings})
        self.calls: Counter[str] = Counter()
        self.faults: dict[str, Fault] = {}
        self.directory: DirectoryService | None = None
        self.managers: dict[int, TierManager] = {}
        self.dead: set[NodeId] = set()
        self._clients: list[Client] = []
        self._tasks: dict[int, set[asyncio.Task[Any]]] = {}
        self._streams: dict[int, set[AsyncGenerator[Any, None]]] = {}
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="rig", daemon=True)
        self._thread.start()
        self.start_directory()
        for number in range(num_nodes):
            self.start(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.check()
        finally:
            self.close()

    def run(self, work: Coroutine[Any, Any, Any], timeout_s: float = 30.0) -> Any:
        """Run a coroutine on the fleet's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def node_id(self, number: int) -> NodeId:
        return NodeId(f"{number:032x}")

    def start_directory(self) -> None:
        """Start the directory, or put an empty one in place of the old one."""

        async def start() -> DirectoryService:
            return DirectoryService(self.config, lambda: frozenset(map(self.node_id, range(9))) - self.dead)

        self.stop_directory()
        self.directory = self.run(start())

    def stop_directory(self) -> None:
        if self.directory is not None:
            self.loop.call_soon_threadsafe(self.directory._watch.cancel)
        self.directory = None

    def start(self, number: int) -> TierManager:
        """Start a node's manager; what an earlier one left in the arena is there."""
        place = NodePlace(self.node_id(number), os.getpid(), 64 * MIB, lambda node: True)

        async def start() -> TierManager:
            return TierManager(self.config, place, _Link(self), lambda budget: _Loopback(self))

        self._tasks[number], self._streams[number] = set(), set()
        manager: TierManager = self.run(start())
        self.managers[number] = manager
        assert manager._node is not None, manager._problem
        return manager

    def kill(self, number: int) -> None:
        """End a node's manager on the spot; its arena stays."""
        self.run(self._kill(number))

    async def _kill(self, number: int) -> None:
        node, self.managers[number]._node = self.part(number), None
        del self.managers[number]
        tasks = [*node._tasks, *self._tasks[number], *([node._listing] if node._listing else [])]
        tasks += [*node.loader._adopted, *node._admitter._moving]
        for task in tasks:
            if task is not asyncio.current_task():
                task.cancel()
        await asyncio.wait({*tasks} - {asyncio.current_task()}, timeout=20)
        for stream in tuple(self._streams[number]):
            with suppress(RuntimeError):  # it is running: the killer is inside of it
                await stream.aclose()
        node._stop_populating.set()
        node.home.lock.release()

    def part(self, number: int) -> Any:
        """The insides of a node's manager."""
        return self.managers[number]._node

    def status(self, number: int) -> Any:
        return self.run(self.managers[number].status())

    def client(self, spec: ModelSpec, number: int = 0, shard: int = 0) -> Client:
        client = Client(spec, _ManagerPort(self, number), _DirectoryPort(self), self.config, shard=shard)
        self._clients.append(client)
        return client

    def check(self) -> None:
        """All books add up, nothing is held, reserved or on its way, and every block has its checksum."""
        for number in self.managers:
            wait_for(lambda number=number: not self._unrest(number), f"node {number} is at rest", 10)  # type: ignore[misc]
            assert self.status(number).audit == ()
            arena = self.part(number).home.arena
            for record in arena.records.live():
                assert record.committed
                assert checksum(arena.slot_view(record.offset, record.length)) == record.checksum

    def _unrest(self, number: int) -> object:
        node = self.part(number)
        placement = node.dram.placement
        assert placement.used_bytes <= node.home.arena.capacity_bytes
        return (
            node.dram.num_reserved or placement._holds or placement.in_transfer or node.loader.flights
            or node.loader._adopted or node.server._budget.taken_bytes
        )  # fmt: skip

    def close(self) -> None:
        self.faults.clear()
        for client in self._clients:
            client.close(5)
        for manager in self.managers.values():
            self.run(manager.shutdown())
        self.stop_directory()
        wait_for(lambda: not asyncio.all_tasks(self.loop), f"no task is left: {asyncio.all_tasks(self.loop)}", 10)
        self.run(self.loop.shutdown_default_executor())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    # calls

    async def passes(self, name: str) -> None:
        """A call is on its way."""
        if not name.endswith(":reply"):
            self.calls[name] += 1
        if name in self.faults:
            await self.faults[name]()

    async def at_manager(self, number: int, name: str, *args: object) -> Any:
        """A call at a node's manager; it dies with the manager."""

        async def work() -> Any:
            await self.passes(f"{number}.{name}")
            answer = await getattr(self.managers[number], name)(*args)
            await self.passes(f"{number}.{name}:reply")
            return answer

        return await self._living(number, work())

    async def at_directory(self, name: str, *args: object) -> Any:
        """A call at the directory."""
        await self.passes(f"directory.{name}")
        if self.directory is None:
            raise DirectoryUnavailableError("away")
        answer = await getattr(self.directory, name)(*args)
        await self.passes(f"directory.{name}:reply")
        return answer

    async def _living(self, number: int, work: Coroutine[Any, Any, Any], *, abandon: bool = True) -> Any:
        """Work of a node's manager, which ends with the manager, and if abandoned goes on or not."""
        manager = self.managers.get(number)
        if manager is None:
            work.close()
            raise TierUnavailableError("dram", f"node {number} is away")
        task = asyncio.ensure_future(work)
        self._tasks[number].add(task)
        task.add_done_callback(self._tasks[number].discard)
        try:
            await asyncio.wait({task})
        finally:
            if not abandon and not task.done():
                task.cancel()
                await asyncio.wait({task})
        if task.cancelled() or self.managers.get(number) is not manager:
            raise TierUnavailableError("dram", f"node {number} died")
        return task.result()

    async def stream(self, number: int, name: str, step: str, request: object) -> AsyncGenerator[Any, None]:
        """A stream from a node's manager, one message after the other; closing it stops the manager's."""
        await self._living(number, self.passes(f"{number}.{name}"))
        stream = getattr(self.managers[number], name)(request)
        streams = self._streams[number]
        streams.add(stream)

        async def next_message() -> Any:
            await self.passes(f"{number}.{step}")
            return await anext(stream, None)

        try:
            while (message := await self._living(number, next_message(), abandon=False)) is not None:
                yield message
        finally:
            streams.discard(stream)
            await stream.aclose()

    def ask(self, work: Coroutine[Any, Any, Any], what: str, timeout_s: float) -> Any:
        """A client's call, which stops waiting after a time."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(timeout_s)
        except FutureTimeoutError as error:
            if future.done():
                raise
            future.cancel()
            raise DeadlineExceededError(what, timeout_s) from error


class _ManagerPort(ManagerPort):
    def __init__(self, rig: Rig, number: int) -> None:
        self._rig = rig
        self._number = number

    def _call(self, name: str, timeout_s: float, *args: object) -> Any:
        return self._rig.ask(self._rig.at_manager(self._number, name, *args), name, timeout_s + GRACE_S)

    @override
    def attach(self, timeout_s: float) -> Any:
        return self._call("attach", timeout_s)

    @override
    def reserve(self, request: ReserveRequest, timeout_s: float) -> Any:
        return self._call("reserve", timeout_s, request)

    @override
    def commit(self, request: CommitRequest, timeout_s: float) -> Any:
        return self._call("commit", timeout_s, request)

    @override
    def load(self, request: LoadRequest) -> Generator[LoadProgress, None, None]:
        deadline = time.monotonic() + request.timeout_s + GRACE_S
        stream = self._rig.stream(self._number, "load", "step", request)

        async def step() -> Any:
            return await anext(stream, None)

        async def end() -> None:
            with suppress(RuntimeError):  # the last step was abandoned just now, which ends the stream as well
                await stream.aclose()

        try:
            while (progress := self._rig.ask(step(), "load", max(0.0, deadline - time.monotonic()))) is not None:
                yield progress
        finally:
            asyncio.run_coroutine_threadsafe(end(), self._rig.loop)


class _DirectoryPort(DirectoryPort):
    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    @override
    def locate(self, keys: bytes, shard: int, num_shards: int, timeout_s: float) -> Any:
        try:
            return self._rig.ask(self._rig.at_directory("locate", keys, shard, num_shards), "locate", timeout_s)
        except DeadlineExceededError as error:
            raise DirectoryUnavailableError("locate") from error


class _Link:
    """A manager's calls to the directory."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(argument: object, timeout_s: float) -> Any:
            try:
                return await asyncio.wait_for(self._rig.at_directory(name, argument), timeout_s)
            except asyncio.TimeoutError as error:
                raise DirectoryUnavailableError(name) from error

        return call


class _Loopback(Transport):
    """Windows straight from the holder's generator, copied as Ray would."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    @override
    async def fetch(self, node: NodeId, request: FetchRequest, total_bytes: int) -> AsyncGenerator[Window, None]:
        deadline = self._rig.loop.time() + request.timeout_s
        windows = self._rig.stream(int(node, 16), "fetch", "window", request)
        async with aclosing(windows):
            while True:
                left = deadline - self._rig.loop.time()
                try:
                    window = await asyncio.wait_for(anext(windows, None), min(left, self._rig.config.holder_timeout_s))
                except asyncio.TimeoutError as error:
                    if left < self._rig.config.holder_timeout_s:
                        raise DeadlineExceededError("fetch", request.timeout_s) from error
                    raise TierUnavailableError("peer", "nothing came") from error
                except TierError:
                    raise
                except Exception as error:
                    raise TierUnavailableError("peer", repr(error)) from error
                if window is None:
                    return
                yield Window(tuple(replace(part, data=part.data.copy()) for part in window.parts))

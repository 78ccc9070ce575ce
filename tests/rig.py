"""A fleet in one process, without Ray: real managers, directory and clients, and calls that can be made to fail.

All managers and the directory run on one event loop in a thread. Calls have names: `directory.locate`, `0.reserve`,
`1.window`; each is counted in `Rig.calls` and passes `Rig.faults[name]` on its way, and `Rig.faults[name + ":reply"]`
on its way back. As with Ray, a caller that gives up waiting does not stop a call, only a stream.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any

from typing_extensions import Self

from kvfleet.client import Client
from kvfleet.config import MIB, FleetConfig
from kvfleet.copying import checksum
from kvfleet.core.directory import NodeId
from kvfleet.core.layout import ModelSpec
from kvfleet.errors import DeadlineExceededError, DirectoryUnavailableError, TierUnavailableError
from kvfleet.node.directory import DirectoryService
from kvfleet.node.manager import TierManager
from kvfleet.node.startup import NodePlace
from tests.conftest import wait_for
from tests.ports import Loopback, RigDirectoryPort, RigLink, RigManagerPort, ended

Fault = Callable[[], Awaitable[None]]

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


class Rig:
    """A running fleet; when left without an error it checks that nothing is amiss or left over."""

    def __init__(self, root: Path, num_nodes: int = 1, *, dram_bytes: int = 8 * MIB, **settings: object) -> None:
        self.config = FleetConfig(arena_root=str(root), dram_bytes=dram_bytes, **{**FAST, **settings})  # type: ignore[arg-type]
        self.calls: Counter[str] = Counter()
        self.faults: dict[str, Fault] = {}
        self.directory: DirectoryService | None = None
        self.managers: dict[int, TierManager] = {}
        self.live: set[NodeId] = set()  # all that were ever started
        self.dead: set[NodeId] = set()
        self._dying: set[int] = set()
        self._killers: set[asyncio.Future[None]] = set()
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

    def run(self, work: Awaitable[Any], timeout_s: float = 30.0) -> Any:
        """Run something on the fleet's loop."""

        async def awaited() -> Any:
            return await work

        return asyncio.run_coroutine_threadsafe(awaited(), self.loop).result(timeout_s)

    def config_of(self, number: int) -> FleetConfig:
        """A node's settings: nodes that have drives need other paths than each other, as they share a machine."""
        return self.config

    def node_id(self, number: int) -> NodeId:
        return NodeId(f"{number:032x}")

    def start_directory(self) -> None:
        """Start the directory, or put an empty one in place of the old one."""

        async def start() -> DirectoryService:
            return DirectoryService(self.config, lambda: frozenset(self.live) - self.dead)

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
            return TierManager(self.config_of(number), place, RigLink(self), lambda budget: Loopback(self, budget))

        wait_for(lambda: number not in self._dying, f"node {number} is dead")
        self._tasks[number], self._streams[number] = set(), set()
        self.live.add(self.node_id(number))
        manager: TierManager = self.run(start())
        self.managers[number] = manager
        assert manager._node is not None, manager._problem
        return manager

    def kill(self, number: int) -> None:
        """End a node's manager on the spot; its arena stays."""
        self.run(self._kill(number))

    def killing(self, number: int) -> Fault:
        """A call in the middle of which a node's manager dies; if it was to that one, it is lost."""

        async def fault() -> None:
            if number in self.managers:
                self._killers.add(asyncio.ensure_future(self._kill(number)))
                await hanging()

        return fault

    async def _kill(self, number: int) -> None:
        node, self.managers[number]._node = self.part(number), None
        del self.managers[number]
        self._dying.add(number)
        tasks = [*node._tasks, *node._last_tasks, *self._tasks[number], *node._admitter._moving]
        for reads in (node.loader.shared_reads, node.loader.drive_reads):
            tasks += reads._adopted if reads else ()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        if node.nvme is not None:
            await node.nvme.close()
        while self._streams[number]:
            await self._streams[number].pop().aclose()
        node._stop_populating.set()
        node.home.lock.release()
        self._dying.discard(number)

    def part(self, number: int) -> Any:
        """The insides of a node's manager."""
        return self.managers[number]._node

    def status(self, number: int) -> Any:
        return self.run(self.managers[number].status())

    def client(self, spec: ModelSpec, number: int = 0, shard: int = 0) -> Client:
        client = Client(spec, RigManagerPort(self, number), RigDirectoryPort(self), self.config, shard=shard)
        self._clients.append(client)
        return client

    def check(self) -> None:
        """All books add up, nothing is held, reserved or on its way, and every block has its checksum.

        Every block that was asked for has one outcome.
        """
        for client in self._clients:
            stats = client.stats()
            assert sum(stats.outcomes.values()) == stats.asked_blocks
        for number in self.managers:
            wait_for(lambda number=number: not self._unrest(number), f"node {number} is at rest", 10)  # type: ignore[misc]
            assert self.status(number).audit == ()
            assert self.run(self._audit(number)) == []
            arena = self.part(number).home.arena
            for record in arena.records.live():
                assert record.committed
                assert checksum(arena.slot_view(record.offset, record.length)) == record.checksum

    async def _audit(self, number: int) -> Any:
        return self.part(number).dram.holdings.audit()

    def _unrest(self, number: int) -> object:
        node = self.part(number)
        placement = node.dram.placement
        assert placement.used_bytes <= node.home.arena.capacity_bytes
        return (
            node.dram.num_reserved or placement._holds or placement.in_transfer or node.loader.flights
            or (node.loader.shared_reads and node.loader.shared_reads._adopted) or node.server._budget.taken_bytes
            or node.peers.transport._budget.taken_bytes or node.peers.holders._inflight_bytes or len(node.holds)
        )  # fmt: skip

    def close(self) -> None:
        self.faults.clear()
        self.run(self._give_up_hanging())
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

    async def _give_up_hanging(self) -> None:
        for tasks in self._tasks.values():
            for task in tasks:
                task.cancel()

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
            if not abandon:
                await ended(task)
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
            if stream in streams:  # else the manager's death closes it
                streams.remove(stream)
                await stream.aclose()

    def ask(self, work: Coroutine[Any, Any, Any], what: str, timeout_s: float) -> Any:
        """A client's call, which stops waiting after a time."""
        return self.end(self.begin(work), what, timeout_s)

    def begin(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def end(self, future: Future[Any], what: str, timeout_s: float) -> Any:
        try:
            return future.result(timeout_s)
        except FutureTimeoutError as error:
            if future.done():
                raise
            future.cancel()
            raise DeadlineExceededError(what, timeout_s) from error

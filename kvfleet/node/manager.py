"""`TierManager`: one a node. Owns the arena, carries out what placement decides, talks to the rest of the fleet.

It runs as an actor, but is a plain class. The work is in the parts it puts together: `DramTier` (the arena),
`Loader` and `Server` (blocks from and to other nodes), `Saver` (the shared tier), `Publisher` (the directory).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from kvfleet.config import MIB, FleetConfig
from kvfleet.errors import KvFleetError, TierUnavailableError
from kvfleet.node.admission import Admitter
from kvfleet.node.arenadir import CLIENTS_DIR, NodeFile
from kvfleet.node.dram import DramTier
from kvfleet.node.listing import list_shared
from kvfleet.node.loading import Loader
from kvfleet.node.messages import (
    Attachment,
    CommitReply,
    CommitRequest,
    FetchRequest,
    LoadProgress,
    LoadRequest,
    ReserveReply,
    ReserveRequest,
    Window,
)
from kvfleet.node.publishing import DirectoryLink, Publisher
from kvfleet.node.saving import Saver
from kvfleet.node.serving import Server
from kvfleet.node.shared import SharedTier
from kvfleet.node.startup import NodeHome, NodePlace, open_home, remove_home
from kvfleet.node.transport import Transport
from kvfleet.node.waiting import now
from kvfleet.node.windows import ByteBudget
from kvfleet.node.writers import Writers

__all__ = ["NodeStatus", "TierManager"]

_log = logging.getLogger(__name__)
_RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node at a moment.

    Attributes:
        node_id: Ray's.
        epoch: of its manager; grows with each start.
        problem: why the node has no arena, or "".
        used_bytes: of slots that hold or await a block; never above `capacity_bytes`.
        reserved_blocks: being written.
        unsaved_blocks: not in the shared tier yet.
        evicted_blocks: left since the manager started; `lost_blocks` of them without a copy in the shared tier.
        loaded_blocks: brought for clients, by outcome.
        loaded_bytes: by source.
        sent_bytes: to other nodes.
        shared_problem: why the shared tier's last answer was an error, or "".
        saved_blocks: written to the shared tier; `save_failures` attempts failed.
        resyncs: full inventories sent to the directory.
        audit: what is wrong with the books; empty if all is well.
    """

    node_id: str
    epoch: int
    problem: str
    capacity_bytes: int = 0
    populated_bytes: int = 0
    used_bytes: int = 0
    blocks: int = 0
    reserved_blocks: int = 0
    unsaved_blocks: int = 0
    evicted_blocks: int = 0
    lost_blocks: int = 0
    loaded_blocks: dict[str, int] | None = None
    loaded_bytes: dict[str, int] | None = None
    sent_bytes: int = 0
    shared_problem: str = ""
    saved_blocks: int = 0
    save_failures: int = 0
    resyncs: int = 0
    audit: tuple[str, ...] = ()


class TierManager:
    """The manager of one node.

    Constructing it never raises: without an arena it says why in `attach` and `status`.

    Threads: one event loop, which must be running when it is made. Blocking work runs in threads.
    """

    def __init__(
        self,
        config: FleetConfig,
        place: NodePlace,
        link: DirectoryLink,
        make_transport: Callable[[ByteBudget], Transport],
    ) -> None:
        self._config = config
        self._place = place
        self._link = link
        self._make_transport = make_transport
        self._problem = ""
        self._retry_at = 0.0
        self._node: _Node | None = None
        self._open()

    def _open(self) -> None:
        """Get an arena, or note why there is none; what is wrong may be mended while we run."""
        self._retry_at = now() + _RETRY_S
        home = None
        try:
            home = open_home(self._config, self._place)
            self._node = _Node(self._config, self._place, home, self._link, self._make_transport)
        except KvFleetError as error:
            self._problem = str(error)
        except Exception as error:  # noqa: BLE001  an actor whose constructor fails on a restart is dead for good
            _log.exception("no arena on this node")
            self._problem = f"unexpected: {error!r}"
        if self._node is None and home is not None:
            self._leave(home)

    def _leave(self, home: NodeHome) -> None:
        """Give back what `open_home` gave; an arena that was warm stays for the next try."""
        try:
            if home.warm:
                home.lock.release()
            else:
                remove_home(home)
        except OSError as error:
            _log.warning("the arena's directory could not be removed: %s", error)

    def _parts(self) -> _Node:
        if self._node is None:
            raise TierUnavailableError("dram", self._problem)
        return self._node

    async def attach(self) -> Attachment:
        """What a client needs to use this node."""
        if self._node is None and now() >= self._retry_at:
            self._open()
        if self._node is None:
            return Attachment("", 0, "", b"", "", self._problem)
        home = self._node.home
        return Attachment(
            home.node_id, home.epoch, str(home.arena.path), home.arena.arena_id, str(home.directory / CLIENTS_DIR)
        )

    async def reserve(self, request: ReserveRequest) -> ReserveReply:
        """Slots for blocks a client wants to store."""
        return await self._parts().writers.reserve(request)

    async def commit(self, request: CommitRequest) -> CommitReply:
        """Make written slots visible, here and in the directory."""
        return await self._parts().writers.commit(request)

    async def load(self, request: LoadRequest) -> AsyncGenerator[LoadProgress, None]:
        """Bring blocks into the arena."""
        async with aclosing(self._parts().loader.load(request)) as steps:
            async for progress in steps:
                yield progress

    async def fetch(self, request: FetchRequest) -> AsyncGenerator[Window, None]:
        """Send blocks to another node."""
        async with aclosing(self._parts().server.fetch(request)) as windows:
            async for window in windows:
                yield window

    async def status(self) -> NodeStatus:
        """How this node is doing."""
        if self._node is None:
            return NodeStatus(self._place.ray_node_id, 0, self._problem)
        return self._node.status()

    async def drain(self, timeout_s: float) -> int:
        """Save what is unsaved, for at most `timeout_s`. Returns how many blocks are left unsaved."""
        return await self._parts().saver.drain(timeout_s) if self._node is not None else 0

    async def shutdown(self) -> None:
        """Stop the background work and remove the arena. Clients that have it mapped can still read it."""
        if self._node is not None:
            node, self._node = self._node, None
            self._retry_at = float("inf")
            self._problem = "the node's manager was shut down"
            await node.shutdown()


class _Node:
    """The parts of a manager that has an arena."""

    def __init__(
        self, config: FleetConfig, place: NodePlace, home: NodeHome, link: DirectoryLink,
        make_transport: Callable[[ByteBudget], Transport],
    ) -> None:  # fmt: skip
        self.config = config
        self.home = home
        # In and out have a budget each: with one for both, two nodes that read from each other could wait forever.
        half = max(MIB, int(place.object_store_bytes * config.object_store_fraction) // 2)
        # A pool each, so that a shared tier that hangs on writes holds up nothing else.
        self._threads = ThreadPoolExecutor(2 + config.load_inflight_max, "kvfleet")
        self._save_threads = ThreadPoolExecutor(2 * config.save_inflight_max, "kvfleet-save")
        self.shared = None
        if config.shared_url is not None:
            self.shared = SharedTier(config.shared_url, config.shared_options, config.shared_timeout_s)
        self.dram = DramTier(home.arena, home.directory / "namespaces", lower_tier=self.shared is not None, now=now)
        self.publisher = Publisher(
            home.node_id, home.epoch, link, config, holdings=self.dram, on_list_shared=self._list_shared
        )
        self.saver = Saver(self.dram, self.shared, self.publisher, link, config, self._save_threads)
        self._admitter = Admitter(self.dram, self.saver.move)
        self.saver.on_moved = self._admitter.freed
        self.loader = Loader(
            home.node_id, self.dram, self._admitter, make_transport(ByteBudget(half)),
            self.shared, self.publisher, link, config, self._threads,
        )  # fmt: skip
        self.server = Server(self.dram, self._admitter, ByteBudget(half), config)
        self.writers = Writers(self.dram, self._admitter, self.saver, self.publisher)
        self._link = link
        self._listing: asyncio.Task[None] | None = None
        self._stop_populating = threading.Event()
        self._tasks = [
            asyncio.create_task(self._supervise(work))
            for work in (self.publisher.run, self.saver.run, self._tend, self._populate)
        ]

    async def _supervise(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run background work, again after a pause if it fails: no error of ours ends it for good."""
        while True:
            try:
                await work()
            except Exception:  # noqa: BLE001
                _log.exception("%s failed, trying again", work.__qualname__)
                await asyncio.sleep(self.config.heartbeat_s)
            else:
                return

    async def _populate(self) -> None:
        await asyncio.to_thread(self.home.arena.populate, self._stop_populating)

    async def _tend(self) -> None:
        """Every heartbeat: look after dead writers, show that we live."""
        while True:
            await asyncio.sleep(self.config.heartbeat_s)
            NodeFile.touch(self.home.directory)
            self.writers.tend(self.home.directory / CLIENTS_DIR)

    def _list_shared(self) -> None:
        if self.shared is not None and (self._listing is None or self._listing.done()):
            self._listing = asyncio.create_task(self._list(self.shared))

    async def _list(self, shared: SharedTier) -> None:
        await self.saver.works.wait()
        await list_shared(self.home.node_id, shared, self.publisher, self._link, self.config)

    def status(self) -> NodeStatus:
        """See `NodeStatus`."""
        placement = self.dram.placement
        return NodeStatus(
            node_id=self.home.node_id,
            epoch=self.home.epoch,
            problem="",
            capacity_bytes=self.home.arena.capacity_bytes,
            populated_bytes=self.home.arena.populated_bytes,
            used_bytes=placement.used_bytes,
            blocks=self.dram.digest().count,
            reserved_blocks=self.dram.num_reserved,
            unsaved_blocks=placement.num_unsaved,
            evicted_blocks=placement.counters.evicted,
            lost_blocks=placement.counters.dropped_unsaved,
            loaded_blocks={outcome.value: n for outcome, n in self.loader.blocks.items()},
            loaded_bytes={source.value: n for source, n in self.loader.num_bytes.items()},
            sent_bytes=self.server.sent_bytes,
            shared_problem=self.saver.problem,
            saved_blocks=self.saver.saved_blocks,
            save_failures=self.saver.failures,
            resyncs=self.publisher.resyncs,
            audit=tuple(placement.audit()),
        )

    async def shutdown(self) -> None:
        """See `TierManager.shutdown`."""
        self._stop_populating.set()
        tasks = [*self._tasks, *([self._listing] if self._listing is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.loader.shared_reads is not None:
            await self.loader.shared_reads.end()
        await self._admitter.settle()
        await self.saver.settle()
        await asyncio.to_thread(self._threads.shutdown)
        await asyncio.to_thread(self._save_threads.shutdown)
        if self.shared is not None:
            await asyncio.to_thread(self.shared.close)
        remove_home(self.home)

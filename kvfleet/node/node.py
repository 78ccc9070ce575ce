"""The parts of a manager that has an arena, and their background work."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from kvfleet.config import MIB, FleetConfig
from kvfleet.metrics import Meter, Sink, node_values
from kvfleet.node.admission import Admitter
from kvfleet.node.arenadir import CLIENTS_DIR, NodeFile
from kvfleet.node.draining import Drained, is_marked, mark
from kvfleet.node.dram import DramTier
from kvfleet.node.holds import Holds
from kvfleet.node.listing import list_shared
from kvfleet.node.loading import Loader
from kvfleet.node.peers import Peers
from kvfleet.node.publishing import DirectoryLink, Publisher
from kvfleet.node.saving import Saver
from kvfleet.node.serving import Server
from kvfleet.node.shared import SharedTier
from kvfleet.node.startup import NodeHome, NodePlace, remove_home
from kvfleet.node.status import NodeStatus
from kvfleet.node.storeroom import StoreRoom
from kvfleet.node.tallybook import TallyBook
from kvfleet.node.transport import Transport
from kvfleet.node.waiting import now
from kvfleet.node.windows import ByteBudget
from kvfleet.node.writers import Writers

__all__ = ["Node"]

_log = logging.getLogger(__name__)


class Node:
    """The parts of a manager that has an arena."""

    def __init__(
        self, config: FleetConfig, place: NodePlace, home: NodeHome, link: DirectoryLink,
        make_transport: Callable[[ByteBudget], Transport], sink: Sink,
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
        store = StoreRoom(place.object_store_bytes, place.object_store_used)
        stream_bytes_max = min(half, (config.windows_in_flight + 1) * config.window_bytes_max)

        async def fits(num_bytes: int) -> bool:
            return await store.fits(min(num_bytes, stream_bytes_max))

        self.peers = Peers(home.node_id, make_transport(ByteBudget(half)), fits, config.holder_timeout_s)
        self.loader = Loader(
            home.node_id, self.dram, self._admitter, self.peers,
            self.shared, self.publisher, link, config, self._threads,
        )  # fmt: skip
        self.server = Server(self.dram, self._admitter, ByteBudget(half), store, config)
        self.writers = Writers(self.dram, self._admitter, self.saver, self.publisher)
        self.holds = Holds(self.dram, self._admitter)
        self.tallies = TallyBook(home.directory / CLIENTS_DIR, home.directory / "departed")
        self.draining = is_marked(home.directory)
        if self.draining:
            self.saver.pause()
        labels = {"fleet": config.name, "node": home.node_id}
        self._meter = Meter(sink, labels, node_values(self.figures()))  # an earlier manager has told of that
        self._link = link
        self._listing: asyncio.Task[None] | None = None
        self._stop_populating = threading.Event()
        self._tasks = [
            asyncio.create_task(self._supervise(work))
            for work in (self.publisher.run, self.saver.run, self.peers.run, self._tend, self._populate)
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
        """Every heartbeat: look after dead clients, show that we live."""
        while True:
            await asyncio.sleep(self.config.heartbeat_s)
            NodeFile.touch(self.home.directory)
            self.holds.tend(self.home.directory / CLIENTS_DIR)
            self.writers.tend(self.home.directory / CLIENTS_DIR, self.tallies.depart)
            self._meter.tell(node_values(self.figures()))

    def _list_shared(self) -> None:
        if self.shared is not None and (self._listing is None or self._listing.done()):
            self._listing = asyncio.create_task(self._list(self.shared))

    async def _list(self, shared: SharedTier) -> None:
        await self.saver.works.wait()
        await list_shared(self.home.node_id, shared, self.publisher, self._link, self.config)

    async def leave(self, timeout_s: float, bytes_max: int | None) -> Drained:
        """See `TierManager.leave`."""
        self.draining = True
        mark(self.home.directory, draining=True)
        return await self.saver.leave(timeout_s, bytes_max)

    def stay(self) -> None:
        """See `TierManager.stay`."""
        self.draining = False
        mark(self.home.directory, draining=False)
        self.saver.resume()

    def status(self) -> NodeStatus:
        """See `NodeStatus`."""
        return replace(self.figures(), audit=tuple(self.dram.placement.audit()))

    def figures(self) -> NodeStatus:
        """All of it but the audit, which takes its time."""
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
            draining=self.draining,
            held_bytes=self.holds.num_bytes,
            avoided=tuple(sorted(self.peers.holders.avoided)),
            totals=self.tallies.totals(),
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

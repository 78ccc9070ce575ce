"""The parts of a manager that has an arena, and their background work."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from kvfleet.config import MIB, FleetConfig
from kvfleet.metrics import Meter, Sink, node_values
from kvfleet.node.admission import Admitter
from kvfleet.node.arenadir import CLIENTS_DIR, NodeFile
from kvfleet.node.directorylink import DeltaReply, DirectoryLink
from kvfleet.node.draining import Drained, is_marked, mark
from kvfleet.node.dram import DramTier
from kvfleet.node.drivecalls import DaemonThreads
from kvfleet.node.holds import Holds
from kvfleet.node.loading import Loader
from kvfleet.node.lowertiers import LowerTiers
from kvfleet.node.nvme import NvmeTier
from kvfleet.node.peers import Peers
from kvfleet.node.publishing import Publisher
from kvfleet.node.recording import Recording
from kvfleet.node.serving import Server
from kvfleet.node.shared import SharedTier
from kvfleet.node.startup import NodeHome, NodePlace, remove_home
from kvfleet.node.status import NodeStatus
from kvfleet.node.storeroom import StoreRoom
from kvfleet.node.tallybook import TallyBook
from kvfleet.node.transport import Transport
from kvfleet.node.waiting import now, within
from kvfleet.node.windows import ByteBudget
from kvfleet.node.writers import Writers

__all__ = ["Node"]

_log = logging.getLogger(__name__)
_FINISH_TIMEOUT_S = 8.0  # whoever stops a fleet kills its managers after 10 s
_AUDITED_MAX = 20_000  # blocks; with more, whoever asks for the status is not to keep others waiting: doctors do it
_WORKS_TIMEOUT_S = 2.0  # of these, so that there is time to close the drives


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
        self._threads = DaemonThreads(2 + config.load_inflight_max, "kvfleet")
        self.lower = lower = LowerTiers(config)
        self.dram = DramTier(
            home.arena, home.directory / "namespaces", lower=lower.gates, now=now, policy=config.policy
        )
        self.publisher = Publisher(
            home.node_id, home.epoch, link, config, holdings=self.dram.holdings, on_reply=self._hear
        )
        lower.join(self.dram, self.publisher, link, home)
        if lower.endpoint is not None:
            self.publisher.may_keep = lower.endpoint.works.is_set
        self.saver, self.endpoint, self.catalog = lower.saver, lower.endpoint, lower.catalog
        self._admitter = Admitter(self.dram, lower.move)
        lower.on_moved(self._admitter.freed)
        drive_reads = None if lower.drives is None else lower.drives.reads
        store = StoreRoom(place.object_store_bytes, place.object_store_used)
        stream_bytes_max = min(half, (config.windows_in_flight + 1) * config.window_bytes_max)

        async def fits(num_bytes: int) -> bool:
            return await store.fits(min(num_bytes, stream_bytes_max))

        self.peers = Peers(home.node_id, make_transport(ByteBudget(half)), fits, config.holder_timeout_s)
        self.loader = Loader(
            home.node_id, self.dram, self._admitter, self.peers,
            self.endpoint, self.publisher, link, config, self._threads, drive_reads,
        )  # fmt: skip
        self.server = Server(self.dram, self._admitter, ByteBudget(half), store, config, drive_reads)
        self.writers = Writers(self.dram, self._admitter, lower, self.publisher)
        self.holds = Holds(self.dram, self._admitter)
        self.recording = Recording(home.directory)
        self.tallies = TallyBook(home.directory / CLIENTS_DIR, home.directory / "departed")
        self.draining = is_marked(home.directory)
        if self.draining:
            self.saver.pause()
        labels = {"fleet": config.name, "node": home.node_id}
        self._meter = Meter(sink, labels, node_values(self.figures()))  # an earlier manager has told of that
        self._stop_populating = threading.Event()
        works = [self.publisher.run, self.peers.run, self._tend, self._populate, *lower.works()]
        self._tasks = [asyncio.create_task(self._supervise(work)) for work in works]
        self._last_tasks = [asyncio.create_task(self._supervise(work)) for work in lower.last_works()]

    def _hear(self, reply: DeltaReply) -> None:
        """The directory has answered."""
        self.lower.hear(reply)
        self.writers.hear_retired(reply.retired)

    @property
    def nvme(self) -> NvmeTier | None:
        """The drives of this node, if it has any."""
        return None if self.lower.drives is None else self.lower.drives.nvme

    @property
    def shared(self) -> SharedTier | None:
        """The tier that all nodes share, if there is one."""
        return None if self.endpoint is None else self.endpoint.shared

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
            clients = self.home.directory / CLIENTS_DIR
            # Removed by somebody, as systemd does with all that a user has there when he logs out: nobody is dead for
            # that, and what lives still writes to its slots.
            if clients.is_dir():
                self.holds.tend(clients)
                self.writers.tend(clients, self.tallies.depart)
            self.recording.tend(now())
            self._meter.tell(node_values(self.figures()))

    async def flush(self, timeout_s: float) -> int:
        """See `TierManager.flush`."""
        await self.lower.flush(timeout_s)
        return self.num_unsaved

    @property
    def num_unsaved(self) -> int:
        """See `TierManager.num_unsaved`."""
        return self.saver.num_waiting

    async def drain(self, timeout_s: float, bytes_max: int | None) -> Drained:
        """See `TierManager.drain`."""
        self.draining = True
        mark(self.home.directory, draining=True)
        return await self.saver.drain(timeout_s, bytes_max)

    def resume(self) -> None:
        """See `TierManager.resume`."""
        self.draining = False
        mark(self.home.directory, draining=False)
        self.saver.resume()

    def status(self) -> NodeStatus:
        """See `NodeStatus`."""
        figures = self.figures()
        return replace(figures, audit=tuple(self.audit())) if figures.blocks <= _AUDITED_MAX else figures

    def audit(self) -> list[str]:
        """What is wrong with the books of the arena. Nothing else is done meanwhile: 1.6 us a block."""
        return self.dram.placement.audit()

    def figures(self) -> NodeStatus:
        """All of it but the audit."""
        placement = self.dram.placement
        return NodeStatus(
            node_id=self.home.node_id,
            epoch=self.home.epoch,
            problem="",
            capacity_bytes=self.home.arena.capacity_bytes,
            populated_bytes=self.home.arena.populated_bytes,
            used_bytes=placement.used_bytes,
            blocks=self.dram.num_records,
            reserved_blocks=self.dram.num_reserved,
            unsaved_blocks=self.saver.num_unsaved,
            evicted_blocks=placement.counters.evicted,
            lost_blocks=placement.counters.dropped_unsaved,
            loaded_blocks={outcome.value: n for outcome, n in self.loader.blocks.items()},
            loaded_bytes={source.value: n for source, n in self.loader.num_bytes.items()},
            sent_bytes=self.server.sent_bytes,
            shared_problem="" if self.endpoint is None else self.endpoint.problem,
            shared_tried=self.endpoint is None or self.endpoint.tried.is_set(),
            shared_counts={} if self.endpoint is None else dict(self.endpoint.counts),
            retired_blocks=self.writers.retired_blocks,
            saved_blocks=self.saver.writes.blocks,
            save_failures=self.saver.writes.failures,
            resyncs=self.publisher.resyncs,
            draining=self.draining,
            held_bytes=self.holds.num_bytes,
            avoided=self._avoided(),
            totals=self.tallies.totals(),
            drives=() if self.nvme is None else self.nvme.status(),
            catalog=None if self.catalog is None else self.catalog.status(),
        )

    def _avoided(self) -> tuple[str, ...]:
        shared = () if self.endpoint is None or self.endpoint.allows("read") else ("shared",)
        return (*sorted(self.peers.holders.avoided), *shared)

    async def shutdown(self) -> None:
        """See `TierManager.shutdown`. The arena goes in time, whatever hangs or takes long: who asks for it waits."""
        finished = True
        try:
            await within(_FINISH_TIMEOUT_S, self._finish())
        except asyncio.TimeoutError:
            _log.warning("not all work of this node has ended in time")
            finished = False
        remove_home(self.home, unmap=finished)

    async def _finish(self) -> None:
        """End all work, and close the tiers."""
        self._stop_populating.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks, timeout=_WORKS_TIMEOUT_S)  # one may be reading a long listing
        if self.loader.shared_reads is not None:
            await self.loader.shared_reads.end()
        await self._admitter.settle()
        await self.lower.end()
        for task in self._last_tasks:
            task.cancel()
        await asyncio.gather(*self._last_tasks, return_exceptions=True)
        await asyncio.to_thread(self._threads.shutdown)
        await self.lower.close()

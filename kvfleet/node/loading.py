"""Brings blocks into the arena: from this node's drives, else from other nodes or the shared tier; first blocks first.

Each load has a producer, which brings blocks in order, and a consumer, the stream of outcomes to the client. What
the client has not copied yet is held in the arena, until the deadline at most, and is a quarter of it at most: the rest
of a prefix waits for that room, so a prefix larger than the arena passes through it, and a client that stops copying
leaves room, and the blocks it would have brought, to others.

Single flight: while one load brings a block, others wait for it. If it fails or its client goes away, they bring it
themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator
from concurrent.futures import Executor
from contextlib import aclosing

from kvfleet.config import FleetConfig
from kvfleet.core.block import BlockKey
from kvfleet.core.directory import NodeId, Run
from kvfleet.node.admission import Admitter
from kvfleet.node.arrivals import Arrivals
from kvfleet.node.dram import DramTier, record_id
from kvfleet.node.drivereads import DriveReads
from kvfleet.node.endpoint import SharedEndpoint
from kvfleet.node.landing import BlockSlots
from kvfleet.node.messages import LoadProgress, LoadRequest, Miss, Outcome, Source
from kvfleet.node.peers import Peers
from kvfleet.node.publishing import DirectoryLink, Publisher
from kvfleet.node.sharedreads import SharedReads
from kvfleet.node.sources import Sources, Tries
from kvfleet.node.whereabouts import Whereabouts

__all__ = ["Loader"]

_log = logging.getLogger(__name__)
_STUCK_MAX = 4096

Flight = asyncio.Future[Source | None]
"""A block on its way; resolves to where it came from, None if it did not come."""


class Loader:
    """Loads of one node. Threads: the manager's event loop; copies and reads run in threads."""

    def __init__(  # noqa: PLR0913  the parts of the manager it works with
        self,
        node: NodeId,
        dram: DramTier,
        admitter: Admitter,
        peers: Peers,
        endpoint: SharedEndpoint | None,
        publisher: Publisher,
        link: DirectoryLink,
        config: FleetConfig,
        executor: Executor,
        drive_reads: DriveReads | None = None,
    ) -> None:
        self.node = node
        self.dram = dram
        self.admitter = admitter
        self.publisher = publisher
        self.link = link
        self.config = config
        self.flights: dict[tuple[BlockKey, int], Flight] = {}
        self.stuck: dict[tuple[BlockKey, int], int | None] = {}  # generations whose writers were waited for in vain
        self.endpoint = endpoint
        self.shared_reads = None if endpoint is None else SharedReads(endpoint, publisher, executor, config)
        self.drive_reads = drive_reads
        self.sources = Sources(peers, drive_reads, self.shared_reads, executor, config)
        self.blocks: Counter[Outcome] = Counter()
        self.num_bytes: Counter[Source] = Counter()

    async def load(self, request: LoadRequest) -> AsyncGenerator[LoadProgress, None]:
        """Bring the blocks of a request; yields outcomes in order until all came or one missed."""
        load = _Load(self, request)
        async with aclosing(load.run()) as steps:
            async for progress in steps:
                for outcome in progress.outcomes:
                    self.blocks[outcome] += 1
                    if isinstance(outcome, Source):
                        self.num_bytes[outcome] += request.num_bytes
                yield progress


class _Load:
    """One load under way. Indexes count from the first block of the request."""

    def __init__(self, loader: Loader, request: LoadRequest) -> None:
        self._loader = loader
        self._request = request
        self._slots = BlockSlots(loader.dram, loader.admitter, request)
        self._keys = self._slots.keys
        self._arrivals = Arrivals(self._slots)
        self._outcomes = self._arrivals.outcomes
        self._where = Whereabouts(loader.link, request)
        self._tries = Tries(loader.sources, self._slots, self._arrivals, self._where, self._landed)

    async def run(self) -> AsyncGenerator[LoadProgress, None]:
        """Bring the blocks; see `Loader.load`."""
        producer = asyncio.create_task(self._produce())
        # A client that dies may leave this generator paused for ever; after the deadline it copies nothing anyway.
        timer = asyncio.get_running_loop().call_later(self._slots.left_s, self._expire, producer)
        try:
            async with aclosing(self._arrivals.steps()) as steps:
                async for progress in steps:
                    yield progress
        finally:
            timer.cancel()
            producer.cancel()
            try:
                await asyncio.gather(producer, return_exceptions=True)
            finally:  # also if we are cancelled once more meanwhile
                self._arrivals.let_go()

    def _expire(self, producer: asyncio.Task[None]) -> None:
        producer.cancel()
        self._arrivals.let_go()

    async def _produce(self) -> None:
        try:
            while len(self._outcomes) < len(self._keys):
                has_room = await self._slots.pace.room(self._slots.left_s)
                miss = await self._bring(len(self._outcomes)) if has_room else Miss.DEADLINE
                if miss is not None:
                    self._arrivals.add(miss)
                    return
        except Exception:  # noqa: BLE001  a bug of ours is a miss for the request, and a line in the log
            _log.exception("load given up")
            self._arrivals.add(Miss.UNREACHABLE)

    async def _bring(self, index: int) -> Miss | None:
        """Bring block `index`, and those after it that come by the same way; why one did not, or None."""
        while not self._arrivals.add_resident(Source.DRAM):
            flight = self._flight(index)
            if flight is not None:
                await asyncio.wait({flight}, timeout=self._slots.left_s)
                if not flight.done():
                    return Miss.DEADLINE
                source = flight.result()
                if source is not None and self._arrivals.add_resident(source):
                    return None
            elif self._slots.pending(index):
                miss = await self._await_writer(index)
                if miss is not None:
                    return miss
            else:
                return await self._fly(self._run_of(index))
        return None

    async def _await_writer(self, index: int) -> Miss | None:
        """Wait for a block that is being written; why in vain, or None. For a stuck writer only one load waits."""
        record, stuck = (self._keys[index], self._request.shard), self._loader.stuck
        generation = self._loader.dram.writing(*record)
        if stuck.get(record) == generation:
            return Miss.TOO_SLOW
        if await self._slots.settled(index, self._loader.config.holder_timeout_s):
            stuck.pop(record, None)
            return None
        if not self._slots.left_s:
            return Miss.DEADLINE
        if len(stuck) >= _STUCK_MAX:
            del stuck[next(iter(stuck))]
        stuck[record] = generation
        return Miss.TOO_SLOW

    def _run_of(self, index: int) -> Run:
        """The blocks from `index` on that nobody is bringing or writing, as far as they have the same holders."""
        run, stop, on_drives = self._where.run_at(index), index + 1, self._tries.on_drives(index)
        end = len(self._keys) if on_drives else run.stop
        while stop < end and on_drives == self._tries.on_drives(stop) and not self._coming(stop):
            stop += 1
        return Run(index, stop, run.nodes, run.shared)

    def _coming(self, index: int) -> bool:
        """Whether a block is here, or will be by another's hand."""
        return bool(self._flight(index)) or self._slots.pending(index) or self._slots.resident(index)

    def _flight(self, index: int) -> Flight | None:
        return self._loader.flights.get((self._keys[index], self._request.shard))

    async def _fly(self, run: Run) -> Miss | None:
        """Bring the blocks of a run from the first source that can; where one stops, the next goes on."""
        loop = asyncio.get_running_loop()
        flights: dict[tuple[BlockKey, int], Flight] = {
            (key, self._request.shard): loop.create_future() for key in self._keys[run.start : run.stop]
        }
        assert not self._loader.flights.keys() & flights.keys(), "a block is brought once at a time"
        self._loader.flights.update(flights)
        try:
            return await self._tries.bring(run)
        finally:
            for record, flight in flights.items():
                if not flight.done():
                    del self._loader.flights[record]
                    flight.set_result(None)

    async def _landed(self, source: Source, saved: bool) -> bool:
        """The next block is in the arena, or will be by another's hand. False: it is not.

        Args:
            source: where it came from.
            saved: the shared tier has it.
        """
        index = len(self._outcomes)
        if not self._slots.resident(index):
            await self._slots.settled(index, self._loader.config.holder_timeout_s)
        if not self._arrivals.add_resident(source):
            return False
        record = (self._keys[index], self._request.shard)
        endpoint, drives = self._loader.endpoint, self._loader.drive_reads
        if saved and endpoint is not None and not endpoint.has_lost(record_id(*record)):
            self._loader.dram.placement.saved(*record, "shared")
        if drives is not None and drives.has(*record, self._request.num_bytes):
            self._loader.dram.placement.saved(*record, "nvme")
        self._loader.publisher.wake()
        self._loader.flights.pop(record).set_result(source)
        return True

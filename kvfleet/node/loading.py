"""Brings blocks into the arena: from other nodes, else from the shared tier; first blocks first.

Each load has a producer, which brings blocks in order, and a consumer, the stream of outcomes to the client. What
the client has not copied yet is held in the arena, until the deadline at most, and is a quarter of it at most: the rest
of a prefix waits for that room, so a prefix larger than the arena passes through it, and a client that stops copying
leaves room, and the blocks it would have brought, to others.

Single flight: while one load brings a block, others wait for it. If it fails or its client goes away, they bring it
themselves.

Why a block did not come is the last failure among those who may have it. Without a failure, all who were said to have
it answered, and do not: then it is what the directory says now, or `EVICTED` where it still names somebody.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable
from concurrent.futures import Executor
from contextlib import aclosing

from kvfleet.config import FleetConfig
from kvfleet.core.block import KEY_BYTES, BlockKey
from kvfleet.core.directory import NodeId, Run
from kvfleet.errors import CorruptBlockError, DeadlineExceededError, LayoutMismatchError, TierError
from kvfleet.node.admission import Admitter
from kvfleet.node.arrivals import Arrivals
from kvfleet.node.dram import DramTier
from kvfleet.node.landing import BlockSlots, land
from kvfleet.node.messages import FetchRequest, LoadProgress, LoadRequest, Miss, Outcome, Source
from kvfleet.node.peers import Peers
from kvfleet.node.publishing import DirectoryLink, Publisher
from kvfleet.node.shared import SharedTier
from kvfleet.node.sharedreads import SharedReads
from kvfleet.node.whereabouts import Whereabouts

__all__ = ["Loader"]

_log = logging.getLogger(__name__)
_OURS = {Miss.NO_ROOM, Miss.DEADLINE, Miss.EVICTED}  # no other holder would help

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
        shared: SharedTier | None,
        publisher: Publisher,
        link: DirectoryLink,
        config: FleetConfig,
        executor: Executor,
    ) -> None:
        self.node = node
        self.dram = dram
        self.admitter = admitter
        self.peers = peers
        self.publisher = publisher
        self.link = link
        self.config = config
        self.executor = executor
        self.flights: dict[tuple[BlockKey, int], Flight] = {}
        self.stuck: dict[tuple[BlockKey, int], int | None] = {}  # generations whose writers were waited for in vain
        self.shared_reads = None if shared is None else SharedReads(shared, peers, publisher, executor, config)
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
        self._failed: dict[NodeId, Miss] = {}

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
            await asyncio.gather(producer, return_exceptions=True)
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
        run = self._where.run_at(index)
        stop = index + 1
        while stop < run.stop and not (self._flight(stop) or self._slots.pending(stop) or self._slots.resident(stop)):
            stop += 1
        return Run(index, stop, run.nodes, run.shared)

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
            return await self._from_any(run)
        finally:
            for record, flight in flights.items():
                if not flight.done():
                    del self._loader.flights[record]
                    flight.set_result(None)

    async def _from_any(self, run: Run) -> Miss | None:
        """Try the sources of a run one after the other.

        Returns:
            Why the next block did not come; None if all came, or another try may bring more.
        """
        miss = await self._from_peers(run)
        if len(self._outcomes) == run.stop or self._slots.pace.full():
            return None
        if not run.shared and miss not in _OURS:
            timeout_s = min(self._slots.left_s, self._loader.config.lookup_timeout_s)
            if await self._where.ask(len(self._outcomes), timeout_s):
                return None
        if self._loader.shared_reads is not None and miss is not Miss.DEADLINE:
            got = await self._attempt(self._from_shared(self._loader.shared_reads, run))
            if got is not Miss.EVICTED:
                return got
        return miss or self._where.why_gone(len(self._outcomes))

    async def _from_peers(self, run: Run) -> Miss | None:
        """Have the other nodes send what they have of a run, the least busy first.

        Returns:
            Why the next block did not come, if one that may have it failed; else None.
        """
        tried: set[NodeId] = set()
        miss: Miss | None = None
        while len(self._outcomes) < run.stop and miss not in _OURS and not self._slots.pace.full():
            usable = self._loader.peers.holders.order(run.nodes)
            node = next((node for node in usable if node not in tried and node not in self._failed), None)
            if node is None:
                break
            tried.add(node)
            got = await self._attempt(self._from_peer(node, run.stop, saved=run.shared))
            if got is not None and got not in _OURS:
                self._failed[node] = got  # also for wrong bytes: for this load, since one copy is bad, not its holder
            miss = got or miss
        return miss or self._avoided(run)

    def _avoided(self, run: Run) -> Miss | None:
        """Why holders of a run were not asked; None if all were."""
        for node in run.nodes:
            if node in self._failed:
                return self._failed[node]
        return Miss.UNREACHABLE if self._loader.peers.holders.avoided.intersection(run.nodes) else None

    async def _attempt(self, source: Awaitable[Miss | None]) -> Miss | None:
        """Try one source; why it did not bring all, or None if it just ended."""
        try:
            return await source
        except DeadlineExceededError:
            return Miss.DEADLINE if not self._slots.left_s else Miss.NO_ROOM
        except (CorruptBlockError, LayoutMismatchError) as error:
            _log.warning("%s", error)
            return Miss.CORRUPT if isinstance(error, CorruptBlockError) else Miss.LAYOUT_REFUSED
        except TierError as error:
            _log.info("%s", error)
            return Miss.UNREACHABLE

    async def _landed(self, source: Source, *, saved: bool) -> bool:
        """The next block is in the arena, or will be by another's hand. False: it is not."""
        index = len(self._outcomes)
        if not self._slots.resident(index):
            await self._slots.settled(index, self._loader.config.holder_timeout_s)
        if not self._arrivals.add_resident(source):
            return False
        record = (self._keys[index], self._request.shard)
        if saved:
            self._loader.dram.placement.saved(*record)
        self._loader.publisher.wake()
        self._loader.flights.pop(record).set_result(source)
        return True

    async def _from_peer(self, node: NodeId, stop: int, *, saved: bool) -> Miss | None:
        """Bring blocks from the next one up to `stop` from another node; it may have fewer."""
        first, request, config = len(self._outcomes), self._request, self._loader.config
        fetch = FetchRequest(
            request.keys[first * KEY_BYTES : stop * KEY_BYTES],
            request.shard,
            config.window_bytes_max,
            self._slots.left_s,
        )
        stream = self._loader.peers.stream(node, fetch, (stop - first) * request.num_bytes)
        windows = stream.windows()
        landing = land(windows, self._slots, first, self._loader.executor, patience_s=config.holder_timeout_s)
        async with aclosing(windows), aclosing(landing) as landed:
            async for index in landed:
                assert index == len(self._outcomes)
                if not await self._landed(Source.PEER, saved=saved):
                    return Miss.EVICTED
        return stream.miss

    async def _from_shared(self, shared: SharedReads, run: Run) -> Miss | None:
        """Bring blocks from the next one to the end of a run from the shared tier."""
        first = len(self._outcomes)
        async with aclosing(shared.bring(self._slots, first, run.stop, told=run.shared)) as outcomes:
            async for outcome in outcomes:
                if isinstance(outcome, Miss):
                    return outcome
                if not await self._landed(outcome, saved=outcome is Source.SHARED):
                    return Miss.EVICTED
                if not await self._slots.pace.room(self._loader.config.holder_timeout_s):
                    return None
        return None

"""Brings blocks into the arena: from other nodes, else from the shared tier; first blocks first.

Each load has a producer, which brings blocks in order, and a consumer, the stream of outcomes to the client. What
the client has not copied yet is held in the arena, until the deadline at most; the rest of a prefix waits for that
room, so a prefix larger than the arena passes through it.

Single flight: while one load brings a block, others wait for it instead of bringing it again. If it fails or its
client goes away, they bring it themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Iterable
from concurrent.futures import Executor
from contextlib import aclosing

from kvfleet.config import FleetConfig
from kvfleet.core.block import KEY_BYTES, BlockKey
from kvfleet.core.directory import NodeId, Run
from kvfleet.errors import CorruptBlockError, DeadlineExceededError, TierError
from kvfleet.node.admission import Admitter
from kvfleet.node.dram import DramTier, Granted
from kvfleet.node.landing import BlockSlots, land
from kvfleet.node.messages import FetchRequest, LoadProgress, LoadRequest, Miss, Outcome, Source
from kvfleet.node.namespaces import Namespaces
from kvfleet.node.publishing import Publisher
from kvfleet.node.shared import SharedTier
from kvfleet.node.sharedreads import Read, SharedReads
from kvfleet.node.transport import Transport
from kvfleet.node.waiting import within

__all__ = ["Loader"]

_log = logging.getLogger(__name__)

Flight = asyncio.Future[Source | None]
"""A block on its way; resolves to where it came from, None if it did not come."""


class Loader:
    """Loads of one node. Threads: the manager's event loop; copies and reads run in threads."""

    def __init__(  # noqa: PLR0913  the parts of the manager it works with
        self,
        node: NodeId,
        dram: DramTier,
        namespaces: Namespaces,
        admitter: Admitter,
        transport: Transport,
        shared: SharedTier | None,
        publisher: Publisher,
        config: FleetConfig,
        executor: Executor,
    ) -> None:
        self.node = node
        self.dram = dram
        self.namespaces = namespaces
        self.admitter = admitter
        self.transport = transport
        self.publisher = publisher
        self.config = config
        self.executor = executor
        self.flights: dict[tuple[BlockKey, int], Flight] = {}
        self.shared_reads = None if shared is None else SharedReads(shared, dram, publisher, executor, config)
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
        self._dram = loader.dram
        self._request = request
        self._slots = BlockSlots(loader.dram, loader.admitter, request, loader.namespaces.index(request.namespace))
        self._keys = self._slots.keys
        self._outcomes: list[Outcome] = []
        self._arrived = asyncio.Event()
        self._held: dict[int, BlockKey] = {}
        self._failed: set[NodeId] = set()

    # consumer

    async def run(self) -> AsyncGenerator[LoadProgress, None]:
        producer = asyncio.create_task(self._produce())
        # A client that dies may leave this generator paused for ever; after the deadline it copies nothing anyway.
        timer = asyncio.get_running_loop().call_later(self._slots.left_s, self._expire, producer)
        try:
            sent = 0
            while sent < len(self._keys):
                outcomes = await self._next(sent)
                yield LoadProgress(outcomes)
                # Resumed: the client has taken these outcomes, so it is done with the blocks before them.
                self._release(range(sent))
                sent += len(outcomes)
                if isinstance(outcomes[-1], Miss):
                    break
        finally:
            timer.cancel()
            producer.cancel()
            await asyncio.gather(producer, return_exceptions=True)
            self._release(list(self._held))

    def _expire(self, producer: asyncio.Task[None]) -> None:
        producer.cancel()
        self._release(list(self._held))

    async def _next(self, sent: int) -> tuple[Outcome, ...]:
        while len(self._outcomes) == sent:
            self._arrived.clear()
            try:
                await within(self._slots.left_s, self._arrived.wait())
            except asyncio.TimeoutError:
                return (Miss.DEADLINE,)
        return tuple(self._outcomes[sent:])

    def _release(self, indexes: Iterable[int]) -> None:
        released = [self._held.pop(i) for i in indexes if i in self._held]
        for key in released:
            self._dram.release(key)
        if released:
            self._loader.admitter.freed()

    # producer

    async def _produce(self) -> None:
        try:
            while len(self._outcomes) < len(self._keys):
                miss = await self._bring(len(self._outcomes))
                if miss is not None:
                    self._arrive(miss)
                    return
        except Exception:  # noqa: BLE001  a bug of ours is a miss for the request, and a line in the log
            _log.exception("load given up")
            self._arrive(Miss.UNREACHABLE)

    def _arrive(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._arrived.set()

    def _arrive_here(self, source: Source) -> bool:
        """The next block is in the arena: hold it until the client has copied it. False: it is not there."""
        index = len(self._outcomes)
        if not self._slots.resident(index):
            return False
        self._dram.hold(self._keys[index])
        self._held[index] = self._keys[index]
        self._arrive(source)
        return True

    async def _bring(self, index: int) -> Miss | None:
        """Bring block `index`, and those after it that come by the same way; why one did not, or None."""
        while not self._arrive_here(Source.DRAM):
            flight = self._flight(index)
            if flight is not None:
                await asyncio.wait({flight}, timeout=self._slots.left_s)
                if not flight.done():
                    return Miss.DEADLINE
                source = flight.result()
                if source is not None and self._arrive_here(source):
                    return None
            elif self._slots.pending(index):
                if not await self._slots.settled(index, self._loader.config.holder_timeout_s):
                    return Miss.UNREACHABLE if self._slots.left_s else Miss.DEADLINE
            else:
                return await self._fly(self._run_of(index))
        return None

    def _run_of(self, index: int) -> Run:
        """The blocks from `index` on that nobody is bringing or writing, as far as they have the same holders."""
        runs = self._request.runs
        run = next((r for r in runs if r.start <= index < r.stop), Run(index, index + 1, (), shared=False))
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
        """Try the sources of a run one after the other; why the last blocks did not come, or None if all did."""
        nodes = [node for node in run.nodes if node != self._loader.node]
        miss = Miss.ABSENT if self._failed.isdisjoint(nodes) else Miss.UNREACHABLE
        for node in nodes:
            if node in self._failed:
                continue
            got = await self._attempt(self._from_peer(node, run.stop, saved=run.shared))
            if len(self._outcomes) == run.stop:
                return None
            if got in {Miss.UNREACHABLE, Miss.CORRUPT}:
                self._failed.add(node)
            miss = got or miss
        if self._loader.shared_reads is not None and miss is not Miss.DEADLINE:
            got = await self._attempt(self._from_shared(self._loader.shared_reads, run.stop))
            if got is None or got is not Miss.ABSENT or miss is Miss.ABSENT:
                return got
        return miss

    async def _attempt(self, source: Awaitable[Miss | None]) -> Miss | None:
        """Try one source; why it did not bring all, or None if it just ended."""
        try:
            return await source
        except DeadlineExceededError:
            return Miss.DEADLINE if not self._slots.left_s else Miss.NO_ROOM
        except CorruptBlockError as error:
            _log.warning("%s", error)
            return Miss.CORRUPT
        except TierError as error:
            _log.info("%s", error)
            return Miss.UNREACHABLE

    async def _landed(self, source: Source, *, saved: bool) -> bool:
        """The next block is in the arena, or will be by another's hand. False: it is not."""
        index = len(self._outcomes)
        if not self._slots.resident(index):
            await self._slots.settled(index, self._loader.config.holder_timeout_s)
        if not self._arrive_here(source):
            return False
        record = (self._keys[index], self._request.shard)
        if saved:
            self._dram.placement.saved(*record)
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
        windows = self._loader.transport.fetch(node, fetch, (stop - first) * request.num_bytes)
        async with aclosing(windows), aclosing(land(windows, self._slots, first, self._loader.executor)) as landed:
            async for index in landed:
                assert index == len(self._outcomes)
                if not await self._landed(Source.PEER, saved=saved):
                    return Miss.EVICTED
        return None

    async def _from_shared(self, shared: SharedReads, stop: int) -> Miss | None:
        """Bring blocks from the next one up to `stop` from the shared tier, several at once, in order."""
        reads: deque[tuple[int, Read]] = deque()
        index = len(self._outcomes)
        try:
            while len(self._outcomes) < stop:
                if index < stop and len(reads) < self._loader.config.load_inflight_max:
                    granted = await self._slot_for_read(index, patient=not reads)
                    if granted is not None:
                        reads.append((index, shared.start(self._slots, index, granted)))
                        index += 1
                        continue
                if not reads:  # another has it, or writes it
                    if not await self._landed(Source.DRAM, saved=False):
                        return Miss.EVICTED
                    index += 1
                    continue
                miss = await asyncio.shield(reads[0][1])
                held, _ = reads.popleft()
                if miss is not None:
                    return miss
                landed = await self._landed(Source.SHARED, saved=True)
                self._slots.release(held)
                assert landed, "the read held it"
        finally:
            # Reads under way go on by themselves: their threads still write to their slots.
            for abandoned, read in reads:
                shared.adopt(self._slots, abandoned, read)
        return None

    async def _slot_for_read(self, index: int, *, patient: bool) -> Granted | None:
        try:
            return await self._slots.reserve(index, patient=patient)
        except DeadlineExceededError:
            if patient:
                raise
            return None

"""Brings blocks into the arena: from other nodes, else from the shared tier; first blocks first.

Each load has a producer, which brings blocks in order, and a consumer, the stream of outcomes to the client. What
the client has not copied yet is held in the arena; the rest of a prefix waits for that room, so a prefix larger
than the arena passes through it.

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
from kvfleet.node.dram import DramTier, Granted, record_id
from kvfleet.node.landing import BlockSlots, land, settle
from kvfleet.node.messages import FetchRequest, LoadProgress, LoadRequest, Miss, Outcome, Source
from kvfleet.node.namespaces import Namespaces, layout_of
from kvfleet.node.publishing import Publisher
from kvfleet.node.shared import SharedTier
from kvfleet.node.transport import Transport

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
        self.shared = shared
        self.publisher = publisher
        self.config = config
        self.executor = executor
        self.flights: dict[tuple[BlockKey, int], Flight] = {}
        self.blocks: Counter[Outcome] = Counter()
        self.num_bytes: Counter[Source] = Counter()
        self._adopted: set[asyncio.Task[Miss | None]] = set()

    def adopt(self, reads: Iterable[asyncio.Task[Miss | None]]) -> None:
        """Let reads end without their load."""
        for read in reads:
            self._adopted.add(read)
            read.add_done_callback(self._adopted.discard)

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
        self._placement = loader.dram.placement
        self._request = request
        self._slots = BlockSlots(loader.dram, loader.admitter, request, loader.namespaces.index(request.namespace))
        self._keys = self._slots.keys
        self._outcomes: list[Outcome] = []
        self._arrived = asyncio.Event()
        self._held: dict[int, BlockKey] = {}

    # consumer

    async def run(self) -> AsyncGenerator[LoadProgress, None]:
        producer = asyncio.create_task(self._produce())
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
            producer.cancel()
            await asyncio.gather(producer, return_exceptions=True)
            self._release(list(self._held))

    async def _next(self, sent: int) -> tuple[Outcome, ...]:
        while len(self._outcomes) == sent:
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), self._slots.left_s)
            except asyncio.TimeoutError:
                return (Miss.DEADLINE,)
        return tuple(self._outcomes[sent:])

    def _release(self, indexes: Iterable[int]) -> None:
        released = [self._held.pop(i) for i in indexes if i in self._held]
        for key in released:
            self._placement.release(key)
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
        self._placement.hold(self._keys[index])
        self._held[index] = self._keys[index]
        self._arrive(source)
        return True

    async def _bring(self, index: int) -> Miss | None:
        """Bring block `index`, and those after it that come by the same way; None if at least that one came."""
        if self._arrive_here(Source.DRAM):
            return None
        flight = self._flight(index)
        if flight is not None:
            await asyncio.wait({flight}, timeout=self._slots.left_s)
            if not flight.done():
                return Miss.DEADLINE
            source = flight.result()
            if source is not None and self._arrive_here(source):
                return None
        run = next(
            (r for r in self._request.runs if r.start <= index < r.stop), Run(index, index + 1, (), shared=False)
        )
        stop = index + 1
        while stop < run.stop and self._flight(stop) is None and not self._slots.resident(stop):
            stop += 1
        return await self._fly(run, index, stop)

    def _flight(self, index: int) -> Flight | None:
        return self._loader.flights.get((self._keys[index], self._request.shard))

    async def _fly(self, run: Run, start: int, stop: int) -> Miss | None:
        """Bring blocks [start, stop) from the first source that can; where one stops, the next goes on."""
        loop = asyncio.get_running_loop()
        flights: dict[tuple[BlockKey, int], Flight] = {
            (key, self._request.shard): loop.create_future() for key in self._keys[start:stop]
        }
        self._loader.flights.update(flights)
        miss = Miss.ABSENT
        try:
            for node in run.nodes:
                if node != self._loader.node:
                    miss = await self._attempt(self._from_peer(node, stop, saved=run.shared)) or miss
                if len(self._outcomes) == stop:
                    return None
            if self._loader.shared is not None and miss is not Miss.DEADLINE:
                last = await self._attempt(self._from_shared(self._loader.shared, stop))
                if last is not None and (last is not Miss.ABSENT or miss is Miss.ABSENT):
                    miss = last
        finally:
            for record, flight in flights.items():
                del self._loader.flights[record]
                if not flight.done():
                    flight.set_result(None)
        return None if len(self._outcomes) > start else miss

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

    def _landed(self, source: Source, *, saved: bool) -> bool:
        """The next block is committed. False: and gone again."""
        index = len(self._outcomes)
        record = (self._keys[index], self._request.shard)
        if saved:
            self._placement.saved(*record)
        self._loader.publisher.wake()
        self._loader.flights[record].set_result(source)
        return self._arrive_here(source)

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
                if not self._landed(Source.PEER, saved=saved):
                    return Miss.EVICTED
        return None

    async def _from_shared(self, shared: SharedTier, stop: int) -> Miss | None:
        """Bring blocks from the next one up to `stop` from the shared tier, several at once, in order."""
        reads: deque[asyncio.Task[Miss | None]] = deque()
        index = len(self._outcomes)
        try:
            while index < stop or reads:
                if index < stop and len(reads) < self._loader.config.load_inflight_max:
                    granted = await self._slot_for_read(index, patient=not reads)
                    if granted is not None:
                        reads.append(asyncio.create_task(self._read(shared, index, granted)))
                        index += 1
                        continue
                    if not reads:
                        return None if self._slots.resident(index) else Miss.NO_ROOM
                miss = await reads.popleft()
                if miss is not None:
                    return miss
                if not self._landed(Source.SHARED, saved=True):
                    return Miss.EVICTED
        finally:
            # Reads under way go on by themselves: their threads still write to their slots.
            self._loader.adopt(reads)
        return None

    async def _slot_for_read(self, index: int, *, patient: bool) -> Granted | None:
        try:
            return await self._slots.reserve(index, patient=patient)
        except DeadlineExceededError:
            if patient:
                raise
            return None

    async def _read(self, shared: SharedTier, index: int, granted: Granted) -> Miss | None:
        """Read one object into its slot and make it visible."""
        request, key, record = self._request, self._keys[index], record_id(self._keys[index], self._request.shard)
        view, num_shards = self._slots.view(granted), layout_of(request.namespace).num_shards
        checksum: int | None = None
        try:
            checksum = await settle(
                self._loader.executor,
                lambda: shared.read(
                    request.namespace, num_shards, key, request.shard, view, timeout_s=self._slots.left_s
                ),
            )
            if checksum is None:
                self._loader.publisher.shared(record, present=False)
                return Miss.ABSENT
        except CorruptBlockError as error:
            _log.warning("%s", error)
            self._loader.publisher.shared(record, present=False)
            return Miss.CORRUPT
        except TierError as error:
            _log.info("%s", error)
            return Miss.UNREACHABLE
        finally:
            if checksum is None:
                self._slots.abort(granted)
        return None if self._slots.commit(granted, checksum) else Miss.NO_ROOM

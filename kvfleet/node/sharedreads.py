"""Reads of the shared tier into the arena."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator
from concurrent.futures import Executor

from kvfleet.config import FleetConfig
from kvfleet.errors import CorruptBlockError, DeadlineExceededError, LayoutMismatchError, TierError
from kvfleet.node.dram import Granted, record_id
from kvfleet.node.landing import BlockSlots, settle
from kvfleet.node.messages import Miss, Outcome, Source
from kvfleet.node.namespaces import layout_of
from kvfleet.node.peers import SHARED_TIER, Peers
from kvfleet.node.publishing import Publisher
from kvfleet.node.shared import SharedTier
from kvfleet.node.waiting import now

__all__ = ["SharedReads"]

_log = logging.getLogger(__name__)

_Read = asyncio.Task[Miss | None]
"""Ends with the block in the arena, visible and held once, or with the reason of a miss."""


class SharedReads:
    """Reads objects for the loads of a node, at most `load_inflight_max` at once.

    A tier that is too slow to answer is left alone like any other holder, until it answers a probe.

    Threads: the manager's event loop; the reads themselves run in the executor's.
    """

    def __init__(
        self, shared: SharedTier, peers: Peers, publisher: Publisher, executor: Executor, config: FleetConfig
    ) -> None:
        self._shared = shared
        self._peers = peers
        self._publisher = publisher
        self._executor = executor
        self._inflight_max = config.load_inflight_max
        self._patience_s = min(config.holder_timeout_s, config.shared_timeout_s)
        self._places = asyncio.Semaphore(config.load_inflight_max)
        self._adopted: set[asyncio.Task[None]] = set()
        peers.probe_by(SHARED_TIER, self._probe)

    async def _probe(self, timeout_s: float) -> None:
        await settle(self._executor, lambda: self._shared.probe(timeout_s))

    async def bring(self, slots: BlockSlots, first: int, stop: int, *, told: bool) -> AsyncGenerator[Outcome, None]:
        """Read blocks [first, stop) of a load into the arena, several at once.

        Args:
            slots: of the load.
            first: index of the first block.
            stop: index after the last one.
            told: the directory says that they are there: it is told of one that is not. Not otherwise: that might
                overtake the news of who is just writing it.

        Yields:
            What became of each, in order, up to the first miss. A block with `Source.SHARED` is here, and held until
            the next one is asked for; one with `Source.DRAM` is here by another's hand, or being written.

        Raises:
            DeadlineExceededError: no room in time.
        """
        if not self._peers.holders.order((SHARED_TIER,)):
            yield Miss.UNREACHABLE
            return
        reads: deque[tuple[int, _Read]] = deque()
        index = first
        try:
            for due in range(first, stop):
                while index < stop and len(reads) < self._inflight_max:
                    granted = await self._reserve(slots, index, patient=not reads)
                    if granted is None:
                        break
                    reads.append((index, asyncio.create_task(self._read(slots, index, granted, told=told))))
                    index += 1
                if not reads:
                    index += 1
                    yield Source.DRAM
                    continue
                miss = await asyncio.shield(reads[0][1])
                reads.popleft()
                if miss is not None:
                    yield miss
                    return
                try:
                    yield Source.SHARED
                finally:
                    slots.release(due)
        finally:
            # Reads under way go on by themselves: their threads still write to their slots.
            for abandoned, read in reads:
                self._adopt(slots, abandoned, read)

    async def _reserve(self, slots: BlockSlots, index: int, *, patient: bool) -> Granted | None:
        try:
            return await slots.reserve(index, patient=patient)
        except DeadlineExceededError:
            if patient:
                raise
            return None

    def _adopt(self, slots: BlockSlots, index: int, read: _Read) -> None:
        """Let a read end without its load."""
        task = asyncio.create_task(self._see_off(slots, index, read))
        self._adopted.add(task)
        task.add_done_callback(self._adopted.discard)

    async def _see_off(self, slots: BlockSlots, index: int, read: _Read) -> None:
        if await read is None:
            slots.release(index)

    async def end(self) -> None:
        """Wait for the reads that no load waits for."""
        await asyncio.gather(*self._adopted, return_exceptions=True)

    async def _read(self, slots: BlockSlots, index: int, granted: Granted, *, told: bool) -> Miss | None:
        request, key = slots.request, slots.keys[index]
        record = record_id(key, request.shard)
        checksum: int | None = None
        try:
            num_shards, view = layout_of(request.namespace).num_shards, slots.view(granted)
            async with self._places:
                if not self._peers.holders.order((SHARED_TIER,)):
                    return Miss.UNREACHABLE
                left_s, begun = slots.left_s, now()
                checksum = await settle(
                    self._executor,
                    lambda: self._shared.read(
                        request.namespace, num_shards, key, request.shard, view, timeout_s=left_s
                    ),
                )
            if checksum is None:
                if told:
                    self._publisher.shared(record, present=False)
                return Miss.EVICTED
            self._peers.holders.worked(SHARED_TIER)
        except (CorruptBlockError, LayoutMismatchError) as error:
            _log.warning("%s", error)
            self._publisher.shared(record, present=False)
            return Miss.CORRUPT if isinstance(error, CorruptBlockError) else Miss.LAYOUT_REFUSED
        except TierError as error:
            _log.info("%s", error)
            self._too_slow(now() - begun, left_s)
            return Miss.UNREACHABLE
        finally:
            if checksum is None:
                slots.abort(granted)
        if not slots.commit(granted, checksum):
            return Miss.NO_ROOM
        slots.hold(index)
        return None

    def _too_slow(self, seconds: float, left_s: float) -> None:
        """Note how long a failure took. Quick ones cost nothing, and the next read may succeed."""
        if seconds >= self._patience_s:
            self._peers.failed(SHARED_TIER)
        elif seconds >= left_s:
            self._peers.doubted(SHARED_TIER)

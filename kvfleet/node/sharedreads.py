"""Reads of the shared tier into the arena."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from concurrent.futures import Executor
from contextlib import aclosing
from functools import partial

from kvfleet.config import FleetConfig
from kvfleet.core.objectrows import SharedObject
from kvfleet.errors import CorruptBlockError, LayoutMismatchError, TierError
from kvfleet.node.dram import record_id
from kvfleet.node.endpoint import SharedEndpoint
from kvfleet.node.landing import BlockSlots, settle
from kvfleet.node.messages import Bytes, Miss, Outcome, Source
from kvfleet.node.namespaces import layout_of
from kvfleet.node.publishing import Publisher
from kvfleet.node.readahead import ReadAhead
from kvfleet.node.recordwords import DEPTH_MAX, key_fingerprint
from kvfleet.node.waiting import now

__all__ = ["SharedReads"]

_log = logging.getLogger(__name__)


class SharedReads(ReadAhead):
    """Reads objects for the loads of a node, at most `load_inflight_max` at once.

    A copy that should be there and is not, or is bad, is told of to all who believe in it.

    Threads: the manager's event loop; the reads themselves run in the executor's.
    """

    def __init__(self, endpoint: SharedEndpoint, publisher: Publisher, executor: Executor, config: FleetConfig) -> None:
        super().__init__(Source.SHARED, config.load_inflight_max)
        self._endpoint = endpoint
        self._publisher = publisher
        self._executor = executor

    async def bring(self, slots: BlockSlots, first: int, stop: int, *, told: bool) -> AsyncGenerator[Outcome, None]:
        """Read blocks [first, stop) of a load into the arena, several at once.

        Args:
            slots: of the load.
            first: index of the first block.
            stop: index after the last one.
            told: the directory says that they are there: it is told of one that is not. Not otherwise: that might
                overtake the news of who is just writing it.

        Yields, and raises, as `ReadAhead.read` does.
        """
        if not self._endpoint.allows("read"):
            self._endpoint.counts["not_asked"] += 1
            yield Miss.STORAGE_FAILED
            return

        async def fill(index: int, memory: Bytes) -> int | Miss:
            return await self._fill(slots, index, memory, told=told)

        async with aclosing(self.read(slots, first, stop, fill)) as outcomes:
            async for outcome in outcomes:
                yield outcome

    async def _fill(self, slots: BlockSlots, index: int, memory: Bytes, *, told: bool) -> int | Miss:
        request, key = slots.request, slots.keys[index]
        record, num_shards = record_id(key, request.shard), layout_of(request.namespace).num_shards
        endpoint, left_s, begun = self._endpoint, slots.left_s, now()
        if not endpoint.allows("read"):
            endpoint.counts["not_asked"] += 1
            return Miss.STORAGE_FAILED
        read = partial(endpoint.shared.read, request.namespace, num_shards, key, request.shard, memory)
        try:
            checksum = await settle(self._executor, lambda: read(timeout_s=left_s))
        except CorruptBlockError as error:
            endpoint.worked("read")
            _log.warning("%s", error)
            self._lost(record, "corrupt")
            return Miss.CORRUPT
        except LayoutMismatchError as error:  # maybe a newer version's, and good: it is not made again for that
            endpoint.worked("read")
            endpoint.counts["layout_refused"] += 1
            _log.warning("%s", error)
            self._publisher.shared(record, present=False)
            return Miss.LAYOUT_REFUSED
        except TierError as error:
            _log.info("%s", error)
            endpoint.failed("read", error, begun)
            return Miss.STORAGE_FAILED
        endpoint.worked("read")
        if checksum is None:
            if told:
                self._lost(record, "absent")
            return Miss.OBJECT_LOST if told else Miss.EVICTED
        endpoint.counts["read"] += 1
        self._publisher.used(
            SharedObject(
                request.namespace.namespace_id, key, request.shard, num_shards, len(memory),
                min(request.depth + index, DEPTH_MAX), key_fingerprint(slots.parent(index) or b""),
            )
        )  # fmt: skip
        endpoint.has_written(record)
        return checksum

    def _lost(self, record: bytes, reason: str) -> None:
        """The directory has said that a copy is there, or it was bad."""
        self._endpoint.counts[reason] += 1
        self._publisher.lost(record)
        self._endpoint.lost(record)

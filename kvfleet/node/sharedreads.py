"""Reads of the shared tier into the arena."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor

from kvfleet.config import FleetConfig
from kvfleet.errors import CorruptBlockError, TierError
from kvfleet.node.dram import DramTier, Granted, record_id
from kvfleet.node.landing import BlockSlots, settle
from kvfleet.node.messages import Miss
from kvfleet.node.namespaces import layout_of
from kvfleet.node.publishing import Publisher
from kvfleet.node.shared import SharedTier

__all__ = ["Read", "SharedReads"]

_log = logging.getLogger(__name__)

Read = asyncio.Task[Miss | None]
"""Ends with the block in the arena, visible and held once, or with the reason of a miss."""


class SharedReads:
    """Reads objects for the loads of a node, at most `load_inflight_max` at once.

    Threads: the manager's event loop; the reads themselves run in the executor's.
    """

    def __init__(
        self, shared: SharedTier, dram: DramTier, publisher: Publisher, executor: Executor, config: FleetConfig
    ) -> None:
        self._shared = shared
        self._dram = dram
        self._publisher = publisher
        self._executor = executor
        self._places = asyncio.Semaphore(config.load_inflight_max)
        self._adopted: set[asyncio.Task[None]] = set()

    def start(self, slots: BlockSlots, index: int, granted: Granted) -> Read:
        """Read block `index` of a load into its slot."""
        return asyncio.create_task(self._read(slots, index, granted))

    def adopt(self, slots: BlockSlots, index: int, read: Read) -> None:
        """Let a read end without its load."""
        task = asyncio.create_task(self._see_off(slots, index, read))
        self._adopted.add(task)
        task.add_done_callback(self._adopted.discard)

    async def _see_off(self, slots: BlockSlots, index: int, read: Read) -> None:
        if await read is None:
            slots.release(index)

    async def end(self) -> None:
        """Wait for the reads that no load waits for."""
        await asyncio.gather(*self._adopted, return_exceptions=True)

    async def _read(self, slots: BlockSlots, index: int, granted: Granted) -> Miss | None:
        request, key = slots.request, slots.keys[index]
        record, view = record_id(key, request.shard), slots.view(granted)
        num_shards = layout_of(request.namespace).num_shards
        checksum: int | None = None
        try:
            async with self._places:
                checksum = await settle(
                    self._executor,
                    lambda: self._shared.read(
                        request.namespace, num_shards, key, request.shard, view, timeout_s=slots.left_s
                    ),
                )
            if checksum is None:
                self._publisher.shared(record, present=False)
                return Miss.ABSENT
        except CorruptBlockError as error:
            _log.warning("%s", error)
            self._publisher.shared(record, present=False)
            return Miss.CORRUPT
        except TierError as error:
            _log.info("%s", error)
            return Miss.UNREACHABLE
        finally:
            if checksum is None:
                slots.abort(granted)
        if not slots.commit(granted, checksum):
            return Miss.NO_ROOM
        slots.hold(index)
        return None

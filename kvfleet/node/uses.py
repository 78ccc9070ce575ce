"""Tells the catalog of the shared tier which of its blocks are used in this node's arena.

Else a block that is used all day, and needs no reading of its object for it, would look as if nobody wanted it.
"""

from __future__ import annotations

import asyncio

import numpy as np

from kvfleet.core.block import BlockKey
from kvfleet.core.objectrows import SharedObject
from kvfleet.node.dram import NS, DramTier
from kvfleet.node.namespaces import layout_of
from kvfleet.node.outbox import USE_S
from kvfleet.node.publishing import Publisher
from kvfleet.node.waiting import now

__all__ = ["ArenaUses"]

_PAUSE_S = 60.0
_SLOTS = 200  # looked at before others have their turn: 1 ms


class ArenaUses:
    """Looks every minute for blocks with a copy in the shared tier that were used since an hour after their last use.

    Memory: 8 bytes a slot. Threads: the manager's event loop.
    """

    def __init__(self, dram: DramTier, publisher: Publisher) -> None:
        self._dram = dram
        self._publisher = publisher
        self._told = np.zeros(dram.arena.records.num_records, np.uint64)  # ns, as last accesses are

    async def run(self) -> None:
        """Tell of uses. Runs until cancelled."""
        while True:
            await asyncio.sleep(_PAUSE_S)
            await self.tell()

    async def tell(self) -> None:
        """Tell of what was used since the last time."""
        accesses = self._dram.arena.records.last_access.copy()
        used = np.flatnonzero(accesses > self._told + np.uint64(USE_S * NS))
        for first in range(0, len(used), _SLOTS):
            for slot in used[first : first + _SLOTS].tolist():
                self._tell_of(slot)
            await asyncio.sleep(0)
        self._told[used] = accesses[used]

    def _tell_of(self, slot: int) -> None:
        record = self._dram.arena.records.record(slot)
        if not record.committed or not self._dram.placement.is_saved(BlockKey(record.key), record.shard, "shared"):
            return  # one that is saved later says then when it was used
        namespace = self._dram.namespaces[record.namespace]
        thing = SharedObject(
            namespace.namespace_id, record.key, record.shard, layout_of(namespace).num_shards, record.length,
            record.depth, record.parent_fingerprint,
        )  # fmt: skip
        self._publisher.used(thing, max(0.0, now() - record.last_access / NS))

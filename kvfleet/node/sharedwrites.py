"""Writes of single blocks from the arena to the shared tier."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from concurrent.futures import Executor
from functools import partial
from typing import Any, Literal

from kvfleet.core.breaker import Breaker
from kvfleet.core.objectrows import SharedObject
from kvfleet.core.placement import Transfer
from kvfleet.errors import CorruptBlockError, TierError
from kvfleet.node.draining import SaveBudget
from kvfleet.node.dram import NS, DramTier, record_id
from kvfleet.node.drivestored import Stored
from kvfleet.node.endpoint import SharedEndpoint
from kvfleet.node.landing import settle
from kvfleet.node.messages import Bytes, Namespace
from kvfleet.node.namespaces import layout_of
from kvfleet.node.publishing import Publisher
from kvfleet.node.records import Record
from kvfleet.node.waiting import now, within

__all__ = ["End", "Patience", "SharedWrites"]

_log = logging.getLogger(__name__)
_DEMOTION_TIMEOUT_S = 2.0  # somebody waits for the room
_DEMOTION_PAUSES_S = (1.0, 30.0)

End = Literal["saved", "failed", "later"]
"""How a transfer ended: the copy is there, or could not be written, or it was not its turn."""


class Patience:
    """How long to wait for writes that do not get through: from the last one that did."""

    def __init__(self, seconds: float, now: float) -> None:
        self._seconds = seconds
        self._since = now
        self._blocks = -1
        self._failures = 0

    def ended(self, writes: SharedWrites, endpoint: SharedEndpoint, now: float) -> bool:
        """Whether nothing was written for too long, though it was tried, or could not even be."""
        if writes.blocks != self._blocks:
            self._since, self._blocks, self._failures = now, writes.blocks, writes.failures
        in_vain = writes.failures > self._failures or not endpoint.allows("write")
        ended = in_vain and now - self._since > self._seconds
        if ended:
            _log.warning("the shared tier has taken nothing for %.0f s: %s", now - self._since, endpoint.problem)
        return ended


class SharedWrites:
    """Writes objects, at most `inflight_max` of each kind at once, each of them told to the directory.

    Threads: the manager's event loop; the writes themselves run in the executor's.

    Attributes:
        budget: what may still be written, or None for no limit.
        blocks: written; `num_bytes` of them, as they are in the arena.
        failures: writes that failed.
    """

    def __init__(
        self,
        dram: DramTier,
        endpoint: SharedEndpoint | None,
        publisher: Publisher,
        inflight_max: int,
        executor: Executor,
    ) -> None:
        self._dram = dram
        self._endpoint = endpoint
        self._publisher = publisher
        self._executor = executor
        self._places = {kind: asyncio.Semaphore(inflight_max) for kind in ("save", "demote")}
        self._demotions = Breaker(*_DEMOTION_PAUSES_S)  # a tier that is slow, and works, is waited for now and then
        self._begun: set[asyncio.Future[Any]] = set()  # tasks whose thread is writing
        self._late: set[asyncio.Future[End]] = set()
        self.budget: SaveBudget | None = None
        self.blocks = 0
        self.num_bytes = 0
        self.failures = 0

    @property
    def paused(self) -> bool:
        """Whether nothing is to be written now."""
        return self.budget is not None and self.budget.closed(now())

    async def write(self, transfer: Transfer) -> End:
        """Carry a transfer out; who gave it is told by the caller."""
        assert self._endpoint is not None, "no transfers without a tier below"
        return await (self._demote if transfer.kind == "demote" else self._save)(self._endpoint, transfer)

    async def _demote(self, endpoint: SharedEndpoint, transfer: Transfer) -> End:
        """Save a block somebody waits to see gone: for a short time, and not if the tier is known to be bad or slow."""
        begun = now()
        with contextlib.suppress(asyncio.TimeoutError):
            await within(_DEMOTION_TIMEOUT_S, endpoint.tried.wait())
        if self.paused or not endpoint.allows("write") or not self._demotions.allows(begun):
            return "later"
        save = asyncio.ensure_future(self._save(endpoint, transfer))
        self._late.add(save)
        save.add_done_callback(self._late.discard)
        await asyncio.wait({save}, timeout=_DEMOTION_TIMEOUT_S)
        if save.done():
            self._demotions.worked()
            return save.result()
        self._demotions.failed(now())
        if save not in self._begun:
            save.cancel()  # else it goes on, to tell of its object: one that nobody knows of would stay for ever
        endpoint.gave_up("write", begun, f"a write took longer than {_DEMOTION_TIMEOUT_S} s")
        return "later"

    async def _save(self, endpoint: SharedEndpoint, transfer: Transfer) -> End:
        async with self._places[transfer.kind]:
            record = self._dram.arena.records.record(transfer.slot)
            if record.key != transfer.key or not record.committed or not endpoint.allows("write"):
                return "later"  # dropped while we waited, or closed
            budget = self.budget
            if budget is not None and not budget.take(record.length, now()):
                return "later"
            task = asyncio.current_task()
            assert task is not None
            self._begun.add(task)
            try:
                end = await self._write(endpoint, transfer, record)
            finally:
                self._begun.discard(task)
            if budget is not None and end != "saved":
                budget.give_back(record.length)
        return end

    async def _write(self, endpoint: SharedEndpoint, transfer: Transfer, record: Record) -> End:
        namespace = self._dram.namespaces[record.namespace]
        stored = Stored(
            transfer.key, transfer.shard, record.length, record.checksum, namespace.namespace_id, record.depth,
            record.parent_fingerprint,
        )  # fmt: skip
        view, unused_s = self._dram.view(transfer.slot, record.length), max(0.0, now() - record.last_access / NS)
        try:
            return await self._put(endpoint, namespace, stored, view, unused_s)
        except CorruptBlockError as error:
            _log.warning("block %s in DRAM: %s", transfer.key.hex(), error)
            if self._dram.arena.records.record(transfer.slot).generation == record.generation:
                self._dram.drop(transfer.key)
            return "later"

    async def write_copy(self, namespace: Namespace, stored: Stored, data: Bytes, unused_s: float) -> End:
        """Write a block that the caller has in memory, and has not to give way: it is written in its turn.

        Args:
            namespace: of the block.
            stored: what it is.
            data: `(num_bytes,)`, uint8, contiguous; not to change until this returns.
            unused_s: seconds since its last use.

        Raises:
            CorruptBlockError: `data` is not the block.
        """
        endpoint = self._endpoint
        assert endpoint is not None, "no writes without a tier"
        async with self._places["save"]:
            if not endpoint.allows("write"):
                return "later"
            return await self._put(endpoint, namespace, stored, data, unused_s)

    async def _put(
        self, endpoint: SharedEndpoint, namespace: Namespace, stored: Stored, data: Bytes, unused_s: float
    ) -> End:
        begun, num_shards = now(), layout_of(namespace).num_shards
        write = partial(endpoint.shared.write, namespace, num_shards, stored.key, stored.shard, data, stored.checksum)
        try:
            object_bytes = await settle(self._executor, write)
        except CorruptBlockError:
            raise
        except TierError as error:
            self.failures += 1
            endpoint.failed("write", error, begun)
            _log.info("block not saved: %s", error)
            return "failed" if endpoint.allows("write") else "later"
        endpoint.counts["written"] += 1
        endpoint.worked("write")
        endpoint.has_written(record_id(stored.key, stored.shard))
        self.blocks += 1
        self.num_bytes += stored.num_bytes
        thing = SharedObject(
            stored.namespace_id, stored.key, stored.shard, num_shards, object_bytes, stored.depth,
            stored.parent_fingerprint,
        )  # fmt: skip
        self._publisher.stored(thing, unused_s)
        return "saved"

    async def settle(self) -> None:
        """Wait for the writes that nobody waits for."""
        await asyncio.gather(*self._late, return_exceptions=True)

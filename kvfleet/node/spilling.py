"""Copies from the arena to this node's drives: write-behind of what is new, demotion of what must make room.

Bounded: write-behind has so many bytes on their way at once; what waits, waits in the arena. Which blocks are worth a
write, and whether there is room in a drive's queue, the drives say. When a drive hangs, none is asked for a while:
blocks that must leave meanwhile go elsewhere, and nobody waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from kvfleet.config import MIB, FleetConfig
from kvfleet.core.block import BlockKey
from kvfleet.core.placement import Transfer
from kvfleet.errors import CorruptBlockError, TierError, TierUnavailableError
from kvfleet.node.dram import DramTier
from kvfleet.node.namespaces import layout_of
from kvfleet.node.nvme import NvmeTier, Stored
from kvfleet.node.records import Record
from kvfleet.node.waiting import now, within

__all__ = ["Spiller"]

_log = logging.getLogger(__name__)
_BYTES_MAX = 256 * MIB
_ARENA_PART = 8
_PAUSE_S = 1.0
_PAUSE_MAX_S = 30.0
_DEMOTION_TIMEOUT_S = 2.0  # somebody waits for the room
_SETTLE_S = 5.0


class Spiller:
    """Writes blocks of one node to its drives.

    Threads: the manager's event loop; the drives do their I/O in threads.

    Attributes:
        on_moved: called at the end of each transfer: its block may be evictable now.
    """

    def __init__(self, dram: DramTier, nvme: NvmeTier, config: FleetConfig) -> None:
        self._dram = dram
        self._nvme = nvme
        # What is in transfer cannot be evicted: only a part of the arena is at a time.
        self._demoted_bytes_max = min(_BYTES_MAX, config.nvme_queue_bytes_max // 2)
        self._bytes_max = min(self._demoted_bytes_max, dram.arena.capacity_bytes // _ARENA_PART)
        self._bytes = 0
        self._heartbeat_s = config.heartbeat_s
        self._wake = asyncio.Event()
        self._moved = asyncio.Event()
        self._writes: set[asyncio.Future[bool]] = set()
        self._pause_s = 0.0
        self._hung_until = 0.0
        self.on_moved: Callable[[], None] = lambda: None

    def wake(self) -> None:
        """There are new blocks."""
        self._wake.set()

    def takes(self, num_bytes: int, uses: int, expected_uses: float | None = None) -> bool:
        """The gate of the drives: see `Gate`. Shut while they are known to hang."""
        return now() >= self._hung_until and self._nvme.admits(num_bytes, uses, expected_uses)

    async def run(self) -> None:
        """Write what is not on the drives yet, oldest first. Runs until cancelled."""
        await self._nvme.opened.wait()
        working = self._nvme.num_working
        while True:
            if self._nvme.num_working > working:
                self._dram.placement.requeue("nvme", every=True)  # a drive is back
            working = self._nvme.num_working
            # Without a drive that works blocks go on waiting: they are not declined, and whoever stops is told of them.
            room = self._bytes_max - self._bytes if working and now() >= self._hung_until else 0
            for transfer in self._dram.placement.next_saves("nvme", room) if room > 0 else ():
                self._bytes += transfer.num_bytes
                self._begin(transfer).add_done_callback(partial(self._saved, transfer.num_bytes))
            try:
                await within(self._heartbeat_s, self._wake.wait())
            except asyncio.TimeoutError:  # blocks that loads brought, and readers that use one again, say nothing
                self._dram.note_accesses()
            self._wake.clear()

    def _saved(self, num_bytes: int, _: asyncio.Future[bool]) -> None:
        self._bytes -= num_bytes
        self._wake.set()

    async def move(self, transfers: Sequence[Transfer]) -> None:
        """Carry demotions out, for a short time, and complete each: somebody waits to see the blocks gone."""
        deadline = now() + _DEMOTION_TIMEOUT_S
        waiting = deque(transfers)
        writes: dict[asyncio.Future[bool], Transfer] = {}
        progress = False
        try:
            while (waiting or writes) and (left := deadline - now()) > 0:
                self._begin_next(waiting, writes)
                done, _ = await asyncio.wait(writes, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                progress = progress or bool(done)
                for write in done:
                    del writes[write]
            if writes and not progress:
                self._hung()
        finally:
            for transfer in (*writes.values(), *waiting):  # if one is written after all, the drives say so
                self._complete(transfer, ok=False)

    def _begin_next(self, waiting: deque[Transfer], writes: dict[asyncio.Future[bool], Transfer]) -> None:
        """Begin the next demotions, as many as the drives should have to write at once."""
        num_bytes = sum(transfer.num_bytes for transfer in writes.values())
        while waiting and (not writes or num_bytes + waiting[0].num_bytes <= self._demoted_bytes_max):
            transfer = waiting.popleft()
            num_bytes += transfer.num_bytes
            writes[self._begin(transfer)] = transfer

    def _begin(self, transfer: Transfer) -> asyncio.Future[bool]:
        write = asyncio.ensure_future(self._move_one(transfer))
        self._writes.add(write)
        write.add_done_callback(self._writes.discard)
        return write

    async def _move_one(self, transfer: Transfer) -> bool:
        ok = again = False
        try:
            ok = await self._write(transfer)
        except TierError as error:
            again = isinstance(error, TierUnavailableError)  # another drive may take it
            _log.info("block not written: %s", error)
        finally:
            self._complete(transfer, ok=ok, again=again)
        if ok:
            self._pause_s = self._hung_until = 0.0
        return ok

    def _complete(self, transfer: Transfer, *, ok: bool, again: bool = False) -> None:
        self._dram.placement.complete(transfer, ok=ok, again=again)
        self._moved.set()
        self.on_moved()

    async def _write(self, transfer: Transfer) -> bool:
        records = self._dram.arena.records
        record = records.record(transfer.slot)
        if record.key != transfer.key or not record.committed:
            return False  # dropped before its turn came
        namespace = self._dram.namespaces[record.namespace]

        def unchanged() -> bool:
            return records.record(transfer.slot).generation == record.generation

        try:
            written = await self._nvme.write(
                _stored(record, namespace.namespace_id),
                self._dram.placement.parent(transfer.key),
                self._dram.view(transfer.slot, record.length),
                layout_of(namespace).itemsize,
                unchanged,
            )
        except CorruptBlockError as error:
            _log.warning("block %s in DRAM: %s", transfer.key.hex(), error)
            if unchanged():
                self._dram.drop(transfer.key)
            return False
        # A drive may have lost it again by now: nobody is to count on a copy that is not there.
        return written and self._nvme.find(transfer.key, transfer.shard) is not None

    def _hung(self) -> None:
        """The drives do not answer: leave them alone for a while, longer each time."""
        if now() >= self._hung_until:
            self._pause_s = min(_PAUSE_MAX_S, max(_PAUSE_S, 2 * self._pause_s))
            self._hung_until = now() + self._pause_s
            _log.warning("this node's drives do not answer: no demotion to them for %.0f s", self._pause_s)

    async def flush(self, timeout_s: float) -> None:
        """Write all that the drives take, for at most `timeout_s`."""
        deadline = now() + timeout_s
        self._dram.note_accesses()
        self._dram.placement.requeue("nvme", every=True)
        self.wake()
        while self._nvme.num_working and self._dram.placement.num_unsaved("nvme") and (left := deadline - now()) > 0:
            self._moved.clear()
            self._wake.set()
            with contextlib.suppress(asyncio.TimeoutError):
                await within(min(left, self._heartbeat_s), self._moved.wait())

    async def settle(self) -> None:
        """Wait for the writes under way; a drive that hangs is not waited for long."""
        if self._writes:
            await asyncio.wait(self._writes, timeout=_SETTLE_S)


def _stored(record: Record, namespace_id: bytes) -> Stored:
    return Stored(
        key=BlockKey(record.key),
        shard=record.shard,
        num_bytes=record.length,
        checksum=record.checksum,
        namespace_id=namespace_id,
        depth=record.depth,
        parent_fingerprint=record.parent_fingerprint,
    )

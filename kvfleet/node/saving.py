"""Copies from the arena to the shared tier: write-behind of what is new, demotion of what must make room.

Bounded: at most `save_inflight_max` objects at once; what waits, waits in the arena. While the shared tier fails,
blocks stay in DRAM and are tried again after a pause; those that must leave meanwhile are lost and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from kvfleet.config import MIB, FleetConfig
from kvfleet.core.directory import split_records
from kvfleet.core.placement import Transfer
from kvfleet.errors import DirectoryUnavailableError, TierError
from kvfleet.node.dram import DramTier, record_id
from kvfleet.node.landing import settle
from kvfleet.node.namespaces import Namespaces, layout_of
from kvfleet.node.publishing import CALL_TIMEOUT_S, DirectoryLink, Publisher
from kvfleet.node.shared import SharedTier
from kvfleet.node.waiting import within

__all__ = ["Saver"]

_log = logging.getLogger(__name__)
_BATCH_BYTES = 256 * MIB
_BATCH_PART = 8
_PAUSE_S = 1.0
_PAUSE_MAX_S = 30.0


class Saver:
    """Writes blocks of one node to the shared tier.

    Threads: the manager's event loop; writes run in threads.

    Attributes:
        on_moved: called at the end of each transfer: its block may be evictable now.
        problem: why the shared tier's last answer was an error, or "".
        works: set once the shared tier was tried out successfully.
    """

    def __init__(
        self,
        dram: DramTier,
        namespaces: Namespaces,
        shared: SharedTier | None,
        publisher: Publisher,
        link: DirectoryLink,
        config: FleetConfig,
    ) -> None:
        self._dram = dram
        self._namespaces = namespaces
        self._shared = shared
        self._publisher = publisher
        self._link = link
        # What is in transfer cannot be evicted: only a part of the arena is at a time.
        self._batch_bytes = min(_BATCH_BYTES, dram.arena.capacity_bytes // _BATCH_PART)
        self._moved = asyncio.Event()
        self._places = asyncio.Semaphore(config.save_inflight_max)
        self._wake = asyncio.Event()
        self._heartbeat_s = config.heartbeat_s
        self.on_moved: Callable[[], None] = lambda: None
        self.problem = ""
        self.works = asyncio.Event()
        self._tried = asyncio.Event()
        self.saved_blocks = 0
        self.failures = 0

    def wake(self) -> None:
        """There are new blocks."""
        self._wake.set()

    async def run(self) -> None:
        """Save what is not saved yet, oldest first. Runs until cancelled."""
        if self._shared is None:
            return
        await self._try_out(self._shared)
        pause_s = 0.0
        while True:
            transfers = self._dram.placement.next_saves(self._batch_bytes)
            if not transfers:
                # Blocks that loads brought say nothing: look for them now and then.
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(self._heartbeat_s, self._wake.wait())
                self._wake.clear()
                continue
            failures = self.failures
            known = await self._known(transfers)
            for transfer in transfers:
                if record_id(transfer.key, transfer.shard) in known:
                    self._complete(transfer, ok=True)
            await self.move([t for t in transfers if record_id(t.key, t.shard) not in known])
            pause_s = min(_PAUSE_MAX_S, max(_PAUSE_S, 2 * pause_s)) if self.failures > failures else 0.0
            await asyncio.sleep(pause_s)

    async def _try_out(self, shared: SharedTier) -> None:
        """Check the shared tier until it works, so that `status` can say what is wrong with it."""
        pause_s = _PAUSE_S
        while not self.works.is_set():
            try:
                await asyncio.to_thread(shared.check)
                self.problem = ""
                self.works.set()
            except TierError as error:
                self.problem = str(error)
                _log.warning("the shared tier does not work, next try in %.0f s: %s", pause_s, error)
                self._tried.set()
                await asyncio.sleep(pause_s)
                pause_s = min(_PAUSE_MAX_S, 2 * pause_s)
        self._tried.set()

    async def _known(self, transfers: Sequence[Transfer]) -> set[bytes]:
        """Records that another node, or an earlier life of this one, has saved already, as the directory knows."""
        records = b"".join(record_id(transfer.key, transfer.shard) for transfer in transfers)
        try:
            return set(split_records(await self._link.shared_among(records, CALL_TIMEOUT_S)))
        except DirectoryUnavailableError:
            return set()

    async def move(self, transfers: Sequence[Transfer]) -> None:
        """Carry transfers out, and complete each as it ends."""
        await asyncio.gather(*(self._move_one(transfer) for transfer in transfers))

    async def _move_one(self, transfer: Transfer) -> None:
        ok = False
        try:
            await self._tried.wait()  # before that its directory may not have been made
            async with self._places:
                ok = await self._write(transfer)
        finally:
            self._complete(transfer, ok=ok)

    def _complete(self, transfer: Transfer, *, ok: bool) -> None:
        self._dram.placement.complete(transfer, ok=ok)
        self._moved.set()
        self.on_moved()

    async def _write(self, transfer: Transfer) -> bool:
        assert self._shared is not None, "no transfers without a tier below"
        record = self._dram.arena.records.record(transfer.slot)
        namespace = self._namespaces[record.namespace]
        view = self._dram.view(transfer.slot, record.length)
        num_shards = layout_of(namespace).num_shards
        write = partial(self._shared.write, namespace, num_shards, transfer.key, transfer.shard, view, record.checksum)
        try:
            await settle(None, write)
        except TierError as error:
            self.failures += 1
            self.problem = str(error)
            _log.info("block not saved: %s", error)
            return False
        self.problem = ""
        self.saved_blocks += 1
        self._publisher.shared(record_id(transfer.key, transfer.shard), present=True)
        return True

    async def drain(self, timeout_s: float) -> int:
        """Save what is unsaved and tell the directory, for at most `timeout_s`. Returns how many blocks are left."""
        if self._shared is None:
            return 0
        deadline = time.monotonic() + timeout_s
        while self._dram.placement.num_unsaved and (left := deadline - time.monotonic()) > 0:
            self._moved.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await within(left, self._moved.wait())
        await self._publisher.flush(max(0.0, deadline - time.monotonic()))
        return self._dram.placement.num_unsaved

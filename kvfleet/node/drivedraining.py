"""Copies from this node's drives to the shared tier, when the node is to leave: drives go with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from kvfleet.core.inventory import parts_of, record_id
from kvfleet.errors import TierError
from kvfleet.node.claiming import Claimer, Left
from kvfleet.node.directorylink import CALL_TIMEOUT_S
from kvfleet.node.draining import SaveBudget
from kvfleet.node.dram import DramTier
from kvfleet.node.drive import pages
from kvfleet.node.drivestored import Stored
from kvfleet.node.messages import Namespace
from kvfleet.node.namespaces import layout_of
from kvfleet.node.nvme import NvmeTier
from kvfleet.node.sharedwrites import SharedWrites
from kvfleet.node.waiting import now

__all__ = ["DriveDrain"]

_log = logging.getLogger(__name__)
_CLAIMED_AT_ONCE = 1000
_SETTLE_S = 5.0


@dataclass(slots=True)
class _Alone:
    """A block on the drives, alone as far as is known.

    Attributes:
        unused_s: seconds since its last use.
        claimed: the directory has said that nobody else has it or writes it.
        saved: it has a copy now.
    """

    stored: Stored
    unused_s: float
    claimed: bool
    saved: bool = False


class DriveDrain:
    """Saves what is on this node's drives and nowhere else: what was used last first.

    A block is read into memory of its own, so that the arena keeps what it has. One whose namespace is not known here,
    as no client of it came since the arena was made, cannot be written. Without the directory nothing is: it might be
    in the shared tier, all of it.

    Threads: the manager's event loop.

    Args:
        dram: what is in it is not looked at: it was saved before.
        nvme: the drives.
        writes: to the shared tier.
        claimer: at the directory.
        num_at_once: blocks in memory.
    """

    def __init__(
        self, dram: DramTier, nvme: NvmeTier, writes: SharedWrites, claimer: Claimer, num_at_once: int
    ) -> None:
        self._dram = dram
        self._nvme = nvme
        self._writes = writes
        self._claimer = claimer
        self._num_at_once = num_at_once
        self._late: set[asyncio.Future[None]] = set()

    async def run(self, budget: SaveBudget, deadline: float) -> tuple[int, int]:
        """Save within a budget; no write begins after the deadline.

        Returns:
            How many blocks are left that only the drives have, as far as is known, and their bytes.
        """
        blocks = await self._alone(deadline)
        waiting = iter([block for block in blocks if block.claimed])
        copies = {asyncio.ensure_future(self._copy(waiting, budget, deadline)) for _ in range(self._num_at_once)}
        done, late = await asyncio.wait(copies, timeout=max(0.0, deadline - now()))
        self._late |= late  # a drive or storage that hangs; more is not begun
        for copy in late:
            copy.add_done_callback(self._late.discard)
        for copy in done:
            copy.result()
        left = [block for block in blocks if not block.saved]
        for block in left:
            self._claimer.give_back(record_id(block.stored.key, block.stored.shard))
        return len(left), sum(block.stored.num_bytes for block in left)

    async def end(self) -> None:
        """Wait for copies under way; what hangs is not waited for long."""
        if self._late:
            await asyncio.wait(self._late, timeout=_SETTLE_S)

    async def _alone(self, deadline: float) -> list[_Alone]:
        """The blocks that neither the arena nor the shared tier has, those used last first."""
        uses = self._nvme.last_uses()
        records = await asyncio.to_thread(sorted, uses, key=lambda record: (uses[record], record))
        found: list[_Alone] = []
        for first in range(0, len(records), _CLAIMED_AT_ONCE):
            page = [r for r in records[first : first + _CLAIMED_AT_ONCE] if not self._resident(r)]
            claimed = await self._claimer.claim(page, CALL_TIMEOUT_S) if page and now() < deadline else Left()
            for record in page:
                stored = self._nvme.find(*parts_of(record))
                if stored is not None and record not in claimed.saved | claimed.taken:
                    found.append(_Alone(stored, uses[record], claimed=claimed.known))
        return found

    def _resident(self, record: bytes) -> bool:
        return self._dram.placement.resident(*parts_of(record)) is not None

    async def _copy(self, waiting: Iterator[_Alone], budget: SaveBudget, deadline: float) -> None:
        """Copy one block after the other."""
        for block in waiting:
            if budget.closed(now()):
                return
            namespace = self._dram.namespaces.known(block.stored.namespace_id)
            if namespace is None or not budget.take(block.stored.num_bytes, now()):
                continue
            block.saved = await self._copy_one(block, namespace, deadline)
            if not block.saved:
                budget.give_back(block.stored.num_bytes)

    async def _copy_one(self, block: _Alone, namespace: Namespace, deadline: float) -> bool:
        stored = block.stored
        data = pages(stored.num_bytes)
        try:
            checksum = await self._nvme.read(stored.key, stored.shard, data, layout_of(namespace).itemsize)
            if checksum is None or now() >= deadline:
                return False
            return await self._writes.write_copy(namespace, stored, data, block.unused_s) == "saved"
        except TierError as error:
            _log.info("block %s on a drive is not saved: %s", stored.key.hex(), error)
            return False

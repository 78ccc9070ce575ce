"""Room for blocks: what placement grants at once, and what it grants after blocks moved down."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from kvfleet.core.placement import Transfer
from kvfleet.node.dram import DramTier, Granted, Incoming, Reservation

__all__ = ["Admitter"]


class Admitter:
    """Reserves slots, moving blocks to the tier below when that makes room.

    Args:
        move: carries transfers out and completes them.
    """

    def __init__(self, dram: DramTier, move: Callable[[Sequence[Transfer]], Awaitable[None]]) -> None:
        self._dram = dram
        self._move = move
        self._freed = asyncio.Event()

    def freed(self) -> None:
        """Something became evictable or free: whoever waits for room looks again."""
        freed, self._freed = self._freed, asyncio.Event()
        freed.set()

    async def reserve(
        self, blocks: Sequence[Incoming], namespace: int, client_id: int, timeout_s: float, *, patient: bool
    ) -> Reservation:
        """Slots for as many of the blocks as there is room for, in order.

        Args:
            blocks: consecutive blocks of one prefix.
            namespace: number of their namespace.
            client_id: of the writer; 0 for the manager.
            timeout_s: longest wait.
            patient: wait for held blocks to be let go, too. Otherwise only for transfers.
        """
        deadline = time.monotonic() + timeout_s
        granted: list[Granted] = []
        already: list[int] = []
        left = list(range(len(blocks)))
        while True:
            freed = self._freed
            got = self._dram.reserve([blocks[i] for i in left], namespace, client_id)
            granted += [Granted(left[g.index], g.slot, g.generation, g.offset) for g in got.granted]
            already += [left[i] for i in got.already]
            left = [left[i] for i in got.refused]
            remaining = deadline - time.monotonic()
            if not left or remaining <= 0:
                break
            if got.transfers:
                await self._move(got.transfers)
            elif patient:
                try:
                    await asyncio.wait_for(freed.wait(), remaining)
                except asyncio.TimeoutError:
                    break
            else:
                break
        granted.sort(key=lambda g: g.index)
        return Reservation(granted, already, left, [])

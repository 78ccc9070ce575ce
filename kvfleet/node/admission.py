"""Room for blocks: what placement grants at once, and what it grants after blocks moved down."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from kvfleet.core.hints import NO_HINTS, Hints
from kvfleet.core.placement import Transfer
from kvfleet.node.dram import DramTier, Granted, Incoming, Reservation
from kvfleet.node.messages import Namespace
from kvfleet.node.waiting import now, within

__all__ = ["Admitter"]

_WRITERS_S = 2.0  # longest wait for clients that have slots to write into them


class Admitter:
    """Reserves slots, moving blocks to the tier below when that makes room.

    Args:
        move: carries transfers out and completes them.
    """

    def __init__(self, dram: DramTier, move: Callable[[Sequence[Transfer]], Awaitable[None]]) -> None:
        self._dram = dram
        self._move = move
        self._freed = asyncio.Event()
        self._moving: set[asyncio.Future[None]] = set()

    def freed(self) -> None:
        """Something became evictable or free: whoever waits for room looks again."""
        freed, self._freed = self._freed, asyncio.Event()
        freed.set()

    async def changed(self, timeout_s: float) -> bool:
        """Wait for the next `freed`, or that long. Returns whether it came."""
        freed = self._freed
        with contextlib.suppress(asyncio.TimeoutError):
            await within(timeout_s, freed.wait())
        return freed.is_set()

    async def reserve(
        self,
        blocks: Sequence[Incoming],
        namespace: Namespace,
        client_id: int,
        timeout_s: float,
        *,
        patient: bool,
        hints: Hints = NO_HINTS,
    ) -> Reservation:
        """Slots for as many of the blocks as there is room for, in order.

        Args:
            blocks: consecutive blocks of one prefix.
            namespace: of all of them.
            client_id: of the writer; 0 for the manager.
            timeout_s: longest wait.
            patient: have room made at the cost of blocks in use, or wait for held ones to be let go. Otherwise only
                wait for transfers, the saver's too, and for other writers.
            hints: of the writer.
        """
        deadline, writers_end = now() + timeout_s, 0.0
        granted: list[Granted] = []
        already: list[int] = []
        declined: list[int] = []
        left = list(range(len(blocks)))
        while True:
            got = self._dram.reserve([blocks[i] for i in left], namespace, client_id, hints=hints)
            granted += [Granted(left[g.index], g.slot, g.generation, g.offset) for g in got.granted]
            already += [left[i] for i in got.already]
            declined = [left[i] for i in got.declined] + declined
            left = [left[i] for i in got.refused]
            move = self._begin(got.transfers) if got.transfers else None  # whatever becomes of this reservation
            remaining = deadline - now()
            if not left or remaining <= 0 or not self._dram.fits(blocks[0].block.num_bytes):
                break
            if move is not None:
                await asyncio.wait({move}, timeout=remaining)
            elif self._dram.placement.in_transfer:
                await self.changed(remaining)
            elif not patient:
                writers_end = writers_end or now() + _WRITERS_S
                others = not granted and self._dram.num_reserved
                if not (others and await self.changed(max(0.0, min(deadline, writers_end) - now()))):
                    break
            elif not self._dram.give_way(blocks[left[0]].block.num_bytes):
                await self.changed(remaining)
        stop = min(left, default=len(blocks))
        self._give_back(granted, stop)
        left += [g.index for g in granted if g.index > stop]
        granted = sorted((g for g in granted if g.index < stop), key=lambda g: g.index)
        return Reservation(granted, already, left, [], declined)

    def _give_back(self, granted: Sequence[Granted], stop: int) -> None:
        """Take slots back from blocks behind one that found no room: nobody could reach them."""
        for slot in granted:
            if slot.index > stop:
                self._dram.abort(slot.slot, slot.generation)
                self.freed()

    async def settle(self) -> None:
        """Wait for the moves that nobody waits for."""
        await asyncio.gather(*self._moving, return_exceptions=True)

    def _begin(self, transfers: Sequence[Transfer]) -> asyncio.Future[None]:
        """Move blocks down, whether or not the one who wanted the room still waits for it."""
        move = asyncio.ensure_future(self._move(transfers))
        self._moving.add(move)
        move.add_done_callback(self._moving.discard)
        return move

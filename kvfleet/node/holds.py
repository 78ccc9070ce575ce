"""Holds: bounded promises to keep blocks for clients that have planned with them.

In the manager's memory only: a restart ends them all, and losing one costs a miss.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

from kvfleet.core.block import BlockKey, split
from kvfleet.node.admission import Admitter
from kvfleet.node.arenadir import FileLock
from kvfleet.node.dram import DramTier
from kvfleet.node.messages import HoldRequest

__all__ = ["HOLD_MAX_S", "Holds"]

_log = logging.getLogger(__name__)

HOLD_MAX_S = 30.0
_ARENA_PART = 4  # a quarter of the arena may be held
_HOLDS_MAX = 4096


@dataclass(frozen=True, slots=True)
class _Hold:
    keys: list[BlockKey]
    timer: asyncio.TimerHandle


class Holds:
    """What the clients of one node hold.

    At most a quarter of the arena, 4096 holds, and each for 30 s unless it is renewed. A hold ends with its release,
    its time, or its client's process.

    Threads: the manager's event loop.
    """

    def __init__(self, dram: DramTier, admitter: Admitter) -> None:
        self._dram = dram
        self._admitter = admitter
        self._holds: dict[tuple[int, int], _Hold] = {}
        self._held: dict[BlockKey, tuple[int, int]] = {}  # by how many holds, and what is counted for it
        self.num_bytes = 0  # of the slots of all that is held

    def __len__(self) -> int:
        return len(self._holds)

    def hold(self, request: HoldRequest) -> int:
        """Keep the first blocks of a prefix, as many as are here and may be held.

        Replaces an earlier hold of the same number. Returns how many blocks are held.
        """
        number = (request.client_id, request.number)
        earlier = self._holds.pop(number, None)
        keys: list[BlockKey] = []
        if len(self._holds) < _HOLDS_MAX:
            for key in split(request.keys):
                if self._dram.placement.resident(key, request.shard) is None or not self._take(key):
                    break
                keys.append(key)
        if earlier is not None:  # after the new one: what both have is never let go
            self._let_go(earlier)
        if keys:
            seconds = min(max(0.0, request.seconds), HOLD_MAX_S)
            timer = asyncio.get_running_loop().call_later(seconds, self.release, *number)
            self._holds[number] = _Hold(keys, timer)
        return len(keys)

    def release(self, client_id: int, number: int) -> None:
        """End a hold; one that has ended already is fine."""
        hold = self._holds.pop((client_id, number), None)
        if hold is not None:
            self._let_go(hold)

    def tend(self, lock_files: Path) -> None:
        """End the holds of clients that are gone."""
        for client_id in {client_id for client_id, _ in self._holds}:
            if not FileLock.held(lock_files / f"{client_id:016x}"):
                _log.info("client %x is gone: its holds end", client_id)
                for number in [number for number in self._holds if number[0] == client_id]:
                    self.release(*number)

    def _take(self, key: BlockKey) -> bool:
        """Hold a block once more. False: that would be too much."""
        count, num_bytes = self._held.get(key, (0, self._dram.placement.block_bytes(key)))
        if not count and (self.num_bytes + num_bytes) * _ARENA_PART > self._dram.arena.capacity_bytes:
            return False
        if not count:
            self.num_bytes += num_bytes
            self._dram.hold(key)
        self._held[key] = (count + 1, num_bytes)
        return True

    def _let_go(self, hold: _Hold) -> None:
        hold.timer.cancel()
        for key in hold.keys:
            count, num_bytes = self._held.pop(key)
            if count > 1:
                self._held[key] = (count - 1, num_bytes)
            else:
                self.num_bytes -= num_bytes
                self._dram.release(key)
        self._admitter.freed()

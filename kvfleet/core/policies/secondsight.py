"""Second sight: leaf-first LRU that takes a block only when it comes for the second time."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from kvfleet.core.block import BlockKey
from kvfleet.core.hints import NO_HINTS, Hints
from kvfleet.core.policies.base import Newcomer, Worth
from kvfleet.core.policies.lru import LeafFirstLRU
from kvfleet.core.policies.queues import Ghosts

__all__ = ["SecondSight"]

_SIGHTS = 8  # keys remembered for each block there is room for


class SecondSight(LeafFirstLRU):
    """Declines what it has not seen before, so that what is used once drives out nothing.

    As a doorkeeper does: Einziger, Friedman, Manes: TinyLFU, 2017, section 3.4.2, but a list of keys. Seen are blocks
    that were declined, and those that left. While there is room everything is taken, and room that orphans and retired
    blocks have is given to all. Of blocks that come together those behind one that is declined are declined too.

    Worked by hand, for a full cache of the roots a and b, used in this order:

        victims(1) for c         = none    never seen
        decline c
        victims(2) for c, d      = a    c is known now, d is not
        remove a, insert c       b c
        victims(1) for a         = b    a was here
        victims(1) for nobody    = b    a load needs the room

    Args:
        capacity: blocks there is room for, about.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity > 0, "there is room for a block"
        super().__init__()
        self._seen = Ghosts()
        self.resize(capacity)

    @override
    def resize(self, capacity: int) -> None:
        self._seen_max = _SIGHTS * capacity

    @override
    def insert(
        self, key: BlockKey, parent: BlockKey | None, now: float, hints: Hints = NO_HINTS, *, passing: bool = False
    ) -> None:
        super().insert(key, parent, now, hints, passing=passing)
        self._seen.discard(key)
        self._seen.discard(_shard(key, 0))  # others of it are forgotten in time
        self._seen.trim(self._seen_max)

    @override
    def remove(self, key: BlockKey) -> None:
        super().remove(key)
        self._seen.add(key)

    @override
    def decline(self, newcomers: Sequence[Newcomer]) -> None:
        for newcomer in newcomers:
            self._seen.add(_shard(newcomer.key, newcomer.shard))
        self._seen.trim(self._seen_max)

    @override
    def victims(self, need: int, worth: Worth, *, newcomers: Sequence[Newcomer] = ()) -> list[BlockKey]:
        chosen = super().victims(need, worth)
        if not newcomers:
            return chosen
        known = next((i for i, newcomer in enumerate(newcomers) if not self._knows(newcomer)), len(newcomers))
        gained = 0
        for index, key in enumerate(chosen):
            node = self._nodes[key]
            if gained >= known and not (node.orphan or node.retired or node.passing):
                return chosen[:index]
            gained += worth(key)
        return chosen

    def _knows(self, newcomer: Newcomer) -> bool:
        return newcomer.key in self._seen or _shard(newcomer.key, newcomer.shard) in self._seen


def _shard(key: BlockKey, shard: int) -> BlockKey:
    """What a declined shard is remembered as: those of one block come one after the other, for one use."""
    return BlockKey(key + shard.to_bytes(4, "big"))

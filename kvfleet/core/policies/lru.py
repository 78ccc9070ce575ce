"""Least recently used, leaf first."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace

from typing_extensions import override

from kvfleet.core.block import BlockKey
from kvfleet.core.policies.base import Policy
from kvfleet.core.policies.forest import Forest

__all__ = ["LeafFirstLRU"]

Entry = tuple[int, float, BlockKey]  # 0 for an orphan, else 1; last use; key


class LeafFirstLRU(Policy):
    """Evicts the leaf with the oldest last use, orphans before all others; ties go by key.

    A heap of the leaves. A use only notes its time: times grow, so an entry that is out of date sorts too early,
    never too late, and is put right when it comes to the top. Insert, touch and remove are O(log n), `victims`
    O(log n) for each key it returns or must leave.

    Worked by hand, children indented under their parents, with the time of last use:

        a 1        victims(1) = c   the oldest leaf; a and b are older but have children
          b 2      victims(3) = c, b, d   b is a leaf once c is chosen, and older than d
            c 3    touch(c, 5):  victims(3) = d, c, b   a has to wait for e
          d 4      remove(b):    victims(2) = c, d   c is an orphan
          e 6
    """

    def __init__(self) -> None:
        self._forest = Forest()
        self._last: dict[BlockKey, float] = {}
        self._heap: list[Entry] = []
        self._entries: dict[BlockKey, Entry] = {}  # the valid one of each key that has one in the heap

    @override
    def __len__(self) -> int:
        return len(self._last)

    @override
    def __contains__(self, key: object) -> bool:
        return key in self._last

    @override
    def insert(self, key: BlockKey, parent: BlockKey | None, now: float) -> None:
        self._forest.add(key, parent)
        self._last[key] = now
        self._queue(key)

    @override
    def touch(self, key: BlockKey, now: float) -> None:
        assert key in self._last, "key is resident"
        if now > self._last[key]:
            self._last[key] = now

    @override
    def remove(self, key: BlockKey) -> None:
        parent = self._forest.parent(key)
        orphaned = self._forest.remove(key)
        del self._last[key]
        self._entries.pop(key, None)
        for other in orphaned:
            self._queue(other)
        if parent is not None:
            self._queue(parent)
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = list(self._entries.values())
            heapify(self._heap)

    @override
    def victims(self, need: int, worth: Callable[[BlockKey], int]) -> list[BlockKey]:
        assert need > 0, "something is needed"
        chosen: list[BlockKey] = []
        taken: list[Entry] = []  # from the heap, to be put back
        bared: list[Entry] = []  # parents that are leaves if what was chosen goes
        children: dict[BlockKey, int] = {}  # of parents of chosen keys: how many are not chosen
        while need > 0:
            oldest = self._oldest()
            if bared and (oldest is None or bared[0] < oldest):
                key = heappop(bared)[2]
            elif oldest is not None:
                key = oldest[2]
                taken.append(heappop(self._heap))
            else:
                break
            gain = worth(key)
            if gain <= 0:
                continue
            need -= gain
            chosen.append(key)
            parent = self._forest.parent(key)
            if parent is not None:
                children[parent] = children.get(parent, self._forest.num_children(parent)) - 1
                if not children[parent]:
                    heappush(bared, self._entry(parent))
        for entry in taken:
            heappush(self._heap, entry)
        return chosen

    @override
    def is_leaf(self, key: BlockKey) -> bool:
        assert key in self._last, "key is resident"
        return self._forest.is_leaf(key)

    @override
    def descendants(self, key: BlockKey) -> list[BlockKey]:
        assert key in self._last, "key is resident"
        return self._forest.descendants(key)

    def _entry(self, key: BlockKey) -> Entry:
        return (0 if self._forest.is_orphan(key) else 1, self._last[key], key)

    def _queue(self, key: BlockKey) -> None:
        """Have an entry for a leaf that sorts no later than it should."""
        if not self._forest.is_leaf(key):
            return
        entry = self._entry(key)
        known = self._entries.get(key)
        if known is None or entry < known:
            self._entries[key] = entry
            heappush(self._heap, entry)

    def _oldest(self) -> Entry | None:
        """The first entry of the heap once it is right; None if the heap is empty."""
        while self._heap:
            entry = self._heap[0]
            key = entry[2]
            valid = self._entries.get(key) is entry
            if valid and self._forest.is_leaf(key):
                right = self._entry(key)
                if right == entry:
                    return entry
                self._entries[key] = right
                heapreplace(self._heap, right)
                continue
            if valid:
                del self._entries[key]
            heappop(self._heap)
        return None

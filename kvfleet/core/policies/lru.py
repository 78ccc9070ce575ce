"""Least recently used, leaf first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace

from typing_extensions import override

from kvfleet.core.block import BlockKey
from kvfleet.core.policies.base import Policy
from kvfleet.core.policies.forest import Forest, Node

__all__ = ["LeafFirstLRU"]

Entry = tuple[int, float, BlockKey]  # 0 for an orphan, else 1; last use; key


@dataclass(slots=True, eq=False)
class _Node(Node):
    last: float = 0.0
    entry: Entry | None = None  # the valid one in the heap

    def right_entry(self) -> Entry:
        """What its entry should be."""
        return (0 if self.orphan else 1, self.last, self.key)


class LeafFirstLRU(Policy):
    """Evicts the leaf with the oldest last use, orphans before all others; ties go by key.

    A heap of the leaves. A use only notes its time: times grow, so an entry that is out of date sorts too early,
    never too late, and is put right when it comes to the top. Insert, touch and remove are O(1), `victims` O(log n)
    for each key that it returns or has to leave, and for each that became a leaf since the last time.

    Worked by hand, children indented under their parents, with the time of last use:

        a 1        victims(1) = c   the oldest leaf; a and b are older but have children
          b 2      victims(3) = c, b, d   b is a leaf once c is chosen, and older than d
            c 3    touch(c, 5):  victims(3) = d, c, b   a has to wait for e
          d 4      remove(b):    victims(2) = c, d   c is an orphan
          e 6
    """

    def __init__(self) -> None:
        self._forest: Forest[_Node] = Forest()
        self._nodes = self._forest.nodes
        self._heap: list[Entry] = []
        self._loose: dict[BlockKey, _Node] = {}  # may be leaves without an entry

    @override
    def __len__(self) -> int:
        return len(self._nodes)

    @override
    def __contains__(self, key: object) -> bool:
        return key in self._nodes

    @override
    def insert(self, key: BlockKey, parent: BlockKey | None, now: float) -> None:
        node = _Node(key, parent, last=now)
        self._forest.add(node)
        self._loose[key] = node

    @override
    def touch(self, key: BlockKey, now: float) -> None:
        node = self._nodes[key]
        if now > node.last:
            node.last = now

    @override
    def remove(self, key: BlockKey) -> None:
        parent = self._nodes[key].parent
        self._loose.update((orphan.key, orphan) for orphan in self._forest.remove(key))
        self._loose.pop(key, None)
        if parent is not None and not parent.children:
            self._loose[parent.key] = parent
        if len(self._heap) > 2 * len(self._nodes) + 64:
            self._heap = [node.entry for node in self._nodes.values() if node.entry is not None]
            heapify(self._heap)

    @override
    def victims(self, need: int, worth: Callable[[BlockKey], int]) -> list[BlockKey]:
        assert need > 0, "something is needed"
        chosen: list[BlockKey] = []
        taken: list[Entry] = []  # from the heap, to be put back
        bared: list[Entry] = []  # parents that are leaves if what was chosen goes
        children: dict[BlockKey, int] = {}  # of parents of chosen keys: how many are not chosen
        self._queue_loose()
        oldest = self._oldest()
        while need > 0:
            if bared and (oldest is None or bared[0] < oldest):
                node = self._nodes[heappop(bared)[2]]
            elif oldest is not None:
                node = self._nodes[oldest[2]]
                taken.append(heappop(self._heap))
                oldest = self._oldest()
            else:
                break
            gain = worth(node.key)
            if gain <= 0:
                continue
            need -= gain
            chosen.append(node.key)
            parent = node.parent
            if parent is not None:
                children[parent.key] = children.get(parent.key, len(parent.children)) - 1
                if not children[parent.key]:
                    heappush(bared, parent.right_entry())
        for entry in taken:
            heappush(self._heap, entry)
        return chosen

    @override
    def is_leaf(self, key: BlockKey) -> bool:
        return not self._nodes[key].children

    @override
    def descendants(self, key: BlockKey) -> list[BlockKey]:
        return [node.key for node in self._nodes[key].descendants()]

    def _queue_loose(self) -> None:
        """Give every leaf an entry that sorts no later than it should.

        Not done before, because most blocks get a child, or go, right after they became leaves.
        """
        for node in self._loose.values():
            entry = node.right_entry()
            if not node.children and (node.entry is None or entry < node.entry):
                node.entry = entry
                heappush(self._heap, entry)
        self._loose.clear()

    def _oldest(self) -> Entry | None:
        """The first entry of the heap once it is right; None if the heap is empty."""
        while self._heap:
            entry = self._heap[0]
            node = self._nodes.get(entry[2])
            if node is not None and node.entry is entry:
                if not node.children:
                    right = node.right_entry()
                    if right == entry:
                        return entry
                    node.entry = right
                    heapreplace(self._heap, right)
                    continue
                node.entry = None
            heappop(self._heap)
        return None

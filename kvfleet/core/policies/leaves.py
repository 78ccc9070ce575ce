"""Leaf-first eviction by a rank: the part that most policies share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from typing_extensions import override

from kvfleet.core.block import BlockKey
from kvfleet.core.policies.base import Newcomer, Policy, Worth
from kvfleet.core.policies.forest import Forest, Node

__all__ = ["RankedLeaves"]

Entry = tuple[int, float, BlockKey]  # 0 for an orphan, 1 for a retired or passing block, else 2; rank; key

AnyNode = TypeVar("AnyNode", bound=Node)


class RankedLeaves(Policy, Generic[AnyNode]):
    """Evicts the leaf of the lowest rank, orphans and then retired blocks before all others; ties go by key.

    A heap of the leaves. A rank may grow at any time, as with a use: an entry that is out of date sorts too early,
    never too late, and is put right when it comes to the top. One whose rank falls has to be told to `_sinks`.
    Insert, touch and remove are O(1), `victims` O(log n) for each key that it returns or has to leave, and for each
    that became a leaf since the last time.
    """

    def __init__(self) -> None:
        self._forest: Forest[AnyNode] = Forest()
        self._nodes = self._forest.nodes
        self._heap: list[Entry] = []
        self._loose: dict[BlockKey, AnyNode] = {}  # may be leaves without an entry, or one that sorts too late

    @abstractmethod
    def _rank(self, node: AnyNode) -> float:
        """The lower, the sooner it goes."""

    def _add(self, node: AnyNode) -> None:
        """Enter the node of an absent key."""
        self._forest.add(node)
        self._loose[node.key] = node

    def _sinks(self, node: AnyNode) -> None:
        """A resident node's rank may have fallen."""
        self._loose[node.key] = node

    @override
    def __len__(self) -> int:
        return len(self._nodes)

    @override
    def __contains__(self, key: object) -> bool:
        return key in self._nodes

    @override
    def remove(self, key: BlockKey) -> None:
        parent = self._nodes[key].parent
        self._loose.update((orphan.key, orphan) for orphan in self._forest.remove(key))
        self._loose.pop(key, None)
        if parent is not None and not parent.children:
            self._loose[parent.key] = parent
        if len(self._heap) > 2 * len(self._nodes) + 64:
            self._heap[:] = [entry for entry in self._entries() if self._heap_of(entry) is self._heap]
            heapify(self._heap)

    @override
    def retire(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            node = self._nodes.get(key)
            if node is not None and len(node.children) < 2:  # else others use it too
                node.retired = True
                self._sinks(node)

    @override
    def victims(self, need: int, worth: Worth, *, newcomers: Sequence[Newcomer] = ()) -> list[BlockKey]:
        assert need > 0, "something is needed"
        chosen: list[BlockKey] = []
        taken: list[Entry] = []  # from the heap, to be put back
        bared: list[Entry] = []  # parents that are leaves if what was chosen goes
        children: dict[BlockKey, int] = {}  # of parents of chosen keys: how many are not chosen
        self._queue_loose()
        oldest = self._oldest(self._heap)
        while need > 0:
            if bared and (oldest is None or bared[0] < oldest):
                node = self._nodes[heappop(bared)[2]]
            elif oldest is not None:
                node = self._nodes[oldest[2]]
                taken.append(heappop(self._heap))
                oldest = self._oldest(self._heap)
            else:
                break
            gain = worth(node.key)
            if gain <= 0:
                continue
            assert not children.get(node.key, len(node.children)), "children go first"
            need -= gain
            chosen.append(node.key)
            parent = node.parent
            if parent is not None:
                children[parent.key] = children.get(parent.key, len(parent.children)) - 1
                if not children[parent.key]:
                    heappush(bared, self._entry(parent))
        for entry in taken:
            heappush(self._heap, entry)
        return chosen

    @override
    def expected_uses(self, key: BlockKey) -> float | None:
        node = self._nodes[key]
        return 0.0 if node.retired else float(node.uses) if node.uses else None

    @override
    def is_leaf(self, key: BlockKey) -> bool:
        return not self._nodes[key].children

    @override
    def goes_first(self, key: BlockKey) -> bool:
        node = self._nodes[key]
        return node.orphan or node.retired or node.passing

    @override
    def descendants(self, key: BlockKey) -> list[BlockKey]:
        return [node.key for node in self._nodes[key].descendants()]

    def _entry(self, node: AnyNode) -> Entry:
        """What its entry should be."""
        return (0 if node.orphan else 1 if node.retired or node.passing else 2, self._rank(node), node.key)

    def _entries(self) -> list[Entry]:
        """The valid ones."""
        return [node.entry for node in self._nodes.values() if node.entry is not None]

    def _queue_loose(self) -> None:
        """Give every leaf an entry that sorts no later than it should.

        Not done before, because most blocks get a child, or go, right after they became leaves.
        """
        for node in self._loose.values():
            if not node.children:
                entry = self._entry(node)
                if node.entry is None or entry < node.entry:
                    node.entry = entry
                    heappush(self._heap_of(entry), entry)
        self._loose.clear()

    def _heap_of(self, entry: Entry) -> list[Entry]:
        """The heap that an entry belongs to."""
        return self._heap

    def _oldest(self, heap: list[Entry]) -> Entry | None:
        """The first entry of a heap once it is right; None if the heap is empty."""
        while heap:
            entry = heap[0]
            node = self._nodes.get(entry[2])
            if node is not None and node.entry is entry:
                if not node.children:
                    right = self._entry(node)
                    if right == entry:
                        return entry
                    heappop(heap)
                    node.entry = right
                    heappush(self._heap_of(right), right)
                    continue
                node.entry = None
            heappop(heap)
        return None

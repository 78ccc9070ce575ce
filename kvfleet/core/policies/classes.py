"""Leaves in classes: each a queue by last use, whose heads compete by price."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from kvfleet.core.block import BlockKey
from kvfleet.core.policies.forest import Node

__all__ = ["ClassedLeaves", "Entry"]

Entry = tuple[int, float, BlockKey]  # class, last use, key
AnyNode = TypeVar("AnyNode", bound=Node)


class ClassedLeaves(Generic[AnyNode]):
    """A heap of the leaves of each class.

    A leaf's last use may grow, and its class change, at any time. One whose entry sorts too early is put right when it
    comes to the top of its queue; one that may be in none, or in that of another class, has to be told to `loosen`.

    Args:
        nodes: of all resident keys, leaves or not.
        entry: what the entry of a leaf should be now.
        price: of a leaf by its entry: the cheapest goes first, of equal prices the one used longest ago.
    """

    def __init__(
        self,
        nodes: Mapping[BlockKey, AnyNode],
        entry: Callable[[AnyNode], Entry],
        price: Callable[[Entry], float],
    ) -> None:
        self._nodes = nodes
        self._entry = entry
        self._price = price
        self._queues: dict[int, list[Entry]] = {}
        self._num_entries = 0
        self._loose: dict[BlockKey, AnyNode] = {}
        self._heads: list[tuple[float, float, Entry]] = []
        self._offering: set[int] = set()  # queues of which a leaf is among the heads
        self._taken: list[Entry] = []  # out of their queues, until `begin`: most of them go
        self._left: dict[BlockKey, int] = {}  # of parents of what goes: how many children stay

    def loosen(self, node: AnyNode) -> None:
        """A resident node may be a leaf without an entry, or with one in the wrong place."""
        self._loose[node.key] = node

    def removed(self, key: BlockKey) -> None:
        """A key is not resident any more."""
        self._loose.pop(key, None)
        if self._num_entries > 2 * len(self._nodes) + 64:
            entries = [node.entry for node in self._nodes.values() if node.entry is not None]
            self._queues, self._num_entries = {}, len(entries)
            self._taken.clear()
            for entry in entries:
                self._queues.setdefault(entry[0], []).append(entry)
            for queue in self._queues.values():
                heapify(queue)

    def begin(self) -> None:
        """Offer leaves, until `end`."""
        self._settle()
        for number, queue in self._queues.items():
            self._offering.add(number)
            self._offer(queue[0])

    def _settle(self) -> None:
        """Have every leaf in its queue, and right entries at the top of all queues."""
        assert not self._heads, "the last walk has ended"
        for entry in self._taken:
            taken = self._nodes.get(entry[2])
            if taken is not None and taken.entry is entry:
                heappush(self._queues.setdefault(entry[0], []), entry)
            else:
                self._num_entries -= 1
        self._taken.clear()
        for node in self._loose.values():
            if not node.children:
                entry = self._entry(node)
                if entry != node.entry:
                    self._push(node, entry)
        self._loose.clear()
        for number in list(self._queues):
            self._head(number)

    def cheapest(self) -> tuple[float, AnyNode] | None:
        """The next leaf to go, by price; None if there is none. Not offered again."""
        while self._heads:
            price, _, entry = heappop(self._heads)
            node = self._nodes[entry[2]]
            if node.entry is not entry:
                return price, node  # a leaf only once others go
            queue = self._queues[entry[0]]
            current = queue[0] is entry  # else one came before it that was in another queue
            if current:
                self._taken.append(heappop(queue))
            self._offer_first(entry[0])
            if current:
                return price, node
        return None

    def goes(self, node: AnyNode) -> None:
        """An offered node will go: its parent may be a leaf then."""
        parent = node.parent
        if parent is not None:
            left = self._left.get(parent.key, len(parent.children)) - 1
            assert left >= 0, "a child goes once"
            self._left[parent.key] = left
            if not left:
                self._offer(self._entry(parent))

    def end(self) -> None:
        """All is as it was before `begin`."""
        self._heads.clear()
        self._offering.clear()
        self._left.clear()

    def _offer(self, entry: Entry) -> None:
        heappush(self._heads, (self._price(entry), entry[1], entry))

    def _offer_first(self, number: int) -> None:
        """Offer the first leaf of a queue, if it has one."""
        self._offering.add(number)
        entry = self._head(number)
        if entry is None:
            self._offering.discard(number)
        else:
            self._offer(entry)

    def _push(self, node: AnyNode, entry: Entry) -> None:
        node.entry = entry
        heappush(self._queues.setdefault(entry[0], []), entry)
        self._num_entries += 1

    def _head(self, number: int) -> Entry | None:
        """The first entry of a queue that is right; None if there is none."""
        queue, nodes = self._queues[number], self._nodes
        while queue:
            entry = queue[0]
            node = nodes.get(entry[2])
            right = None
            if node is not None and node.entry is entry:
                right = None if node.children else self._entry(node)
                if right == entry:
                    return entry
                node.entry = None
            heappop(queue)
            self._num_entries -= 1
            if node is not None and right is not None:
                self._push(node, right)
                if self._offering and right[0] not in self._offering:
                    self._offer_first(right[0])
        del self._queues[number]
        return None

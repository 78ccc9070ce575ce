"""Leaf-first eviction from several queues: the part that S3-FIFO and ARC share."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from typing_extensions import override

from kvfleet.core.block import BlockKey
from kvfleet.core.policies.base import Newcomer, Worth
from kvfleet.core.policies.forest import Node
from kvfleet.core.policies.leaves import Entry, RankedLeaves

__all__ = ["Ghosts", "Leaver", "QueuedLeaves", "Walk"]

_FIRST_QUEUE = 2  # before it: orphans, and retired or passing blocks

AnyNode = TypeVar("AnyNode", bound=Node)


class QueuedLeaves(RankedLeaves[AnyNode]):
    """Each block is in one of a few queues, by a rank that only grows while it stays; a policy says which queue gives.

    A victim costs O(log n) at most, however many blocks and queues there are.
    """

    def __init__(self, num_queues: int) -> None:
        super().__init__()
        self._queues: list[list[Entry]] = [[] for _ in range(num_queues)]

    @abstractmethod
    def _queue(self, node: AnyNode) -> int:
        """Which queue a block is in."""

    @abstractmethod
    def _leavers(self, walk: Walk[AnyNode], newcomers: Sequence[Newcomer]) -> Leaver[AnyNode]:
        """What says, for one call of `victims`, which block is next."""

    @override
    def victims(self, need: int, worth: Worth, *, newcomers: Sequence[Newcomer] = ()) -> list[BlockKey]:
        assert need > 0, "something is needed"
        self._queue_loose()
        walk = Walk(self)
        leaver = self._leavers(walk, newcomers)
        chosen: list[BlockKey] = []
        while need > 0:
            node = walk.doomed()
            node = leaver.next() if node is None else node
            if node is None:
                break
            gain = worth(node.key)
            if gain > 0:
                need -= gain
                chosen.append(node.key)
                leaver.leaves(node)
                walk.bare(node)
        walk.end()
        return chosen

    @override
    def remove(self, key: BlockKey) -> None:
        super().remove(key)
        for heap in self._queues:
            if len(heap) > 2 * len(self._nodes) + 64:
                heap[:] = [entry for entry in self._entries() if self._heap_of(entry) is heap]
                heapify(heap)

    @override
    def _sinks(self, node: AnyNode) -> None:
        if node.entry is not None and node.entry[0] != self._entry(node)[0]:
            node.entry = None  # it is in the heap of another queue
        super()._sinks(node)

    @override
    def _entry(self, node: AnyNode) -> Entry:
        first, rank, key = super()._entry(node)
        return (_FIRST_QUEUE + self._queue(node) if first == _FIRST_QUEUE else first), rank, key

    @override
    def _heap_of(self, entry: Entry) -> list[Entry]:
        return self._heap if entry[0] < _FIRST_QUEUE else self._queues[entry[0] - _FIRST_QUEUE]


class Leaver(Generic[AnyNode]):
    """One policy's choice, during one call of `victims`. It changes nothing of the policy."""

    def next(self) -> AnyNode | None:
        """Take the next block that should go out of the walk; None if there is none."""
        raise NotImplementedError

    def leaves(self, node: AnyNode) -> None:
        """A block was chosen: one of `next`, or an orphan or a retired one."""
        raise NotImplementedError


class Walk(Generic[AnyNode]):
    """The queues as they would be if what was chosen had gone, and moved what has to be moved for that."""

    def __init__(self, leaves: QueuedLeaves[AnyNode]) -> None:
        self._leaves = leaves
        self._taken: list[Entry] = []  # out of the heaps, to be put back
        self._moved: list[list[Entry]] = [[] for _ in range(1 + len(leaves._queues))]
        self._children: dict[BlockKey, int] = {}  # of parents of chosen keys: how many are not chosen

    def doomed(self) -> AnyNode | None:
        """Take the next one of orphans and retired blocks."""
        return self._take(self._leaves._heap, self._moved[-1])

    def take(self, queue: int) -> AnyNode | None:
        """Take the first leaf out of a queue."""
        return self._take(self._leaves._queues[queue], self._moved[queue])

    def move(self, node: AnyNode, queue: int, rank: float) -> None:
        """Put a leaf that was taken into a queue."""
        heappush(self._moved[queue], (_FIRST_QUEUE + queue, rank, node.key))

    def bare(self, node: AnyNode) -> None:
        """A leaf was chosen: its parent may be one now."""
        parent = node.parent
        if parent is not None:
            left = self._children[parent.key] = self._children.get(parent.key, len(parent.children)) - 1
            if not left:
                entry = self._leaves._entry(parent)
                heappush(self._moved[max(-1, entry[0] - _FIRST_QUEUE)], entry)

    def end(self) -> None:
        """Put everything back."""
        for entry in self._taken:
            heappush(self._leaves._heap_of(entry), entry)

    def _take(self, heap: list[Entry], moved: list[Entry]) -> AnyNode | None:
        oldest = self._leaves._oldest(heap)
        if moved and (oldest is None or moved[0] < oldest):
            return self._leaves._nodes[heappop(moved)[2]]
        if oldest is None:
            return None
        self._taken.append(heappop(heap))
        return self._leaves._nodes[oldest[2]]


class Ghosts:
    """Keys of blocks that left, the first ones first.

    They are only made fewer by `trim`, when a block comes: that they made room for it must not make it a stranger. So
    they are never more than their bound and the blocks that were resident when one came last.
    """

    def __init__(self) -> None:
        self._keys: OrderedDict[BlockKey, None] = OrderedDict()  # a dict from which the first go gets slow

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def add(self, key: BlockKey) -> None:
        """Remember a key as the last one to have left."""
        self._keys.pop(key, None)
        self._keys[key] = None

    def discard(self, key: BlockKey) -> bool:
        """Forget a key. Returns whether it was known."""
        return self._keys.pop(key, self) is None

    def trim(self, most: int) -> None:
        """Forget those that left first, but for so many."""
        while len(self._keys) > max(0, most):
            self._keys.popitem(last=False)

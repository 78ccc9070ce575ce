"""S3-FIFO, leaf first."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from kvfleet.core.block import BlockKey
from kvfleet.core.hints import NO_HINTS, Hints
from kvfleet.core.policies.base import Newcomer
from kvfleet.core.policies.forest import Node
from kvfleet.core.policies.queues import Ghosts, Leaver, QueuedLeaves, Walk

__all__ = ["S3Fifo"]

_SMALL, _MAIN = 0, 1
_SMALL_PART = 0.1
_USES_MAX = 3
_USES_TO_MAIN = 2


@dataclass(slots=True, eq=False)
class _Node(Node):
    queue: int = _SMALL
    place: int = 0  # in its queue
    credit: int = 0  # uses since it came to its queue, at most 3


@dataclass(frozen=True, slots=True)
class _Move:
    """What happens to a block, once the victim after it goes: it is put at the end of the main queue."""

    key: BlockKey
    credit: int


class S3Fifo(QueuedLeaves[_Node]):
    """A small queue for what is new, a main one for what was used while it was in that, and ghosts of what was not.

    Yang, Zhang, Qiu, Yue, Rashmi: FIFO queues are all you need for cache eviction, SOSP 2023, section 4. A block that
    comes goes to the small queue, or to the main one if it is a ghost. A victim is the first of the small queue, unless
    the main one has more than nine tenths of the capacity. One of the small queue that was used twice goes to the main
    queue instead, one of the main queue that was used goes to its end with a use less.

    Here only leaves are looked at: a block that has children keeps its place. Capacity is what the policy was made for,
    and blocks move between queues as the victim goes for which they had to, as `victims` only decides. Until the first
    one goes, the main queue takes what the small one has no room for, as in libCacheSim. Priorities are not used.

    Worked by hand, for a capacity of 10: small has room for 1; all are roots.

        insert a b c            small: a     main: b c      victims(1) = a
        touch a, a              small: a2    main: b c      victims(2) = b, c    a would go to main: it was used twice
        remove b                small:       main: c a      a has moved as b went
        insert d                small: d     main: c a      victims(1) = d
        remove d, insert d      small:       main: c a d    a ghost comes to main
        touch c                                             victims(3) = a, d, c    c goes behind d, with no use left

    Args:
        capacity: blocks there is room for, about.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity > 0, "there is room for a block"
        super().__init__(num_queues=2)
        self.resize(capacity)
        self._filling = True
        self._num_main = 0
        self._place = 0
        self._ghosts = Ghosts()
        self._plan: deque[tuple[BlockKey, list[_Move]]] = deque()  # victims, with what moves before each

    @override
    def resize(self, capacity: int) -> None:
        self._small_max = int(capacity * _SMALL_PART)
        self._main_max = capacity - self._small_max

    @override
    def insert(
        self, key: BlockKey, parent: BlockKey | None, now: float, hints: Hints = NO_HINTS, *, passing: bool = False
    ) -> None:
        self._plan.clear()
        node = _Node(key, parent, last=now, retired=hints.final, passing=passing)
        self._add(node)
        self._place += 1
        node.place = self._place
        no_room = self._filling and len(self) - 1 - self._num_main >= self._small_max
        if self._ghosts.discard(key) or no_room:
            node.queue = _MAIN
            self._num_main += 1
        self._ghosts.trim(self._main_max)

    @override
    def touch(self, key: BlockKey, now: float, uses: int = 1) -> None:
        node = self._nodes[key]
        if now > node.last:
            node.use(now, uses)
            if uses:
                self._plan.clear()
                node.credit = min(_USES_MAX, node.credit + uses)

    @override
    def retire(self, keys: Sequence[BlockKey]) -> None:
        self._plan.clear()
        super().retire(keys)

    @override
    def remove(self, key: BlockKey) -> None:
        node = self._nodes[key]
        if self._plan and self._plan[0][0] == key:
            for move in self._plan.popleft()[1]:
                self._to_main(self._nodes[move.key], move.credit)
        else:
            self._plan.clear()
        super().remove(key)
        self._filling = False
        if node.queue == _SMALL:
            self._ghosts.add(key)
        else:
            self._num_main -= 1
        assert 0 <= self._num_main <= len(self), "each block is in one queue"

    def _to_main(self, node: _Node, credit: int) -> None:
        self._num_main += node.queue != _MAIN
        self._place += 1
        node.queue, node.place, node.credit = _MAIN, self._place, credit
        self._sinks(node)

    @override
    def _queue(self, node: _Node) -> int:
        return node.queue

    @override
    def _rank(self, node: _Node) -> float:
        return node.place

    @override
    def _leavers(self, walk: Walk[_Node], newcomers: Sequence[Newcomer]) -> Leaver[_Node]:
        self._plan.clear()
        return _S3Leaver(walk, self)


class _S3Leaver(Leaver[_Node]):
    """Follows the queues as they would be."""

    def __init__(self, walk: Walk[_Node], policy: S3Fifo) -> None:
        self._walk = walk
        self._main_max = policy._main_max
        self._plan = policy._plan
        self._place = policy._place
        self._num_main = policy._num_main
        self._moves: list[_Move] = []
        self._moved: dict[BlockKey, int] = {}  # credits of those that are in main now

    @override
    def next(self) -> _Node | None:
        main_first = self._num_main > self._main_max
        while True:
            node = self._walk.take(_MAIN if main_first else _SMALL) or self._walk.take(_SMALL if main_first else _MAIN)
            if node is None:
                return None
            credit = self._moved.get(node.key, node.credit)
            if self._queue(node) == _SMALL and credit >= _USES_TO_MAIN:
                self._num_main += 1
                self._move(node, 0)
            elif self._queue(node) == _MAIN and credit:
                self._move(node, credit - 1)
            else:
                return node

    @override
    def leaves(self, node: _Node) -> None:
        self._num_main -= self._queue(node) == _MAIN
        self._plan.append((node.key, self._moves))
        self._moves = []

    def _queue(self, node: _Node) -> int:
        return _MAIN if node.key in self._moved else node.queue

    def _move(self, node: _Node, credit: int) -> None:
        self._place += 1
        self._moves.append(_Move(node.key, credit))
        self._moved[node.key] = credit
        self._walk.move(node, _MAIN, self._place)

"""ARC, leaf first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from kvfleet.core.block import BlockKey
from kvfleet.core.hints import NO_HINTS, Hints
from kvfleet.core.policies.base import Newcomer
from kvfleet.core.policies.forest import Node
from kvfleet.core.policies.queues import Ghosts, Leaver, QueuedLeaves, Walk

__all__ = ["Arc"]

_ONCE, _OFTEN = 0, 1


@dataclass(slots=True, eq=False)
class _Node(Node):
    queue: int = _ONCE
    place: int = 0


class Arc(QueuedLeaves[_Node]):
    """One queue by last use for blocks used once, one for those used often, and ghosts of both that divide the room.

    Megiddo and Modha: ARC, a self-tuning, low overhead replacement cache, FAST 2003, figure 4. A block that comes and
    is a ghost of the first queue gives that queue more room, one of the second less. A victim is the first block of the
    queue that has more than its room.

    Here only leaves are looked at. Capacity is what the policy was made for. A victim's key becomes a ghost when it
    goes, and ghosts that are too many are dropped when a block comes. Priorities are not used.

    Worked by hand, for a capacity of 2; `room` is that of the first queue, which is written first.

        insert a b       a b |            room 0    victims(1) = a
        touch a          b | a            room 0    victims(2) = b, a
        remove b         | a              b is a ghost of the first queue
        insert c         c | a            victims(1) = c    the first queue has more than its room
        remove a         c |              a is a ghost of the second queue
        insert b         c | b            room 1    b has come back: the first queue gets more
                                          victims(1) = b    it has no more than its room
        victims(1) for a                  = c    if a came back, there would be room 0

    Args:
        capacity: blocks there is room for, about.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity > 0, "there is room for a block"
        super().__init__(num_queues=2)
        self._capacity = capacity
        self._room = 0.0
        self._place = 0
        self._sizes = [0, 0]
        self._ghosts = (Ghosts(), Ghosts())
        self._counted = (0, 0)  # ghosts, before room was made for the next newcomer

    @override
    def resize(self, capacity: int) -> None:
        self._capacity = capacity

    @override
    def insert(
        self, key: BlockKey, parent: BlockKey | None, now: float, hints: Hints = NO_HINTS, *, passing: bool = False
    ) -> None:
        node = _Node(key, parent, last=now, retired=hints.final, passing=passing)
        self._add(node)
        self._room = self._room_with(key, self._room)
        back = self._ghosts[_ONCE].discard(key) or self._ghosts[_OFTEN].discard(key)
        self._enter(node, _OFTEN if back else _ONCE)
        once, often = self._ghosts
        once.trim(self._capacity - self._sizes[_ONCE])
        often.trim(2 * self._capacity - len(self) - len(once))
        self._counted = len(once), len(often)

    @override
    def touch(self, key: BlockKey, now: float, uses: int = 1) -> None:
        node = self._nodes[key]
        if now > node.last:
            node.use(now, uses)
            self._sizes[node.queue] -= 1
            self._enter(node, _OFTEN if uses else node.queue)

    @override
    def remove(self, key: BlockKey) -> None:
        node = self._nodes[key]
        super().remove(key)
        self._sizes[node.queue] -= 1
        self._ghosts[node.queue].add(key)
        assert sum(self._sizes) == len(self), "each block is in one queue"

    def _enter(self, node: _Node, queue: int) -> None:
        self._place += 1
        self._sizes[queue] += 1
        node.queue, node.place = queue, self._place
        self._sinks(node)

    def _room_with(self, key: BlockKey, room: float) -> float:
        """The first queue's room, once a block has come."""
        once, often = (max(1, count) for count in self._counted)
        if key in self._ghosts[_ONCE]:
            return min(room + max(1.0, often / once), float(self._capacity))
        if key in self._ghosts[_OFTEN]:
            return max(room - max(1.0, once / often), 0.0)
        return room

    @override
    def _queue(self, node: _Node) -> int:
        return node.queue

    @override
    def _rank(self, node: _Node) -> float:
        return node.place

    @override
    def _leavers(self, walk: Walk[_Node], newcomers: Sequence[Newcomer]) -> Leaver[_Node]:
        return _ArcLeaver(walk, self, newcomers)


class _ArcLeaver(Leaver[_Node]):
    """Makes room for newcomers, one after the other."""

    def __init__(self, walk: Walk[_Node], policy: Arc, newcomers: Sequence[Newcomer]) -> None:
        self._walk = walk
        self._policy = policy
        self._sizes = list(policy._sizes)
        self._room = policy._room
        self._coming = [newcomer.key for newcomer in reversed(newcomers)]
        self._back = False
        self._come()

    @override
    def next(self) -> _Node | None:
        once = self._sizes[_ONCE]
        first = once > self._room or (once == self._room and self._back)
        return self._walk.take(_ONCE if first else _OFTEN) or self._walk.take(_OFTEN if first else _ONCE)

    @override
    def leaves(self, node: _Node) -> None:
        self._sizes[node.queue] -= 1
        self._come()

    def _come(self) -> None:
        """The next newcomer is as good as there."""
        if self._coming:
            key = self._coming.pop()
            self._back = key in self._policy._ghosts[_OFTEN]
            self._room = self._policy._room_with(key, self._room)

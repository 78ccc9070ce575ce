"""LFU with dynamic aging, leaf first."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from kvfleet.core.block import BlockKey
from kvfleet.core.hints import NO_HINTS, Hints
from kvfleet.core.policies.forest import Node
from kvfleet.core.policies.leaves import RankedLeaves

__all__ = ["AgingLFU"]

_PLACE_BITS = 48


@dataclass(slots=True, eq=False)
class _Node(Node):
    count: int = 1
    weight: int = 0
    place: int = 0


class AgingLFU(RankedLeaves[_Node]):
    """Evicts the leaf of least weight: how often it was used, plus the age at its last use.

    Arlitt, Cherkasova, Dilley, Friedrich, Jin: Evaluating content management techniques for web proxy caches, 2000,
    as LFU-DA. The *age* is the weight of the last block that went, so that what was used much long ago goes at last. Of
    equal weight, the one used longest ago goes first. Only leaves are looked at. Orphans and retired blocks do not age
    the others. Priorities are not used.

    Worked by hand; all are roots, with their weights:

        insert a b c, touch a, a       a 3, b 1, c 1    victims(2) = b, c    age 0
        touch b                        a 3, b 2, c 1    victims(3) = c, b, a
        remove c, remove b             a 3              age 2
        insert d                       a 3, d 3         victims(1) = a    used longer ago than d
        touch a                        a 6, d 3         victims(1) = d    a was used four times, at age 2
    """

    def __init__(self) -> None:
        super().__init__()
        self._age = 0
        self._place = 0

    @override
    def insert(
        self, key: BlockKey, parent: BlockKey | None, now: float, hints: Hints = NO_HINTS, *, passing: bool = False
    ) -> None:
        node = _Node(key, parent, last=now, retired=hints.final, passing=passing)
        self._add(node)
        self._weigh(node)

    @override
    def touch(self, key: BlockKey, now: float, uses: int = 1) -> None:
        node = self._nodes[key]
        if now > node.last:
            node.use(now, uses)
            node.count += uses
            self._weigh(node)

    @override
    def remove(self, key: BlockKey) -> None:
        node = self._nodes[key]
        if not (node.orphan or node.retired or node.passing or node.children):
            self._age = max(self._age, node.weight)
        super().remove(key)

    def _weigh(self, node: _Node) -> None:
        """It was used now."""
        self._place += 1
        assert self._place < 1 << _PLACE_BITS, "a use a nanosecond for three days"
        node.weight, node.place = self._age + node.count, self._place

    @override
    def _rank(self, node: _Node) -> float:
        return (node.weight << _PLACE_BITS) | node.place  # an integer: exact, however large

"""Least recently used, leaf first."""

from __future__ import annotations

from typing_extensions import override

from kvfleet.core.block import BlockKey
from kvfleet.core.hints import NO_HINTS, Hints
from kvfleet.core.policies.forest import Node
from kvfleet.core.policies.leaves import RankedLeaves

__all__ = ["LeafFirstLRU"]


class LeafFirstLRU(RankedLeaves[Node]):
    """Evicts the leaf with the oldest last use.

    Worked by hand, children indented under their parents, with the time of last use:

        a 1        victims(1) = c   the oldest leaf; a and b are older but have children
          b 2      victims(3) = c, b, d   b is a leaf once c is chosen, and older than d
            c 3    touch(c, 5):  victims(3) = d, c, b   a has to wait for e
          d 4      remove(b):    victims(2) = c, d   c is an orphan
          e 6
    """

    @override
    def insert(
        self, key: BlockKey, parent: BlockKey | None, now: float, hints: Hints = NO_HINTS, *, passing: bool = False
    ) -> None:
        self._add(Node(key, parent, last=now, retired=hints.final, passing=passing))

    @override
    def touch(self, key: BlockKey, now: float, uses: int = 1) -> None:
        node = self._nodes[key]
        if now > node.last:
            node.use(now, uses)

    @override
    def _rank(self, node: Node) -> float:
        return node.last

"""Which resident block is whose child: what every leaf-first policy needs to know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from typing_extensions import Self

from kvfleet.core.block import BlockKey

__all__ = ["Forest", "Node"]


@dataclass(slots=True, eq=False)
class Node:
    """A resident block among its kin. Policies add fields of their own.

    Attributes:
        key: of the block.
        above: key of its parent, resident or not; None for the first block of a prefix.
        parent: the parent, if it is resident.
        children: the resident ones, in the order they came.
        orphan: its parent is not resident, or is an orphan.
        last: seconds, of its last use.
        uses: how often it was used since it came.
        retired: somebody says that it will not be used again.
        passing: it is here on its way to a tier below, and not used since.
        entry: the valid one of those that a queue of leaves has for it.
    """

    key: BlockKey
    above: BlockKey | None
    parent: Self | None = None
    children: dict[BlockKey, Self] = field(default_factory=dict)
    orphan: bool = False
    last: float = 0.0
    uses: int = 0
    retired: bool = False
    passing: bool = False
    entry: tuple[int, float, BlockKey] | None = None

    def use(self, now: float, uses: int) -> None:
        """Note a use later than the last: of `uses` it is told for the first time."""
        self.last = now
        self.uses += uses
        if uses:
            self.retired = self.passing = False

    def descendants(self) -> list[Self]:
        """Resident children, their children and so on; each after its own children."""
        seen = {self.key}
        found = [self]
        for node in found:  # grows as we go
            fresh = [child for key, child in node.children.items() if key not in seen]
            seen.update(child.key for child in fresh)
            found += fresh
        return found[:0:-1]


AnyNode = TypeVar("AnyNode", bound=Node)


class Forest(Generic[AnyNode]):
    """The nodes of all resident keys. Orders are those of insertion: equal calls give equal answers."""

    def __init__(self) -> None:
        self.nodes: dict[BlockKey, AnyNode] = {}
        self._waiting: dict[BlockKey, dict[BlockKey, AnyNode]] = {}  # children of parents that are not resident

    def add(self, node: AnyNode) -> None:
        """Add a node of an absent key. Its descendants, if it has any, are orphans no longer unless it is one."""
        assert node.key not in self.nodes, "key is absent"
        self.nodes[node.key] = node
        if node.above is not None:
            node.parent = self.nodes.get(node.above)
            siblings = self._waiting.setdefault(node.above, {}) if node.parent is None else node.parent.children
            siblings[node.key] = node
            node.orphan = node.parent is None or node.parent.orphan
        if node.key in self._waiting:
            node.children = self._waiting.pop(node.key)
            for child in node.children.values():
                child.parent = node
            for below in node.descendants():
                below.orphan = node.orphan

    def remove(self, key: BlockKey) -> list[AnyNode]:
        """Remove a resident key. Returns its descendants, orphans now."""
        node = self.nodes.pop(key)
        if node.parent is not None:
            del node.parent.children[key]
        elif node.above is not None:
            siblings = self._waiting[node.above]
            del siblings[key]
            if not siblings:
                del self._waiting[node.above]
        if not node.children:
            return []
        below = node.descendants()
        for each in below:
            each.orphan = True
        for child in node.children.values():
            child.parent = None
        assert key not in self._waiting, "children wait for absent parents only"
        self._waiting[key] = node.children
        return below

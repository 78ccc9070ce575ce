"""Which resident block is whose child: what every leaf-first policy needs to know."""

from __future__ import annotations

from kvfleet.core.block import BlockKey

__all__ = ["Forest"]


class Forest:
    """Parents and children among resident keys.

    A key is an *orphan* if its parent is named but not resident, or is an orphan itself. All orders are those of
    insertion, so that equal calls give equal answers.
    """

    def __init__(self) -> None:
        self._parents: dict[BlockKey, BlockKey | None] = {}
        self._children: dict[BlockKey, dict[BlockKey, None]] = {}  # also of parents that are not resident
        self._orphans: set[BlockKey] = set()

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, key: object) -> bool:
        return key in self._parents

    def add(self, key: BlockKey, parent: BlockKey | None) -> None:
        """Add an absent key. Its descendants, if it has any, are orphans no longer unless it is one."""
        assert key not in self._parents, "key is absent"
        self._parents[key] = parent
        if parent is not None:
            self._children.setdefault(parent, {})[key] = None
        if parent is None or (parent in self._parents and parent not in self._orphans):
            self._orphans.difference_update(self.descendants(key))
        else:
            self._orphans.add(key)

    def remove(self, key: BlockKey) -> list[BlockKey]:
        """Remove a resident key; returns the descendants that became orphans by it."""
        assert key in self._parents, "key is resident"
        was_orphan = key in self._orphans
        orphaned = [] if was_orphan else self.descendants(key)
        self._orphans.update(orphaned)
        self._orphans.discard(key)
        parent = self._parents.pop(key)
        if parent is not None:
            siblings = self._children[parent]
            del siblings[key]
            if not siblings:
                del self._children[parent]
        return orphaned

    def parent(self, key: BlockKey) -> BlockKey | None:
        """The resident parent of a resident key, if it has one."""
        parent = self._parents[key]
        return parent if parent in self._parents else None

    def num_children(self, key: BlockKey) -> int:
        """How many resident children a key has."""
        return len(self._children.get(key, ()))

    def is_leaf(self, key: BlockKey) -> bool:
        """Whether a key has no resident child."""
        return key not in self._children

    def is_orphan(self, key: BlockKey) -> bool:
        """Whether no lookup can reach a resident key."""
        return key in self._orphans

    def descendants(self, key: BlockKey) -> list[BlockKey]:
        """Resident children, their children and so on; each after its own children."""
        seen = {key: None}
        found = [key]
        for above in found:  # grows as we go
            for child in self._children.get(above, ()):
                if child not in seen:
                    seen[child] = None
                    found.append(child)
        return found[:0:-1]

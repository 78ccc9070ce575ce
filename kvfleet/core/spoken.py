"""Which nodes have told a directory all that they hold."""

from __future__ import annotations

from collections.abc import Set

from kvfleet.core.inventory import NodeId

__all__ = ["Spoken"]


class Spoken:
    """Nodes that are expected to speak, those that have spoken, and those that have told all. O(1) to be asked."""

    def __init__(self) -> None:
        self._expected: Set[NodeId] | None = None
        self._behind: dict[NodeId, bool] = {}  # who has spoken, and whether something is not known of it
        self._silent: set[NodeId] = set()  # of those that are expected
        self._num_behind = 0

    @property
    def all_told(self) -> bool:
        """Whether all nodes that are expected to, and all others that have spoken, have told what they hold.

        Not before it is known who is expected, nor before one has spoken.
        """
        assert 0 <= self._num_behind <= len(self._behind)
        return bool(self._behind) and self._expected is not None and not self._silent and not self._num_behind

    def expect(self, nodes: Set[NodeId]) -> None:
        """Name the nodes that may hold something, in place of those named before."""
        self._expected = nodes
        self._silent = {node for node in nodes if node not in self._behind}

    def told(self, node: NodeId, *, everything: bool) -> None:
        """A node has spoken; whether all is known now that it holds."""
        self._num_behind += (not everything) - self._behind.get(node, False)
        self._behind[node] = not everything
        self._silent.discard(node)

    def gone(self, node: NodeId) -> None:
        """A node is dead: nothing is expected of it."""
        self._num_behind -= self._behind.pop(node, False)
        self._silent.discard(node)
        if self._expected is not None:
            self._expected -= {node}

"""What the directory has to tell single nodes with its next answer: which copies of theirs are not where they think."""

from __future__ import annotations

from kvfleet.core.inventory import NodeId

__all__ = ["Notices"]

_PAGE_RECORDS = 1_000


class Notices:
    """Records for each node, kept until it has had them.

    Hints: what finds no room is not said. Threads: none of its own; calls must not overlap.
    """

    def __init__(self, records_max: int) -> None:
        """Start empty, for at most so many records of each node."""
        assert records_max > 0
        self._max = records_max
        self._waiting: dict[NodeId, dict[bytes, None]] = {}
        self._told: dict[NodeId, tuple[tuple[int, int], list[bytes]]] = {}

    def post(self, node: NodeId, record: bytes) -> None:
        """Tell a node of a record."""
        waiting = self._waiting.setdefault(node, {})
        if len(waiting) < self._max:
            waiting[record] = None

    def take(self, node: NodeId, message: tuple[int, int]) -> bytes:
        """What to tell a node in the answer to a message of its own, packed.

        Args:
            node: the sender.
            message: its number. The answer to one that comes again is the same; after it another one shows that the
                node had it.
        """
        told = self._told.get(node)
        if told is not None and told[0] == message:
            return b"".join(told[1])
        waiting = self._waiting.get(node, {})
        for record in told[1] if told is not None else ():
            waiting.pop(record, None)
        page = list(waiting)[:_PAGE_RECORDS]
        self._told.pop(node, None)
        if page:
            self._told[node] = message, page
        elif not waiting:
            self._waiting.pop(node, None)
        return b"".join(page)

    def drop_node(self, node: NodeId) -> None:
        """A node is gone."""
        self._waiting.pop(node, None)
        self._told.pop(node, None)

"""Who is writing what to the shared tier, so that content is written once however many nodes hold it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvfleet.core.inventory import NodeId

__all__ = ["Claims"]


@dataclass(frozen=True, slots=True)
class _Claim:
    node: NodeId
    until: float


class Claims:
    """Records that a node has said it is about to write. A claim ends with the write's news, its node, or in time.

    Hints: who writes without a claim, or after it has ended, does no harm but work done twice.

    Bounded: of more claims the oldest are forgotten.

    Threads: none of its own; calls must not overlap. Times are passed in, in seconds.
    """

    def __init__(self, claims_max: int, seconds: float) -> None:
        """Start empty.

        Args:
            claims_max: remembered at once.
            seconds: that a claim lasts.
        """
        assert claims_max > 0
        assert seconds > 0
        self._max = claims_max
        self._seconds = seconds
        self._claims: OrderedDict[bytes, _Claim] = OrderedDict()  # the first to end first

    def __len__(self) -> int:
        return len(self._claims)

    def claim(self, node: NodeId, records: list[bytes], now: float) -> list[bytes]:
        """Let a node write what no other one is writing.

        Returns:
            What others are writing, in order.
        """
        self._expire(now)
        taken = []
        for record in records:
            claim = self._claims.get(record)
            if claim is not None and claim.node != node:
                taken.append(record)
                continue
            self._claims[record] = _Claim(node, now + self._seconds)
            self._claims.move_to_end(record)
        while len(self._claims) > self._max:
            self._claims.popitem(last=False)
        return taken

    def end(self, records: list[bytes]) -> None:
        """They are written, or gone."""
        for record in records:
            self._claims.pop(record, None)

    def give_back(self, node: NodeId, records: list[bytes]) -> None:
        """A node does not write what it has claimed. What others have claimed since is theirs."""
        for record in records:
            claim = self._claims.get(record)
            if claim is not None and claim.node == node:
                del self._claims[record]

    def drop_node(self, node: NodeId) -> None:
        """A node is gone, and what it wanted to write with it."""
        self._claims = OrderedDict((record, claim) for record, claim in self._claims.items() if claim.node != node)

    def _expire(self, now: float) -> None:
        while self._claims and next(iter(self._claims.values())).until <= now:
            self._claims.popitem(last=False)

"""Claims at the directory, so that content is written to the shared tier once however many nodes hold it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvfleet.core.breaker import Breaker
from kvfleet.core.directory import split_records
from kvfleet.errors import KvFleetError
from kvfleet.node.directorylink import DirectoryLink
from kvfleet.node.publishing import Publisher
from kvfleet.node.waiting import now

__all__ = ["Claimer", "Left"]

_PAUSES_S = (1.0, 10.0)  # of a directory that does not answer


@dataclass(frozen=True, slots=True)
class Left:
    """Which of some records need not be written. The others are this node's to write.

    Attributes:
        known: the directory has answered; if not, nothing is known, and nobody is kept from writing.
        saved: by another node, or in an earlier life of this one.
        taken: another node is writing them.
    """

    known: bool = False
    saved: set[bytes] = field(default_factory=set)
    taken: set[bytes] = field(default_factory=set)


class Claimer:
    """Claims for one node. A directory that does not answer is left alone for a while.

    Threads: the manager's event loop.
    """

    def __init__(self, link: DirectoryLink, publisher: Publisher) -> None:
        self._link = link
        self._publisher = publisher
        self._directory = Breaker(*_PAUSES_S)

    async def claim(self, records: Sequence[bytes], timeout_s: float) -> Left:
        """Claim records to write them."""
        if not self._directory.allows(now()):
            return Left()
        try:
            claimed = await self._link.claim(self._publisher.node, b"".join(records), timeout_s)
        except KvFleetError:
            self._directory.failed(now())
            return Left()
        self._directory.worked()
        saved, taken = set(split_records(claimed.saved)), set(split_records(claimed.taken))
        return Left(True, saved - self._publisher.untold(saved), taken)

    def give_back(self, record: bytes) -> None:
        """This node is not going to write a record for now: another one that holds it may."""
        self._publisher.unclaimed(record)

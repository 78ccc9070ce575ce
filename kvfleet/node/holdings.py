"""What a node holds, in whichever of its tiers: what its inventory says, and what changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from kvfleet.core.inventory import RECORD_BYTES, Digest, record_id

__all__ = ["Holdings"]

_Records = Callable[[], Iterable[tuple[bytes, int]]]


@dataclass(frozen=True, slots=True)
class _Tier:
    has: Callable[[bytes, int], bool]
    records: _Records


class Holdings:
    """The records of a node, each counted once, however many of its tiers have it.

    Threads: the manager's event loop.
    """

    def __init__(self) -> None:
        self._tiers: list[_Tier] = []
        self._changes: dict[bytes, bool] = {}
        self._count = 0
        self._xor = 0

    def add_tier(self, has: Callable[[bytes, int], bool], records: _Records) -> int:
        """Take in another tier.

        Args:
            has: whether a record, by key and shard, can be read there now.
            records: all of which that is true.

        Returns:
            Its number, by which `changed` speaks of it. What it has already must be told by that too.
        """
        self._tiers.append(_Tier(has, records))
        return len(self._tiers) - 1

    def changed(self, key: bytes, shard: int, *, present: bool, tier: int) -> None:
        """A record came to a tier, or left it. It is news only if no other tier has it."""
        if any(other.has(key, shard) for number, other in enumerate(self._tiers) if number != tier):
            return
        record = record_id(key, shard)
        if self._changes.pop(record, present) == present:  # else it came and went: no news
            self._changes[record] = present
        self._count += 1 if present else -1
        self._xor ^= int.from_bytes(record, "little")

    def take_changes(self, limit: int) -> dict[bytes, bool]:
        """At most so many of the records that came (True) or went (False) since they were last taken."""
        taken = dict(islice(self._changes.items(), limit))
        for record in taken:
            del self._changes[record]
        return taken

    @property
    def num_changes(self) -> int:
        """How many changes are left to be taken."""
        return len(self._changes)

    def snapshot(self) -> list[bytes]:
        """All records that can be read now. Changes up to now are in it and are not reported again."""
        self._changes = {}
        return self.records()

    def records(self) -> list[bytes]:
        """All records that can be read now."""
        return list(dict.fromkeys(record_id(key, shard) for tier in self._tiers for key, shard in tier.records()))

    def digest(self) -> Digest:
        """Count and xor of all records that can be read now."""
        return Digest(self._count, self._xor.to_bytes(RECORD_BYTES, "little"))

    def audit(self) -> list[str]:
        """What does not add up; nothing, unless there is a bug."""
        held = self.records()
        if Digest.of(b"".join(held)) == self.digest():
            return []
        return [f"{len(held)} records are here, {self._count} were told of, or others"]

"""Why a record is missing: a bounded memory of those that left, or were refused."""

from __future__ import annotations

from collections.abc import Sequence

from kvfleet.core.outcomes import Miss

__all__ = ["Departures"]

_GENERATION_MAX = 200_000


class Departures:
    """record → why nobody has it: of the last `generation_max` at least, of twice as many at most.

    Attributes:
        complete: nothing was ever forgotten: a record that is neither here nor in the directory never came to it.
    """

    def __init__(self, generation_max: int = _GENERATION_MAX) -> None:
        assert generation_max > 0, "a memory remembers something"
        self.complete = True
        self._generation_max = generation_max
        self._young: dict[bytes, Miss] = {}
        self._old: dict[bytes, Miss] = {}

    def __len__(self) -> int:
        """How many are remembered; those noted in both generations count twice."""
        return len(self._young) + len(self._old)

    def note(self, record: bytes, why: Miss) -> None:
        """Remember why a record is not there any more. If it left before, this is the later news."""
        self._young[record] = why
        if len(self._young) >= self._generation_max:
            self.complete = self.complete and not self._old
            self._old, self._young = self._young, {}

    def note_late(self, record: bytes, why: Miss) -> None:
        """The same for what happened a while ago: later news of the record, if there are any, stay."""
        if self.why(record) is None:
            self.note(record, why)

    def forget(self, records: Sequence[bytes]) -> None:
        """These are there again."""
        if self._young or self._old:
            for record in records:
                self._young.pop(record, None)
                self._old.pop(record, None)

    def why(self, record: bytes) -> Miss | None:
        """Why a record is missing, None if that is not remembered."""
        return self._young.get(record) or self._old.get(record)

"""Whether traffic has become another: the uses that came, against those that were to be expected."""

from __future__ import annotations

__all__ = ["Surprise"]

_FACTOR = 1.5  # so many times more or fewer uses than expected are another traffic
_SURE = 4.0  # standard deviations
_ENOUGH = 20.0  # uses that do not depend on each other


class Surprise:
    """Uses of late. Threads: calls must not overlap."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self._expected = self._came = 0.0

    def note(self, expected: float, came: float, keep: float) -> None:
        """Take in the uses of some time.

        Args:
            expected: in it, by what was known before.
            came: in it.
            keep: what earlier ones weigh still, in [0, 1].
        """
        assert 0 <= keep <= 1
        self._expected = self._expected * keep + expected
        self._came = self._came * keep + came

    def sure(self, clump: float) -> bool:
        """Whether it is another. `clump` uses say as much as one that depends on no other."""
        less, more = sorted((self._expected / clump, self._came / clump))
        return more > max(_ENOUGH, _FACTOR * less) and more - less > _SURE * more**0.5

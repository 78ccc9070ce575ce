"""What somebody who looks at a thing has found out about it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Findings", "some"]


@dataclass(frozen=True, slots=True)
class Findings:
    """What something is.

    Attributes:
        kind: in words.
        facts: names and values of what it says of itself.
        problems: why it is not sound; empty if it is, as far as it was looked at.
        checked: how that was found out, or what was not looked at.
        whole: all of it was looked at.
        foreign: it is of a version or codec that is not known here, and may be sound.
    """

    kind: str
    facts: tuple[tuple[str, str], ...] = ()
    problems: tuple[str, ...] = ()
    checked: str = ""
    whole: bool = True
    foreign: bool = False

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong with it."""
        return not self.problems


def some(problems: list[str], shown: int = 20) -> tuple[str, ...]:
    """The first of many problems, and how many more there are."""
    more = len(problems) - shown
    return (*problems[:shown], *([f"and {more:,} more"] if more > 0 else []))

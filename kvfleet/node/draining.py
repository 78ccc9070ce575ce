"""A node that is to leave: what it may still write to the shared tier, and the mark that it takes no stores."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Drained", "SaveBudget", "is_marked", "mark"]

_MARK = "draining"


@dataclass(frozen=True, slots=True)
class Drained:
    """What a drain has done.

    Attributes:
        saved_blocks: written to the shared tier; those it had already are not among them.
        saved_bytes: of them.
        left_blocks: in this node's memory, or on its drives, and without a copy in the shared tier, as far as is known.
            They go with the node.
        left_bytes: of them.
    """

    saved_blocks: int
    saved_bytes: int
    left_blocks: int
    left_bytes: int


class SaveBudget:
    """Bytes that may be written until a time. The first block that does not fit ends it: less valuable ones follow.

    Args:
        num_bytes: of blocks; None for no limit.
        deadline: seconds, by the clock of the event loop.
    """

    def __init__(self, num_bytes: int | None, deadline: float) -> None:
        self._left_bytes = num_bytes
        self._deadline = deadline
        self._closed = False

    def closed(self, now: float) -> bool:
        """Whether nothing may be written any more."""
        return self._closed or now >= self._deadline

    def close(self) -> None:
        """End it."""
        self._closed = True

    def take(self, num_bytes: int, now: float) -> bool:
        """Take what one block needs. False: it may not be written."""
        if self._left_bytes is not None and num_bytes > self._left_bytes:
            self._closed = True
        if self.closed(now):
            return False
        if self._left_bytes is not None:
            self._left_bytes -= num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        """A block was not written after all."""
        if self._left_bytes is not None:
            self._left_bytes += num_bytes


def is_marked(directory: Path) -> bool:
    """Whether the node with this directory was draining when its manager ended."""
    return (directory / _MARK).exists()


def mark(directory: Path, *, draining: bool) -> None:
    """Note that a node is draining, or not, for its next manager."""
    if draining:
        (directory / _MARK).touch(mode=0o600)
    else:
        (directory / _MARK).unlink(missing_ok=True)

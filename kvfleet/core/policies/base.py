"""What an eviction policy must do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from kvfleet.core.block import BlockKey

__all__ = ["Policy"]


class Policy(ABC):
    """Decides which blocks leave first; it knows keys and their parents, not bytes.

    Leaf first: a block is never a victim before all its resident children are. An *orphan*, whose parent is
    named but not resident, or is itself an orphan, cannot be reached by a lookup and goes before all others.

    Times are seconds; a key's time never goes back. Equal calls give equal victims.
    """

    @abstractmethod
    def insert(self, key: BlockKey, parent: BlockKey | None, now: float) -> None:
        """Add an absent key. `parent` is None for the first block of a prefix, else a key, resident or not."""

    @abstractmethod
    def touch(self, key: BlockKey, now: float) -> None:
        """Note a use of a resident key; a time before the last known use is ignored."""

    @abstractmethod
    def remove(self, key: BlockKey) -> None:
        """Forget a resident key. Its resident children become orphans."""

    @abstractmethod
    def victims(self, need: int, worth: Callable[[BlockKey], int]) -> list[BlockKey]:
        """The keys to evict next, in order, until their worth sums to `need`. Only decides: nothing changes.

        Args:
            need: at least 1.
            worth: what the eviction of a key would bring; 0 for a key that must stay.

        Returns:
            Fewer keys than needed, down to none, if no more may go.
        """

    @abstractmethod
    def is_leaf(self, key: BlockKey) -> bool:
        """Whether a resident key has no resident child."""

    @abstractmethod
    def descendants(self, key: BlockKey) -> list[BlockKey]:
        """Resident children of a resident key, their children and so on; each after its own children."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, key: object) -> bool: ...

"""What an eviction policy must do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvfleet.core.block import BlockKey
from kvfleet.core.hints import NO_HINTS, Hints

__all__ = ["Newcomer", "Policy", "Worth"]

Worth = Callable[[BlockKey], int]
"""What the eviction of a key would bring; 0 for a key that must stay."""


class Newcomer(NamedTuple):
    """A block that wants the room of others.

    Attributes:
        key: of the block, which is not resident.
        parent: the key before it, resident or not; None for the first block of a prefix.
        now: seconds.
        hints: of who brings it.
        shard: which of the block's shards it is; each is declined on its own.
    """

    key: BlockKey
    parent: BlockKey | None
    now: float
    hints: Hints = NO_HINTS
    shard: int = 0


class Policy(ABC):
    """Decides which blocks leave first; it knows keys and their parents, not bytes.

    Leaf first: a block is never a victim before all its resident children are. An *orphan*, whose parent is
    named but not resident, or is itself an orphan, cannot be reached by a lookup and goes before all others. Next are
    those that are *retired*.

    Times are seconds; a key's time never goes back. Equal calls give equal victims.
    """

    @abstractmethod
    def insert(
        self, key: BlockKey, parent: BlockKey | None, now: float, hints: Hints = NO_HINTS, *, passing: bool = False
    ) -> None:
        """Add an absent key.

        Args:
            key: of the block.
            parent: None for the first block of a prefix, else a key, resident or not.
            now: seconds.
            hints: of who brings it.
            passing: it would be declined, but is on its way to a tier below: it goes as if it was retired.
        """

    @abstractmethod
    def touch(self, key: BlockKey, now: float, uses: int = 1) -> None:
        """Note a use of a resident key; a time before the last known use is ignored.

        `uses` is 0 where a use goes on that was counted, as when a block is written or a block after it is stored.
        """

    @abstractmethod
    def remove(self, key: BlockKey) -> None:
        """Forget a resident key. Its resident children become orphans."""

    @abstractmethod
    def retire(self, keys: Sequence[BlockKey]) -> None:
        """Somebody says that a prefix will not be continued: its keys, all or the last ones, in any order.

        A touch undoes it. Ignored are keys that are not resident, and those that other prefixes use too, as far as the
        policy knows.
        """

    @abstractmethod
    def victims(self, need: int, worth: Worth, *, newcomers: Sequence[Newcomer] = ()) -> list[BlockKey]:
        """The keys to evict next, in order, until their worth sums to `need`. Only decides: nothing changes.

        Args:
            need: at least 1.
            worth: what the eviction of a key would bring; 0 for a key that must stay.
            newcomers: whom the room is for, each worth 1: the first victims are for the first of them. A policy may
                rather keep what is here, and then stops. Empty: the room is needed anyway.

        Returns:
            Fewer keys than needed, down to none, if no more may go.
        """

    def resize(self, capacity: int) -> None:
        """There is room for about so many blocks, not for as many as it was made for: they have several shards here."""

    def decline(self, newcomers: Sequence[Newcomer]) -> None:
        """These were not admitted, as `victims` did not make room for them: a policy may remember their keys."""

    @abstractmethod
    def expected_uses(self, key: BlockKey) -> float | None:
        """How often a resident key will be used within as long as it is worth keeping; None: too early to say."""

    @abstractmethod
    def is_leaf(self, key: BlockKey) -> bool:
        """Whether a resident key has no resident child."""

    @abstractmethod
    def goes_first(self, key: BlockKey) -> bool:
        """Whether a resident key is of no use here, as far as is known: an orphan, retired, or passing."""

    @abstractmethod
    def descendants(self, key: BlockKey) -> list[BlockKey]:
        """Resident children of a resident key, their children and so on; each after its own children."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, key: object) -> bool: ...

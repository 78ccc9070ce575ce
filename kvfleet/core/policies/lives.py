"""What a policy remembers of blocks, here or gone: when they were used last, and as part of what."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvfleet.core.block import BlockKey
from kvfleet.core.reuse import ReuseModel
from kvfleet.core.reuseclasses import kind_of_shared, kind_of_turn

__all__ = ["Life", "Lives", "Turn"]

_REMEMBERED = 8  # times the capacity
_REMEMBERED_MIN = 1024
_REMEMBERED_MAX = 1_000_000  # some 300 MB


@dataclass(slots=True, eq=False)
class Turn:
    """Blocks that one request brought at the end of a prefix, and what of the prefix is this conversation's alone.

    Attributes:
        number: of the turn, from 1.
        growth: blocks that were not known before.
        again: its end was used again as it is: what extends it is of this turn, not the next.
        priority: as hinted.
    """

    number: int
    growth: int = 0
    again: bool = False
    priority: int = 0


@dataclass(slots=True, eq=False)
class Life:
    """A block since its last use.

    Attributes:
        last: seconds, of that use.
        turn: it is part of; None for one that prefixes of different ends share.
        uses: how often it was used after it came first.
        parent: the block before it.
        child: the first block that came after it; None for the end of what is known.
        forked: others did too.
        retired: it will not be used again, as somebody said.
        number: of the class that the model knows it by; -1: it does not.
    """

    last: float
    turn: Turn | None
    parent: BlockKey | None
    uses: int = 0
    child: BlockKey | None = None
    forked: bool = False
    retired: bool = False
    number: int = -1

    def kind(self) -> int:
        """The number of its class."""
        if self.number >= 0:
            return self.number
        if self.turn is None:
            return kind_of_shared(self.uses)
        return kind_of_turn(0 if self.retired else self.turn.number, self.turn.growth)


class Lives:
    """The lives of blocks, with a memory of keys of blocks that are gone, those forgotten first that left first.

    Args:
        capacity: of the cache, in blocks; the memory has eight times as many.
    """

    def __init__(self, capacity: int) -> None:
        self.model = ReuseModel(capacity)
        self._gone: OrderedDict[BlockKey, Life] = OrderedDict()
        self.resize(capacity)
        self._used: BlockKey | None = None  # last
        self._young: dict[int, Life] = {}  # by identity; the model has not been told of them

    def __len__(self) -> int:
        return len(self._gone)

    def resize(self, capacity: int) -> None:
        """See `Policy.resize`."""
        self.model.capacity = capacity
        self._gone_max = max(_REMEMBERED_MIN, min(_REMEMBERED * capacity, _REMEMBERED_MAX))

    def tick(self, now: float) -> None:
        """Keep the model up to date, when it is due."""
        for life in self._young.values():
            life.number = life.kind()
            self.model.began(life.number, life.last)
        self._young.clear()
        self.model.tick(now)

    def of_gone(self, key: BlockKey) -> Life | None:
        """The life of a block that is not here, if it is remembered."""
        return self._gone.get(key)

    def back(self, key: BlockKey) -> None:
        """A block is here again."""
        self._gone.pop(key, None)

    def gone(self, key: BlockKey, life: Life) -> None:
        """A block is not here: remember it."""
        self._gone[key] = life
        self._gone.move_to_end(key)
        while len(self._gone) > self._gone_max:
            _, oldest = self._gone.popitem(last=False)
            self._end(oldest)
            self._young.pop(id(oldest), None)  # ticks may be hours apart

    def begin(self, now: float, turn: Turn, parent: BlockKey | None) -> Life:
        """A block is used that is not known."""
        life = Life(now, turn, parent)
        self._young[id(life)] = life
        return life

    def use(self, key: BlockKey, life: Life, now: float) -> None:
        """A block is used again."""
        self.model.ended(life.kind(), now - life.last, follows=life.parent is not None and life.parent == self._used)
        self._used = key
        self.move(life, now)
        life.uses += 1
        life.retired = False

    def move(self, life: Life, now: float) -> None:
        """A use that was counted goes on until now."""
        self._end(life)
        life.last = now
        self._young[id(life)] = life

    def join(self, life: Life, turn: Turn | None, *, retired: bool) -> None:
        """A block is part of another turn, or of none."""
        if life.turn is not turn or life.retired != retired:
            self._end(life)
            life.turn, life.retired = turn, retired
            self._young[id(life)] = life

    def _end(self, life: Life) -> None:
        if life.number >= 0:
            self.model.forgotten(life.number, life.last)
            life.number = -1

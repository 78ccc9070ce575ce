"""Who gets the slots of a node, and who is not worth one."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass

from kvfleet.core.admission import Admission, Grant, NewBlock
from kvfleet.core.block import BlockKey
from kvfleet.core.evictions import Evictions
from kvfleet.core.hints import Hints
from kvfleet.core.policies import Newcomer
from kvfleet.core.residents import Residents
from kvfleet.core.saves import Saves
from kvfleet.core.slabs import SlabMap

__all__ = ["Asked", "Granting"]


@dataclass(frozen=True, slots=True)
class Asked:
    """Blocks that want in.

    Attributes:
        blocks: all of one size.
        now: seconds.
        hints: of who brings them.
        optional: the policy may decline them.
        protected: blocks that must stay.
    """

    blocks: Sequence[NewBlock]
    now: float
    hints: Hints
    optional: bool
    protected: Container[BlockKey]


class Granting:
    """Gives out slots, those of evicted blocks where none is free.

    What the policy declines, but a tier below takes, passes through: it gets a slot, at the cost of what the policy
    wants least, and is the first to go itself. So does the rest of a prefix that has filled the arena: it gets the
    slots of what it builds on. Whatever builds on a block that passes through gets slots of such blocks only.
    """

    def __init__(self, slabs: SlabMap, residents: Residents, evictions: Evictions, saves: Saves) -> None:
        self._slabs = slabs
        self._residents = residents
        self._evictions = evictions
        self._saves = saves

    def grant(self, asked: Asked, waiting: deque[int], answer: Admission) -> None:
        """Grant slots to blocks whose indexes wait, as far as it goes. They wait no longer, nor do declined ones."""
        assert len({block.num_bytes for block in asked.blocks}) == 1, "blocks of one call have one size"
        self._give(asked, waiting, answer, passing=False)
        if not waiting:
            return
        parent = asked.blocks[0].parent
        if asked.optional and parent is not None and self._evictions.goes_first(parent):
            written = all(record.committed for record in self._residents.blocks[parent].records.values())
            self._let_pass(asked, waiting, answer, at_own_cost=not written)  # else it came with these
            return
        optional = asked.optional and not any(asked.blocks[i].key in self._residents.blocks for i in waiting)
        declined = self._make_room(asked, waiting, answer, optional=optional)
        self._give(asked, waiting, answer, passing=False)
        spurned = deque(waiting.pop() for _ in range(min(declined, len(waiting))))
        spurned.reverse()
        if spurned and self._saves.takes_new(asked.blocks[0].num_bytes):
            self._make_room(asked, spurned, answer, optional=False)
            self._give(asked, spurned, answer, passing=True)
            waiting.extend(spurned)
        else:
            answer.declined.extend(spurned)
        if waiting and asked.optional and not answer.transfers:
            self._let_pass(asked, waiting, answer, at_own_cost=True)
        assert not answer.declined or asked.optional, "what is needed is not declined"

    def _make_room(self, asked: Asked, waiting: deque[int], answer: Admission, *, optional: bool) -> int:
        blocks = [asked.blocks[i] for i in waiting]
        size = self._slabs.slot_size(blocks[0].num_bytes)
        newcomers = [Newcomer(block.key, block.parent, asked.now, asked.hints, block.shard) for block in blocks]
        declined = self._evictions.make_room(size, newcomers, asked.protected, answer, optional=optional)
        policy = self._residents.policy(size)
        if declined and policy is not None and not self._saves.takes_new(blocks[0].num_bytes):
            policy.decline(newcomers[-declined:])
        return declined

    def _let_pass(self, asked: Asked, waiting: deque[int], answer: Admission, *, at_own_cost: bool) -> None:
        size = self._slabs.slot_size(asked.blocks[0].num_bytes)
        self._evictions.let_pass(size, len(waiting), answer, at_own_cost=at_own_cost)
        self._give(asked, waiting, answer, passing=True)

    def _give(self, asked: Asked, waiting: deque[int], answer: Admission, *, passing: bool) -> None:
        """Give the slots there are to the first that wait."""
        size = self._slabs.slot_size(asked.blocks[0].num_bytes)
        while waiting and (slot := self._slabs.take(size)) is not None:
            index = waiting.popleft()
            self._residents.add(asked.blocks[index], slot, asked.now, hints=asked.hints, passing=passing)
            answer.grants.append(Grant(index, slot))

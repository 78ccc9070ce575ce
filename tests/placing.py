"""A placement to be tried step by step: blocks are numbers, and tiers below take or refuse as told."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from kvfleet.config import MIB
from kvfleet.core.block import BlockKey
from kvfleet.core.placement import Admission, Gate, LowerTier, NewBlock, Placement, Transfer
from kvfleet.core.policies import POLICIES
from kvfleet.core.slabs import SlabMap
from kvfleet.testing.clock import ManualClock
from kvfleet.testing.policies import block_key


class Node:
    """A placement with its slabs and a clock; blocks are of 1 MiB if not said otherwise."""

    def __init__(self, num_units: int, *, lower: Iterable[LowerTier] = (), policy: str = "lru") -> None:
        self.clock = ManualClock()
        self.slabs = SlabMap(num_units * MIB, MIB, 4096)
        self.refusing: set[LowerTier] = set()
        self.uses_needed = 0
        self.below: set[int] = set()
        self.placement = Placement(self.slabs, POLICIES[policy], lower={tier: self.gate(tier) for tier in lower})

    def gate(self, tier: LowerTier) -> Gate:
        return lambda _, uses, _expected: tier not in self.refusing and uses >= self.uses_needed

    def ask(
        self,
        numbers: Iterable[int],
        parent: int | None = None,
        shard: int = 0,
        num_bytes: int = MIB,
        *,
        optional: bool = False,
    ) -> Admission:
        """Admit a prefix, a second after the last call."""
        self.clock.advance(1.0)
        blocks = []
        above = None if parent is None else block_key(parent)
        for number in numbers:
            blocks.append(NewBlock(block_key(number), shard, above, num_bytes))
            above = block_key(number)
        return self.placement.admit(blocks, self.clock.now(), optional=optional)

    def store(
        self, numbers: Iterable[int], parent: int | None = None, shard: int = 0, num_bytes: int = MIB
    ) -> Admission:
        """Admit a prefix and commit what got a slot."""
        numbers = list(numbers)
        admission = self.ask(numbers, parent, shard, num_bytes)
        for grant in admission.grants:
            self.placement.commit(block_key(numbers[grant.index]), shard, self.clock.now())
        assert self.placement.audit() == []
        return admission

    def offer(self, numbers: Sequence[int], parent: int | None, refusing: Collection[int] = ()) -> list[int]:
        """Store blocks as a client does, with what moves down for them. Returns those that found no room.

        `refusing`: blocks that the tier below does not take after all.
        """
        left = list(numbers)
        while left:
            above = {number: before for before, number in zip([parent, *numbers], numbers, strict=False)}
            admission = self.ask(left, above[left[0]], optional=True)
            for grant in admission.grants:
                self.placement.commit(block_key(left[grant.index]), 0, self.clock.now())
            assert self.placement.audit() == []
            if not (admission.transfers or admission.grants):
                break
            self.write(admission.transfers, refusing)
            left = [left[index] for index in admission.refused]
        return left

    def write(self, transfers: Iterable[Transfer], refusing: Collection[int] = ()) -> None:
        """Complete transfers; `below` has what the tier below took."""
        for transfer in transfers:
            taken = number_of(transfer.key) not in refusing
            self.below |= {number_of(transfer.key)} if taken else set()
            self.placement.complete(transfer, ok=taken, again=False)

    def touch(self, *numbers: int) -> None:
        self.clock.advance(1.0)
        for number in numbers:
            self.placement.touch(block_key(number), self.clock.now())

    def held(self) -> list[int]:
        return sorted(number_of(record.key) for record in self.placement.records())


def number_of(key: BlockKey) -> int:
    return int.from_bytes(key, "big")


def gone(admission: Admission) -> list[int]:
    return [number_of(evicted.key) for evicted in admission.evicted]


def wanted(admission: Admission) -> list[int]:
    return [number_of(transfer.key) for transfer in admission.transfers]

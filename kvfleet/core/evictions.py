"""Which blocks leave a node's slots for others, and what is saved first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import takewhile

from kvfleet.core.admission import Admission, Counters, Evicted
from kvfleet.core.block import BlockKey
from kvfleet.core.policies import Newcomer, Policy
from kvfleet.core.policies.base import Worth
from kvfleet.core.residents import Residents
from kvfleet.core.saves import Saves
from kvfleet.core.slabs import SlabMap

__all__ = ["Evictions"]


class Evictions:
    """Takes blocks out: leaf first, all shards of a key together, busy and held ones never.

    Args:
        slabs: the slots.
        residents: the books of what is in them.
        saves: knows what has no copy below.
        holds: how often a block is held; absent for not at all.
        counters: of the placement.
    """

    def __init__(
        self, slabs: SlabMap, residents: Residents, saves: Saves, holds: Mapping[BlockKey, int], counters: Counters
    ) -> None:
        self._slabs = slabs
        self._residents = residents
        self._saves = saves
        self._holds = holds
        self._counters = counters

    def make_room(
        self,
        size: int,
        newcomers: Sequence[Newcomer],
        protected: Container[BlockKey],
        answer: Admission,
        *,
        optional: bool,
    ) -> int:
        """Make slots of a size free, now or by transfers, as far as it goes.

        Args:
            size: of the slots.
            newcomers: for which one is needed each, in order.
            protected: blocks that must stay, besides those that are busy or held.
            answer: is told what went and what is to be transferred.
            optional: the policy may rather keep what is here.

        Returns:
            For how many of the last of them it does.
        """

        def worth(key: BlockKey) -> int:
            return self._worth(key, protected)

        need, num_transfers = len(newcomers), len(answer.transfers)
        own, dearer = self._own_victims(self._residents.policy(size), newcomers, worth, optional=optional)
        leaving: set[BlockKey] = set()
        for window in self._slabs.windows(size, self._residents.heat()) if self._slabs.others(size) else ():
            while own and need > 0 and self._residents.blocks[own[0]].last_used <= window.heat:
                need -= self._let_go([own.popleft()], answer)
            spared = not own and dearer is not None and self._residents.blocks[dearer].last_used <= window.heat
            if need <= 0 or spared:
                break
            keys = self._closure(window.slots, worth, leaving)
            if keys is not None:
                self._let_go(keys, answer)
                leaving.update(keys)
                need -= self._slabs.slots_per_run(size)
        while own and need > 0:
            need -= self._let_go([own.popleft()], answer)
        answer.transfers[num_transfers:] = reversed(answer.transfers[num_transfers:])  # parents first
        return max(0, need) if dearer is not None else 0

    def let_pass(self, size: int, need: int, answer: Admission, *, at_own_cost: bool) -> None:
        """Make slots of a size free for blocks on their way to a tier below, as far as it goes.

        What goes for them is in a tier below, and all that it builds on: without a copy they get one first, once
        nothing is on its way down any more that may make the room.

        Args:
            size: of the slots.
            need: how many.
            answer: is told what went and what is to be transferred.
            at_own_cost: of what they build on, as nothing else can go; else of what is of no use here.
        """
        policy = self._residents.policy(size)
        if policy is None:
            return
        keys = policy.victims(need, self._worth)
        if not at_own_cost:
            keys = [*takewhile(policy.goes_first, keys)]
        unsaved = self._unsaved(keys)
        if not unsaved:
            self._let_go(keys, answer)
        elif not self._saves.in_transfer and all(map(self._has_refuge, unsaved)):
            for key in sorted(unsaved, key=lambda key: self._residents.blocks[key].depth)[:need]:
                self._demote(key, answer)

    def goes_first(self, key: BlockKey) -> bool:
        """Whether a block is here, and of no use here."""
        return key in self._residents.blocks and self._residents.policy_of(key).goes_first(key)

    def _worth(self, key: BlockKey, protected: Container[BlockKey] = ()) -> int:
        block = self._residents.blocks[key]
        return 0 if block.busy or key in protected or key in self._holds else len(block.records)

    def _unsaved(self, keys: Iterable[BlockKey]) -> dict[BlockKey, None]:
        """Those of some blocks, and of what they build on, that are not in a tier below, up to one that is."""
        found: dict[BlockKey, None] = {}
        for key in keys:
            above: BlockKey | None = key
            while above is not None and above not in found and not self._is_saved(above):
                found[above] = None
                above = self._residents.blocks[above].parent
        return found

    def _is_saved(self, key: BlockKey) -> bool:
        """Whether all of a block that is here is in a tier below; True for one that is not here."""
        block = self._residents.blocks.get(key)
        return block is None or all(record.saved for record in block.records.values())

    def _has_refuge(self, key: BlockKey) -> bool:
        records = self._residents.blocks[key].records.values()
        return all(record.saved or (record.committed and self._saves.refuge(key, record)) for record in records)

    @staticmethod
    def _own_victims(
        policy: Policy | None, newcomers: Sequence[Newcomer], worth: Worth, *, optional: bool
    ) -> tuple[deque[BlockKey], BlockKey | None]:
        """What the policy of a size lets go for newcomers, and the next that it could, but does not for these."""
        if policy is None:
            return deque(), None
        own = policy.victims(len(newcomers), worth, newcomers=newcomers if optional else ())
        if not optional or sum(map(worth, own)) >= len(newcomers):
            return deque(own), None
        further = policy.victims(sum(map(worth, own)) + 1, worth)[len(own) :]
        return deque(own), further[0] if further else None

    def give_way(self, num_bytes: int) -> list[Evicted]:
        """See `Placement.give_way`."""
        size, blocks = self._slabs.slot_size(num_bytes), self._residents.blocks
        fit = (key for key, b in blocks.items() if b.size == size and not b.busy and key not in self._holds)
        victim = max(fit, key=lambda key: (blocks[key].last_used, blocks[key].depth, key), default=None)
        answer = Admission()
        if victim is not None:
            self._evict(victim, answer)
        return answer.evicted

    def remove(self, key: BlockKey, shard: int) -> Evicted:
        """Take a committed record out, whatever is going on with it."""
        record = self._residents.remove(key, shard)
        self._saves.forget(key, shard, record)
        return Evicted(key, shard, record.slot)

    def _closure(
        self, slots: Sequence[int], worth: Callable[[BlockKey], int], leaving: Container[BlockKey]
    ) -> list[BlockKey] | None:
        """The blocks in some slots with all their descendants, each after its own, less those that leave already.

        None if one of them must stay.
        """
        keys: dict[BlockKey, None] = {}
        for slot in slots:
            root = self._residents.key_at(slot)
            if root is None or root in keys or root in leaving:
                continue  # a window before this one shares the slot
            for key in (*self._residents.policy_of(root).descendants(root), root):
                if key in leaving:
                    continue
                if not worth(key):
                    return None
                keys[key] = None
        return list(keys)

    def _let_go(self, keys: Sequence[BlockKey], answer: Admission) -> int:
        """Evict blocks, unless some must be saved first: then those are demoted, and all go another time.

        Returns:
            How many slots they have.
        """
        num_slots = 0
        num_transfers = len(answer.transfers)
        for key in keys:
            num_slots += len(self._residents.blocks[key].records)
            self._demote(key, answer)
        if len(answer.transfers) == num_transfers:
            for key in keys:
                if self._residents.policy_of(key).is_leaf(key):  # else a child of it is being demoted
                    self._evict(key, answer)
        return num_slots

    def _demote(self, key: BlockKey, answer: Admission) -> None:
        for shard, record in self._residents.blocks[key].records.items():
            tier = self._saves.refuge(key, record)
            if tier is not None:
                answer.transfers.append(self._saves.begin("demote", tier, key, shard))

    def _evict(self, key: BlockKey, answer: Admission) -> None:
        assert not self._residents.blocks[key].busy, "nobody reads or writes what goes"
        assert key not in self._holds, "what is held stays"
        for shard, record in list(self._residents.blocks[key].records.items()):
            answer.evicted.append(self.remove(key, shard))
            self._counters.evicted += 1
            self._counters.dropped_unsaved += not record.saved

"""Placement against a plain model, at random: two sizes in a tiny arena, shards, holds, transfers, restarts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvfleet.config import MIB
from kvfleet.core.block import BlockKey
from kvfleet.core.placement import Gate, LowerTier, NewBlock, Placement, Restored, Transfer
from kvfleet.core.policies import POLICIES
from kvfleet.core.slabs import SlabMap

NUM_UNITS = 24
NUM_SLOTS = 40
TIERS: list[LowerTier] = ["nvme", "shared"]
RecordId = tuple[BlockKey, int]


@dataclass
class Held:
    """What the model knows of a record."""

    slot: int
    committed: bool = False
    saved: set[LowerTier] = field(default_factory=set)
    given_up: set[LowerTier] = field(default_factory=set)


def key_of(chain: int, index: int) -> BlockKey:
    """Chains of one size share their first two blocks."""
    trunk = chain % 2 if index < 2 else chain
    return BlockKey(bytes([1 + trunk, index, 7, 7]) + bytes(12))


def parent_of(key: BlockKey) -> BlockKey | None:
    chain, index = key[0] - 1, key[1]
    return None if index == 0 else key_of(chain, index - 1)


def num_bytes_of(key: BlockKey) -> int:
    return 4 * MIB - 9 if (key[0] - 1) % 2 == 0 else 700_000


class PlacementMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.table = [0] * NUM_UNITS
        self.model: dict[RecordId, Held] = {}
        self.holds: dict[BlockKey, int] = {}
        self.transfers: list[Transfer] = []

    @initialize(lower=st.permutations(TIERS), number=st.integers(0, 2))
    def start(self, lower: list[LowerTier], number: int) -> None:
        self.lower = lower[:number]
        self.uses_needed: dict[LowerTier, int] = dict.fromkeys(TIERS, 0)
        self.make()

    def make(self) -> None:
        self.slabs = SlabMap(NUM_UNITS * MIB, MIB, NUM_SLOTS, self.table.__setitem__)
        self.placement = Placement(self.slabs, POLICIES["lru"], lower={tier: self.gate(tier) for tier in self.lower})

    def gate(self, tier: LowerTier) -> Gate:
        return lambda _, uses, _expected: uses >= self.uses_needed[tier]

    # --- what callers do

    @rule(chain=st.integers(0, 5), start=st.integers(0, 8), length=st.integers(1, 10), shard=st.integers(0, 1))
    def admit(self, chain: int, start: int, length: int, shard: int) -> None:
        self.now += 1.0
        keys = [key_of(chain, index) for index in range(start, start + length)]
        blocks = [NewBlock(key, shard, parent_of(key), num_bytes_of(key)) for key in keys]
        before = set(self.model)
        free = self.free_slots(keys[0])
        admission = self.placement.admit(blocks, self.now)
        indexes = sorted([grant.index for grant in admission.grants] + admission.already + admission.refused)
        assert indexes == list(range(length))
        assert admission.already == [i for i, key in enumerate(keys) if (key, shard) in before]
        assert not admission.refused or not admission.grants or admission.refused[0] > admission.grants[-1].index
        if free >= length:
            assert not admission.evicted
            assert not admission.transfers
        self.check_evictions([(gone.key, gone.shard, gone.slot) for gone in admission.evicted], keys)
        for transfer in admission.transfers:
            self.check_transfer(transfer, "demote")
            held = self.model[transfer.key, transfer.shard]
            assert not held.saved
            skipped = self.lower[: self.lower.index(transfer.tier)]
            assert all(tier in held.given_up or self.uses_needed[tier] for tier in skipped), "the first that takes it"
        for grant in admission.grants:
            self.model[keys[grant.index], shard] = Held(grant.slot)

    def free_slots(self, key: BlockKey) -> int:
        """Slots that are free for a key's size without any eviction, at least."""
        size = self.slabs.slot_size(num_bytes_of(key))
        taken = []
        while (slot := self.slabs.take(size)) is not None:
            taken.append(slot)
        for slot in taken:
            self.slabs.give(slot)
        return len(taken)

    def check_evictions(self, evicted: list[tuple[BlockKey, int, int]], asked: list[BlockKey]) -> None:
        for key, shard, slot in evicted:
            held = self.model.pop((key, shard))
            assert held.slot == slot
            assert held.committed
            taking = [tier for tier in self.lower if tier not in held.given_up and not self.uses_needed[tier]]
            assert held.saved or not taking, "in no tier, though one would take it"
            assert key not in self.holds
            assert key not in asked
            assert not any((t.key, t.shard) == (key, shard) for t in self.live_transfers())
        left = {key for key, _ in self.model}
        for key, _, _ in evicted:
            assert key not in left, "shards go together"
            assert not any(parent_of(child) == key for child in left), "leaf first"
            assert not any(parent_of(child) == key for child in asked), "not for its own children"

    def check_transfer(self, transfer: Transfer, kind: str) -> None:
        held = self.model[transfer.key, transfer.shard]
        assert transfer.kind == kind
        assert (transfer.slot, transfer.num_bytes) == (held.slot, num_bytes_of(transfer.key))
        assert held.committed
        assert transfer.tier not in held.saved
        assert transfer.tier not in {t.tier for t in self.transfers if t.slot == transfer.slot}
        self.transfers.append(transfer)

    def live_transfers(self) -> Iterator[Transfer]:
        return (t for t in self.transfers if (t.key, t.shard) in self.model)

    def pick(self, data: Any, *, committed: bool | None = None) -> RecordId:
        among = [record for record, held in self.model.items() if committed in (None, held.committed)]
        picked: RecordId = data.draw(st.sampled_from(among))
        return picked

    def has(self, *, committed: bool) -> bool:
        return any(held.committed is committed for held in self.model.values())

    @precondition(lambda self: self.has(committed=False))
    @rule(data=st.data(), many=st.booleans(), brought=st.booleans())
    def commit(self, data: Any, many: bool, brought: bool) -> None:
        self.now += 0.25
        pending = [record for record, held in self.model.items() if not held.committed]
        for key, shard in pending if many else [data.draw(st.sampled_from(pending))]:
            self.placement.commit(key, shard, self.now, brought=brought)
            self.model[key, shard].committed = True

    @precondition(lambda self: self.has(committed=False))
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        key, shard = self.pick(data, committed=False)
        assert self.placement.abort(key, shard) == self.model.pop((key, shard)).slot

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def drop(self, data: Any) -> None:
        key, _ = self.pick(data)
        for gone in self.placement.drop(key):
            held = self.model.pop((gone.key, gone.shard))
            assert (gone.key, held.slot, held.committed) == (key, gone.slot, True)
            self.transfers = [t for t in self.transfers if (t.key, t.shard) != (gone.key, gone.shard)]
        assert not any(key == other and held.committed for (other, _), held in self.model.items())

    @precondition(lambda self: self.model)
    @rule(data=st.data(), by_slot=st.booleans(), ago=st.sampled_from([0.0, 0.0, 3.0]))
    def touch(self, data: Any, by_slot: bool, ago: float) -> None:
        key, shard = self.pick(data)
        self.now += 1.0
        if by_slot:
            self.placement.touch_slot(self.model[key, shard].slot, self.now - ago)
        else:
            self.placement.touch(key, self.now - ago)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def hold(self, data: Any) -> None:
        key, _ = self.pick(data)
        self.placement.hold(key)
        self.holds[key] = self.holds.get(key, 0) + 1

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        key = data.draw(st.sampled_from(list(self.holds)))
        self.placement.release(key)
        self.holds[key] -= 1
        if not self.holds[key]:
            del self.holds[key]

    # --- the tiers below

    @precondition(lambda self: self.model and self.lower)
    @rule(data=st.data(), lost=st.booleans(), again=st.booleans())
    def news_from_below(self, data: Any, lost: bool, again: bool) -> None:
        key, shard = self.pick(data)
        tier = data.draw(st.sampled_from(self.lower))
        if lost:
            self.placement.lost(key, shard, tier, again=again)
            self.model[key, shard].saved.discard(tier)
        else:
            self.placement.saved(key, shard, tier)
            self.model[key, shard].saved.add(tier)

    @rule(tier=st.sampled_from(TIERS), uses=st.sampled_from([0, 0, 1, 1 << 30]))
    def a_gate_changes(self, tier: LowerTier, uses: int) -> None:
        self.uses_needed[tier] = uses

    @rule(tier=st.sampled_from(TIERS), max_bytes=st.integers(1, 12 * MIB))
    def save(self, tier: LowerTier, max_bytes: int) -> None:
        transfers = self.placement.next_saves(tier, max_bytes)
        assert sum(t.num_bytes for t in transfers[1:]) < max_bytes
        assert tier in self.lower or not transfers
        for transfer in transfers:
            assert transfer.tier == tier
            self.check_transfer(transfer, "save")

    @precondition(lambda self: self.lower)
    @rule(data=st.data())
    def save_all(self, data: Any) -> None:
        tier = data.draw(st.sampled_from(self.lower))
        self.placement.requeue(tier, every=True)
        busy = {(t.key, t.shard) for t in self.transfers if t.tier == tier}
        missing = {r for r, held in self.model.items() if held.committed and tier not in held.saved and r not in busy}
        assert self.placement.num_unsaved(tier) == len(missing) + self.placement.num_in_transfer(tier)
        if not self.uses_needed[tier]:
            transfers = self.placement.next_saves(tier, 1 << 40)
            assert {(t.key, t.shard) for t in transfers} == missing
            for transfer in transfers:
                self.check_transfer(transfer, "save")

    @precondition(lambda self: self.transfers)
    @rule(data=st.data(), ok=st.booleans(), many=st.booleans(), again=st.booleans())
    def complete(self, data: Any, ok: bool, many: bool, again: bool) -> None:
        done = list(self.transfers) if many else [data.draw(st.sampled_from(self.transfers))]
        for transfer in done:
            self.transfers.remove(transfer)
            self.placement.complete(transfer, ok=ok, again=again)
            held = self.model[transfer.key, transfer.shard]
            if ok:
                held.saved.add(transfer.tier)
            elif transfer.kind == "demote" and transfer.tier not in held.saved:
                held.given_up.add(transfer.tier)

    # --- restart

    @rule()
    def restart(self) -> None:
        live = {held.slot: self.slabs.offset(held.slot) for held in self.model.values()}
        table = list(self.table)
        self.make()
        assert self.slabs.restore(table, live) == []
        assert self.table == [value if value in self.table else 0 for value in table]
        refused = self.placement.restore(
            Restored(
                slot=held.slot,
                key=key,
                shard=shard,
                parent_fingerprint=int.from_bytes((parent_of(key) or bytes(4))[:4], "little"),
                depth=key[1],
                num_bytes=num_bytes_of(key),
                last_access=self.now,
                committed=held.committed,
            )
            for (key, shard), held in self.model.items()
        )
        assert refused == []
        assert {held.slot: self.slabs.offset(held.slot) for held in self.model.values()} == live
        self.holds, self.transfers = {}, []
        for held in self.model.values():
            held.saved, held.given_up = set(), set()

    # --- what always holds

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "placement"):
            return
        assert self.placement.audit() == []
        assert self.placement.in_transfer == len(self.transfers)
        for (key, shard), held in self.model.items():
            assert self.placement.resident(key, shard) == (held.slot if held.committed else None)
            assert self.placement.pending(key, shard) is not held.committed
        for tier in TIERS:
            assert self.placement.num_in_transfer(tier) == sum(t.tier == tier for t in self.transfers)
            missing = sum(held.committed and tier not in held.saved for held in self.model.values())
            assert self.placement.unsaved(tier)[0] == missing
        committed = {(key, shard, held.slot) for (key, shard), held in self.model.items() if held.committed}
        assert {(record.key, record.shard, record.slot) for record in self.placement.records()} == committed

    @invariant()
    def slots_are_apart_and_counted(self) -> None:
        if not hasattr(self, "placement"):
            return
        spans = sorted((self.slabs.offset(h.slot), num_bytes_of(key)) for (key, _), h in self.model.items())
        assert all(start + size <= after for (start, size), (after, _) in pairwise(spans))
        used = sum(self.slabs.slot_bytes(held.slot) for held in self.model.values())
        assert self.placement.used_bytes == used <= self.slabs.capacity_bytes


TestPlacement = PlacementMachine.TestCase
TestPlacement.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)

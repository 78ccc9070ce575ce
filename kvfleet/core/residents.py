"""The books of one node's blocks: which record is in which slot, in which state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvfleet.core.admission import LowerTier, NewBlock, Restored, Transfer
from kvfleet.core.block import KEY_BYTES, BlockKey
from kvfleet.core.hints import NO_HINTS, Hints
from kvfleet.core.policies import Policy, PolicyFactory
from kvfleet.core.slabs import SlabMap

__all__ = ["Block", "Record", "Residents"]

_COLDER_BY_DEPTH_S = 1e-6
_READ_S = 30.0  # a load reads what it brought in this time, or not at all
_EMPTY_MAX = 8  # slot sizes, beyond which those without blocks are forgotten with what their policies remember


@dataclass(slots=True)
class Record:
    """One shard of a block, in its slot.

    Attributes:
        slot: its number.
        committed: False while it is being written.
        saved: lower tiers that have a copy.
        given_up: lower tiers that did not take a copy when the room was needed; the record may go without, if it
            has to go before write-behind succeeds.
        transfers: those that read the slot now, at most one to each lower tier.
    """

    slot: int
    committed: bool = False
    saved: tuple[LowerTier, ...] = ()
    given_up: tuple[LowerTier, ...] = ()
    transfers: tuple[Transfer, ...] = ()

    def wants(self, tier: LowerTier) -> bool:
        """Whether a copy in a lower tier could be made: there is none, and none on its way."""
        return self.committed and tier not in self.saved and all(t.tier != tier for t in self.transfers)

    @property
    def busy(self) -> int:
        """What goes on with the slot: it is written, or read by so many transfers."""
        return len(self.transfers) if self.committed else 1


@dataclass(slots=True)
class Block:
    """All records of one key.

    Attributes:
        parent: key of the block before it, or None.
        num_bytes: of each record.
        size: of their slots.
        last_used: seconds; itself or, as far as `Residents.heat` has seen, through a block that builds on it.
        depth: how many ancestors it has here, or had when an earlier manager admitted it.
        uses: how often it was used since it came here.
        read_due: its next use is no reason to save it: a load brought it for that, or it is the first one since a tier
            below dropped its copy. With a tier that drops, each read would have it written once more.
        awaited: a load brought it, and the read that it was brought for has not come: that is the use it came with.
        records: by shard.
        busy: how many of them are being written, and how many transfers of them there are. A busy block stays.
    """

    parent: BlockKey | None
    num_bytes: int
    size: int
    last_used: float
    depth: int = 0
    uses: int = 0
    read_due: bool = False
    awaited: bool = False
    records: dict[int, Record] = field(default_factory=dict)
    busy: int = 0


class Residents:
    """Blocks by key, with a policy for each slot size, since a block only makes room for its own size.

    Blocks of one prefix have one size, so that a policy sees whole prefixes.
    """

    def __init__(self, slabs: SlabMap, policy: PolicyFactory) -> None:
        self.blocks: dict[BlockKey, Block] = {}
        self.num_records = 0
        self._heat = np.full(slabs.num_slots, -np.inf)  # as `heat` gave it
        self._used: dict[BlockKey, None] = {}  # since then
        self._keys: list[BlockKey | None] = [None] * slabs.num_slots
        self._slabs = slabs
        self._new_policy = policy
        self._policies: dict[int, Policy] = {}
        self._num_shards: dict[int, int] = {}  # of the sizes that policies are for: most that a block had here

    def record(self, key: BlockKey, shard: int) -> Record | None:
        """The record, in whatever state."""
        block = self.blocks.get(key)
        return None if block is None else block.records.get(shard)

    def records(self) -> Iterator[tuple[BlockKey, int, Record]]:
        """All records, in the order of their blocks' arrival."""
        for key, block in self.blocks.items():
            for shard, record in block.records.items():
                yield key, shard, record

    def key_at(self, slot: int) -> BlockKey | None:
        """Whose slot it is; None for a free one."""
        return self._keys[slot]

    def heat(self) -> npt.NDArray[np.float64]:
        """How dear each slot is: the last use of its block, or of any that builds on it; -inf if not taken.

        Of blocks used at once the deeper are a little colder: leaves go first.
        """
        for key in sorted(self._used, key=lambda key: (-self.blocks[key].last_used, key)):
            block: Block | None = self.blocks[key]
            time = self.blocks[key].last_used
            while block is not None:
                block.last_used = time
                for record in block.records.values():
                    self._heat[record.slot] = time - _COLDER_BY_DEPTH_S * block.depth
                block = self._parent(block)
                if block is not None and block.last_used >= time:
                    break
        self._used.clear()
        return self._heat

    def last_uses(self) -> dict[BlockKey, float]:
        """See `Placement.last_uses`."""
        heat = self.heat()
        return {key: float(heat[next(iter(b.records.values())).slot]) for key, b in self.blocks.items()}

    def _parent(self, block: Block) -> Block | None:
        return None if block.parent is None else self.blocks.get(block.parent)

    def policy(self, size: int) -> Policy | None:
        """What decides among the blocks of a slot size; None if there never were any."""
        return self._policies.get(size)

    def policy_of(self, key: BlockKey) -> Policy:
        """What decides about a block that is here."""
        return self._policies[self.blocks[key].size]

    def fits(self, key: BlockKey, shard: int, num_bytes: int, slot: int) -> bool:
        """Whether a taken slot can be that of a record."""
        size = self._slabs.slot_bytes(slot)
        block = self.blocks.get(key)
        new = block is None or (block.size == size and shard not in block.records)
        return new and num_bytes > 0 and self._slabs.slot_size(num_bytes) == size

    def add(
        self,
        new: NewBlock,
        slot: int,
        now: float,
        *,
        depth: int | None = None,
        hints: Hints = NO_HINTS,
        passing: bool = False,
    ) -> None:
        """Enter a record that is being written to a slot; without a depth, one below its parent.

        `passing`: as in `Policy.insert`.
        """
        size = self._slabs.slot_bytes(slot)
        block = self.blocks.get(new.key)
        if block is None:
            block = self.blocks[new.key] = Block(new.parent, new.num_bytes, size, now)
            parent = self._parent(block)
            block.depth = depth or (0 if parent is None else parent.depth + 1)
            if size not in self._policies:
                self._policies[size] = self._new_policy(max(1, self._slabs.capacity_bytes // size))
                self._num_shards[size] = 1
            self._policies[size].insert(new.key, new.parent, now, hints, passing=passing)
        assert new.shard not in block.records, "record is new"
        assert block.size == size, "all records of a block have one size"
        block.records[new.shard] = Record(slot)
        if len(block.records) > self._num_shards[size]:
            self._num_shards[size] = len(block.records)
            self._policies[size].resize(max(1, self._slabs.capacity_bytes // (size * len(block.records))))
        block.busy += 1
        self.num_records += 1
        self._used[new.key] = None
        self._keys[slot] = new.key

    def restore(self, found: Iterable[Restored]) -> Iterator[tuple[Restored, bool]]:
        """Enter records that are in taken slots already, as being written, those used longest ago first.

        Returns:
            Each with whether it is entered. The slot of one that does not fit it, or that is here twice, is free now.
        """
        found = sorted(found, key=lambda item: (item.last_access, item.depth, item.slot))
        parents = {(_fingerprint(item.key), item.depth): item.key for item in found}
        for item in found:
            fits = self.fits(item.key, item.shard, item.num_bytes, item.slot)
            if fits:
                parent = None
                if item.parent_fingerprint:
                    absent = BlockKey(item.parent_fingerprint.to_bytes(4, "little") + bytes(KEY_BYTES - 4))
                    parent = parents.get((item.parent_fingerprint, item.depth - 1), absent)
                block = NewBlock(item.key, item.shard, parent, item.num_bytes)
                self.add(block, item.slot, item.last_access, depth=item.depth)
            else:
                self._slabs.give(item.slot)
            yield item, fits

    def remove(self, key: BlockKey, shard: int) -> Record:
        """Take a record out and give its slot back."""
        block = self.blocks[key]
        record = block.records.pop(shard)
        block.busy -= record.busy
        assert block.busy >= 0, "each read and write of a record is counted once"
        self.num_records -= 1
        self._heat[record.slot] = -np.inf
        self._keys[record.slot] = None
        self._slabs.give(record.slot)
        if not block.records:
            del self.blocks[key]
            self._used.pop(key, None)
            self._policies[block.size].remove(key)
            if len(self._policies) > _EMPTY_MAX:
                self._policies = {size: policy for size, policy in self._policies.items() if len(policy)}
                self._num_shards = {size: self._num_shards[size] for size in self._policies}
        return record

    def first(self, slot: int) -> bool:
        """Whether a taken slot is that of its block's first record: all are read for one use, and that one counts."""
        key = self._keys[slot]
        if key is None:
            return False
        records = self.blocks[key].records
        return len(records) == 1 or next(iter(records.values())).slot == slot

    def touch(self, key: BlockKey, now: float, *, uses: int) -> None:
        """Note that a block was of use, if it is here; `uses` of them are counted."""
        block = self.blocks.get(key)
        if block is None:
            return
        block.uses += uses
        if now > block.last_used:
            awaited = block.awaited and now <= block.last_used + _READ_S
            block.last_used = now
            self._policies[block.size].touch(key, now, 0 if awaited else uses)
            self._used[key] = None
        if uses:
            block.awaited = False

    def audit(self) -> list[str]:
        """What does not add up; nothing, unless there is a bug."""
        findings = self._slabs.audit()
        for key, shard, record in self.records():
            if self._keys[record.slot] != key or self._slabs.slot_bytes(record.slot) != self.blocks[key].size:
                findings.append(f"{key.hex()}.{shard}: slot {record.slot} is not its own")
        for key, block in self.blocks.items():
            busy = sum(record.busy for record in block.records.values())
            if busy != block.busy or key not in self._policies[block.size]:
                findings.append(f"{key.hex()}: {busy} reads and writes, {block.busy} counted, or unknown to its policy")
        used = sum(len(block.records) * block.size for block in self.blocks.values())
        taken = sum(key is not None for key in self._keys)
        if (taken, used) != (self.num_records, self._slabs.used_bytes):
            findings.append(
                f"{self.num_records} records, {taken} slots taken; {used} of {self._slabs.used_bytes} bytes"
            )
        known = sum(len(policy) for policy in self._policies.values())
        if known != len(self.blocks):
            findings.append(f"policies know {known} of {len(self.blocks)} blocks")
        return findings


def _fingerprint(key: BlockKey) -> int:
    return int.from_bytes(key[:4], "little")

"""The books of one node's blocks: which record is in which slot, in which state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvfleet.core.admission import NewBlock
from kvfleet.core.block import BlockKey
from kvfleet.core.policies.base import Policy
from kvfleet.core.slabs import SlabMap

__all__ = ["Block", "Record", "Residents"]

_COLDER_BY_DEPTH_S = 1e-6


@dataclass(slots=True)
class Record:
    """One shard of a block, in its slot.

    Attributes:
        slot: its number.
        committed: False while it is being written.
        saved: the tier below has a copy.
        given_up: it could not be copied below when its room was needed; it may go without, if it has to go before
            write-behind succeeds.
        transfer: serial of the transfer that reads the slot, or 0.
    """

    slot: int
    committed: bool = False
    saved: bool = False
    given_up: bool = False
    transfer: int = 0


@dataclass(slots=True)
class Block:
    """All records of one key.

    Attributes:
        parent: key of the block before it, or None.
        num_bytes: of each record.
        size: of their slots.
        last_used: seconds; itself or, as far as `Residents.heat` has seen, through a block that builds on it.
        depth: how many ancestors it has here, or had when an earlier manager admitted it.
        records: by shard.
        busy: how many of them are being written or transferred. A busy block stays.
    """

    parent: BlockKey | None
    num_bytes: int
    size: int
    last_used: float
    depth: int = 0
    records: dict[int, Record] = field(default_factory=dict)
    busy: int = 0


class Residents:
    """Blocks by key, with a policy for each slot size, since a block only makes room for its own size.

    Blocks of one prefix have one size, so that a policy sees whole prefixes.
    """

    def __init__(self, slabs: SlabMap, policy: Callable[[], Policy]) -> None:
        self.blocks: dict[BlockKey, Block] = {}
        self.num_records = 0
        self._heat = np.full(slabs.num_slots, -np.inf)  # as `heat` gave it
        self._used: dict[BlockKey, None] = {}  # since then
        self._keys: list[BlockKey | None] = [None] * slabs.num_slots
        self._slabs = slabs
        self._new_policy = policy
        self._policies: dict[int, Policy] = {}

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

    def _parent(self, block: Block) -> Block | None:
        return None if block.parent is None else self.blocks.get(block.parent)

    def policy(self, size: int) -> Policy | None:
        """What decides among the blocks of a slot size; None if there are none."""
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

    def add(self, new: NewBlock, slot: int, now: float, depth: int | None = None) -> None:
        """Enter a record that is being written to a slot; without a depth, one below its parent."""
        size = self._slabs.slot_bytes(slot)
        block = self.blocks.get(new.key)
        if block is None:
            block = self.blocks[new.key] = Block(new.parent, new.num_bytes, size, now)
            parent = self._parent(block)
            block.depth = depth or (0 if parent is None else parent.depth + 1)
            if size not in self._policies:
                self._policies[size] = self._new_policy()
            self._policies[size].insert(new.key, new.parent, now)
        assert new.shard not in block.records, "record is new"
        assert block.size == size, "all records of a block have one size"
        block.records[new.shard] = Record(slot)
        block.busy += 1
        self.num_records += 1
        self._used[new.key] = None
        self._keys[slot] = new.key

    def remove(self, key: BlockKey, shard: int) -> Record:
        """Take a record out and give its slot back."""
        block = self.blocks[key]
        record = block.records.pop(shard)
        block.busy -= (not record.committed) + (record.transfer != 0)
        self.num_records -= 1
        self._heat[record.slot] = -np.inf
        self._keys[record.slot] = None
        self._slabs.give(record.slot)
        if not block.records:
            del self.blocks[key]
            self._used.pop(key, None)
            policy = self._policies[block.size]
            policy.remove(key)
            if not len(policy):
                del self._policies[block.size]
        return record

    def touch(self, key: BlockKey, now: float) -> None:
        """Note a use of a block, if it is here."""
        block = self.blocks.get(key)
        if block is not None and now > block.last_used:
            block.last_used = now
            self._policies[block.size].touch(key, now)
            self._used[key] = None

    def audit(self) -> list[str]:
        """What does not add up; nothing, unless there is a bug."""
        findings = self._slabs.audit()
        for key, shard, record in self.records():
            if self._keys[record.slot] != key or self._slabs.slot_bytes(record.slot) != self.blocks[key].size:
                findings.append(f"{key.hex()}.{shard}: slot {record.slot} is not its own")
        for key, block in self.blocks.items():
            busy = sum((not record.committed) + (record.transfer != 0) for record in block.records.values())
            if busy != block.busy or key not in self._policies[block.size]:
                findings.append(f"{key.hex()}: {busy} records busy, {block.busy} counted, or unknown to its policy")
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

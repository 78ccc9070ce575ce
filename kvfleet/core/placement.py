"""What one node holds: admission, eviction, accounting.

Plan, then act: nothing is copied here. `admit` says which slots to write and which blocks left for them;
`Transfer`s are copies somebody else makes and reports.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence

from kvfleet.core.admission import Admission, Counters, Evicted, Grant, NewBlock, Restored, Transfer
from kvfleet.core.block import KEY_BYTES, BlockKey
from kvfleet.core.policies.base import Policy
from kvfleet.core.residents import Record, Residents
from kvfleet.core.saves import Saves
from kvfleet.core.slabs import SlabMap

__all__ = ["Admission", "Counters", "Evicted", "Grant", "NewBlock", "Placement", "Restored", "Transfer"]


class Placement:
    """Decides which blocks a node's arena holds.

    Evicts on demand, for the exact deficit, leaf first and all shards of a key together. Busy blocks (being
    written or transferred) and held ones stay. With a tier below, a block that has no copy there is demoted
    before it goes: `admit` answers with transfers, and finds the room when it is asked again.

    Room of other slot sizes is taken a run at a time, where a whole run with all its blocks' descendants was used
    less lately than what the size itself would evict.

    Threads: none of its own; calls must not overlap. Times are passed in, in seconds.
    """

    def __init__(self, slabs: SlabMap, policy: Callable[[], Policy], *, lower_tier: bool) -> None:
        """Start empty.

        Args:
            slabs: the arena's slots, none taken, or as restored.
            policy: makes an eviction policy; one is made for each slot size.
            lower_tier: there is a tier to save blocks to.
        """
        self.counters = Counters()
        self._slabs = slabs
        self._residents = Residents(slabs, policy)
        self._holds: dict[BlockKey, int] = {}
        self._saves = Saves(self._residents, self.counters, lower_tier=lower_tier)

    @property
    def used_bytes(self) -> int:
        """Bytes of all taken slots."""
        return self._slabs.used_bytes

    @property
    def in_transfer(self) -> int:
        """Transfers given out and not yet completed."""
        return self._saves.in_transfer

    @property
    def num_unsaved(self) -> int:
        """Records that wait for a copy in the tier below, or are being copied."""
        return self._saves.num_unsaved

    def unsaved(self) -> tuple[int, int]:
        """How many committed records have no copy below, and their bytes; also if there is no tier below."""
        sizes = [
            self._residents.blocks[key].num_bytes
            for key, _, record in self._residents.records()
            if record.committed and not record.saved
        ]
        return len(sizes), sum(sizes)

    def block_bytes(self, key: BlockKey) -> int:
        """Bytes of the slots that a block's records have; 0 if it is not here."""
        block = self._residents.blocks.get(key)
        return 0 if block is None else block.size * len(block.records)

    def saved_records(self) -> list[tuple[BlockKey, int]]:
        """Committed records of which the tier below has a copy."""
        return [(key, shard) for key, shard, record in self._residents.records() if record.committed and record.saved]

    def resident(self, key: BlockKey, shard: int) -> int | None:
        """The slot of a committed record."""
        record = self._residents.record(key, shard)
        return record.slot if record is not None and record.committed else None

    def pending(self, key: BlockKey, shard: int) -> bool:
        """Whether the record is being written."""
        return self.writing(key, shard) is not None

    def writing(self, key: BlockKey, shard: int) -> int | None:
        """The slot of a record that is being written."""
        record = self._residents.record(key, shard)
        return record.slot if record is not None and not record.committed else None

    def records(self) -> list[Evicted]:
        """All committed records."""
        return [
            Evicted(key, shard, record.slot) for key, shard, record in self._residents.records() if record.committed
        ]

    def slots(self) -> list[int]:
        """All taken slots."""
        return [record.slot for _, _, record in self._residents.records()]

    def admit(self, blocks: Sequence[NewBlock], now: float) -> Admission:
        """Give slots to blocks, the first ones first, evicting others as far as needed.

        Blocks of the call and their parents are not evicted for each other.

        Args:
            blocks: all of one size.
            now: counts as a use of the blocks that are here already and of the parents.
        """
        answer = Admission()
        wanted: dict[tuple[BlockKey, int], int] = {}
        protected = dict.fromkeys(key for block in blocks for key in (block.key, block.parent) if key is not None)
        for key in protected:
            self._residents.touch(key, now)
        for index, block in enumerate(blocks):
            record_id = (block.key, block.shard)
            if record_id in wanted or self._residents.record(*record_id) is not None:
                answer.already.append(index)
            else:
                wanted[record_id] = index
        waiting = deque(wanted.values())
        if blocks:
            assert len({block.num_bytes for block in blocks}) == 1, "blocks of one call have one size"
            size = self._slabs.slot_size(blocks[0].num_bytes)
            self._grant(blocks, waiting, answer, now)
            if waiting:
                self._make_room(size, len(waiting), protected, answer)
                self._grant(blocks, waiting, answer, now)
        answer.refused.extend(waiting)
        self.counters.admitted += len(answer.grants)
        self.counters.refused += len(waiting)
        return answer

    def commit(self, key: BlockKey, shard: int, now: float) -> None:
        """A granted slot is written: its record is readable from now on."""
        record = self._pending_record(key, shard)
        record.committed = True
        self._residents.blocks[key].busy -= 1
        self._residents.touch(key, now)
        self._saves.want(key, shard)

    def abort(self, key: BlockKey, shard: int) -> int:
        """A granted slot will not be written: it is free again. Returns the slot."""
        record = self._pending_record(key, shard)
        self._residents.remove(key, shard)
        return record.slot

    def drop(self, key: BlockKey) -> list[Evicted]:
        """Take out a block's committed records, held or not: they are corrupt, or an operator says so.

        A transfer of them is void; records still being written stay. Nothing happens if the block is not here.
        """
        block = self._residents.blocks.get(key)
        shards = [] if block is None else [shard for shard, record in block.records.items() if record.committed]
        return [self._remove(key, shard) for shard in shards]

    def touch(self, key: BlockKey, now: float) -> None:
        """Note a use of a block; one that is not here is ignored."""
        self._residents.touch(key, now)

    def touch_slot(self, slot: int, now: float) -> None:
        """Note a use that a reader wrote into the record table; a free slot is ignored."""
        key = self._residents.key_at(slot)
        if key is not None:
            self._residents.touch(key, now)

    def hold(self, key: BlockKey) -> None:
        """Keep a block that is here until as many `release`s."""
        assert key in self._residents.blocks, "only a block that is here can be held"
        self._holds[key] = self._holds.get(key, 0) + 1

    def release(self, key: BlockKey) -> None:
        """End a hold, whether or not the block was dropped under it."""
        assert key in self._holds, "block is held"
        self._holds[key] -= 1
        if not self._holds[key]:
            del self._holds[key]

    def give_way(self, num_bytes: int) -> list[Evicted]:
        """Evict the block used last among those of a size that nobody holds; of several, the deepest.

        For the one case in which `admit` finds nothing: loads larger than the arena, taken together. All they have
        brought are ancestors of the few blocks they hold, and blocks go leaf first. What was just copied out of the
        deepest is then the best to go. Nothing, if all are held or busy.
        """
        size, blocks = self._slabs.slot_size(num_bytes), self._residents.blocks
        fit = (key for key, b in blocks.items() if b.size == size and not b.busy and key not in self._holds)
        victim = max(fit, key=lambda key: (blocks[key].last_used, blocks[key].depth, key), default=None)
        answer = Admission()
        if victim is not None:
            self._evict(victim, answer)
        return answer.evicted

    def saved(self, key: BlockKey, shard: int) -> None:
        """The tier below has a copy of a record; one that is not here is ignored."""
        self._saves.saved(key, shard)

    def next_saves(self, max_bytes: int) -> list[Transfer]:
        """Write-behind to be done next, the longest committed first.

        At most `max_bytes` of records, but at least one if any has to be saved.
        """
        return self._saves.next(max_bytes)

    def rank_saves(self) -> None:
        """Do write-behind by value from here on: what was used last first, a block before those that build on it."""
        self._saves.rank(self._residents.heat())

    def complete(self, transfer: Transfer, *, ok: bool) -> None:
        """Tell the outcome of a transfer. One whose record was dropped meanwhile is void.

        After it a demoted block can be evicted at once: one that could not be copied goes without.
        """
        self._saves.complete(transfer, ok=ok)

    def restore(self, found: Iterable[Restored]) -> list[int]:
        """Take over the records that an earlier manager left in the arena; the slabs have been restored.

        Parents are found again by fingerprint and depth; a block whose parent is not here is an orphan. All
        are taken for unsaved until `saved` says otherwise.

        Returns:
            Slots of records that do not fit their slot or that another slot has as well. They are free again.
        """
        assert not self._residents.blocks, "nothing has been admitted yet"
        found = sorted(found, key=lambda item: (item.last_access, item.depth, item.slot))
        parents = {(_fingerprint(item.key), item.depth): item.key for item in found}
        refused = []
        for item in found:
            if not self._residents.fits(item.key, item.shard, item.num_bytes, item.slot):
                self._slabs.give(item.slot)
                refused.append(item.slot)
                continue
            parent = None
            if item.parent_fingerprint:
                absent = BlockKey(item.parent_fingerprint.to_bytes(4, "little") + bytes(KEY_BYTES - 4))
                parent = parents.get((item.parent_fingerprint, item.depth - 1), absent)
            block = NewBlock(item.key, item.shard, parent, item.num_bytes)
            self._residents.add(block, item.slot, item.last_access, item.depth)
            if item.committed:
                self.commit(item.key, item.shard, item.last_access)
        return refused

    def audit(self) -> list[str]:
        """What does not add up; nothing, unless there is a bug."""
        return self._residents.audit() + self._saves.audit()

    def _pending_record(self, key: BlockKey, shard: int) -> Record:
        record = self._residents.record(key, shard)
        assert record is not None, "record was granted"
        assert not record.committed, "record is being written"
        return record

    def _grant(self, blocks: Sequence[NewBlock], waiting: deque[int], answer: Admission, now: float) -> None:
        """Give the slots there are to the first that wait."""
        while waiting:
            block = blocks[waiting[0]]
            slot = self._slabs.take(self._slabs.slot_size(block.num_bytes))
            if slot is None:
                return
            self._residents.add(block, slot, now)
            answer.grants.append(Grant(waiting.popleft(), slot))

    def _make_room(self, size: int, need: int, protected: Container[BlockKey], answer: Admission) -> None:
        """Make `need` slots free, now or by transfers, as far as it goes."""

        def worth(key: BlockKey) -> int:
            block = self._residents.blocks[key]
            return 0 if block.busy or key in protected or key in self._holds else len(block.records)

        policy = self._residents.policy(size)
        own = deque(policy.victims(need, worth) if policy is not None else ())
        leaving: set[BlockKey] = set()
        for window in self._slabs.windows(size, self._residents.heat()) if self._slabs.others(size) else ():
            while own and need > 0 and self._residents.blocks[own[0]].last_used <= window.heat:
                need -= self._let_go([own.popleft()], answer)
            if need <= 0:
                return
            keys = self._closure(window.slots, worth, leaving)
            if keys is not None:
                self._let_go(keys, answer)
                leaving.update(keys)
                need -= self._slabs.slots_per_run(size)
        while own and need > 0:
            need -= self._let_go([own.popleft()], answer)

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
            records = self._residents.blocks[key].records
            num_slots += len(records)
            for shard, record in records.items():
                if self._saves.needed(record):
                    answer.transfers.append(self._saves.begin("demote", key, shard))
        if len(answer.transfers) == num_transfers:
            for key in keys:
                if self._residents.policy_of(key).is_leaf(key):  # else a child of it is being demoted
                    self._evict(key, answer)
        return num_slots

    def _evict(self, key: BlockKey, answer: Admission) -> None:
        for shard, record in list(self._residents.blocks[key].records.items()):
            answer.evicted.append(self._remove(key, shard))
            self.counters.evicted += 1
            self.counters.dropped_unsaved += not record.saved

    def _remove(self, key: BlockKey, shard: int) -> Evicted:
        record = self._residents.remove(key, shard)
        self._saves.forget(key, shard, record)
        return Evicted(key, shard, record.slot)


def _fingerprint(key: BlockKey) -> int:
    return int.from_bytes(key[:4], "little")

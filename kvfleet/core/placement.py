"""What one node holds: admission, eviction, accounting.

Plan, then act: nothing is copied here. `admit` says which slots to write and which blocks left for them;
`Transfer`s are copies somebody else makes and reports.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from kvfleet.core.admission import Admission, Counters, Evicted, Gate, Grant, LowerTier, NewBlock, Restored, Transfer
from kvfleet.core.block import BlockKey
from kvfleet.core.evictions import Evictions
from kvfleet.core.granting import Asked, Granting
from kvfleet.core.hints import NO_HINTS, Hints
from kvfleet.core.policies import PolicyFactory
from kvfleet.core.residents import Record, Residents
from kvfleet.core.saves import Saves
from kvfleet.core.slabs import SlabMap

__all__ = [
    "Admission",
    "Counters",
    "Evicted",
    "Gate",
    "Grant",
    "LowerTier",
    "NewBlock",
    "Placement",
    "Restored",
    "Transfer",
]

_NONE_BELOW: Mapping[LowerTier, Gate] = MappingProxyType({})


class Placement:
    """Decides which blocks a node's arena, or one of its drives, holds.

    Evicts on demand, for the exact deficit, leaf first and all shards of a key together. Busy blocks (being
    written or transferred) and held ones stay. With tiers below, a block that has no copy in any of them is demoted
    before it goes, to the first whose gate takes it: `admit` answers with transfers, and finds the room when it is
    asked again. One that no gate takes goes without.

    Room of other slot sizes is taken a run at a time, where a whole run with all its blocks' descendants was used
    less lately than what the size itself would evict.

    Threads: none of its own; calls must not overlap. Times are passed in, in seconds.
    """

    def __init__(self, slabs: SlabMap, policy: PolicyFactory, *, lower: Mapping[LowerTier, Gate] = _NONE_BELOW) -> None:
        """Start empty.

        Args:
            slabs: the slots, none taken, or as restored.
            policy: makes an eviction policy; one is made for each slot size.
            lower: the tiers to save blocks to, in order of demotion. Each gate is asked before a copy is begun.
        """
        self.counters = Counters()
        self._slabs = slabs
        self._residents = Residents(slabs, policy)
        self._holds: dict[BlockKey, int] = {}
        self._saves = Saves(self._residents, self.counters, lower)
        self._evictions = Evictions(slabs, self._residents, self._saves, self._holds, self.counters)
        self._granting = Granting(slabs, self._residents, self._evictions, self._saves)

    @property
    def used_bytes(self) -> int:
        """Bytes of all taken slots."""
        return self._slabs.used_bytes

    @property
    def in_transfer(self) -> int:
        """Transfers given out and not yet completed."""
        return self._saves.in_transfer

    def num_in_transfer(self, tier: LowerTier) -> int:
        """Those of them that go to one tier."""
        return self._saves.num_in_transfer(tier)

    def num_unsaved(self, tier: LowerTier) -> int:
        """Records that wait for a copy in a tier, or are being copied; 0 if there is no such tier."""
        return self._saves.num_unsaved(tier)

    def unsaved(self, *tiers: LowerTier) -> tuple[int, int]:
        """How many committed records have no copy in any of some tiers, and their bytes."""
        return self._saves.unsaved(tiers)

    def num_waiting(self, postponed: Iterable[tuple[BlockKey, int]]) -> int:
        """How many records have no copy below and are to have one; `postponed` are those that are in no queue now."""
        return self._saves.waiting(postponed)

    def parent(self, key: BlockKey) -> BlockKey | None:
        """The key before that of a block that is here; None for the first. An absent one may be a fingerprint only."""
        return self._residents.blocks[key].parent

    def retire(self, keys: Iterable[BlockKey]) -> None:
        """Somebody says that blocks will not be used again: the first to go. Those that are not here are ignored."""
        for key in keys:
            if key in self._residents.blocks:
                self._residents.policy_of(key).retire((key,))

    def block_bytes(self, key: BlockKey) -> int:
        """Bytes of the slots that a block's records have; 0 if it is not here."""
        block = self._residents.blocks.get(key)
        return 0 if block is None else block.size * len(block.records)

    def last_uses(self) -> dict[BlockKey, float]:
        """When each block was used last, or one that builds on it, in seconds; of those used at once parents later."""
        return self._residents.last_uses()

    def shards(self, key: BlockKey) -> list[int]:
        """The shards of a block that are here, committed or not."""
        block = self._residents.blocks.get(key)
        return [] if block is None else list(block.records)

    def saved_records(self, tier: LowerTier) -> list[tuple[BlockKey, int]]:
        """Committed records of which a tier has a copy."""
        return [(key, shard) for key, shard, r in self._residents.records() if r.committed and tier in r.saved]

    def is_saved(self, key: BlockKey, shard: int, tier: LowerTier) -> bool:
        """Whether a record that is here has a copy in a lower tier."""
        return self._saves.is_saved(key, shard, tier)

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
        return [Evicted(key, shard, r.slot) for key, shard, r in self._residents.records() if r.committed]

    def slots(self) -> list[int]:
        """All taken slots."""
        return [record.slot for _, _, record in self._residents.records()]

    def admit(
        self, blocks: Sequence[NewBlock], now: float, *, hints: Hints = NO_HINTS, optional: bool = False
    ) -> Admission:
        """Give slots to blocks, the first ones first, evicting others as far as needed.

        Blocks of the call and their parents are not evicted for each other, unless a tier below has them.

        Args:
            blocks: all of one size.
            now: counts as a use of the blocks that are here already. It is the last use of their parents too.
            hints: of who brings the blocks.
            optional: the policy may decline them, to keep what is here. Else they are needed here now, as for a load.
        """
        answer = Admission()
        wanted: dict[tuple[BlockKey, int], int] = {}
        involved = dict.fromkeys(key for block in blocks for key in (block.key, block.parent) if key is not None)
        for key in involved:
            self._residents.touch(key, now, uses=0)
        for index, block in enumerate(blocks):
            record_id = (block.key, block.shard)
            if record_id in wanted or self._residents.record(*record_id) is not None:
                answer.already.append(index)
                if self.resident(*record_id) is not None:
                    self.touch(block.key, now)
            else:
                wanted[record_id] = index
        waiting = deque(wanted.values())
        if waiting:
            self._granting.grant(Asked(blocks, now, hints, optional, involved), waiting, answer)
            answer.grants.sort(key=lambda grant: grant.index)
        if hints.final:
            self.retire(blocks[index].key for index in answer.already)
        answer.refused.extend(waiting)
        self.counters.count(answer)
        return answer

    def commit(self, key: BlockKey, shard: int, now: float, *, brought: bool = False) -> None:
        """A granted slot is written: its record is readable from now on. `brought`: by a load; see `Saves.brought`."""
        record = self._pending_record(key, shard)
        record.committed = True
        self._residents.blocks[key].busy -= 1
        self._residents.touch(key, now, uses=0)
        (self._saves.brought if brought else self._saves.want)(key)

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
        return [self._evictions.remove(key, shard) for shard in shards]

    def touch(self, key: BlockKey, now: float, *, uses: int = 1) -> None:
        """Note a use of a block; one that is not here is ignored. `uses`: 0 where it was counted already."""
        self._residents.touch(key, now, uses=uses)
        if uses:
            self._saves.used(key)

    def touch_slot(self, slot: int, now: float) -> BlockKey | None:
        """Note a use that a reader wrote into the record table. Returns whose slot it is; None if it is free."""
        key = self._residents.key_at(slot)
        if key is not None:
            self.touch(key, now, uses=int(self._residents.first(slot)))
        return key

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
        return self._evictions.give_way(num_bytes)

    def saved(self, key: BlockKey, shard: int, tier: LowerTier) -> None:
        """A tier has a copy of a record; one that is not here is ignored."""
        self._saves.saved(key, shard, tier)

    def lost(self, key: BlockKey, shard: int, tier: LowerTier, *, again: bool) -> None:
        """A tier has no copy of a record any more, if it is here. `again`: save it now, and not with its second use."""
        self._saves.lost(key, shard, tier, again=again)

    def next_saves(self, tier: LowerTier, max_bytes: int) -> list[Transfer]:
        """Write-behind to be done next, the longest committed first.

        At most `max_bytes` of records, but at least one if any has to be saved. What the tier's gate refuses is not
        asked about again until it is used again, or `requeue`d.
        """
        return self._saves.next(tier, max_bytes)

    def requeue(self, tier: LowerTier, *, every: bool = False) -> None:
        """Save all that has no copy in a tier, also what its gate refused or what failed; see `Saves.requeue`."""
        self._saves.requeue(tier, every=every)

    def rank_saves(self, tier: LowerTier) -> None:
        """Do write-behind by value from here on: what was used last first, a block before those that build on it."""
        self._saves.rank(tier, self._residents.heat())

    def complete(self, transfer: Transfer, *, ok: bool, again: bool = True) -> None:
        """Tell the outcome of a transfer. One whose record was dropped meanwhile is void.

        After it a demoted block can be evicted at once: one that no tier could take goes without. What failed is
        tried again in its turn, or only once it is used again.
        """
        self._saves.complete(transfer, ok=ok, again=again)

    def restore(self, found: Iterable[Restored]) -> list[int]:
        """Take over the records that an earlier process left in the slots; the slabs have been restored.

        Parents are found again by fingerprint and depth; a block whose parent is not here is an orphan. All
        are taken for unsaved until `saved` says otherwise.

        Returns:
            Slots of records that do not fit their slot or that another slot has as well. They are free again.
        """
        assert not self._residents.blocks, "nothing has been admitted yet"
        refused = []
        for item, fits in self._residents.restore(found):
            if not fits:
                refused.append(item.slot)
            elif item.committed:
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

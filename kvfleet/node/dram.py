"""The DRAM tier of a node: the arena, its record table, and the placement that decides over them.

`Placement` decides, this class carries its decisions out in shared memory in the one order that is safe: a block
leaves the record table before its slot is given to another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvfleet.core.block import BlockKey
from kvfleet.core.hints import NO_HINTS, Hints
from kvfleet.core.inventory import record_id
from kvfleet.core.placement import Evicted, Gate, LowerTier, NewBlock, Placement, Restored, Transfer
from kvfleet.core.policies import DEFAULT, POLICIES
from kvfleet.core.slabs import SlabMap
from kvfleet.node.arena import Arena
from kvfleet.node.holdings import Holdings
from kvfleet.node.messages import Bytes, Namespace
from kvfleet.node.namespaces import Namespaces
from kvfleet.node.records import Record, key_fingerprint

__all__ = ["NS", "DramTier", "Granted", "Incoming", "Reservation", "record_id"]

NS = 1e9  # in a second


@dataclass(frozen=True, slots=True)
class Incoming:
    """A block to reserve a slot for. `depth`: its index in its prefix."""

    block: NewBlock
    depth: int


@dataclass(frozen=True, slots=True)
class Granted:
    """A slot to be written: which of the asked-for blocks it is for, and where it is.

    Attributes:
        offset: in the arena file, bytes.
    """

    index: int
    slot: int
    generation: int
    offset: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """Outcome of `DramTier.reserve`.

    Attributes:
        granted: slots to write, in order of the blocks.
        already: indexes of blocks that are here or being written.
        refused: indexes of blocks that get no room until `transfers` are done.
        declined: indexes of blocks that are worth less than what is here.
        transfers: copies to lower tiers that would make room.
    """

    granted: list[Granted]
    already: list[int]
    refused: list[int]
    transfers: list[Transfer]
    declined: list[int]


class DramTier:
    """Blocks in one arena.

    Threads: all methods are called from one thread, the manager's event loop. Other processes read the arena at
    any time.

    Args:
        arena: of this node.
        directory: for what the blocks' namespaces are.
        lower: the tiers below, and what they take; see `Placement`.
        policy: what is kept, by name.
        now: monotonic seconds, by the clock that readers store last accesses by, in nanoseconds.

    Attributes:
        holdings: what is here, and may be in other tiers of the node too.
        num_records: that can be read here.
        on_use: told of each use of a block that readers have left word of, with its time.
    """

    def __init__(
        self,
        arena: Arena,
        directory: Path,
        *,
        lower: Mapping[LowerTier, Gate],
        now: Callable[[], float],
        policy: str = DEFAULT,
    ) -> None:
        self.arena = arena
        self.namespaces = Namespaces(directory, lambda: self._records.namespaces(self.placement.slots()))
        self._records = arena.records
        self._now = now
        self._slabs = SlabMap(arena.capacity_bytes, arena.unit_bytes, self._records.num_records, self._persist_unit)
        self.placement = Placement(self._slabs, POLICIES[policy], lower=lower)
        self.holdings = Holdings()
        self.on_use: Callable[[BlockKey, float], None] = lambda _key, _now: None
        self._number = self.holdings.add_tier(
            lambda key, shard: self.placement.resident(BlockKey(key), shard) is not None,
            lambda: ((held.key, held.shard) for held in self.placement.records()),
        )
        self._seen_access = np.zeros(self._records.num_records, np.uint64)
        self._slots_end = 0  # no slot from here on was ever used: large blocks need few of a table made for small ones
        self._reserved: dict[int, dict[int, int]] = {}
        self.num_records = 0
        self._recover()

    def _persist_unit(self, unit: int, value: int) -> None:
        self.arena.slab_table[unit] = value

    def _recover(self) -> None:
        """Take over what an earlier manager left: committed blocks, and slots whose writers may still be at work."""
        self._records.recover()
        live = {record.slot: record for record in self._records.live()}
        base = self.arena.slots_offset
        misfits = self._slabs.restore(self.arena.slab_table.tolist(), {s: r.offset - base for s, r in live.items()})
        for slot in misfits:
            self._records.free(slot)
            del live[slot]
        for slot in self.placement.restore(_restored(record) for record in live.values()):
            self._records.free(slot)
            del live[slot]
        self._slots_end = max(live, default=-1) + 1
        for record in live.values():
            if record.committed:
                self._tell(record.key, record.shard, present=True)
            else:
                self._reserved.setdefault(record.client_id, {})[record.slot] = record.generation
        self._seen_access[:] = self._records.last_access

    def view(self, slot: int, num_bytes: int) -> Bytes:
        """The bytes of a slot, writable, shape `(num_bytes,)`."""
        return self.arena.slot_view(self.arena.slots_offset + self._slabs.offset(slot), num_bytes)

    def reserve(
        self, blocks: Sequence[Incoming], namespace: Namespace, client_id: int, *, hints: Hints = NO_HINTS
    ) -> Reservation:
        """Slots for blocks of one prefix, evicting what must go for them.

        Args:
            blocks: in order, all of the same size.
            namespace: of all of them.
            client_id: of the writer; 0 for the manager, whose loads land in any case.
            hints: of the writer.
        """
        number = self.namespaces.index(namespace)
        self.note_accesses()
        asked = [incoming.block for incoming in blocks]
        admission = self.placement.admit(asked, self._now(), hints=hints, optional=client_id != 0)
        self._gone(admission.evicted)
        granted = []
        for grant in admission.grants:
            incoming = blocks[grant.index]
            block, offset = incoming.block, self.arena.slots_offset + self._slabs.offset(grant.slot)
            generation = self._records.reserve(
                grant.slot,
                key=block.key,
                shard=block.shard,
                parent_fingerprint=key_fingerprint(block.parent) if block.parent else 0,
                depth=incoming.depth,
                namespace=number,
                offset=offset,
                length=block.num_bytes,
                client_id=client_id,
            )
            granted.append(Granted(grant.index, grant.slot, generation, offset))
            self._slots_end = max(self._slots_end, grant.slot + 1)
            if client_id:
                self._reserved.setdefault(client_id, {})[grant.slot] = generation
        return Reservation(granted, admission.already, admission.refused, admission.transfers, admission.declined)

    def note_accesses(self) -> None:
        """Tell placement what readers did since the last time, oldest first; of what was read at once parents first."""
        recent, seen = self._records.last_access[: self._slots_end], self._seen_access[: self._slots_end]
        slots = np.flatnonzero(recent != seen)
        times = recent[slots]  # a copy: readers go on
        order = np.lexsort((self._records.depths(slots), times))
        for slot, time in zip(slots[order].tolist(), times[order].tolist(), strict=True):
            key = self.placement.touch_slot(slot, time / NS)
            if key is not None:
                self.on_use(key, time / NS)
        seen[slots] = times

    def commit(self, slot: int, generation: int, checksum: int, *, brought: bool = False) -> bool:
        """Make a written block visible. False: the slot is not, or no longer, this reservation's.

        A block that is committed with this generation already counts as a success: commits may come twice.
        `brought`: a load has brought it.
        """
        record = self._records.record(slot)
        if record.generation == generation + 1:
            return True
        if record.generation != generation or not self.placement.pending(BlockKey(record.key), record.shard):
            return False
        self._end_reservation(record)
        now = self._now()
        if not self._records.commit(slot, generation, checksum, int(now * NS)):
            self.placement.abort(BlockKey(record.key), record.shard)
            return False
        self._seen_access[slot] = int(now * NS)
        self.placement.commit(BlockKey(record.key), record.shard, now, brought=brought)
        self._tell(record.key, record.shard, present=True)
        return True

    def abort(self, slot: int, generation: int) -> None:
        """Take back a slot that will not be written. Nothing happens if the reservation is gone already."""
        record = self._records.record(slot)
        if record.generation == generation and self.placement.pending(BlockKey(record.key), record.shard):
            self._end_reservation(record)
            self._records.free(slot)
            self.placement.abort(BlockKey(record.key), record.shard)

    def _end_reservation(self, record: Record) -> None:
        slots = self._reserved.get(record.client_id, {})
        slots.pop(record.slot, None)
        if not slots:
            self._reserved.pop(record.client_id, None)

    @property
    def writers(self) -> frozenset[int]:
        """Clients that have slots reserved."""
        return frozenset(self._reserved)

    @property
    def num_reserved(self) -> int:
        """Slots that clients have reserved."""
        return sum(map(len, self._reserved.values()))

    def writing(self, key: BlockKey, shard: int) -> int | None:
        """The generation under which a record is being written, None if it is not."""
        slot = self.placement.writing(key, shard)
        return None if slot is None else self._records.record(slot).generation

    def abort_all(self, client_id: int) -> int:
        """Take back all that a client has reserved. Returns how many slots that were."""
        slots = dict(self._reserved.get(client_id, {}))
        for slot, generation in slots.items():
            self.abort(slot, generation)
        return len(slots)

    def hold(self, key: BlockKey) -> None:
        """Keep a block that is here until as many `release`s."""
        self.placement.hold(key)

    def release(self, key: BlockKey) -> None:
        """End a hold."""
        self.placement.release(key)

    def rank_saves(self, tier: LowerTier) -> None:
        """See `Placement.rank_saves`."""
        self.note_accesses()
        self.placement.rank_saves(tier)

    def drop(self, key: BlockKey) -> None:
        """Remove a block, all shards of it, held or not."""
        self._gone(self.placement.drop(key))

    def fits(self, num_bytes: int) -> bool:
        """Whether a block of that size can be here at all."""
        units = self._slabs.run_units(self._slabs.slot_size(num_bytes))
        return units * self.arena.unit_bytes <= self.arena.capacity_bytes

    def give_way(self, num_bytes: int) -> bool:
        """See `Placement.give_way`. False if there is no such block."""
        evicted = self.placement.give_way(num_bytes)
        self._gone(evicted)
        return bool(evicted)

    def _gone(self, evicted: Sequence[Evicted]) -> None:
        for gone in evicted:
            self._records.free(gone.slot)
            self._tell(gone.key, gone.shard, present=False)

    def _tell(self, key: bytes, shard: int, *, present: bool) -> None:
        self.num_records += 1 if present else -1
        self.holdings.changed(key, shard, present=present, tier=self._number)


def _restored(record: Record) -> Restored:
    return Restored(
        slot=record.slot,
        key=BlockKey(record.key),
        shard=record.shard,
        parent_fingerprint=record.parent_fingerprint,
        depth=record.depth,
        num_bytes=record.length,
        last_access=record.last_access / NS,
        committed=record.committed,
    )

"""The DRAM tier of a node: the arena, its record table, and the placement that decides over them.

`Placement` decides, this class carries its decisions out in shared memory in the one order that is safe: a block
leaves the record table before its slot is given to another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from kvfleet.core.block import BlockKey
from kvfleet.core.directory import RECORD_BYTES, Digest
from kvfleet.core.placement import Evicted, NewBlock, Placement, Restored, Transfer
from kvfleet.core.policies.lru import LeafFirstLRU
from kvfleet.core.slabs import SlabMap
from kvfleet.node.arena import Arena
from kvfleet.node.messages import Bytes, Namespace
from kvfleet.node.namespaces import Namespaces
from kvfleet.node.records import Record, key_fingerprint

__all__ = ["NS", "DramTier", "Granted", "Incoming", "Reservation", "record_id"]

NS = 1e9  # in a second


def record_id(key: bytes, shard: int) -> bytes:
    """A key and a shard as the directory names them: 18 bytes."""
    return key + shard.to_bytes(RECORD_BYTES - len(key), "little")


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
        transfers: copies to the tier below that would make room.
    """

    granted: list[Granted]
    already: list[int]
    refused: list[int]
    transfers: list[Transfer]


class DramTier:
    """Blocks in one arena.

    Threads: all methods are called from one thread, the manager's event loop. Other processes read the arena at
    any time.

    Args:
        arena: of this node.
        directory: for what the blocks' namespaces are.
        now: monotonic seconds, by the clock that readers store last accesses by, in nanoseconds.
    """

    def __init__(self, arena: Arena, directory: Path, *, lower_tier: bool, now: Callable[[], float]) -> None:
        self.arena = arena
        self.namespaces = Namespaces(directory, lambda: self._records.namespaces(self.placement.slots()))
        self._records = arena.records
        self._now = now
        self._slabs = SlabMap(arena.capacity_bytes, arena.unit_bytes, self._records.num_records, self._persist_unit)
        self.placement = Placement(self._slabs, LeafFirstLRU, lower_tier=lower_tier)
        self._seen_access = np.zeros(self._records.num_records, np.uint64)
        self._reserved: dict[int, dict[int, int]] = {}
        self._changes: dict[bytes, bool] = {}
        self._count = 0
        self._xor = 0
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
        for record in live.values():
            if record.committed:
                self._changed(record.key, record.shard, present=True)
            else:
                self._reserved.setdefault(record.client_id, {})[record.slot] = record.generation
        self._seen_access[:] = self._records.last_access

    def view(self, slot: int, num_bytes: int) -> Bytes:
        """The bytes of a slot, writable, shape `(num_bytes,)`."""
        return self.arena.slot_view(self.arena.slots_offset + self._slabs.offset(slot), num_bytes)

    def reserve(self, blocks: Sequence[Incoming], namespace: Namespace, client_id: int) -> Reservation:
        """Slots for blocks of one prefix, evicting what must go for them.

        Args:
            blocks: in order, all of the same size.
            namespace: of all of them.
            client_id: of the writer; 0 for the manager.
        """
        number = self.namespaces.index(namespace)
        self._note_accesses()
        admission = self.placement.admit([b.block for b in blocks], self._now())
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
            if client_id:
                self._reserved.setdefault(client_id, {})[grant.slot] = generation
        return Reservation(granted, admission.already, admission.refused, admission.transfers)

    def _note_accesses(self) -> None:
        """Tell placement what readers did since the last time, oldest first."""
        now = self._records.last_access.copy()
        slots = np.flatnonzero(now != self._seen_access)
        for slot in slots[np.argsort(now[slots], kind="stable")].tolist():
            self.placement.touch_slot(slot, int(now[slot]) / NS)
        self._seen_access = now

    def commit(self, slot: int, generation: int, checksum: int) -> bool:
        """Make a written block visible. False: the slot is not, or no longer, this reservation's.

        A block that is committed with this generation already counts as a success: commits may come twice.
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
        self.placement.commit(BlockKey(record.key), record.shard, now)
        self._changed(record.key, record.shard, present=True)
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

    def rank_saves(self) -> None:
        """See `Placement.rank_saves`."""
        self._note_accesses()
        self.placement.rank_saves()

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
            self._changed(gone.key, gone.shard, present=False)

    def _changed(self, key: bytes, shard: int, *, present: bool) -> None:
        record = record_id(key, shard)
        if self._changes.pop(record, present) == present:  # else it came and went: no news
            self._changes[record] = present
        self._count += 1 if present else -1
        self._xor ^= int.from_bytes(record, "little")

    # Holdings

    def take_changes(self, limit: int) -> dict[bytes, bool]:
        """At most so many of the records that came (True) or went (False) since they were last taken."""
        taken = dict(islice(self._changes.items(), limit))
        for record in taken:
            del self._changes[record]
        return taken

    def snapshot(self) -> list[bytes]:
        """All records that can be read now. Changes up to now are in it and are not reported again."""
        self._changes = {}
        return [record_id(held.key, held.shard) for held in self.placement.records()]

    def saved(self) -> list[bytes]:
        """Those of them that the shared tier has."""
        return [record_id(key, shard) for key, shard in self.placement.saved_records()]

    def digest(self) -> Digest:
        """Count and xor of all records that can be read now."""
        return Digest(self._count, self._xor.to_bytes(RECORD_BYTES, "little"))

    @property
    def num_changes(self) -> int:
        """How many changes are left to be taken."""
        return len(self._changes)


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

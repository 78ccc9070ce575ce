"""The books of an open drive: which blocks it has, in which slots, and who goes first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvfleet.core.block import BlockKey
from kvfleet.core.inventory import record_id
from kvfleet.core.placement import Evicted, Placement, Restored
from kvfleet.core.policies import POLICIES
from kvfleet.core.slabs import SlabMap
from kvfleet.node.driveentry import Entry
from kvfleet.node.driveindex import DriveIndex

__all__ = ["NS", "DriveBooks"]

NS = 1e9  # in a second


class DriveBooks:
    """What a drive holds, as the manager knows it; the index on the medium is told.

    Threads: the thread that opens the drive, then the event loop.

    Attributes:
        entries: what can be read, by record.
        placement: the slots of them and of what is being written. Lengths in it are those of slots.
        slabs: the slots.
        deleted: records that the index still has to forget, before any slot is written.
        table_changes: of the slab table, that the index has to be told with the next transaction.
    """

    def __init__(self, slabs_bytes: int, unit_bytes: int, records_max: int) -> None:
        """Start empty.

        Args:
            slabs_bytes: of the data file.
            unit_bytes: what slabs are made of.
            records_max: most entries.
        """
        self.table_changes: dict[int, int] = {}
        self.slabs = SlabMap(slabs_bytes, unit_bytes, records_max, self.table_changes.__setitem__)
        self.placement = Placement(self.slabs, POLICIES["lru"])
        self.entries: dict[bytes, Entry] = {}
        self.deleted: set[bytes] = set()

    def restore(self, index: DriveIndex, *, alone: bool) -> None:
        """Take over what an index speaks of; what cannot be is to be forgotten.

        Args:
            index: of the drive.
            alone: it is the only drive of its node: a block whose parent is not on it is an orphan.

        Raises:
            TierUnavailableError: the drive failed.
        """
        found: list[Entry] = []
        offsets: set[int] = set()
        for record, entry in index.entries():
            if entry is None or not 0 < entry.coded_bytes <= entry.slot_bytes or entry.offset in offsets:
                self.deleted.add(record)
            else:
                offsets.add(entry.offset)
                found.append(entry)
        found.sort(key=lambda entry: entry.offset)
        table = index.units(self.slabs.num_units)
        misfits = set(self.slabs.restore(table, {slot: entry.offset for slot, entry in enumerate(found)}))
        live = {slot: entry for slot, entry in enumerate(found) if slot not in misfits}
        misfits.update(self.placement.restore(_restored(live, alone=alone)))
        self.deleted.update(found[slot].record for slot in misfits)
        self.entries.update((entry.record, entry) for slot, entry in live.items() if slot not in misfits)

    def gone(self, evicted: Iterable[Evicted]) -> list[Entry]:
        """Take out what has left the placement. Returns what it was."""
        records = [record_id(gone.key, gone.shard) for gone in evicted]
        self.deleted.update(records)
        return [self.entries.pop(record) for record in records]

    def shards(self, key: BlockKey) -> list[Entry]:
        """The shards of a block; none if one of them is just being written."""
        found = [self.entries.get(record_id(key, shard)) for shard in self.placement.shards(key)]
        whole = [entry for entry in found if entry is not None]
        return whole if len(whole) == len(found) else []

    def stored(self, entry: Entry) -> None:
        """A block that was being written is on the medium, index and all."""
        self.placement.commit(BlockKey(entry.key), entry.shard, entry.last_access / NS)
        self.entries[entry.record] = entry

    def audit(self) -> list[str]:
        """What does not add up; nothing, unless there is a bug."""
        findings = self.placement.audit()
        there = {record_id(held.key, held.shard): held.slot for held in self.placement.records()}
        for record, entry in self.entries.items():
            slot = there.pop(record, None)
            if slot is None:
                findings.append(f"{record.hex()}: has no slot")
            elif (self.slabs.offset(slot), self.slabs.slot_bytes(slot)) != (entry.offset, entry.slot_bytes):
                findings.append(f"{record.hex()}: its slot at {entry.offset} is another's")
        return findings + [f"{record.hex()}: has a slot but no entry" for record in there]


def _restored(live: Mapping[int, Entry], *, alone: bool) -> Iterable[Restored]:
    """What a placement is told of entries. On one of several drives a parent may be on another: it is not missed."""
    here = {(int.from_bytes(entry.record[:4], "little"), entry.depth) for entry in live.values()}
    for slot, entry in live.items():
        known = alone or (entry.parent_fingerprint, entry.depth - 1) in here
        yield Restored(
            slot=slot,
            key=BlockKey(entry.key),
            shard=entry.shard,
            parent_fingerprint=entry.parent_fingerprint if known else 0,
            depth=entry.depth,
            num_bytes=entry.slot_bytes,
            last_access=entry.last_access / NS,
            committed=True,
        )

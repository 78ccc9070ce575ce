"""Making a drive fit a cap that is smaller than the one it was filled under.

Blocks that were used last longest ago are evicted until the rest fits. What is left of it beyond the new end of the
data file is copied to slots before it, and only then the file is cut. The process may die at any moment: an entry
speaks of its old slot until its new one is written, and the next start goes on.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from kvfleet.core.slabs import SlabMap
from kvfleet.errors import CorruptBlockError
from kvfleet.node.driveentry import Entry
from kvfleet.node.drivefile import DriveFile
from kvfleet.node.driveformat import Plan
from kvfleet.node.driveindex import BATCH_MAX, DriveIndex, index_bytes

__all__ = ["eviction_order", "shrink"]

_PLACE = 0xFFFF  # of a slab table value: which unit of its run it is
_MOVES_MAX = 64  # blocks copied before the index is told


def eviction_order(entries: Iterable[Entry]) -> list[list[Entry]]:
    """Blocks in the order in which they go, each with all its shards.

    What was used last longest ago goes first; a use of a block is one of all blocks before it in its prefix, so that
    none goes before those that build on it. Parents are known by their fingerprints.
    """
    blocks: dict[bytes, list[Entry]] = {}
    for entry in entries:
        blocks.setdefault(entry.record[:-2], []).append(entry)
    heat: dict[tuple[bytes, int, int], int] = {}  # of a parent, by what its children know of it
    order = []
    for key, shards in sorted(blocks.items(), key=lambda item: (-item[1][0].depth, item[0])):
        one = shards[0]
        here = (one.namespace_id, int.from_bytes(key[:4], "little"), one.depth)
        used = max(heat.get(here, 0), *(entry.last_access for entry in shards))
        order.append((used, -one.depth, key))
        if one.depth:
            above = (one.namespace_id, one.parent_fingerprint, one.depth - 1)
            heat[above] = max(heat.get(above, 0), used)
    return [blocks[key] for _, _, key in sorted(order)]


def shrink(index: DriveIndex, file: DriveFile, plan: Plan, spend: Callable[[int], None]) -> int:
    """Make an index and a data file fit a plan, if they do not; damaged entries go as well.

    Args:
        index: to be made smaller.
        file: to be made smaller.
        plan: what they may have.
        spend: told of bytes before they are written to the data file.

    Returns:
        How many entries had to go.

    Raises:
        TierFullError: the disk has no room to write the index anew.
        TierUnavailableError: the drive failed. What was done so far is done.

    Blocking: as long as it takes to copy what is beyond the new end.
    """
    num_before = index.num_entries
    if file.num_bytes > plan.num_units * plan.unit_bytes or num_before > plan.records_max:
        _Shrinking(index, file, plan, spend).run()
    num_evicted = num_before - index.num_entries
    if index.num_bytes > index_bytes(plan.records_max):
        index.shrink(plan.records_max)
    return num_evicted


class _Shrinking:
    def __init__(self, index: DriveIndex, file: DriveFile, plan: Plan, spend: Callable[[int], None]) -> None:
        self._index = index
        self._file = file
        self._spend = spend
        num_units = min(plan.num_units, file.num_bytes // plan.unit_bytes)
        self._table = index.units(file.num_bytes // plan.unit_bytes)
        # A run that the new end cuts in two goes as a whole: its slots must stay until they are copied.
        place = self._table[num_units] & _PLACE if num_units < len(self._table) else 0
        self._plan = replace(plan, num_units=max(1, num_units - place))
        self._end = self._plan.num_units * plan.unit_bytes

    def run(self) -> None:
        """Evict, move, cut."""
        entries = list(self._index.entries())
        self._delete([record for record, entry in entries if entry is None])
        order = eviction_order(entry for _, entry in entries if entry is not None)
        self._delete([entry.record for block in self._take_excess(order) for entry in block])
        within = {entry.offset: entry for block in order for entry in block if entry.offset < self._end}
        found = {offset: entry.slot_bytes for offset, entry in within.items()}
        self._slots = _Slots(self._plan, self._table, found)
        lost = {within[offset].record for offset in self._slots.lost}
        self._delete(list(lost))
        by_size: dict[int, deque[list[Entry]]] = {}
        for block in order:
            there = [entry for entry in block if entry.record not in lost]
            if there:
                by_size.setdefault(there[0].slot_bytes, deque()).append(there)
        for blocks in by_size.values():
            self._move(blocks)
        units = dict.fromkeys(range(self._plan.num_units, len(self._table)), 0)
        self._index.apply(units={**units, **self._slots.take_changes()})
        self._file.truncate(min(self._end, self._file.num_bytes))

    def _take_excess(self, order: list[list[Entry]]) -> list[list[Entry]]:
        """Take the coldest blocks out until the rest could fit, were it not for what slabs waste."""
        size = sum(entry.slot_bytes for block in order for entry in block)
        count = sum(map(len, order))
        num_blocks = 0
        while size > self._end or count > self._plan.records_max:
            size -= sum(entry.slot_bytes for entry in order[num_blocks])
            count -= len(order[num_blocks])
            num_blocks += 1
        excess, order[:] = order[:num_blocks], order[num_blocks:]
        return excess

    def _move(self, blocks: deque[list[Entry]]) -> None:
        """Copy what is beyond the end, the hottest first; where there is no room, the coldest makes it.

        Args:
            blocks: of one size, coldest first.
        """
        moved: list[Entry] = []
        while blocks:
            block = blocks.pop()
            beyond = [entry for entry in block if entry.offset >= self._end]
            offsets = self._room(beyond, blocks)
            if len(offsets) < len(beyond):
                for offset in offsets:
                    self._slots.give(offset)
                self._evict(block)
                continue
            for entry, offset in zip(beyond, offsets, strict=True):
                if self._copy(entry, offset):
                    moved.append(replace(entry, offset=offset))
                else:
                    self._slots.give(offset)
                    self._delete([entry.record])
            if len(moved) >= _MOVES_MAX:
                self._enter(moved)
                moved = []
        self._enter(moved)

    def _room(self, beyond: Sequence[Entry], colder: deque[list[Entry]]) -> list[int]:
        """Take a slot for each, or for as many as go."""
        offsets: list[int] = []
        while len(offsets) < len(beyond):
            offset = self._slots.take(beyond[0].slot_bytes)
            if offset is not None:
                offsets.append(offset)
            elif colder:
                self._evict(colder.popleft())
            else:
                break
        return offsets

    def _copy(self, entry: Entry, offset: int) -> bool:
        """Copy a slot to another. False if the file ends before it does."""
        data = np.frombuffer(mmap.mmap(-1, entry.slot_bytes), np.uint8)
        try:
            self._file.read(entry.offset, data)
        except CorruptBlockError:
            return False
        self._spend(entry.slot_bytes)
        self._file.write(offset, data)
        return True

    def _enter(self, moved: Sequence[Entry]) -> None:
        if moved:
            self._file.flush()
        for start in range(0, len(moved), BATCH_MAX // 2):
            batch = moved[start : start + BATCH_MAX // 2]
            self._index.apply(batch, [entry.record for entry in batch], units=self._slots.take_changes())

    def _evict(self, block: Sequence[Entry]) -> None:
        self._delete([entry.record for entry in block])
        for entry in block:
            if entry.offset < self._end:
                self._slots.give(entry.offset)

    def _delete(self, records: Sequence[bytes]) -> None:
        for start in range(0, len(records), BATCH_MAX):
            self._index.apply(delete=records[start : start + BATCH_MAX])


class _Slots:
    """The slots of a data file, named by their offsets.

    Attributes:
        lost: offsets where no slot of that size can be. They are not taken.
    """

    def __init__(self, plan: Plan, table: Sequence[int], found: Mapping[int, int]) -> None:
        self._changes: dict[int, int] = {}
        self._slabs = SlabMap(
            plan.num_units * plan.unit_bytes, plan.unit_bytes, plan.records_max, self._changes.__setitem__
        )
        self._numbers = {offset: number for number, offset in enumerate(found)}
        misfits = self._slabs.restore(
            [*table, *[0] * plan.num_units][: plan.num_units], {n: offset for offset, n in self._numbers.items()}
        )
        wrong = {n for offset, n in self._numbers.items() if n not in misfits and self._size(n) != found[offset]}
        self.lost = [offset for offset, number in self._numbers.items() if number in wrong or number in misfits]
        for offset in self.lost:
            number = self._numbers.pop(offset)
            if number in wrong:
                self._slabs.give(number)

    def _size(self, number: int) -> int:
        return self._slabs.slot_bytes(number)

    def take(self, size: int) -> int | None:
        """The offset of a free slot, or None."""
        number = self._slabs.take(size)
        if number is None:
            return None
        offset = self._slabs.offset(number)
        self._numbers[offset] = number
        return offset

    def give(self, offset: int) -> None:
        """A slot that the index does not speak of is free."""
        self._slabs.give(self._numbers.pop(offset))

    def take_changes(self) -> dict[int, int]:
        """What the index has to be told of the slab table."""
        changes = dict(self._changes)
        self._changes.clear()
        return changes

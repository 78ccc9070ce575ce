"""What the shared tier holds, and what of it must go when it is too much.

The catalog of the one manager that keeps it. Rows come in batches, are found by binary search in two sorted tables,
and the smaller one is merged into the larger when it has grown: 89 bytes a row, twice that during a merge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from kvfleet.core.inventory import RECORD_BYTES
from kvfleet.core.objectrows import ROW, ObjectRows, record_ids

__all__ = ["Catalog", "Flags"]

Ids = npt.NDArray[np.bytes_]
Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Codes = npt.NDArray[np.uint64]

_ID = np.dtype(f"S{RECORD_BYTES}")
_FRESH_MIN = 4096
_FRESH_PART = 8
_PAGE_ROWS = 1 << 13
_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F))


class _Table:
    """Rows sorted by record id, without duplicates; those with 0 bytes are vacant."""

    def __init__(self) -> None:
        self.ids: Ids = np.empty(0, _ID)
        self.rows: ObjectRows = np.empty(0, ROW)

    def find(self, ids: Ids) -> tuple[Numbers, Flags]:
        """Where some records are, or would be, and which of them are here."""
        places = np.searchsorted(self.ids, ids)
        here: Flags = places < len(self.ids)
        here[here] = self.ids[places[here]] == ids[here]
        return places, here

    def insert(self, ids: Ids, rows: ObjectRows) -> None:
        """Add records that are not here, sorted; vacant rows go."""
        keep = self.rows["bytes"] > 0
        kept, places = self.ids[keep], np.searchsorted(self.ids[keep], ids)
        self.ids = np.insert(kept, places, ids)
        merged = np.empty(len(self.ids), ROW)
        at = places + np.arange(len(ids))
        old = np.ones(len(merged), np.bool_)
        old[at] = False
        merged[at], merged[old] = rows, self.rows[keep]
        self.rows = merged


class Catalog:
    """The rows of all objects, at most `rows_max`; more are refused and counted.

    Threads: none of its own; calls must not overlap.

    Attributes:
        num_rows: objects known.
        num_bytes: of them.
        deleting_bytes: of those that are to be deleted.
        refused: rows for which there was no room.
    """

    def __init__(self, rows_max: int) -> None:
        assert rows_max > 0, "a catalog holds something"
        self._rows_max = rows_max
        self._old = _Table()
        self._fresh = _Table()
        self.num_rows = 0
        self.num_bytes = 0
        self.deleting_bytes = 0
        self.refused = 0

    def apply(self, rows: ObjectRows) -> ObjectRows:
        """Take in rows, in order; one record may come several times.

        A row with a time of storing replaces what was known. One without tells of a use; where the record is not known
        it is taken for the object. A row with 0 bytes tells that the object is gone. Of one that is to be deleted that
        is believed only if the row says that it was deleted, and a use changes nothing.

        Returns:
            The rows that changed, as they are now, for the manifests; those of objects that are gone have 0 bytes.
        """
        changed = [self._apply(part) for part in _distinct(rows)]
        self._settle()
        return np.concatenate(changed) if changed else np.empty(0, ROW)

    def _apply(self, rows: ObjectRows) -> ObjectRows:
        """Rows of different records, sorted."""
        ids = _ids(rows)
        changed = []
        for table in (self._old, self._fresh):
            places, here = table.find(ids)
            changed.append(self._update(table, places[here], rows[here]))
            ids, rows = ids[~here], rows[~here]
        there = rows["bytes"] > 0
        room = max(0, self._rows_max - self.num_rows)
        ids, rows = ids[there], rows[there]
        self.refused += len(rows[room:])
        ids, rows = ids[:room], rows[:room].copy()
        rows["stored_at"] = np.where(rows["stored_at"] == 0, rows["last_used"], rows["stored_at"])
        self._count(rows, 1)
        self._fresh.insert(ids, rows)
        return np.concatenate([*changed, rows])

    def _update(self, table: _Table, places: Numbers, rows: ObjectRows) -> ObjectRows:
        """Change rows that a table has; returns those that differ now."""
        before = table.rows[places]
        gone, use = rows["bytes"] == 0, (rows["stored_at"] == 0) & (before["bytes"] > 0)
        deleting = before["deleting"] == 1
        after = before.copy()
        used = use & ~gone & ~deleting
        after["last_used"][used] = np.maximum(before["last_used"], rows["last_used"])[used]
        for name in ("depth", "parent"):  # a listing does not tell them
            after[name][used] = rows[name][used]
        stored = ~use & ~gone
        after[stored] = rows[stored]
        after["last_used"][stored] = np.maximum(before["last_used"], rows["last_used"])[stored]
        after["stored_at"][stored] = np.where(rows["stored_at"] == 0, rows["last_used"], rows["stored_at"])[stored]
        after["bytes"][gone & (~deleting | (rows["deleting"] == 1))] = 0
        return self._replace(table, places, before, after)

    def _replace(self, table: _Table, places: Numbers, before: ObjectRows, after: ObjectRows) -> ObjectRows:
        different = np.not_equal(_raw(before), _raw(after)).any(axis=1)
        self._count(before, -1)
        self._count(after, 1)
        table.rows[places] = after
        return after[different]

    def _count(self, rows: ObjectRows, change: int) -> None:
        self.num_rows += change * int(np.count_nonzero(rows["bytes"]))
        self.num_bytes += change * int(rows["bytes"].sum())
        self.deleting_bytes += change * int(rows["bytes"][rows["deleting"] == 1].sum())
        assert min(self.num_rows, self.num_bytes, self.deleting_bytes) >= 0

    def _settle(self) -> None:
        """Merge the small table into the large one when it has grown."""
        fresh = self._fresh
        if len(fresh.ids) > max(_FRESH_MIN, len(self._old.ids) // _FRESH_PART):
            there = fresh.rows["bytes"] > 0
            self._old.insert(fresh.ids[there], fresh.rows[there])
            self._fresh = _Table()

    def pages(self) -> Iterator[bytes]:
        """Yield the packed record ids of all objects that are not being deleted."""
        for table in (self._old, self._fresh):
            for first in range(0, len(table.ids), _PAGE_ROWS):
                rows = table.rows[first : first + _PAGE_ROWS]
                there = (rows["bytes"] > 0) & (rows["deleting"] == 0)
                if there.any():
                    yield table.ids[first : first + _PAGE_ROWS][there].tobytes()

    def unknown(self, rows: ObjectRows) -> ObjectRows:
        """Those of some rows whose objects are not known."""
        return rows[~self.knows(rows)]

    def knows(self, rows: ObjectRows) -> Flags:
        """Which of some objects are known."""
        return self._found(rows, lambda known: known["bytes"] > 0)

    def still_deleting(self, rows: ObjectRows) -> Flags:
        """Which of some objects are to be deleted."""
        return self._found(rows, lambda known: (known["bytes"] > 0) & (known["deleting"] == 1))

    def _found(self, rows: ObjectRows, test: Callable[[ObjectRows], Flags]) -> Flags:
        ids = _ids(rows)
        found: Flags = np.zeros(len(ids), np.bool_)
        for table in self._tables:
            places, here = table.find(ids)
            found[here] |= test(table.rows[places[here]])
        return found

    def deleting(self, limit: int) -> ObjectRows:
        """At most so many of the rows of objects that are to be deleted. Looks at all rows."""
        found = [table.rows[(table.rows["bytes"] > 0) & (table.rows["deleting"] == 1)] for table in self._tables]
        return np.concatenate(found)[:limit]

    def deleted(self, rows: ObjectRows) -> ObjectRows:
        """Objects that were to be deleted are gone. Returns the rows that say so."""
        ids = _ids(rows)
        changed = []
        for table in self._tables:
            places, here = table.find(ids)
            before = table.rows[places[here]]
            after = before.copy()
            after["bytes"][before["deleting"] == 1] = 0
            changed.append(self._replace(table, places[here], before, after))
        return np.concatenate(changed)

    def shrink(self, num_bytes: int, limit: int) -> ObjectRows:
        """Mark objects to be deleted: those unused longest, leaf first, until `num_bytes` are or will be left.

        A use of a block is one of all blocks before it in its prefix, so that none goes before those that build on it.
        All shards of a block go together. Parents are known by fingerprint, depth and namespace: where two blocks are
        alike in all of them they are taken for one.

        Args:
            num_bytes: to be left, at most.
            limit: of blocks marked by one call.

        Returns:
            The rows of those objects, for the manifests.
        """
        excess = self.num_bytes - self.deleting_bytes - num_bytes
        if excess <= 0:
            return np.empty(0, ROW)
        places = [np.flatnonzero((table.rows["bytes"] > 0) & (table.rows["deleting"] == 0)) for table in self._tables]
        rows = np.concatenate([table.rows[place] for table, place in zip(self._tables, places, strict=True)])
        chosen = _coldest(rows, excess, limit)
        marked = []
        for table, place, first in zip(self._tables, places, (0, len(places[0])), strict=True):
            mine = place[chosen[first : first + len(place)]]
            before = table.rows[mine]
            after = before.copy()
            after["deleting"] = 1
            marked.append(self._replace(table, mine, before, after))
        return np.concatenate(marked)

    @property
    def _tables(self) -> tuple[_Table, _Table]:
        return self._old, self._fresh


def _ids(rows: ObjectRows) -> Ids:
    return np.frombuffer(record_ids(rows), _ID)


def _raw(rows: ObjectRows) -> npt.NDArray[np.uint8]:
    return np.frombuffer(rows.tobytes(), np.uint8).reshape(len(rows), ROW.itemsize)


def _distinct(rows: ObjectRows) -> Iterator[ObjectRows]:
    """Yield rows in sorted parts without duplicates, those of one record in their order."""
    ids = _ids(rows)
    order = np.argsort(ids, kind="stable")
    ids = ids[order]
    starts = np.flatnonzero(np.r_[True, ids[1:] != ids[:-1]]) if len(ids) else np.empty(0, np.int64)
    lengths = np.diff(np.r_[starts, len(ids)])
    for turn in range(int(lengths.max(initial=0))):
        yield rows[order[starts[lengths > turn] + turn]]


def _code(namespaces: Codes, fingerprints: Codes, depths: Codes) -> Codes:
    codes: Codes = (namespaces * _MIX[0]) ^ ((fingerprints << np.uint64(32) | depths) * _MIX[1])
    return codes


def _coldest(rows: ObjectRows, excess: int, limit: int) -> Flags:
    """Which rows go so that `excess` bytes do."""
    depth = rows["depth"].astype(np.uint64)
    namespace = _first_word(rows["namespace_id"])
    here = _code(namespace, _first_word(rows["key"]) & np.uint64(0xFFFF_FFFF), depth)
    above = _code(namespace, rows["parent"].astype(np.uint64), depth - np.uint64(1))
    block, index, members = np.unique(here, return_index=True, return_inverse=True)
    heat = np.full(len(block), np.iinfo(np.int64).min)
    np.maximum.at(heat, members, rows["last_used"])
    size = np.zeros(len(block), np.int64)
    np.add.at(size, members, rows["bytes"].astype(np.int64))
    level = depth[index].astype(np.int64)
    _warm_parents(heat, block, level, above[index])
    order = np.lexsort((block, -level, heat))
    gone = np.cumsum(size[order])
    count = min(limit, int(np.searchsorted(gone, excess)) + 1)
    victims: Flags = np.zeros(len(block), np.bool_)
    victims[order[:count]] = True
    chosen: Flags = victims[members]
    return chosen


def _warm_parents(heat: Numbers, block: Codes, depth: Numbers, above: Codes) -> None:
    """Give each block the heat of what follows it, deepest first.

    Args:
        heat: of each block, ms; changed.
        block: its code, sorted.
        depth: of each.
        above: the code of its parent.
    """
    order = np.argsort(-depth, kind="stable")
    ends = np.flatnonzero(np.diff(depth[order], append=-1) != 0) + 1
    start = 0
    for end in ends:
        level, start = order[start:end], int(end)
        if depth[level[0]] == 0:
            return
        places = np.minimum(np.searchsorted(block, above[level]), len(block) - 1)
        known = block[places] == above[level]
        np.maximum.at(heat, places[known], heat[level[known]])


def _first_word(names: npt.NDArray[np.void]) -> Codes:
    """The first 8 bytes of 16-byte names."""
    words: Codes = np.frombuffer(names.tobytes(), "<u8")[::2]
    return words

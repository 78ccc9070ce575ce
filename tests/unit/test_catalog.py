"""The catalog of the shared tier step by step, and against a plain model."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest

from kvfleet.core import catalog as catalog_module
from kvfleet.core.catalog import Catalog
from kvfleet.core.mailbox import Mailbox
from kvfleet.core.objectrows import ROW, ObjectRows, SharedObject, gone_rows, record_ids, rows_of

HOUR = 3_600_000


def key(number: int) -> bytes:
    return random.Random(number).randbytes(16)


def thing(number: int, *, size: int = 100, shard: int = 0, shards: int = 1, parent: int | None = None) -> SharedObject:
    """Object of a block at depth `number % 100`; its parent is the block before it."""
    depth = number % 100
    parent = number - 1 if parent is None else parent
    fingerprint = int.from_bytes(key(parent)[:4], "little") if depth else 0
    return SharedObject(bytes(16), key(number), shard, shards, size, depth, fingerprint)


def stored(*numbers: int, at: int = HOUR, size: int = 100) -> bytes:
    return b"".join(thing(number, size=size).row(stored_at=at, last_used=at) for number in numbers)


def used(*numbers: int, at: int) -> bytes:
    return b"".join(thing(number).row(stored_at=0, last_used=at) for number in numbers)


def gone(*numbers: int) -> bytes:
    return gone_rows(b"".join(thing(number).record for number in numbers))


def known(catalog: Catalog) -> set[bytes]:
    packed = b"".join(catalog.pages())
    found = {packed[first : first + 18] for first in range(0, len(packed), 18)}
    assert len(found) == len(packed) // 18
    return found


def ids(*numbers: int) -> set[bytes]:
    return {thing(number).record for number in numbers}


def split(rows: ObjectRows) -> set[bytes]:
    packed = record_ids(rows)
    return {packed[first : first + 18] for first in range(0, len(packed), 18)}


def filled(*packed: bytes, rows_max: int = 10_000) -> Catalog:
    catalog = Catalog(rows_max)
    catalog.apply(rows_of(b"".join(packed)))
    return catalog


def test_a_row_is_what_was_packed():
    one = thing(5, size=77, shard=2, shards=3)
    (row,) = rows_of(one.row(stored_at=3, last_used=4))
    assert row.tolist() == (bytes(16), key(5), 2, 3, 77, 3, 4, 5, one.parent_fingerprint, 0)
    assert record_ids(rows_of(one.row(stored_at=3, last_used=4))) == one.record == key(5) + b"\x02\x00"
    (row,) = rows_of(gone_rows(one.record))
    assert (row["key"].tobytes(), row["shard"], row["bytes"]) == (key(5), 2, 0)


def test_objects_come_and_go():
    catalog = filled(stored(1, 2, 3))
    assert known(catalog) == ids(1, 2, 3)
    assert (catalog.num_rows, catalog.num_bytes) == (3, 300)
    changed = catalog.apply(rows_of(gone(2, 7) + stored(4)))
    assert split(changed) == ids(2, 4)
    assert dict(zip(record_ids_of(changed), changed["bytes"].tolist(), strict=True)) == {
        thing(2).record: 0,
        thing(4).record: 100,
    }
    assert known(catalog) == ids(1, 3, 4)
    assert (catalog.num_rows, catalog.num_bytes) == (3, 300)
    assert len(catalog.apply(rows_of(gone(2)))) == 0
    assert split(catalog.apply(rows_of(stored(2)))) == ids(2)
    assert known(catalog) == ids(1, 2, 3, 4)


def record_ids_of(rows: ObjectRows) -> list[bytes]:
    packed = record_ids(rows)
    return [packed[first : first + 18] for first in range(0, len(packed), 18)]


def test_a_use_keeps_what_is_known_and_makes_known_what_is_not():
    catalog = filled(stored(1, at=HOUR, size=55))
    (row,) = catalog.apply(rows_of(used(1, at=3 * HOUR)))
    assert (row["bytes"], row["stored_at"], row["last_used"]) == (55, HOUR, 3 * HOUR)
    assert len(catalog.apply(rows_of(used(1, at=2 * HOUR)))) == 0
    (row,) = catalog.apply(rows_of(used(2, at=2 * HOUR)))
    assert (row["bytes"], row["stored_at"], row["last_used"]) == (100, 2 * HOUR, 2 * HOUR)
    (row,) = catalog.apply(rows_of(gone(1) + used(1, at=5 * HOUR)))[-1:]
    assert (row["bytes"], row["stored_at"], row["last_used"]) == (100, 5 * HOUR, 5 * HOUR)
    assert known(catalog) == ids(1, 2)


def test_a_full_catalog_refuses_and_counts():
    catalog = filled(stored(1, 2, 3), rows_max=2)
    assert (catalog.num_rows, catalog.refused) == (2, 1)
    catalog.apply(rows_of(gone(*range(4)) + stored(3)))
    assert known(catalog) == ids(3)


def deleting(catalog: Catalog) -> set[bytes]:
    return split(catalog.deleting(1000))


def test_those_unused_longest_go_first_and_leaves_before_their_parents():
    catalog = filled(stored(0, 1, 2, at=HOUR), stored(100, 101, at=2 * HOUR), stored(200, at=3 * HOUR))
    catalog.shrink(600, 10)
    assert deleting(catalog) == set()
    catalog.shrink(500, 10)
    assert deleting(catalog) == ids(2)
    catalog.shrink(400, 10)
    assert deleting(catalog) == ids(1, 2)
    catalog.apply(rows_of(used(0, at=9 * HOUR)))
    catalog.shrink(100, 10)
    assert deleting(catalog) == ids(1, 2, 100, 101, 200)
    assert known(catalog) == ids(0)
    assert (catalog.num_bytes, catalog.deleting_bytes) == (600, 500)


def test_a_use_of_a_leaf_keeps_what_is_before_it():
    catalog = filled(stored(0, 1, 2, at=HOUR), stored(100, 101, at=2 * HOUR), used(2, at=4 * HOUR))
    catalog.shrink(300, 10)
    assert deleting(catalog) == ids(100, 101)


def test_all_shards_of_a_block_go_together():
    rows = b"".join(thing(100, shard=s, shards=2).row(stored_at=1, last_used=1 + s) for s in range(2))
    catalog = filled(rows, stored(200, at=2))
    catalog.shrink(250, 10)
    assert deleting(catalog) == {thing(100, shard=s, shards=2).record for s in range(2)} | ids()
    assert known(catalog) == ids(200)


def test_no_more_blocks_are_marked_than_asked_for():
    catalog = filled(stored(*range(0, 1000, 100)))
    marked = catalog.shrink(0, 3)
    assert split(marked) == deleting(catalog)
    assert (len(marked), set(marked["deleting"].tolist())) == (3, {1})
    assert len(catalog.shrink(10**9, 3)) == 0
    assert len(catalog.deleting(2)) == 2


def test_what_is_to_be_deleted_goes_when_it_was_deleted():
    catalog = filled(stored(0, 100, 200))
    catalog.shrink(0, 2)
    doomed = catalog.deleting(10)
    catalog.apply(rows_of(b"".join(gone_rows(record) for record in deleting(catalog))))
    assert deleting(catalog) == split(doomed)
    catalog.apply(rows_of(used(0, 100, 200, at=9 * HOUR)))
    assert deleting(catalog) == split(doomed)
    one, other = doomed[:1], doomed[1:]
    told = catalog.deleted(one)
    assert told["bytes"].tolist() == [0]
    assert deleting(catalog) == split(other)
    number = next(n for n in (0, 100, 200) if thing(n).record in split(other))
    catalog.apply(rows_of(stored(number)))  # somebody has stored it again
    assert deleting(catalog) == set()
    assert len(catalog.deleted(other)) == 0
    assert (catalog.num_rows, catalog.num_bytes, catalog.deleting_bytes) == (2, 200, 0)
    again = Catalog(10)
    again.apply(np.concatenate([doomed, told]))
    assert deleting(again) == split(other)


def test_it_is_as_a_dict_would_be(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(catalog_module, "_FRESH_MIN", 8)
    rng = random.Random(3)
    catalog, model = Catalog(1000), dict[bytes, int]()
    manifest = dict[bytes, ObjectRows]()
    for step in range(200):
        letter = []
        for _ in range(rng.randrange(12)):
            number, at = rng.randrange(60), HOUR + step
            record = thing(number).record
            kind = rng.choice(("stored", "used", "gone"))
            if kind == "gone":
                model.pop(record, None)
                letter.append(gone(number))
            else:
                size = 100 + step if kind == "stored" else model.get(record, 100)
                model[record] = size
                letter.append(stored(number, at=at, size=size) if kind == "stored" else used(number, at=at))
        for row in np.split(changed := catalog.apply(rows_of(b"".join(letter))), len(changed)) if letter else []:
            manifest.update(dict.fromkeys(record_ids_of(row), row))
        assert known(catalog) == model.keys()
        assert (catalog.num_rows, catalog.num_bytes) == (len(model), sum(model.values()))
    told = {record: int(row["bytes"][0]) for record, row in manifest.items() if row["bytes"][0]}
    assert told == model


def test_a_hundred_thousand_rows_take_little_memory():
    rng = np.random.default_rng(1)
    rows = np.zeros(100_000, ROW)
    rows["key"] = np.frombuffer(rng.bytes(16 * len(rows)), "V16")
    rows["depth"] = np.arange(len(rows)) % 500
    rows["parent"][1:] = np.frombuffer(rows["key"].tobytes(), "<u4")[::4][:-1]
    rows["num_shards"], rows["bytes"], rows["stored_at"] = 1, 4096, 1
    rows["last_used"] = rng.permutation(len(rows)) + 1
    tracemalloc.start()
    catalog = Catalog(1_000_000)
    for first in range(0, len(rows), 10_000):
        catalog.apply(rows[first : first + 10_000])
    kept, _ = tracemalloc.get_traced_memory()
    catalog.shrink(4096 * 50_000, 1 << 20)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 100 * len(rows)
    assert peak < 400 * len(rows)
    assert len(known(catalog)) == 50_000
    kept_ids = known(catalog)
    stays = [record in kept_ids for record in record_ids_of(rows)]
    assert not any(stays[child] and not stays[child - 1] for child in range(len(rows)) if rows["depth"][child])


# --- the mailbox


def test_letters_stay_until_they_are_written_down():
    box = Mailbox(5)
    assert box.post(stored(1, 2)) == 2
    assert box.post(stored(3)) == 3
    assert box.post(stored(4, 5, 6)) is None
    assert (len(box), box.posted, box.refused) == (3, 3, 3)
    assert box.read(0, 1) == (stored(1, 2), 2)
    assert box.read(0, 3) == (stored(1, 2, 3), 3)
    assert box.read(2, 3) == (stored(3), 3)
    assert box.read(3, 3) == (b"", 3)
    box.acknowledge(2)
    assert (len(box), box.written) == (1, 2)
    assert box.post(stored(4, 5, 6)) == 6
    assert box.read(2, 9) == (stored(3, 4, 5, 6), 6)
    box.acknowledge(6)
    assert (len(box), box.posted, box.written) == (0, 6, 6)


def test_a_letter_of_nothing_is_a_bug():
    box = Mailbox(5)
    for letter in (b"", bytes(70)):
        with pytest.raises(AssertionError):
            box.post(letter)
    box.post(stored(1, 2))
    with pytest.raises(AssertionError):
        box.acknowledge(1)

from __future__ import annotations

import io
import json
import tracemalloc
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from kvfleet.core.objectrows import ROW, record_ids
from kvfleet.errors import StaleEpochError, TierUnavailableError
from kvfleet.node import manifestwriter
from kvfleet.node.manifestfile import About, Manifest, ManifestMaker, Skip, Unreadable
from kvfleet.node.manifestlist import CURRENT, FOLDER, Current, ManifestFile, file_name
from kvfleet.node.manifests import ManifestReader
from kvfleet.node.manifestwriter import ManifestWriter
from kvfleet.node.objects import Child, ObjectStore
from tests.manifest_store import MANY, NAMESPACE, Store, expected, files, rows_of, state, told

# --- one file


def test_rows_come_back_and_any_tool_reads_them():
    maker = ManifestMaker()
    maker.write(rows_of(*range(5)))
    maker.write(rows_of(7, gone=True))
    data = maker.finish(About(True, ("a",), ("b", "c")))
    manifest = Manifest(data)
    assert manifest.about == About(True, ("a",), ("b", "c"))
    assert manifest.num_rows == 6
    (rows,) = manifest.rows()
    assert rows.tobytes() == np.concatenate([rows_of(*range(5)), rows_of(7, gone=True)]).tobytes()
    table = pq.read_table(io.BytesIO(data))
    assert table.column_names == list(ROW.names or ())
    assert table["namespace_id"].to_pylist() == [NAMESPACE] * 6
    assert table["bytes"].to_pylist() == [4096, 4097, 4098, 4099, 4100, 0]
    assert str(table["stored_at"][0].as_py()) == "2026-11-30 00:53:20+00:00"


def test_record_ids_are_those_of_the_directory():
    assert record_ids(rows_of(3)) == xxhash.xxh3_128_digest((3).to_bytes(8, "little")) + b"\x01\x00"


def test_many_rows_are_read_in_pages():
    maker = ManifestMaker()
    rows = np.repeat(rows_of(0, 1, 2), 50_000)
    for first in range(0, len(rows), 40_000):
        maker.write(rows[first : first + 40_000])
    pages = list(Manifest(maker.finish(About())).rows())
    assert [len(page) for page in pages] == [65_536, 65_536, 18_928]
    assert np.concatenate(pages).tobytes() == rows.tobytes()


def test_a_file_without_rows():
    assert list(Manifest(ManifestMaker().finish(About())).rows()) == []


def refused(data: bytes) -> Skip:
    with pytest.raises(Unreadable) as caught:
        list(Manifest(data).rows())
    return caught.value.reason


def parquet(table: pa.Table, metadata: object = None) -> bytes:
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, table.schema, store_schema=False) as writer:
        writer.write_table(table)
        if metadata is not None:
            writer.add_key_value_metadata({"kvfleet.manifest": json.dumps(metadata)})
    return sink.getvalue()


def test_other_files_are_refused_for_a_reason():
    ours = {"format": 1, "snapshot": False, "parts": [], "replaces": []}
    other = pa.table({"key": [1, 2]})
    assert refused(b"") is Skip.DAMAGED
    assert refused(b"PAR1" * 5) is Skip.DAMAGED
    assert refused(parquet(other)) is Skip.FOREIGN
    assert refused(parquet(other, "text")) is Skip.FOREIGN
    assert refused(parquet(other, ours)) is Skip.FOREIGN
    assert refused(parquet(other, ours | {"format": 2})) is Skip.NEWER
    assert refused(parquet(other, ours | {"parts": [1]})) is Skip.DAMAGED
    assert refused(bytes((64 << 20) + 1)) is Skip.TOO_BIG


def test_too_long_groups_of_rows_and_impossible_rows_are_refused():
    maker = ManifestMaker()
    maker.write(np.repeat(rows_of(1), 1000))
    table = pq.read_table(io.BytesIO(maker.finish(About())))
    ours = {"format": 1, "snapshot": False, "parts": [], "replaces": []}
    schema = pa.schema([field.with_nullable(False) for field in table.schema])

    def again(table: pa.Table) -> bytes:
        return parquet(pa.table(table.columns, schema=schema), ours)

    assert len(list(Manifest(again(table)).rows())) == 1
    assert refused(again(pa.concat_tables([table] * 66).combine_chunks())) is Skip.TOO_BIG
    assert refused(again(table.set_column(2, "shard", pa.array([2] * 1000, pa.uint16())))) is Skip.DAMAGED
    nullable = table.set_column(4, "bytes", pa.array([None] * 1000, pa.uint64()))
    assert refused(parquet(nullable, ours)) is Skip.FOREIGN


def test_no_flipped_bit_gives_other_rows():
    maker = ManifestMaker()
    maker.write(rows_of(*range(40)))
    data = maker.finish(About())
    file = ManifestFile("0000000001-0000000001.parquet", len(data), 40, f"{xxhash.xxh3_64_intdigest(data):016x}")
    harmless = 0
    for bit in range(0, 8 * len(data), 41):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert not file.is_of(bytes(flipped))
        try:
            pages = list(Manifest(bytes(flipped)).rows())
        except Unreadable:
            continue
        harmless += 1
        keys = np.concatenate([page["key"] for page in pages]) if pages else np.empty(0, "V16")
        assert set(keys.tolist()) <= set(rows_of(*range(40))["key"].tolist())
    assert harmless < 8 * len(data) / 41 / 2


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=400))
def test_garbage_is_refused(data: bytes):
    for garbage in (data, b"PAR1" + data + len(data).to_bytes(4, "little") + b"PAR1"):
        assert refused(garbage) in (Skip.DAMAGED, Skip.FOREIGN)


# --- the set of files


@pytest.fixture(params=["memory", "file"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    url = f"memory://{uuid.uuid4().hex}/kv" if request.param == "memory" else f"file://{tmp_path}/kv"
    store = ObjectStore(url, {}, timeout_s=10)
    store.make_root()
    yield store
    store.close()
    MemoryFileSystem.store.clear()


def test_a_fresh_fleet_is_told_what_was_appended(objects: ObjectStore):
    assert told(objects) == {}
    writer = ManifestWriter(objects, MANY)
    assert told(objects) == {}
    writer.append(rows_of(1, 2, 3))
    writer.append(rows_of(2, gone=True))
    writer.append(rows_of(4))
    assert told(objects) == expected(1, 3, 4)
    writer.compact()
    assert told(objects) == expected(1, 3, 4)
    writer.append(rows_of(2))
    assert told(objects) == expected(1, 2, 3, 4)
    writer.compact()
    writer.append(rows_of(1, gone=True))
    assert told(objects) == expected(2, 3, 4)
    assert ManifestWriter(objects, MANY).epoch == 2


def test_nothing_is_listed_as_long_as_current_is_there():
    store = Store()
    writer = ManifestWriter(store, MANY)
    assert store.methods() == ["get", "list", "put"]
    for number in range(100):
        writer.append(rows_of(number))
    store.calls.clear()
    reader = ManifestReader(store)
    assert state(reader) == expected(*range(100))
    assert not reader.listed
    assert "list" not in store.methods()
    assert len(store.calls) == 1 + reader.files + 2
    assert reader.files <= manifestwriter.DELTAS_MAX + 1
    assert not reader.skipped


def test_the_last_row_of_a_record_counts():
    store = Store()
    writer = ManifestWriter(store, MANY)
    writer.append(np.concatenate([rows_of(1, 2), rows_of(1, gone=True), rows_of(2, gone=True), rows_of(2)]))
    assert told(store) == expected(2)
    writer.compact()
    assert told(store) == expected(2)


def test_files_are_compacted_and_those_replaced_are_deleted_one_time_later():
    store = Store()
    writer = ManifestWriter(store, MANY)
    for number in range(3):
        writer.append(rows_of(number))
    writer.compact()
    assert files(store) == {file_name(1, seq) for seq in (1, 2, 3, 4)}
    writer.append(rows_of(3))
    assert files(store) == {file_name(1, seq) for seq in (1, 2, 3, 4, 5)}
    writer.compact()
    assert files(store) == {file_name(1, seq) for seq in (4, 5, 6)}
    assert told(store) == expected(0, 1, 2, 3)


def test_the_number_of_files_is_bounded():
    store = Store()
    writer = ManifestWriter(store, MANY)
    for number in range(150):
        writer.append(rows_of(number % 50, gone=number >= 125))
    assert len(files(store)) <= 2 * manifestwriter.DELTAS_MAX + 2
    assert told(store) == expected(*range(25))


def test_few_changes_of_many_rows_are_folded_and_the_snapshot_stays():
    store = Store()
    writer = ManifestWriter(store, MANY)
    writer.append(rows_of(*range(2000)))
    writer.compact()
    writer.compact()
    (snapshot,) = files(store) - {file_name(1, 1), file_name(1, 2)}
    for number in range(3 * manifestwriter.DELTAS_MAX):
        writer.append(rows_of(number, gone=number % 2 == 0))
    current = Current.read(store)
    assert current is not None
    assert [file.name for file in current.snapshot] == [snapshot]
    assert len(current.deltas) <= manifestwriter.DELTAS_MAX
    assert len(files(store)) < 3 * manifestwriter.DELTAS_MAX
    left = set(range(2000)) - set(range(0, 3 * manifestwriter.DELTAS_MAX, 2))
    assert told(store) == expected(*left)
    del store.objects[CURRENT]
    assert told(store) == expected(*left)
    ManifestWriter(store, MANY).compact()
    assert told(store) == expected(*left)


def test_many_rows_are_compacted_early(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(manifestwriter, "DELTA_ROWS_MAX", 10)
    writer = ManifestWriter(Store(), MANY)
    writer.append(rows_of(*range(10)))
    assert not writer.is_crowded
    writer.append(rows_of(11))
    assert writer.is_crowded
    writer.append(rows_of(12))
    assert not writer.is_crowded


def test_a_snapshot_of_many_rows_has_parts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(manifestwriter, "PART_ROWS_MAX", 10)
    store = Store()
    writer = ManifestWriter(store, MANY)
    for first in range(0, 40, 4):
        writer.append(rows_of(*range(first, first + 4)))
        writer.compact()
    current = Current.read(store)
    assert current is not None
    assert len(current.snapshot) == 5  # pages of 4 rows: two in a part
    assert told(store) == expected(*range(40))
    del store.objects[CURRENT]
    assert told(store) == expected(*range(40))


def test_a_snapshot_has_no_more_rows_than_allowed():
    store = Store()
    writer = ManifestWriter(store, rows_max=5)
    writer.append(rows_of(*range(9)))
    writer.compact()
    assert told(store) == expected(*range(5))


def test_wrong_rows_are_bugs():
    writer = ManifestWriter(Store(), MANY)
    impossible = rows_of(1)
    impossible["shard"] = 2
    for rows in (rows_of(), np.zeros(1, np.uint8), impossible, np.zeros((1 << 16) + 1, ROW)):
        with pytest.raises(AssertionError):
            writer.append(rows)


# --- damage


def written() -> Store:
    """Five appends, two of them in a snapshot."""
    store = Store()
    writer = ManifestWriter(store, MANY)
    for number in range(5):
        writer.append(rows_of(number))
        if number == 1:
            writer.compact()
    return store


def test_damaged_and_absent_files_are_skipped_and_counted():
    names = [file_name(1, seq) for seq in (3, 4, 5, 6)]
    lost = dict(zip(names, ((0, 1), (2,), (3,), (4,)), strict=True))
    for name in names:
        for damage, reason in ((None, Skip.ABSENT), (b"", Skip.DAMAGED), (b"x" * 99, Skip.DAMAGED)):
            store = written()
            path = f"{FOLDER}/{name}"
            if damage is None:
                del store.objects[path]
            else:
                store.objects[path] = damage
            reader = ManifestReader(store)
            assert state(reader) == expected(*({0, 1, 2, 3, 4} - set(lost[name])))
            assert +reader.skipped == {reason: 1}
            writer = ManifestWriter(store, MANY)
            writer.append(rows_of(9))
            with pytest.raises(TierUnavailableError, match="not replaced yet"):
                writer.compact()
            assert told(store) == expected(*({0, 1, 2, 3, 4, 9} - set(lost[name])))
            writer.compact()
            assert told(store) == expected(*({0, 1, 2, 3, 4, 9} - set(lost[name])))
            assert writer.skipped[reason] >= 2


def test_a_file_that_was_damaged_on_the_way_is_read_again():
    store = written()
    get, path = store.get, f"{FOLDER}/{file_name(1, 3)}"
    bad = 1

    def cut(asked, bytes_max):
        nonlocal bad
        data = get(asked, bytes_max)
        if asked != path or not bad or data is None:
            return data
        bad -= 1
        return data[:-1]

    store.get = cut
    reader = ManifestReader(store)
    assert state(reader) == expected(0, 1, 2, 3, 4)
    assert not reader.skipped
    writer = ManifestWriter(store, MANY)
    bad = 4  # the snapshot is read twice, each time twice
    with pytest.raises(TierUnavailableError, match="not replaced yet"):
        writer.compact()
    writer.compact()
    assert told(store) == expected(0, 1, 2, 3, 4)


@pytest.mark.parametrize("damage", ["absent", "empty", "cut", "flipped", "other"])
def test_without_current_the_folder_is_listed(damage: str):
    store = written()
    store.objects[f"{FOLDER}/notes.txt"] = b"hello"
    data = store.objects.pop(CURRENT)
    if damage != "absent":
        other = b"{}\n" + f"{xxhash.xxh3_64_intdigest(b'{}'):016x}\n".encode()
        flipped = data.replace(b'"seq": 6', b'"seq": 7')
        store.objects[CURRENT] = {"empty": b"", "cut": data[:50], "flipped": flipped, "other": other}[damage]
    reader = ManifestReader(store)
    assert state(reader) == expected(0, 1, 2, 3, 4)
    assert reader.listed
    assert reader.skipped[Skip.FOREIGN] == 1 + (damage == "other")
    assert reader.skipped[Skip.DAMAGED] == (damage in ("empty", "cut", "flipped"))
    writer = ManifestWriter(store, MANY)
    assert writer.epoch == 2
    writer.append(rows_of(5))
    assert told(store) == expected(0, 1, 2, 3, 4, 5)
    writer.compact()
    writer.compact()
    assert files(store) == {"notes.txt", file_name(2, 2), file_name(2, 3)}


def test_a_newer_format_is_not_misread_nor_overwritten():
    store = written()
    line, _, _ = store.objects[CURRENT].partition(b"\n")
    line = line.replace(b'"format": 1', b'"format": 2')
    newer = line + f"\n{xxhash.xxh3_64_intdigest(line):016x}\n".encode()
    writer = ManifestWriter(store, MANY)
    store.objects[CURRENT] = newer
    reader = ManifestReader(store)
    assert state(reader) == {}
    assert reader.skipped == {Skip.NEWER: 1}
    with pytest.raises(TierUnavailableError, match="format 2"):
        ManifestWriter(store, MANY)
    with pytest.raises(TierUnavailableError, match="format 2"):
        writer.append(rows_of(1))
    assert store.objects[CURRENT] == newer


# --- two writers


def test_an_older_writer_stops():
    store = Store()
    old = ManifestWriter(store, MANY)
    old.append(rows_of(1))
    new = ManifestWriter(store, MANY, epoch_min=7)
    assert new.epoch == 7
    for act in (lambda: old.append(rows_of(2)), old.compact):
        with pytest.raises(StaleEpochError) as caught:
            act()
        assert (caught.value.epoch, caught.value.current) == (1, 7)
    new.append(rows_of(3))
    assert told(store) == expected(1, 3)


def test_of_two_writers_of_one_epoch_the_later_stays():
    store = Store()
    first = ManifestWriter(store, MANY)
    current = store.objects.pop(CURRENT)
    second = ManifestWriter(store, MANY)
    assert second.epoch == first.epoch
    second.append(rows_of(2))
    with pytest.raises(StaleEpochError):
        first.append(rows_of(1))
    assert store.objects[CURRENT] != current


def test_what_an_older_writer_puts_late_is_put_right():
    store = Store()
    old = ManifestWriter(store, MANY)
    old.append(rows_of(1))
    late = store.objects[CURRENT]
    new = ManifestWriter(store, MANY)
    new.append(rows_of(2))
    store.objects[CURRENT] = late
    assert told(store) == expected(1)  # less than there is, but nothing wrong
    new.append(rows_of(3))
    assert told(store) == expected(1, 2, 3)


def test_a_reader_that_is_overtaken_starts_again():
    store = written()
    writer = ManifestWriter(store, MANY)
    pages = ManifestReader(store)
    reading = pages.read()
    seen = [next(reading)]
    for number in range(5, 8):
        writer.append(rows_of(number))
        writer.compact()
    seen += reading
    ids = {record_ids(rows[index : index + 1]) for rows in seen for index in range(len(rows))}
    assert ids == expected(*range(8)).keys()
    assert pages.skipped[Skip.ABSENT] > 0


# --- crashes and failures


def test_a_file_that_appears_late_does_no_harm():
    store = Store()
    writer = ManifestWriter(store, MANY)
    writer.append(rows_of(1))
    late = f"{FOLDER}/{file_name(1, 2)}"

    def fail(number: int) -> None:
        if store.calls[-1] == ("put", late):
            raise TierUnavailableError("shared", "no answer in time")

    store.before = fail
    with pytest.raises(TierUnavailableError):
        writer.append(rows_of(2))
    store.before = lambda _: None
    assert told(store) == expected(1)
    writer.append(rows_of(2))
    maker = ManifestMaker()
    maker.write(rows_of(2))
    store.objects[late] = maker.finish(About())
    assert told(store) == expected(1, 2)
    writer.append(rows_of(2, gone=True))
    writer.compact()
    assert told(store) == expected(1)
    writer.compact()
    assert late not in store.objects


def test_an_object_that_cannot_be_deleted_is_tried_again():
    store = Store()
    writer = ManifestWriter(store, MANY)
    writer.append(rows_of(1))
    writer.compact()

    def fail(number: int) -> None:
        if store.calls[-1][0] == "delete":
            raise TierUnavailableError("shared", "refused")

    store.before = fail
    for _ in range(3):
        writer.compact()
    assert files(store) == {file_name(1, seq) for seq in range(1, 6)}
    store.before = lambda _: None
    writer.compact()
    writer.compact()
    assert files(store) == {file_name(1, seq) for seq in (6, 7)}
    assert told(store) == expected(1)


# --- size


def test_a_hundred_thousand_blocks():
    store = Store()
    writer = ManifestWriter(store, MANY)
    rng = np.random.default_rng(1)
    for _ in range(10):
        rows = np.repeat(rows_of(1), 10_000)
        rows["key"] = np.frombuffer(rng.bytes(160_000), "V16")
        writer.append(rows)
    writer.compact()
    store.calls.clear()
    reader = ManifestReader(store)
    tracemalloc.start()
    try:
        num_rows = sum(len(rows) for rows in reader.read())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert num_rows == reader.num_rows == 100_000
    assert "list" not in store.methods()
    current = Current.read(store)
    assert current is not None
    assert sum(file.num_bytes for file in current.files) < 30 * 100_000
    assert peak < 16 << 20


class Recording(ObjectStore):
    """Counts listings."""

    listings = 0

    @override
    def children(self, path: str) -> list[Child]:
        self.listings += 1
        return super().children(path)


def test_an_object_store_is_never_listed_by_readers(tmp_path: Path):
    store = Recording(f"file://{tmp_path}", {}, timeout_s=10)
    writer = ManifestWriter(store, MANY)
    writer.append(rows_of(1))
    store.listings = 0
    assert told(store) == expected(1)
    assert store.listings == 0
    store.close()

"""The shared tier's catalog in a running fleet: who keeps it, what it remembers, what goes when there is too much."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvfleet.config import MIB
from kvfleet.core.block import split
from kvfleet.core.objectrows import ObjectRows, SharedObject, record_ids
from kvfleet.errors import DirectoryUnavailableError, TierUnavailableError
from kvfleet.node.catalog import CatalogKeeper
from kvfleet.node.catalogbook import CatalogBook
from kvfleet.node.manifests import ManifestReader
from kvfleet.node.manifestwriter import ManifestWriter
from kvfleet.node.messages import Source
from kvfleet.node.objects import ObjectStore
from kvfleet.node.outbox import Uses
from tests.conftest import wait_for
from tests.rig import Fault, Rig
from tests.workload import kv, load, model, prompt, store

SPEC = model(64)
BLOCK = SPEC.layout.block_bytes
FAST: dict[str, Any] = {"manifest_interval_s": 0.05}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What is asked of the storage, listings of the tier and of the folder of manifests apart."""
    counted: Counter[str] = Counter()

    def counting(name: str, method: Any) -> Any:
        def call(self: ObjectStore, path: str, *args: Any) -> Any:
            counted["manifests listed" if (name, path) == ("children", "manifests") else name] += 1
            return method(self, path, *args)

        return call

    for name in ("put", "get", "delete", "children"):
        monkeypatch.setattr(ObjectStore, name, counting(name, getattr(ObjectStore, name)))
    return counted


def objects(root: Path) -> dict[str, int]:
    """Sizes of the blocks' objects by key."""
    found = {}
    for path in root.glob("*/*/*.arrow"):
        with suppress(FileNotFoundError):  # deleted meanwhile
            found[path.name.partition(".")[0]] = path.stat().st_size
    return found


def told(root: Path) -> set[bytes]:
    """The record ids that manifests tell of."""
    store, found = ObjectStore(f"file://{root}", {}, 10.0), dict[bytes, int]()
    for rows in ManifestReader(store).read():
        packed = record_ids(rows)
        for index, row in enumerate(rows):
            found[packed[18 * index : 18 * index + 18]] = int(row["bytes"]) * (1 - int(row["deleting"]))
    return {record for record, size in found.items() if size}


def objects_are_told_with(root: Path, some: set[str]) -> bool:
    """Whether manifests tell of all objects and no others, these among them: the keeper has done its work on them."""
    known = objects(root).keys()
    return some <= known and told(root) == {bytes.fromhex(key) + b"\0\0" for key in known}


def last_uses(root: Path) -> dict[str, int]:
    """When each object was used last, by key, as manifests tell."""
    store = ObjectStore(f"file://{root}", {}, 10.0)
    return {row["key"].tobytes().hex(): int(row["last_used"]) for rows in ManifestReader(store).read() for row in rows}


def keys(tokens: Any) -> list[str]:
    return [key.hex() for key in split(SPEC.keys(tokens))]


def keepers(rig: Rig) -> list[int]:
    return [n for n in rig.managers if rig.part(n).catalog.status() is not None]


def settled(rig: Rig, what: str = "one manager keeps the catalog") -> int:
    wait_for(lambda: rig.run(rig.at_directory("status")).shared_listed and len(keepers(rig)) == 1, what)
    (keeper,) = keepers(rig)
    return keeper


def flushed(rig: Rig) -> None:
    """All is saved and written down, or was deleted since."""
    for number in rig.managers:
        rig.run(rig.managers[number].flush(20))
        assert len(rig.part(number).publisher._outbox) == 0
        assert rig.part(number).saver.num_unsaved == 0


def flushed_together(rig: Rig) -> None:
    """As by who stops a fleet: the keeper does not wait for its interval."""

    async def flush() -> list[int]:
        return await asyncio.gather(*(manager.flush(20.0) for manager in rig.managers.values()))

    assert not any(rig.run(flush()))
    assert [len(rig.part(number).publisher._outbox) for number in rig.managers] == [0] * len(rig.managers)


def shrink(book: CatalogBook, num_bytes: int, limit: int) -> None:
    """Have a keeper delete what is beyond a number of bytes."""
    book.changes.append(book.catalog.shrink(num_bytes, limit))


def shared_blocks(rig: Rig, tokens: Any) -> int:
    """How many blocks of a prefix the directory knows to be in the shared tier."""
    answer = rig.run(rig.at_directory("locate", SPEC.keys(tokens), 0, 1))
    return max((run.stop for run in answer.runs if run.shared), default=0)


def test_a_fleet_that_starts_later_finds_all_and_lists_nothing(arena_root, tmp_path, calls):
    url = f"file://{tmp_path}/kv"
    with Rig(arena_root, 2, shared_url=url, **FAST) as rig:
        store(rig.client(SPEC), prompt(9))
        store(rig.client(SPEC, 1), prompt(5, 7))
        flushed(rig)
        assert told(tmp_path / "kv") == {
            key + b"\0\0" for number in (0, 7) for key in split(SPEC.keys(prompt(9) if not number else prompt(5, 7)))
        }
    assert calls["children"] > 0  # there was no manifest
    for _ in range(2):
        calls.clear()
        with Rig(arena_root, 2, shared_url=url, **FAST) as rig:
            settled(rig)
            assert load(rig.client(SPEC), prompt(9)).outcomes == (Source.SHARED,) * 9
            assert load(rig.client(SPEC, 1), prompt(5, 7)).outcomes == (Source.SHARED,) * 5
            figures = [rig.part(n).catalog.status() for n in keepers(rig)]
            assert [(f.objects, f.listed, f.problem) for f in figures] == [(14, False, "")]
        assert calls["children"] == calls["manifests listed"] == 0


def test_without_manifests_and_where_one_is_damaged_the_tier_is_listed_once(arena_root, tmp_path, calls):
    url, folder = f"file://{tmp_path}/kv", tmp_path / "kv" / "manifests"
    with Rig(arena_root, shared_url=url, **FAST) as rig:
        store(rig.client(SPEC), prompt(9))
        flushed(rig)
    for harm in ("all gone", "none", "one damaged", "none"):
        files = sorted(folder.glob("*.parquet"))
        if harm == "one damaged":
            files[-1].write_bytes(files[-1].read_bytes()[:-9])
        elif harm == "all gone":
            for path in (*files, folder / "CURRENT"):
                path.unlink()
        calls.clear()
        with Rig(arena_root, shared_url=url, **FAST) as rig:
            settled(rig)
            assert load(rig.client(SPEC), prompt(9)) == 144
        assert (calls["children"] > 0) == (harm != "none"), harm


def test_a_directory_that_starts_empty_is_told_and_nothing_is_listed(arena_root, tmp_path, calls):
    with Rig(arena_root, 3, shared_url=f"file://{tmp_path}/kv", inventory_page_records=4, **FAST) as rig:
        store(rig.client(SPEC), prompt(9))
        flushed(rig)
        settled(rig)
        calls.clear()
        for _ in range(3):
            rig.start_directory()
            settled(rig)
            wait_for(lambda: shared_blocks(rig, prompt(9)) == 9, "it knows what is in the shared tier")
        assert calls["children"] == calls["manifests listed"] == 0


def test_a_keeper_that_dies_is_replaced_and_nothing_is_forgotten(arena_root, tmp_path):
    with Rig(arena_root, 3, shared_url=f"file://{tmp_path}/kv", **FAST) as rig:
        writer = rig.client(SPEC, 2)
        for number in range(4):
            store(writer, prompt(4, number))
            flushed(rig)
            keeper = settled(rig)
            if keeper == 2:
                break
            store(writer, prompt(3, 100 + number))
            rig.kill(keeper)
            rig.dead.add(rig.node_id(keeper))
        flushed(rig)
        stored = {
            key for n in range(4) for key in split(SPEC.keys(prompt(4, n))) + split(SPEC.keys(prompt(3, 100 + n)))
        }
        there = {key for key in stored if key.hex() in objects(tmp_path / "kv")}
        assert told(tmp_path / "kv") == {key + b"\0\0" for key in there}
        for number in list(range(3)):
            if number not in rig.managers:
                rig.dead.discard(rig.node_id(number))
                rig.start(number)


def test_what_was_written_is_not_forgotten_by_a_directory_that_dies(arena_root, tmp_path):
    """The mailbox dies with it: the managers say again what is in no manifest."""
    with Rig(arena_root, 2, shared_url=f"file://{tmp_path}/kv", **FAST | {"manifest_interval_s": 1000.0}) as rig:
        keeper = settled(rig)
        store(rig.client(SPEC, 1 - keeper), prompt(1))  # the first is written down at once
        wait_for(lambda: len(told(tmp_path / "kv")) == 1, "the first block is in a manifest")
        store(rig.client(SPEC, 1 - keeper), prompt(7))
        wait_for(lambda: len(objects(tmp_path / "kv")) == 7, "all blocks are saved")
        rig.start_directory()
        flushed(rig)
        assert len(told(tmp_path / "kv")) == 7


def test_a_fleet_that_stops_in_order_forgets_nothing_however_seldom_manifests_are_written(arena_root, tmp_path):
    url, seldom = f"file://{tmp_path}/kv", {"manifest_interval_s": 1000.0}
    with Rig(arena_root, 2, shared_url=url, **seldom) as rig:
        client = rig.client(SPEC, 1 - settled(rig))
        store(client, prompt(1))  # the first is written down at once
        wait_for(lambda: len(told(tmp_path / "kv")) == 1, "the first block is in a manifest")
        store(client, prompt(9))
        wait_for(lambda: len(objects(tmp_path / "kv")) == 9, "all blocks are saved")
        assert len(told(tmp_path / "kv")) == 1
        flushed_together(rig)
        assert len(told(tmp_path / "kv")) == 9
    with Rig(arena_root, 1, shared_url=url, **seldom) as rig:
        settled(rig)
        assert load(rig.client(SPEC), prompt(9)).outcomes == (Source.SHARED,) * 9


def test_who_stops_a_fleet_does_not_wait_for_heartbeats(arena_root, tmp_path):
    """The keeper writes down what is saved as soon as it comes, and says so at once."""
    url, seldom = f"file://{tmp_path}/kv", {"manifest_interval_s": 1000.0, "heartbeat_s": 60.0}
    with Rig(arena_root, 2, shared_url=url, **seldom) as rig:
        for number in (0, 1):
            store(rig.client(SPEC, number), prompt(5, number))
        flushed_together(rig)  # within 20 s, or it is not all written down
        assert len(told(tmp_path / "kv")) == 10


def test_what_is_known_to_be_gone_is_not_said_again_to_a_directory_that_starts_empty(arena_root, tmp_path):
    root = tmp_path / "kv"
    with Rig(arena_root, 2, shared_url=f"file://{root}", manifest_interval_s=1000.0) as rig:
        keeper = settled(rig)
        writer = 1 - keeper
        store(rig.client(SPEC, writer), prompt(1))
        wait_for(lambda: len(told(root)) == 1, "the first block is in a manifest")
        store(rig.client(SPEC, writer), prompt(5))
        wait_for(lambda: shared_blocks(rig, prompt(5)) == 5, "all blocks are saved")
        wait_for(lambda: rig.part(keeper).catalog.status().objects == 5, "the keeper knows them")
        (path,) = root.glob(f"*/*/{keys(prompt(5))[-1]}*")
        path.unlink()
        rig.loop.call_soon_threadsafe(rig.part(writer).publisher.lost, bytes.fromhex(keys(prompt(5))[-1]) + b"\0\0")
        wait_for(lambda: shared_blocks(rig, prompt(5)) == 4, "the last one is known to be gone")
        wait_for(lambda: rig.part(1 - writer).catalog.status().objects == 4, "the keeper has heard of it")
        wait_for(lambda: rig.part(keeper).catalog.status().objects == 4, "the keeper knows it")
        assert len(told(root)) == 1
        rig.start_directory()
        flushed_together(rig)
        settled(rig)
        assert shared_blocks(rig, prompt(5)) == len(told(root)) == 4


def test_what_an_earlier_keeper_has_deleted_is_looked_for_before_it_is_believed_to_be_there(arena_root, tmp_path):
    """A manager that says again what a directory has lost may not have heard of it."""
    root = tmp_path / "kv"
    with Rig(arena_root, 2, shared_url=f"file://{root}", **FAST) as rig:
        keeper = settled(rig)
        writer = 1 - keeper
        store(rig.client(SPEC, writer), prompt(3))
        flushed(rig)
        book = rig.part(keeper).catalog._book
        (row,) = [row for rows in ManifestReader(ObjectStore(f"file://{root}", {}, 10.0)).read() for row in rows
                  if row["key"].tobytes().hex() == keys(prompt(3))[-1]]  # fmt: skip
        rig.loop.call_soon_threadsafe(shrink, book, book.catalog.num_bytes - 1, 1)
        wait_for(lambda: len(objects(root)) == 2 and not book.num_changes, "the last one is deleted, and that is told")
        rig.loop.call_soon_threadsafe(rig.part(writer).dram.drop, split(SPEC.keys(prompt(3)))[-1])  # not saved again
        rig.kill(keeper)
        rig.dead.add(rig.node_id(keeper))
        wait_for(lambda: keepers(rig) == [writer], "the other one keeps the catalog")
        numbers = (int(row[name]) for name in ("shard", "num_shards", "bytes", "depth", "parent"))
        thing = SharedObject(row["namespace_id"].tobytes(), row["key"].tobytes(), *numbers)
        for say in (rig.part(writer).publisher.stored, rig.part(writer).publisher.used):
            rig.part(writer).publisher._uses = Uses()
            rig.loop.call_soon_threadsafe(say, thing)
            wait_for(lambda: len(rig.part(writer).publisher._outbox) > 0, "it is said")
            flushed(rig)
            wait_for(lambda: shared_blocks(rig, prompt(3)) == 2, "the directory does not believe it")
            assert rig.part(writer).catalog.status().objects == len(told(root)) == 2
        rig.dead.discard(rig.node_id(keeper))
        rig.start(keeper)


def test_beyond_its_limit_those_unused_longest_go_leaf_first(arena_root, tmp_path):
    root = tmp_path / "kv"
    limit = 3 * MIB
    with Rig(arena_root, 2, shared_url=f"file://{root}", shared_bytes_max=limit, **FAST) as rig:
        client = rig.client(SPEC)
        length = 12
        size = 0
        for number in range(2 * limit // (length * BLOCK) + 1):
            store(client, prompt(length, number))
            newest = set(keys(prompt(length, number)))
            # Without a flush: it would save once more what was deleted, and some of that may find room.
            wait_for(partial(objects_are_told_with, root, newest), "the newest are saved and in the manifests")
            wait_for(lambda: sum(objects(root).values()) <= limit, "it is within its limit")
            size = max(size, sum(objects(root).values()))
        assert size > limit // 2
        wait_for(partial(objects_are_told_with, root, newest), "the manifests know what was deleted")
        catalog = rig.part(settled(rig)).catalog
        there = objects(root)
        wait_for(lambda: catalog.status().objects == len(there), "the catalog has heard of the last deletion")
        assert catalog.status().num_bytes == sum(there.values())
        assert catalog.deleted > 0
        left = [sum(key in objects(root) for key in keys(prompt(length, n))) for n in range(number + 1)]
        assert left[-1] == length
        assert left[0] == 0
        assert sorted(left) == left
        for n, count in enumerate(left):  # what is left of a prompt is its beginning, and it can be found
            assert [key in objects(root) for key in keys(prompt(length, n))] == [i < count for i in range(length)]
            assert shared_blocks(rig, prompt(length, n)) == count


def test_what_is_used_in_an_arena_or_read_from_the_tier_counts_as_used(arena_root, tmp_path, monkeypatch):
    root = tmp_path / "kv"
    for module in ("uses", "outbox"):
        monkeypatch.setattr(f"kvfleet.node.{module}.USE_S", 0.0)
    with Rig(arena_root, 2, shared_url=f"file://{root}", **FAST) as rig:
        for number in range(3):
            store(rig.client(SPEC), prompt(12, number))
        flushed(rig)
    with Rig(arena_root, 2, shared_url=f"file://{root}", **FAST) as rig:
        settled(rig)
        assert load(rig.client(SPEC), prompt(12, 1)).outcomes == (Source.SHARED,) * 12
        flushed(rig)
        before = last_uses(root)
        assert min(before[key] for key in keys(prompt(12, 1))) > max(before[key] for key in keys(prompt(12, 2)))
        assert load(rig.client(SPEC), prompt(12, 1)).outcomes == (Source.DRAM,) * 12
        assert rig.run(rig.part(0).lower.uses.tell()) is None
        flushed(rig)
        after = last_uses(root)
        assert {key for key in after if after[key] > before[key]} == set(keys(prompt(12, 1)))


def test_objects_that_a_rule_of_the_bucket_deletes_leave_the_catalog(arena_root, tmp_path):
    root = tmp_path / "kv"
    with Rig(arena_root, 2, shared_url=f"file://{root}", **FAST) as rig:
        store(rig.client(SPEC), prompt(6))
        flushed(rig)
    with Rig(arena_root, 2, shared_url=f"file://{root}", **FAST) as rig:
        keeper = settled(rig)
        for path in root.glob("*/*/*.arrow"):
            if path.name.startswith(tuple(keys(prompt(6))[3:])):
                path.unlink()
        assert load(rig.client(SPEC, 1), prompt(6)) == 48
        wait_for(lambda: rig.part(keeper).catalog.status().objects < 6, "the first that is missing is known to be")
        wait_for(lambda: shared_blocks(rig, prompt(6)) == 3, "the directory knows it")
        wait_for(lambda: 3 <= len(told(root)) < 6, "the manifests know it")


def test_a_smaller_limit_is_kept_after_a_restart(arena_root, tmp_path):
    root = tmp_path / "kv"
    with Rig(arena_root, shared_url=f"file://{root}", **FAST) as rig:
        for number in range(10):
            store(rig.client(SPEC), prompt(12, number))
        flushed(rig)
    before = sum(objects(root).values())
    assert before > 2 * MIB
    with Rig(arena_root, shared_url=f"file://{root}", shared_bytes_max=MIB, **FAST) as rig:
        wait_for(lambda: sum(objects(root).values()) <= MIB, "it is within its new limit")
        settled(rig)
        wait_for(lambda: len(told(root)) == len(objects(root)), "the manifests know it")


def failing_some(numbers: range) -> Fault:
    """Some calls fail."""
    count = iter(range(1 << 30))

    async def fault() -> None:
        if next(count) in numbers:
            raise DirectoryUnavailableError("lost")

    return fault


@pytest.mark.parametrize("call", ["objects", "listed", "objects:reply", "apply:reply"])
@pytest.mark.parametrize("passing", [0, 5])
def test_every_call_of_the_keeper_may_fail(arena_root, tmp_path, call, passing):
    root = tmp_path / "kv"
    with Rig(arena_root, 2, shared_url=f"file://{root}", shared_bytes_max=MIB, **FAST) as rig:
        rig.faults[f"directory.{call}"] = failing_some(range(passing, passing + 3))
        client = rig.client(SPEC)
        for number in range(4):
            client.store(prompt(12, number), kv(SPEC, prompt(12, number))).wait(60)
        rig.faults.clear()
        flushed(rig)
        settled(rig)
        wait_for(lambda: sum(objects(root).values()) <= MIB, "it is within its limit")
        wait_for(lambda: told(root) == {bytes.fromhex(key) + b"\0\0" for key in objects(root)}, "all are known")


def test_a_keeper_that_was_replaced_and_does_not_know_it_does_no_harm(arena_root, tmp_path):
    root = tmp_path / "kv"
    with Rig(arena_root, 2, shared_url=f"file://{root}", **FAST) as rig:
        keeper = settled(rig)
        old: CatalogKeeper = rig.part(keeper).catalog
        book = old._book
        assert book is not None
        for number in range(3):
            store(rig.client(SPEC), prompt(12, number))
        flushed(rig)
        before = objects(root)

        async def replace() -> None:
            assert rig.directory is not None
            rig.directory._keeper = rig.node_id(1 - keeper), rig.part(1 - keeper).home.epoch

        rig.run(replace())
        wait_for(lambda: keepers(rig) == [1 - keeper], "the other one keeps it")

        async def trim() -> None:
            shrink(book, 0, 100)
            await old._trim(book)

        with pytest.raises(Exception, match=r"epoch|another"):
            rig.run(trim())
        assert objects(root) == before
        rig.run(asyncio.sleep(0))
        settled(rig)
        wait_for(lambda: told(root) == {bytes.fromhex(key) + b"\0\0" for key in objects(root)}, "all are known")
        flushed(rig)
        assert [shared_blocks(rig, prompt(12, number)) for number in range(3)] == [12] * 3


def test_that_an_object_is_to_go_is_written_down_before_anybody_is_told(arena_root, tmp_path, monkeypatch):
    """Else it would be known to nobody when the keeper dies: never found, and never counted."""
    root, append = tmp_path / "kv", ManifestWriter.append

    def fail(self: ManifestWriter, rows: ObjectRows) -> None:
        if rows["deleting"].any():
            raise TierUnavailableError("shared", "no answer")
        append(self, rows)

    with Rig(arena_root, 2, shared_url=f"file://{root}", **FAST) as rig:
        keeper = settled(rig)
        store(rig.client(SPEC, 1 - keeper), prompt(6))
        flushed(rig)
        catalog = rig.part(keeper).catalog
        monkeypatch.setattr(ManifestWriter, "append", fail)
        rig.loop.call_soon_threadsafe(shrink, catalog._book, 1, 3)
        wait_for(lambda: "no answer" in catalog.problem, "it cannot be written down")
        assert (len(objects(root)), shared_blocks(rig, prompt(6))) == (6, 6)
        rig.kill(keeper)
        rig.dead.add(rig.node_id(keeper))
        wait_for(lambda: keepers(rig) == [1 - keeper], "the other one keeps the catalog")
        flushed(rig)
        assert shared_blocks(rig, prompt(6)) == len(told(root)) == 6
        rig.dead.discard(rig.node_id(keeper))
        rig.start(keeper)


def test_half_written_files_of_writers_long_dead_are_found_without_a_listing(arena_root, tmp_path, monkeypatch):
    monkeypatch.setattr("kvfleet.node.catalog._SWEEP_S", 0.0)
    root = tmp_path / "kv"
    with Rig(arena_root, shared_url=f"file://{root}", **FAST) as rig:
        settled(rig)
        store(rig.client(SPEC), prompt(3))
        flushed(rig)
        young, old = (next(root.glob("*/*/*.arrow")).with_suffix(f".{number}.partial") for number in range(2))
        for file in (young, old):
            file.write_bytes(b"half")
        os.utime(old, (0, 0))
        wait_for(lambda: not old.exists(), "it is found")
        assert young.exists()
        assert len(objects(root)) == 3

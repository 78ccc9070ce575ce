"""What clients see of a node's drives: a table in the arena, and what lookups make of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typing_extensions import override

from kvfleet.attachment import DirectoryPort
from kvfleet.config import GIB, MIB, DriveConfig
from kvfleet.core.block import split
from kvfleet.core.directory import NodeId, Run
from kvfleet.core.layout import ModelSpec
from kvfleet.errors import DirectoryUnavailableError, KvFleetError
from kvfleet.hits import HitRun
from kvfleet.looking import Asked, Looking
from kvfleet.node.arena import Arena
from kvfleet.node.messages import Located, Miss
from kvfleet.node.mirror import Mirror, num_drive_records
from kvfleet.node.nvme import Stored
from kvfleet.node.records import RecordTable
from tests.workload import model, prompt

SPEC = model()
KEYS = SPEC.keys(prompt(8))
NODE = NodeId("b" * 56)


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    arena = Arena.create(tmp_path / "node", 4 * MIB, num_drive_records=16)
    yield arena
    arena.close()


def drives(arena: Arena) -> RecordTable:
    assert arena.drive_records is not None
    return arena.drive_records


@pytest.fixture
def mirror(arena: Arena) -> Mirror:
    return Mirror(drives(arena), lambda *_: None)


def stored(index: int, shard: int = 0, keys: bytes = KEYS) -> Stored:
    return Stored(split(keys)[index], shard, SPEC.layout.block_bytes, 7, SPEC.namespace_id, index, 0)


def commit(arena: Arena, index: int, shard: int = 0, *, written: bool = True) -> None:
    """A block is in the arena, or being written to it by a client."""
    slot = index * 2 + shard
    generation = arena.records.reserve(
        slot, key=split(KEYS)[index], shard=shard, parent_fingerprint=0, depth=index, namespace=0,
        offset=arena.slots_offset, length=64, client_id=9,
    )  # fmt: skip
    assert not written or arena.records.commit(slot, generation, 0, 0)


class Directory(DirectoryPort):
    """Says where blocks are; or nothing."""

    def __init__(self, answer: Located | KvFleetError) -> None:
        self.answer = answer
        self.asked: list[int] = []

    @override
    def locate(self, keys: bytes, shard: int, num_shards: int, timeout_s: float) -> Located:
        self.asked.append(len(keys) // 16)
        if isinstance(self.answer, KvFleetError):
            raise self.answer
        return self.answer


AWAY = DirectoryUnavailableError("away")


def runs(arena: Arena, answer: Located | KvFleetError = AWAY, spec: ModelSpec = SPEC) -> tuple[HitRun, ...]:
    return Looking(spec, 0, Directory(answer), 1.0).everywhere(Asked(KEYS, 0, ""), arena).runs


def test_clients_see_what_comes_to_the_drives_and_what_leaves_them(arena):
    table, told = drives(arena), list[tuple[bytes, int, bool]]()
    mirror = Mirror(table, lambda *what: told.append(what))
    for index in (0, 1, 2):
        mirror.note(stored(index), True)
    assert (table.find(KEYS).slots >= 0).tolist() == [True] * 3 + [False] * 5
    assert [record.depth for record in table.live()] == [0, 1, 2]
    mirror.note(stored(1), False)
    assert (table.find(KEYS).slots >= 0).tolist() == [True, False, True] + [False] * 5
    assert not (table.find(KEYS, 1).slots >= 0).any()
    keys = split(KEYS)
    assert told == [(keys[0], 0, True), (keys[1], 0, True), (keys[2], 0, True), (keys[1], 0, False)]


def test_what_the_table_has_no_room_for_is_told_all_the_same(arena):
    many, told = SPEC.keys(prompt(20)), list[tuple[bytes, int, bool]]()
    mirror = Mirror(drives(arena), lambda *what: told.append(what))
    for index in range(20):
        mirror.note(stored(index, keys=many), True)
    assert (mirror.num_left_out, len(told)) == (4, 20)
    mirror.note(stored(19, keys=many), False)
    mirror.note(stored(0, keys=many), False)
    assert (mirror.num_left_out, len(told)) == (3, 22)
    mirror.note(stored(19, keys=many), True)
    assert (mirror.num_left_out, len(told)) == (3, 23)
    assert (drives(arena).find(many).slots >= 0).sum() == 16


def test_a_new_manager_starts_with_an_empty_table(arena, mirror):
    for index in range(4):
        mirror.note(stored(index), True)
    with_readers = Arena.attach(arena.path)
    found = drives(with_readers).find(KEYS)
    again = Mirror(drives(arena), lambda *_: None)
    assert (drives(with_readers).find(KEYS).slots < 0).all()
    assert not drives(with_readers).unchanged(found.slots, found.generations).any()
    again.note(stored(3), True)
    assert (drives(with_readers).find(KEYS).slots >= 0).tolist() == [i == 3 for i in range(8)]
    with_readers.close()


def test_a_lookup_finds_what_is_on_the_drives_without_a_directory(arena, mirror):
    commit(arena, 0)
    commit(arena, 2)
    for index in (1, 2, 3):
        mirror.note(stored(index), True)
    commit(arena, 4, written=False)
    assert runs(arena) == (
        HitRun(0, 1, local=True),
        HitRun(1, 2, local=False, nvme=True),
        HitRun(2, 3, local=True),
        HitRun(3, 4, local=False, nvme=True),
        HitRun(4, 5, local=False, pending=True),
    )
    directory = Directory(AWAY)
    hit = Looking(SPEC, 0, directory, 1.0).here(Asked(KEYS, 0, ""), arena)
    assert (hit.runs, hit.missing, directory.asked) == (runs(arena)[:4], Miss.DIRECTORY_UNAVAILABLE, [])


def test_the_directory_is_asked_from_the_first_block_that_is_not_on_the_node(arena, mirror):
    for index in (0, 1, 6):
        mirror.note(stored(index), True)
    directory = Directory(Located((Run(0, 4, (NODE,), shared=True),), None))
    hit = Looking(SPEC, 0, directory, 1.0).everywhere(Asked(KEYS, 0, ""), arena)
    assert directory.asked == [6]
    assert hit.runs == (
        HitRun(0, 2, local=False, nvme=True),
        HitRun(2, 6, local=False, nodes=(NODE,), shared=True),
        HitRun(6, 7, local=False, nvme=True),
    )


def test_no_call_is_made_if_all_is_on_the_node(arena, mirror):
    for index in range(8):
        mirror.note(stored(index), True)
    commit(arena, 3)
    hit = Looking(SPEC, 0, Directory(AWAY), 1.0).everywhere(Asked(KEYS, 0, ""), arena)
    assert [(run.stop, run.local, run.nvme) for run in hit.runs] == [
        (3, False, True), (4, True, False), (8, False, True),
    ]  # fmt: skip
    assert (hit.missing, hit.calls) == (None, ())


def test_a_block_is_on_the_node_if_all_its_shards_are_somewhere(arena, mirror):
    commit(arena, 0)
    mirror.note(stored(0, shard=1), True)
    mirror.note(stored(1), True)
    two = model(num_shards=2)
    assert runs(arena, spec=two) == (HitRun(0, 1, local=False, nvme=True),)


def test_the_table_grows_with_the_drives(tmp_path):
    def drive(max_bytes: int | None = None, directory: str = str(tmp_path)) -> DriveConfig:
        return DriveConfig(directory=directory, max_bytes=max_bytes)

    assert num_drive_records(()) == 0
    assert num_drive_records((drive(GIB),)) == 4096
    assert num_drive_records((drive(8 << 40), drive(8 << 40, "/x"))) == 4_000_000
    assert num_drive_records((drive(6 * GIB), drive(10 * GIB, "/x"))) == 16384
    found = os.statvfs(tmp_path)
    whole = found.f_blocks * found.f_frsize // MIB
    assert num_drive_records((drive(),)) == min(max(whole, 4096), 4_000_000)
    assert num_drive_records((drive(directory="/nowhere"), drive(directory="$NOT_SET/x"))) == 4096


def test_a_drive_that_hangs_does_not_keep_a_manager_from_starting(tmp_path, monkeypatch):
    answer = threading.Event()
    monkeypatch.setattr("kvfleet.node.mirror._MEASURING_TIMEOUT_S", 0.05)
    monkeypatch.setattr(os, "statvfs", lambda _: answer.wait())
    hung = DriveConfig(directory=str(tmp_path))
    assert num_drive_records((hung, DriveConfig(directory="/x", max_bytes=10 * GIB), hung)) == 10240
    answer.set()


def test_an_arena_without_drives_has_no_table_of_them(tmp_path):
    arena = Arena.create(tmp_path / "node", 4 * MIB)
    assert arena.drive_records is None
    larger = Arena.create(tmp_path / "other", 4 * MIB, num_drive_records=4096)
    assert larger.slots_offset - arena.slots_offset == 4096 * 128
    attached = Arena.attach(larger.path)
    assert drives(attached).num_records == 4096
    for one in (arena, larger, attached):
        one.close()

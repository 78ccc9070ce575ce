"""The arena file: made whole or not at all, attached only if it is what it should be."""

import errno
import gc
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from kvfleet.config import GIB, MIB
from kvfleet.errors import ConfigError, TierUnavailableError
from kvfleet.node import arena as arena_module
from kvfleet.node.arena import Arena
from kvfleet.node.arenafile import Geometry
from kvfleet.node.memory import free_bytes

KEY = bytes(range(16))


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "home" / "node"


@pytest.fixture
def arena(directory):
    directory.parent.mkdir(mode=0o700)
    arena = Arena.create(directory, 4 * MIB)
    yield arena
    arena.close()


def open_files():
    gc.collect()  # what earlier tests left open
    return len(list(Path("/proc/self/fd").iterdir()))


def commit(arena, slot, key, value):
    offset = arena.slots_offset + slot * 4096
    generation = arena.records.reserve(
        slot, key=key, shard=0, parent_fingerprint=0, depth=0, namespace=0, offset=offset, length=4096, client_id=0
    )
    arena.slot_view(offset, 4096)[:] = value
    assert arena.records.commit(slot, generation, 0, 0)


def test_a_new_arena_is_private_empty_and_of_the_size_asked_for(arena, directory):
    assert arena.path == directory / "arena"
    assert arena.path.stat().st_mode & 0o777 == 0o600
    assert directory.stat().st_mode & 0o777 == 0o700
    assert arena.capacity_bytes == 4 * MIB
    assert arena.slots_offset % 4096 == 0
    assert arena.path.stat().st_size == arena.slots_offset + 4 * MIB
    assert arena.path.stat().st_blocks * 512 >= arena.path.stat().st_size
    assert len(arena.slab_table) * arena.unit_bytes == 4 * MIB
    assert not arena.slab_table.any()
    assert arena.records.live() == []
    assert {p.name for p in directory.iterdir()} == {"arena", "clients"}


def test_all_who_attach_see_the_same_blocks(arena):
    commit(arena, 5, KEY, 42)
    arena.slab_table[3] = 7
    other = Arena.attach(arena.path, arena.arena_id)
    found = other.records.find(KEY)
    assert found.slots.tolist() == [5]
    assert (other.slot_view(int(found.offsets[0]), int(found.lengths[0])) == 42).all()
    assert other.slab_table.tolist() == arena.slab_table.tolist() == [0, 0, 0, 7]
    assert (other.capacity_bytes, other.unit_bytes, other.records.num_records) == (4 * MIB, MIB, 1024)
    other.records.touch(found.slots, 99)
    assert arena.records.last_access[5] == 99
    other.close()


def test_the_arena_outlives_its_mappings(arena):
    commit(arena, 5, KEY, 42)
    path = arena.path
    arena.close()
    again = Arena.attach(path)
    again.records.recover()
    assert again.arena_id == arena.arena_id
    assert again.records.find(KEY).slots.tolist() == [5]
    again.close()


def test_a_slot_view_stays_inside_the_slot_area(arena):
    end = arena.slots_offset + arena.capacity_bytes
    assert len(arena.slot_view(end - 10, 10)) == 10
    for offset, length in ((arena.slots_offset - 1, 10), (end - 10, 11), (end + 1, 0), (end, -1)):
        with pytest.raises(AssertionError):
            arena.slot_view(offset, length)


def test_close_leaves_views_alive_and_refuses_further_use(arena):
    view = arena.slot_view(arena.slots_offset, 8)
    records = arena.records
    view[:] = 3
    arena.close()
    arena.close()
    assert view.tolist() == [3] * 8
    assert records.find(KEY).slots.tolist() == [-1]
    for use in (lambda: arena.records, lambda: arena.slab_table, lambda: arena.slot_view(arena.slots_offset, 1)):
        with pytest.raises(AssertionError, match="closed"):
            use()
    with pytest.raises(AssertionError, match="closed"):
        arena.populate(threading.Event())


def test_nothing_stays_open_or_mapped_after_close(arena):
    def mapped():
        return Path("/proc/self/maps").read_text().count(str(arena.path))

    before = open_files()
    for _ in range(5):
        other = Arena.attach(arena.path)
        assert mapped() == 2
        other.records.find(KEY)
        other.close()
    assert mapped() == 1
    assert open_files() == before


def test_create_replaces_an_arena_and_its_users_keep_the_old_one(arena, directory):
    commit(arena, 0, KEY, 1)
    (directory / "arena.partial").write_bytes(b"left by a crash")
    new = Arena.create(directory, 2 * MIB, num_records=8)
    assert new.arena_id != arena.arena_id
    assert new.records.num_records == 8
    assert new.records.find(KEY).slots.tolist() == [-1]
    assert arena.records.find(KEY).slots.tolist() == [0]
    with pytest.raises(TierUnavailableError, match="another arena"):
        Arena.attach(arena.path, arena.arena_id)
    assert not (directory / "arena.partial").exists()
    new.close()


def test_unlink_removes_the_file_and_not_the_memory(arena):
    commit(arena, 0, KEY, 1)
    arena.unlink()
    arena.unlink()
    assert not arena.path.exists()
    assert arena.records.find(KEY).slots.tolist() == [0]


@pytest.mark.parametrize("damage", ["missing", "symlink", "directory", "fifo", "empty", "garbage", "shorter", "longer"])
def test_what_is_not_an_arena_is_refused(arena, directory, damage):
    path = directory / damage
    whole = arena.path.read_bytes()
    match damage:
        case "symlink":
            path.symlink_to(arena.path)
        case "directory":
            path.mkdir()
        case "fifo":
            os.mkfifo(path, 0o600)
        case "empty":
            path.touch(0o600)
        case "garbage":
            path.touch(0o600)
            path.write_bytes(np.random.default_rng(0).bytes(8192))
        case "shorter" | "longer":
            path.touch(0o600)
            path.write_bytes(whole[:-1] if damage == "shorter" else whole + b"x")
    before = open_files()
    with pytest.raises(TierUnavailableError, match=damage):
        Arena.attach(path)
    assert open_files() == before


def test_every_flipped_header_byte_is_refused_or_harmless(arena):
    whole = arena.path.read_bytes()
    header_bytes = 56
    for position in range(header_bytes):
        damaged = bytearray(whole[:header_bytes])
        damaged[position] ^= 0xFF
        with arena.path.open("r+b") as file:
            file.write(damaged)
        if 16 <= position < 32:  # the arena id: any will do, but the expected one is asked for
            with pytest.raises(TierUnavailableError, match="another arena"):
                Arena.attach(arena.path, arena.arena_id)
        else:
            with pytest.raises(TierUnavailableError):
                Arena.attach(arena.path)


@pytest.mark.parametrize("mode", [0o644, 0o620, 0o601])
def test_an_arena_that_others_may_open_is_refused(arena, mode):
    arena.path.chmod(mode)
    with pytest.raises(TierUnavailableError, match="private"):
        Arena.attach(arena.path)


def test_another_users_arena_is_refused(arena, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(TierUnavailableError, match="private"):
        Arena.attach(arena.path)


def test_create_refuses_a_directory_that_is_not_private(directory, tmp_path):
    directory.parent.mkdir(mode=0o700)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    directory.symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="private"):
        Arena.create(directory, MIB)
    assert list(elsewhere.iterdir()) == []


def test_create_says_what_is_in_the_way(arena, directory):
    arena.unlink()
    (directory / "arena").mkdir()
    with pytest.raises(TierUnavailableError, match="directory"):
        Arena.create(directory, MIB)


def test_an_arena_larger_than_what_is_free_is_a_config_error_that_says_what_to_do(directory):
    directory.parent.mkdir(mode=0o700)
    free = free_bytes(directory.parent)
    with pytest.raises(ConfigError, match=r"dram_bytes: .*GiB are free.*--shm-size.*medium: Memory.*remount"):
        Arena.create(directory, free + GIB)
    assert {p.name for p in directory.iterdir()} == {"clients"}


@pytest.mark.parametrize("problem", [errno.ENOSPC, errno.EFBIG, errno.EIO])
def test_an_allocation_that_fails_leaves_nothing(directory, monkeypatch, problem):
    def fail(*_):
        raise OSError(problem, os.strerror(problem))

    directory.parent.mkdir(mode=0o700)
    monkeypatch.setattr(os, "posix_fallocate", fail)
    before = open_files()
    with pytest.raises(TierUnavailableError if problem == errno.EIO else ConfigError):
        Arena.create(directory, MIB)
    assert {p.name for p in directory.iterdir()} == {"clients"}
    assert open_files() == before


@pytest.mark.parametrize("advice", [23, 9999])
def test_populate_stops_goes_on_and_keeps_contents(directory, monkeypatch, advice):
    monkeypatch.setattr(arena_module, "_MADV_POPULATE_WRITE", advice)  # 9999 is what an older kernel thinks of it
    directory.parent.mkdir(mode=0o700)
    arena = Arena.create(directory, 64 * MIB)
    size = arena.slots_offset + arena.capacity_bytes
    commit(arena, 0, KEY, 42)
    stop = threading.Event()
    stop.set()
    arena.populate(stop)
    assert arena.populated_bytes == 0
    arena.populate(threading.Event(), threads=3)
    assert arena.populated_bytes == size
    arena.populate(threading.Event())
    found = arena.records.find(KEY)
    assert (arena.slot_view(int(found.offsets[0]), 4096) == 42).all()
    arena.close()


def test_populate_that_the_kernel_refuses_can_be_tried_again(arena, monkeypatch):
    class Refusing:
        @staticmethod
        def madvise(*_):
            return -1

    with monkeypatch.context() as patch:
        patch.setattr(arena_module, "_libc", Refusing)
        patch.setattr("ctypes.get_errno", lambda: errno.ENOMEM)
        with pytest.raises(TierUnavailableError, match="memory"):
            arena.populate(threading.Event(), threads=1)
    assert arena.populated_bytes == 0
    arena.populate(threading.Event())
    assert arena.populated_bytes == arena.slots_offset + arena.capacity_bytes


@pytest.mark.parametrize(
    ("capacity", "unit", "records"),
    [
        (MIB, MIB, 1024),
        (64 * MIB, MIB, 1024),
        (256 * MIB, MIB, 4096),
        (257 * MIB, 2 * MIB, 4112),
        (4 * GIB, 16 * MIB, 65536),
        (1024 * GIB, 64 * MIB, 1 << 24),
    ],
)
def test_geometry(capacity, unit, records):
    geometry = Geometry.plan(capacity)
    assert geometry.unit_bytes == unit
    assert geometry.num_records == records
    assert geometry.capacity_bytes % unit == 0
    assert capacity - unit < geometry.capacity_bytes <= capacity
    assert geometry.slots_offset <= max(256 << 10, capacity // 300)

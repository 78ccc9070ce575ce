"""Processes that die at any moment leave an arena whose committed blocks are whole, and no lock."""

import os
import random
import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest

from kvfleet.config import MIB
from kvfleet.errors import ConfigError
from kvfleet.node.arena import Arena
from kvfleet.node.arenadir import CLIENTS_DIR, FileLock, NodeFile, make_directory, reap
from tests.fault.arena_process import key_of, process, reserve, running, word_of, words

CLIENT = 0xC1

needs_namespaces = pytest.mark.skipif(
    subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False).returncode != 0,
    reason="only root outside most containers may mount and make pid namespaces",
)


def assert_whole(arena, num_keys):
    """Every committed block has its key's bytes and checksum and is found; no key is there twice."""
    committed = [r for r in arena.records.live() if r.committed]
    keys = b"".join(key_of(i) for i in range(num_keys))
    found = arena.records.find(keys)
    assert sorted(found.slots[found.slots >= 0].tolist()) == [r.slot for r in committed]
    for record in committed:
        assert record.checksum == word_of(record.key)
        assert (words(arena, record.slot) == word_of(record.key)).all()
    return len(committed)


def generations_of(arena):
    return np.array([arena.records.record(slot).generation for slot in range(arena.records.num_records)], np.uint64)


def all_rewritten(arena, generations):
    return (generations_of(arena) > generations + 4).all()


def test_a_manager_killed_at_any_moment_leaves_whole_blocks(arena_root, seed, wait_for_condition):
    directory = arena_root / "node"
    arena = Arena.create(directory, 4 * MIB, num_records=32)
    rng = random.Random(seed)
    generations = np.zeros(32, np.uint64)
    for round_ in range(8):
        with running(process("manage", directory, 32, round_)):
            wait_for_condition(partial(all_rewritten, arena, generations), "every slot was rewritten")
            time.sleep(rng.random() * 0.01)
        assert not FileLock.held(directory / "lock")
        assert (generations_of(arena) > generations).all()
        generations = generations_of(arena)
        arena.records.recover()
        assert assert_whole(arena, 64) > 8
    arena.close()


def test_a_reservation_stays_its_writers_until_the_writer_is_dead(arena_root, wait_for_condition):
    directory = arena_root / "node"
    arena = Arena.create(directory, 4 * MIB, num_records=32)
    generation = reserve(arena, arena.records, 5, key_of(5), client_id=CLIENT)
    reserve(arena, arena.records, 6, key_of(6))
    arena.close()  # the first manager is gone, with all it remembered
    lock = directory / CLIENTS_DIR / f"{CLIENT:016x}"
    with running(process("write", directory, arena.arena_id.hex(), CLIENT, 5)):
        arena = Arena.attach(directory / "arena", arena.arena_id)
        arena.records.recover()
        assert [(r.slot, r.client_id, r.generation) for r in arena.records.live()] == [(5, CLIENT, generation)]
        assert FileLock.held(lock)
        writes = words(arena, 5)
        before = int(writes[0])
        wait_for_condition(lambda: int(writes[0]) != before, "the writer goes on writing")
    assert not FileLock.held(lock)
    arena.records.free(5)  # nobody writes there any more
    writes[:] = 7
    again = reserve(arena, arena.records, 5, key_of(8))
    assert not arena.records.commit(5, generation, 0, 0)
    assert arena.records.commit(5, again, 0, 0)
    assert (writes == 7).all()
    arena.close()


def test_a_writer_that_lives_on_through_a_restart_commits(arena_root):
    directory = arena_root / "node"
    first = Arena.create(directory, 4 * MIB, num_records=32)
    generation = reserve(first, first.records, 5, key_of(5), client_id=CLIENT)
    view = words(first, 5)
    view[:100] = word_of(key_of(5))
    second = Arena.attach(directory / "arena")
    second.records.recover()
    view[100:] = word_of(key_of(5))
    assert second.records.commit(5, generation, word_of(key_of(5)), 1)
    assert assert_whole(second, 10) == 1
    assert assert_whole(first, 10) == 1
    first.close()
    second.close()


def test_a_stopped_writer_keeps_its_lock(arena_root):
    directory = arena_root / "node"
    arena = Arena.create(directory, 4 * MIB, num_records=32)
    with running(process("write", directory, arena.arena_id.hex(), CLIENT, 5)) as writer:
        writer.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, writer.pid, os.WSTOPPED | os.WNOWAIT)
        assert FileLock.held(directory / CLIENTS_DIR / f"{CLIENT:016x}")
    assert not FileLock.held(directory / CLIENTS_DIR / f"{CLIENT:016x}")
    arena.close()


def test_a_create_that_is_killed_leaves_a_whole_arena_or_none(arena_root, seed):
    directory = arena_root / "node"
    rng = random.Random(seed)
    for _ in range(10):
        with running(process("create", directory, 64 * MIB)):
            time.sleep(rng.random() * 0.05)
        if (directory / "arena").exists():
            arena = Arena.attach(directory / "arena")
            assert arena.records.live() == []
            arena.close()
    Arena.create(directory, 4 * MIB).close()
    assert {path.name for path in directory.iterdir()} == {"arena", CLIENTS_DIR}


def test_a_lock_is_not_kept_by_a_forked_child(tmp_path):
    path = tmp_path / "lock"
    program = f"""
import os, time
from pathlib import Path
from kvfleet.node.arenadir import FileLock
lock = FileLock(Path({str(path)!r}))
assert lock.acquire()
if not os.fork():
    Path({str(tmp_path / "child")!r}).write_text(str(os.getpid()))
    print("ready", flush=True)
time.sleep(600)
"""
    with running([sys.executable, "-c", program]) as parent:
        assert FileLock.held(path)
        parent.kill()
        parent.wait()
        try:
            assert not FileLock.held(path)
        finally:
            os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


def test_acquire_waits_for_one_who_lets_go(tmp_path):
    path = tmp_path / "lock"
    first, second = FileLock(path), FileLock(path)
    assert first.acquire()
    assert not second.acquire(0.05)
    program = f"""
from pathlib import Path
from kvfleet.node.arenadir import FileLock
print("ready", flush=True)
assert FileLock(Path({str(path)!r})).acquire(20)
"""
    with running([sys.executable, "-c", program]) as waiter:
        assert waiter.poll() is None
        first.release()
        assert waiter.wait(30) == 0


@needs_namespaces
def test_a_small_tmpfs_is_a_clear_error_and_never_a_sigbus(tmp_path, monkeypatch):
    mount = tmp_path / "shm"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m,mode=0700", "kvfleet-test", mount], check=True)
    try:
        with pytest.raises(ConfigError, match=r"does not fit into .*0\.01. GiB are free"):
            Arena.create(mount / "node", 16 * MIB)
        # The same if what was free went to someone else meanwhile: the allocation itself fails, at once.
        with monkeypatch.context() as patch:
            patch.setattr("kvfleet.node.arena.free_bytes", lambda _: 1 << 40)
            with pytest.raises(ConfigError, match="does not fit"):
                Arena.create(mount / "node", 16 * MIB)
        assert {path.name for path in (mount / "node").iterdir()} == {CLIENTS_DIR}
        arena = Arena.create(mount / "node", 12 * MIB)
        assert os.statvfs(mount).f_bavail * 4096 < 4 * MIB
        (mount / "filler").write_bytes(bytes(os.statvfs(mount).f_bavail * 4096))
        arena.slot_view(arena.slots_offset, arena.capacity_bytes)[:] = 1  # on a full file system
        arena.close()
    finally:
        subprocess.run(["umount", "--lazy", mount], check=True)


@needs_namespaces
def test_locks_work_across_pid_namespaces(arena_root):
    directory = arena_root / "home" / "node"
    directory.parent.mkdir(mode=0o700)
    make_directory(directory)
    Arena.create(directory, 4 * MIB, num_records=32).close()
    with running(["unshare", "--pid", "--fork", "--kill-child", *process("manage", directory, 32, 0)]):
        assert FileLock.held(directory / "lock")
    lock = FileLock(directory / "lock")
    assert lock.acquire(5)


def test_a_killed_node_is_reaped_with_its_arena(arena_root):
    directory = arena_root / f"kvfleet-{os.geteuid()}" / "fleet-00ff"
    directory.parent.mkdir(mode=0o700)
    Arena.create(directory, 4 * MIB, num_records=32).close()
    with running(process("manage", directory, 32, 0)) as node:
        NodeFile.here("fleet", "00ff", node.pid).write(directory)
        assert reap(arena_root, lambda _: False) == []
    assert reap(arena_root, lambda _: False) == [directory]
    assert not directory.exists()

"""Private directories, file locks, and the reaping of what dead nodes left."""

import errno
import fcntl
import gc
import os
import subprocess
import time
from pathlib import Path

import pytest

from kvfleet.errors import ConfigError, TierUnavailableError
from kvfleet.node.arenadir import FileLock, NodeFile, directory_for, make_directory, reap


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def nobody(_):
    return False


@pytest.fixture
def directory(tmp_path):
    directory = directory_for(tmp_path, "fleet", "00ff")
    make_directory(directory)
    return directory


def test_a_node_has_one_private_directory_per_user_and_fleet(directory, tmp_path):
    assert directory == tmp_path / f"kvfleet-{os.geteuid()}" / "fleet-00ff"
    for path in (directory.parent, directory, directory / "clients"):
        assert path.stat().st_mode & 0o777 == 0o700
    make_directory(directory)
    with pytest.raises(AssertionError):
        directory_for(tmp_path, "../fleet", "00ff")


def test_make_directory_takes_nothing_that_is_not_private(tmp_path):
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    home = directory_for(tmp_path, "fleet", "00ff").parent
    for spoil in (
        lambda: home.symlink_to(target),
        lambda: home.mkdir(mode=0o755),
        lambda: home.touch(0o700),
    ):
        spoil()
        with pytest.raises(ConfigError, match="arena_root"):
            make_directory(home / "fleet-00ff")
        with pytest.raises(ConfigError, match="arena_root"):
            reap(tmp_path, nobody)
        home.unlink() if not home.is_dir() or home.is_symlink() else home.rmdir()
    assert list(target.iterdir()) == []


def test_make_directory_takes_no_other_users_directory(directory, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="private"):
        make_directory(directory)


def test_make_directory_without_a_root(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        make_directory(directory_for(tmp_path / "absent", "fleet", "00ff"))


def test_a_lock_excludes_and_comes_back(tmp_path):
    path = tmp_path / "lock"
    assert not FileLock.held(path)
    lock = FileLock(path)
    assert lock.acquire(0)
    assert path.stat().st_mode & 0o777 == 0o600
    assert FileLock.held(path)
    assert not FileLock(path).acquire(0)
    lock.release()
    lock.release()
    assert not FileLock.held(path)
    assert lock.acquire(0)
    with pytest.raises(AssertionError):
        lock.acquire(0)
    del lock
    gc.collect()
    assert not FileLock.held(path)


def test_a_lock_of_a_removed_file_is_no_lock(tmp_path, monkeypatch):
    path = tmp_path / "lock"
    real = Path.lstat

    def removed_meanwhile(self):
        self.unlink()
        return real(self)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "lstat", removed_meanwhile)
        assert not FileLock(path).acquire(0)
    lock = FileLock(path)
    assert lock.acquire(0)
    path.unlink()
    assert not FileLock.held(path)
    other = FileLock(path)
    assert other.acquire(0)


def test_a_lock_that_cannot_be_taken_or_asked_for_is_an_error(tmp_path, monkeypatch):
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    lock = FileLock(tmp_path / "lock")
    assert lock.acquire()
    lock.release()
    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(TierUnavailableError, match="no locks available"):
        lock.acquire()
    with pytest.raises(TierUnavailableError, match="no locks available"):
        FileLock.held(lock.path)


def test_a_lock_that_cannot_be_made_is_an_error(tmp_path):
    with pytest.raises(TierUnavailableError, match="No such file"):
        FileLock(tmp_path / "absent" / "lock").acquire(0)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(TierUnavailableError, match="symbolic links"):
        FileLock(tmp_path / "link").acquire(0)
    with pytest.raises(TierUnavailableError, match="symbolic links"):
        FileLock.held(tmp_path / "link")
    before = open_files()
    (tmp_path / "directory").mkdir()
    with pytest.raises(TierUnavailableError, match="directory"):
        FileLock(tmp_path / "directory").acquire(0)
    assert open_files() == before


def test_a_node_file_is_read_as_written(directory):
    assert NodeFile.read(directory) is None
    NodeFile.touch(directory)
    node = NodeFile.here("fleet", "00ff", os.getpid())
    node.write(directory)
    assert NodeFile.read(directory) == node
    os.utime(directory / "node.json", (0, 0))
    NodeFile.touch(directory)
    assert time.time() - (directory / "node.json").stat().st_mtime < 60
    for garbage in (b"", b"{", b"[]", b"{}", b"\xff", b'{"fleet": 1, "x": 2}'):
        (directory / "node.json").write_bytes(garbage)
        assert NodeFile.read(directory) is None


def test_what_a_dead_raylet_left_is_reaped_and_nothing_else(directory, tmp_path):
    def node(name, raylet_start, **changes):
        path = directory_for(tmp_path, "fleet", name)
        make_directory(path)
        facts = NodeFile.here("fleet", name, os.getpid())
        fields = {slot: getattr(facts, slot) for slot in NodeFile.__slots__}
        NodeFile(**(fields | {"raylet_start": facts.raylet_start + raylet_start} | changes)).write(path)
        return path

    alive = node("aa", 0)
    dead = node("bb", 1)  # the pid is another process's now
    known = node("cc", 1)
    locked = node("dd", 1)
    lock = FileLock(locked / "lock")
    assert lock.acquire(0)
    elsewhere_new = node("ee", 1, pid_namespace=1)
    elsewhere_old = node("11", 0, pid_namespace=1)
    never_written = directory  # died before it wrote node.json
    new_and_empty = directory_for(tmp_path, "fleet", "22")
    make_directory(new_and_empty)
    (dead / "arena").write_bytes(b"x")
    (directory.parent / "link").symlink_to(tmp_path)
    (directory.parent / "file").touch()
    for old in (elsewhere_old / "node.json", elsewhere_old, never_written):
        FileLock(old / "lock").acquire(0) if old.is_dir() else None
        os.utime(old, (0, 0))

    gone = reap(tmp_path, lambda ray_node_id: ray_node_id == "cc")
    assert sorted(gone) == sorted([dead, elsewhere_old, never_written])
    assert not any(path.exists() for path in gone)
    for kept in (alive, known, locked, elsewhere_new, new_and_empty, directory.parent / "link"):
        assert kept.exists()
    assert reap(tmp_path, lambda ray_node_id: ray_node_id == "cc") == []
    lock.release()
    assert reap(tmp_path, nobody) == sorted([known, locked])


def test_a_zombie_raylet_is_dead(directory, tmp_path):
    child = subprocess.Popen(["sleep", "600"])
    NodeFile.here("fleet", "00ff", child.pid).write(directory)
    assert reap(tmp_path, nobody) == []
    child.terminate()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert reap(tmp_path, nobody) == [directory]
    child.wait()


def test_reap_of_nothing_is_nothing(tmp_path):
    assert reap(tmp_path, nobody) == []
    assert reap(tmp_path / "absent", nobody) == []


def test_one_bad_directory_does_not_stop_the_reaping_of_others(directory, tmp_path):
    (directory / "lock").mkdir()
    other = directory_for(tmp_path, "fleet", "zz")
    make_directory(other)
    NodeFile("fleet", "zz", os.getpid(), 1, Path("/proc/self/ns/pid").stat().st_ino).write(other)
    with pytest.raises(TierUnavailableError, match="lock"):
        reap(tmp_path, nobody)
    assert not other.exists()

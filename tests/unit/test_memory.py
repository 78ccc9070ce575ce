"""How much memory there is: the file system's word and that of every cgroup above."""

import os
from pathlib import Path

import pytest

from kvfleet.config import GIB, MIB
from kvfleet.errors import ConfigError
from kvfleet.node.memory import default_capacity, free_bytes


def group_v2(path, limit, usage, inactive_file=0):
    path.mkdir(parents=True, exist_ok=True)
    (path / "memory.max").write_text(f"{limit}\n")
    (path / "memory.current").write_text(f"{usage}\n")
    (path / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_file}\n")


def group_v1(path, limit, usage, inactive_file=0):
    path.mkdir(parents=True, exist_ok=True)
    (path / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (path / "memory.usage_in_bytes").write_text(f"{usage}\n")
    (path / "memory.stat").write_text(f"cache 5\ntotal_inactive_file {inactive_file}\n")


@pytest.fixture
def free(tmp_path, monkeypatch):
    """`free(lines of /proc/self/cgroup)` with a terabyte free in the file system."""

    class Statvfs:
        f_bavail, f_frsize = 1 << 28, 4096

    monkeypatch.setattr(os, "statvfs", lambda _: Statvfs)

    def free(*lines):
        (tmp_path / "proc/self").mkdir(parents=True, exist_ok=True)
        (tmp_path / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in lines))
        return free_bytes(tmp_path, proc=tmp_path / "proc", cgroup=tmp_path / "cgroup")

    return free


def test_without_limits_the_file_system_decides(free, tmp_path):
    assert free("0::/") == 1 << 40
    group_v2(tmp_path / "cgroup/a", "max", 5 * GIB)
    assert free("0::/a") == 1 << 40
    assert free() == 1 << 40
    assert free("3:cpu,cpuacct:/a") == 1 << 40


def test_the_tightest_group_above_decides(free, tmp_path):
    group_v2(tmp_path / "cgroup/a", 10 * GIB, 9 * GIB)
    group_v2(tmp_path / "cgroup/a/b", 8 * GIB, 2 * GIB)
    assert free("0::/a/b") == GIB
    group_v2(tmp_path / "cgroup/a", "max", 9 * GIB)
    assert free("0::/a/b") == 6 * GIB
    assert free("0::/a/not-visible-here") == 1 << 40


def test_file_cache_that_can_be_dropped_is_free(free, tmp_path):
    group_v2(tmp_path / "cgroup", 8 * GIB, 7 * GIB, inactive_file=2 * GIB)
    assert free("0::/") == 3 * GIB


def test_cgroup_v1_and_hybrid(free, tmp_path):
    group_v1(tmp_path / "cgroup/memory", 1 << 62, 0)
    group_v1(tmp_path / "cgroup/memory/pod", 4 * GIB, GIB, inactive_file=MIB)
    assert free("5:memory:/pod", "0::/") == 3 * GIB + MIB


def test_an_exhausted_limit_leaves_nothing(free, tmp_path):
    group_v2(tmp_path / "cgroup", GIB, 2 * GIB)
    assert free("0::/") == 0


def test_free_bytes_of_no_directory(tmp_path):
    with pytest.raises(ConfigError, match="arena_root"):
        free_bytes(tmp_path / "absent")


@pytest.mark.parametrize(("free", "capacity"), [(100 * GIB, 4 * GIB), (2 * GIB, 512 * MIB), (MIB, 0)])
def test_default_capacity_is_half_of_what_is_free_and_not_promised(monkeypatch, free, capacity):
    monkeypatch.setattr("kvfleet.node.memory.free_bytes", lambda _: free)
    assert default_capacity(Path("/dev/shm"), reserved_bytes=GIB) == capacity

"""How much shared memory there is to have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from kvfleet.config import GIB
from kvfleet.errors import ConfigError

__all__ = ["default_capacity", "free_bytes"]

_CAPACITY_MAX = 4 * GIB


def free_bytes(root: Path, *, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes a new file in `root` may take: what the file system has free, and what the container's memory limit leaves.

    Raises:
        ConfigError: there is no such directory.
    """
    try:
        found = os.statvfs(root)
    except OSError as error:
        raise ConfigError("arena_root", f"{root}: {error.strerror}") from error
    return min([found.f_bavail * found.f_frsize, *_unused(proc, cgroup)])


def default_capacity(root: Path, *, reserved_bytes: int = 0) -> int:
    """Arena size if none is configured: 4 GiB, or half of what is free if that is less.

    Args:
        root: the arena root.
        reserved_bytes: memory that is free now but promised to others, such as Ray's object store.
    """
    return min(_CAPACITY_MAX, max(0, free_bytes(root) - reserved_bytes) // 2)


def _unused(proc: Path, cgroup: Path) -> Iterator[int]:
    """Memory each limit above this process leaves: cgroup v2 and v1, here and in the enclosing groups."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names, base = ("memory.max", "memory.current", "inactive_file"), cgroup
        elif "memory" in controllers.split(","):
            names, base = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"), cgroup / "memory"
        else:
            continue
        group = base / path.lstrip("/")
        for directory in (group, *group.parents):
            if directory.is_relative_to(base):
                unused = _unused_in(directory, *names)
                if unused is not None:
                    yield unused


def _unused_in(directory: Path, limit_name: str, usage_name: str, reclaimable: str) -> int | None:
    """What one group's limit leaves, or None if it has no limit. File cache that can be dropped counts as unused."""
    try:
        limit = (directory / limit_name).read_text().strip()
        usage = int((directory / usage_name).read_text())
        counters = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except FileNotFoundError:
        return None
    if limit == "max":
        return None
    return max(0, int(limit) - usage + int(counters.get(reclaimable, 0)))

"""What of a machine makes a node slow, or loses it blocks, and can be put right by its operator."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvfleet.config import FleetConfig
from kvfleet.errors import ConfigError
from kvfleet.node.memory import free_bytes

__all__ = ["Check", "State", "check_drive_mount", "check_host"]

State = Literal["ok", "note", "bad"]

_IN_MEMORY = {"tmpfs", "ramfs", "hugetlbfs"}
_TIGHT = 0.02  # of the arena: with less left for others, tmpfs writes of theirs may fail
_FAR = {"9p", "ceph", "cifs", "lustre", "nfs", "nfs4", "overlay"}


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: of it, a word or two.
        state: `note` is for what is not as it could be, and does no harm; `bad` for what has to be put right.
        text: what was found.
    """

    name: str
    state: State
    text: str


def check_host(
    config: FleetConfig, arena_bytes: int, *, proc: Path = Path("/proc"), sys: Path = Path("/sys")
) -> Iterator[Check]:
    """Memory as the node's arena has it.

    Args:
        config: of the fleet.
        arena_bytes: of this node's arena.
        proc: where the kernel tells of mounts.
        sys: where it tells of huge pages.
    """
    mounted = _mount_of(Path(config.arena_root), proc)
    kind, options = ("unknown", "") if mounted is None else mounted[1:]
    if kind in _IN_MEMORY:
        yield Check("arena root", "ok", f"{config.arena_root} is in memory ({kind})")
    else:
        yield Check("arena root", "bad", f"{config.arena_root} is on {kind}, not in memory: loads wait for a disk")
    yield _huge_pages(kind, options, sys)
    try:
        free = free_bytes(Path(config.arena_root))
    except ConfigError as error:
        yield Check("memory", "bad", str(error))
        return
    tight = free < _TIGHT * arena_bytes
    yield Check("memory", "note" if tight else "ok", f"{free / 2**30:.1f} GiB are left beside the arena")


def _huge_pages(kind: str, options: str, sys: Path) -> Check:
    if kind == "hugetlbfs" or re.search(r"\bhuge=(always|within_size|advise)\b", options):
        return Check("huge pages", "ok", "the arena's mount has them")
    path = sys / "kernel/mm/transparent_hugepage/shmem_enabled"
    try:
        found = re.search(r"\[(\w+)\]", path.read_text())
    except OSError:
        found = None
    if found is not None and found[1] in {"always", "within_size", "force"}:
        return Check("huge pages", "ok", f"the kernel gives them to shared memory ({found[1]})")
    advice = "`mount -o remount,huge=within_size /dev/shm` on the host gives larger ones"
    return Check("huge pages", "note", f"none: the arena has pages of 4 KiB. {advice}")


def check_drive_mount(directory: Path, *, proc: Path = Path("/proc")) -> str:
    """What is odd about where a drive's directory is; "" if nothing is."""
    mounted = _mount_of(directory, proc)
    if mounted is None:
        return ""
    where, kind, options = mounted
    if kind in _FAR or kind.startswith("fuse"):
        return f"is on {kind}: not a local drive"
    if kind in _IN_MEMORY:
        return f"is in memory ({kind}): it takes from what the arena could have"
    if where == "/":
        return "is on the root filesystem: no drive of its own"
    return "is mounted with `sync`: each write waits" if "sync" in options.split(",") else ""


def _mount_of(path: Path, proc: Path) -> tuple[str, str, str] | None:
    """Mount point, filesystem and options of the mount that a path is on; None if that is not known."""
    try:
        lines = (proc / "self/mounts").read_text().splitlines()
    except OSError:
        return None
    real, best = os.path.realpath(path), None
    for line in lines:
        _, where, kind, options = line.split(" ")[:4]
        where = where.replace("\\040", " ")
        inside = real == where or real.startswith(where.rstrip("/") + "/")
        if inside and (best is None or len(where) >= len(best[0])):
            best = (where, kind, options)
    return best

"""Gives a manager its arena: the one an earlier manager of this node left, else a new one."""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvfleet.config import MIB, FleetConfig
from kvfleet.core.directory import NodeId
from kvfleet.errors import ConfigError, KvFleetError, TierUnavailableError
from kvfleet.node.arena import ARENA_FILE, Arena
from kvfleet.node.arenadir import LOCK_FILE, FileLock, NodeFile, directory_for, make_directory, reap
from kvfleet.node.arenafile import Geometry
from kvfleet.node.memory import default_capacity
from kvfleet.node.mirror import num_drive_records

__all__ = ["NodeHome", "NodePlace", "open_home", "remove_home"]

_log = logging.getLogger(__name__)
_LOCK_TIMEOUT_S = 10.0  # a manager that was just killed lets go at once; one being replaced takes a moment


@dataclass(frozen=True, slots=True)
class NodePlace:
    """Where a manager runs, as Ray says.

    Attributes:
        ray_node_id: hex.
        raylet_pid: of the raylet that is this process's parent.
        object_store_bytes: size of this node's Ray object store.
        alive: whether a Ray node id is one of a live node of this cluster.
        object_store_used: measures the bytes in use in that store; may block. Raises OSError: not known.
    """

    ray_node_id: str
    raylet_pid: int
    object_store_bytes: int
    alive: Callable[[str], bool]
    object_store_used: Callable[[], int] = lambda: 0


@dataclass(frozen=True, slots=True)
class NodeHome:
    """A node's arena directory, locked for this manager.

    Attributes:
        node_id: Ray's id of the node. A raylet that starts again is another node, with an arena of its own.
        epoch: of this manager, larger than that of any before it on this node.
        warm: an earlier manager's arena was taken over.
    """

    node_id: NodeId
    epoch: int
    directory: Path
    lock: FileLock
    arena: Arena
    warm: bool


def open_home(config: FleetConfig, place: NodePlace) -> NodeHome:
    """Lock this node's arena directory, clear away what dead nodes left, and take over or make the arena.

    Raises:
        ConfigError: there is no memory for it, or the directory is not safe.
        TierUnavailableError: another manager has the directory.
    """
    root = Path(config.arena_root)
    try:
        for gone in reap(root, place.alive):
            _log.info("removed the arena of a dead node: %s", gone)
    except TierUnavailableError as error:
        _log.warning("could not remove all that dead nodes left: %s", error)
    directory = directory_for(root, config.name, place.ray_node_id)
    make_directory(directory)
    lock = FileLock(directory / LOCK_FILE)
    if not lock.acquire(_LOCK_TIMEOUT_S):
        raise TierUnavailableError("dram", f"{directory}: another manager is using it")
    try:
        return _open_locked(config, place, directory, lock)
    except KvFleetError:
        shutil.rmtree(directory)
        lock.release()
        raise


def _open_locked(config: FleetConfig, place: NodePlace, directory: Path, lock: FileLock) -> NodeHome:
    if NodeFile.read(directory) is not None:
        try:
            arena = Arena.attach(directory / ARENA_FILE)
            _check_size(config, arena)
            return NodeHome(NodeId(place.ray_node_id), _next_epoch(directory), directory, lock, arena, warm=True)
        except TierUnavailableError as error:
            _log.warning("starting with an empty arena: %s", error)
    capacity = config.dram_bytes
    if capacity is None:
        capacity = default_capacity(Path(config.arena_root), reserved_bytes=place.object_store_bytes)
        if capacity < MIB:
            raise ConfigError("arena_root", f"{config.arena_root} has no room left for an arena")
    arena = Arena.create(directory, capacity, num_drive_records=num_drive_records(config.nvme))
    NodeFile.here(config.name, place.ray_node_id, place.raylet_pid).write(directory)
    return NodeHome(NodeId(place.ray_node_id), _next_epoch(directory), directory, lock, arena, warm=False)


def _check_size(config: FleetConfig, arena: Arena) -> None:
    """A fleet that could not be stopped in order may have left an arena of another size than is wanted now."""
    resized = config.dram_bytes is not None and arena.capacity_bytes != Geometry.plan(config.dram_bytes).capacity_bytes
    if resized or (arena.drive_records is None) == bool(config.nvme):
        arena.close()
        raise TierUnavailableError("dram", f"{arena.path} has another size than it should")


def remove_home(home: NodeHome, *, unmap: bool = True) -> None:
    """Remove a node's arena and what is beside it, and let go of the lock.

    Args:
        home: of the node.
        unmap: let go of the arena's memory too. Not where somebody may still use it: then it ends with the process.
    """
    home.arena.unlink()
    with contextlib.suppress(FileNotFoundError):  # somebody was faster
        shutil.rmtree(home.directory)
    home.lock.release()
    if unmap:
        home.arena.close()


def _next_epoch(directory: Path) -> int:
    """Larger than any before: also after the file was lost, unless the clock was set back as well."""
    path = directory / "epoch"
    stored = int(path.read_text()) if path.exists() else 0
    epoch = max(stored + 1, time.time_ns() // 1_000_000)
    partial = path.with_suffix(".partial")
    partial.write_text(str(epoch))
    partial.replace(path)
    return epoch

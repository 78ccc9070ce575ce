"""Where arenas live: private directories, the locks in them, and what is left of dead nodes.

    <arena_root>/kvfleet-<uid>/<fleet>-<ray_node_id>/
        arena  lock  node.json  clients/<client_id>  departed  draining  namespaces/

A lock (`flock`) is a sign of life that needs no pid: it works across containers, and the kernel drops it with the
last process that has the file open, however that dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from kvfleet.errors import ConfigError, TierUnavailableError

__all__ = [
    "CLIENTS_DIR",
    "LOCK_FILE",
    "FileLock",
    "NodeFile",
    "directory_for",
    "make_directory",
    "reap",
]

CLIENTS_DIR = "clients"
LOCK_FILE = "lock"
NODE_FILE = "node.json"

_GRACE_S = 60.0  # a node that cannot be looked at is given this long without a sign of life
_POLL_S = 0.005


def directory_for(root: Path, fleet: str, ray_node_id: str) -> Path:
    """The directory of one node's arena."""
    name = f"{fleet}-{ray_node_id}"
    assert "/" not in name
    return _home(root) / name


def _home(root: Path) -> Path:
    return root / f"kvfleet-{os.geteuid()}"


def make_directory(directory: Path) -> None:
    """Make a node's directory and its parent, private to this user, or check that they are.

    Raises:
        ConfigError: the root is missing, or something else is in the way: another user's directory, a link, or
            one that others may enter. It is left as it is.
    """
    for path in (directory.parent, directory, directory / CLIENTS_DIR):
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            found = path.lstat()
        except OSError as error:
            raise ConfigError("arena_root", f"{path}: {error.strerror}") from error
        _check_private(path, found)


def _check_private(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigError("arena_root", f"{path}: not a private directory of this user")


class FileLock:
    """An exclusive `flock`, made with its file.

    A forked child does not keep it. Dropped by `release`, by the process's end, and when the object is collected.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None

    def acquire(self, timeout_s: float = 0.1) -> bool:
        """Take the lock.

        Returns:
            False if another process has it for longer than `timeout_s`. Those that merely ask `held` have it
            for microseconds.

        Raises:
            TierUnavailableError: the file cannot be made.

        Blocking: up to `timeout_s`.
        """
        assert self._fd is None, "already acquired"
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._fd = _try_lock(self.path)
            except OSError as error:
                raise TierUnavailableError("dram", f"{self.path}: {error.strerror}") from error
            if self._fd is not None:
                _acquired.add(self)
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)

    def release(self) -> None:
        """Give the lock back. The file stays. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __del__(self) -> None:
        self.release()

    @staticmethod
    def held(path: Path) -> bool:
        """Whether any process has the lock of this file.

        Raises:
            TierUnavailableError: the file is there but cannot be opened, or asked for its lock.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise TierUnavailableError("dram", f"{path}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError as error:
            raise TierUnavailableError("dram", f"{path}: {error.strerror}") from error
        finally:
            os.close(fd)
        return False


def _try_lock(path: Path) -> int | None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever cleans up removes the file while holding its lock: a lock on a removed file is no lock.
        if path.lstat().st_ino == os.fstat(fd).st_ino:
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(fd)
        raise
    os.close(fd)
    return None


_acquired: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    # Closing the child's copy leaves the parent's lock; without it the lock would outlive the parent.
    for lock in tuple(_acquired):
        lock.release()


os.register_at_fork(after_in_child=_forget_in_child)


def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def _start_time(pid: int) -> int | None:
    """Clock ticks since boot at which a process started, None if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name, in parentheses, may itself hold spaces and parentheses; the state comes after it.
    after_name = fields.rpartition(")")[2].split()
    return None if after_name[0] in "ZX" else int(after_name[19])


@dataclass(frozen=True, slots=True)
class NodeFile:
    """What `node.json` says of the node an arena belongs to.

    Attributes:
        fleet: name.
        ray_node_id: hex.
        raylet_pid: in the pid namespace whose inode is `pid_namespace`.
        raylet_start: start time of that process, clock ticks since boot.
    """

    fleet: str
    ray_node_id: str
    raylet_pid: int
    raylet_start: int
    pid_namespace: int

    @classmethod
    def here(cls, fleet: str, ray_node_id: str, raylet_pid: int) -> NodeFile:
        """Facts of this node, whose raylet is running in this process's pid namespace."""
        return cls(fleet, ray_node_id, raylet_pid, _start_time(raylet_pid) or 0, _pid_namespace())

    def write(self, directory: Path) -> None:
        """Write it, whole or not at all."""
        partial = directory / f"{NODE_FILE}.partial"
        partial.write_text(json.dumps(asdict(self)))
        partial.replace(directory / NODE_FILE)

    @classmethod
    def read(cls, directory: Path) -> NodeFile | None:
        """Read it; None if there is none, or none that can be understood."""
        try:
            return cls(**json.loads((directory / NODE_FILE).read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    @staticmethod
    def touch(directory: Path) -> None:
        """A sign of life for those who cannot see this node's processes; the manager gives one every few seconds."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(directory / NODE_FILE)


def reap(root: Path, alive: Callable[[str], bool]) -> list[Path]:
    """Remove what dead nodes of this user left.

    A directory goes if `alive` does not know its Ray node, no manager holds its lock, and its raylet is gone: no
    such process with that start time, or, in another pid namespace where this cannot be seen, no sign of life
    for 60 s.

    Args:
        root: the arena root.
        alive: whether a Ray node id is known to be alive.

    Returns:
        The directories that are gone.

    Raises:
        ConfigError: the user's directory in `root` is not private.
        TierUnavailableError: something could not be removed; all else was looked at.
    """
    home = _home(root)
    if not os.path.lexists(home):
        return []
    _check_private(home, home.lstat())
    reaped, problems = [], []
    for directory in sorted(home.iterdir()):
        if directory.is_symlink() or not directory.is_dir():
            continue
        try:
            if _remove_if_dead(directory, alive):
                reaped.append(directory)
        except (OSError, TierUnavailableError) as error:
            problems.append(str(error))
    if problems:
        raise TierUnavailableError("dram", "; ".join(problems))
    return reaped


def _remove_if_dead(directory: Path, alive: Callable[[str], bool]) -> bool:
    lock = FileLock(directory / LOCK_FILE)
    if not lock.acquire(0.0):
        return False
    try:
        dead = _dead(directory, alive)
        if dead:
            shutil.rmtree(directory)
        return dead
    finally:
        lock.release()


def _dead(directory: Path, alive: Callable[[str], bool]) -> bool:
    node = NodeFile.read(directory)
    if node is not None:
        if alive(node.ray_node_id):
            return False
        if node.pid_namespace == _pid_namespace():
            return _start_time(node.raylet_pid) != node.raylet_start
    signs = [directory / NODE_FILE, directory]
    newest = max(path.stat().st_mtime for path in signs if path.exists())
    return time.time() - newest > _GRACE_S

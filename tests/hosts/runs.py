"""What a run of hosts consists of: namespaces, links, mounts, directories, processes. How to find and remove it.

All of it is named after the run, and processes are found by the namespace they are in: so what a run left that was
killed is removed by the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import SHARED_MEMORY, wait_for

__all__ = [
    "END_TIMEOUT_S",
    "NAMESPACES",
    "STATE",
    "begin_run",
    "children",
    "command",
    "descriptors",
    "end_run",
    "is_running",
    "kill_all_in",
    "leftovers",
    "processes_in",
    "sweep",
    "threads",
]

STATE = Path(f"/tmp/kvf-{os.getuid()}")  # short: a socket's path may have 107 characters
NAMESPACES = Path("/run/netns")
END_TIMEOUT_S = 60.0


def command(*arguments: str) -> str:
    """Run a command, quickly done, and return what it prints."""
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, f"{' '.join(arguments)}: {done.stderr.strip()}"
    return done.stdout


# --- processes, found by the namespace they are in


def processes_in(namespace: str) -> list[int]:
    """Ids of all processes in a network namespace, those of dead parents too."""
    try:
        wanted = (NAMESPACES / namespace).stat()
    except FileNotFoundError:
        return []
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        # Gone meanwhile, or so well guarded that it is none of ours.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            network = (entry / "ns/net").stat()
            if (network.st_dev, network.st_ino) == (wanted.st_dev, wanted.st_ino):
                found.append(int(entry.name))
    return found


def kill_all_in(namespace: str) -> None:
    """Kill -9 all processes in a network namespace, and wait until they are gone."""

    def empty() -> bool:
        processes = processes_in(namespace)
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return not processes

    wait_for(empty, f"no process is left in {namespace}", END_TIMEOUT_S)


def children(process: int) -> dict[int, str]:
    """Names of the executables of a process's children, by process id."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == process:
                found[int(stat.parent.name)] = (stat.parent / "exe").readlink().name
    return found


def is_running(process: int) -> bool:
    """Whether a process has not ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def threads(process: int) -> int:
    """How many threads a process has."""
    return len(list(Path(f"/proc/{process}/task").iterdir()))


def descriptors(process: int) -> int:
    """How many files a process has open."""
    return len(list(Path(f"/proc/{process}/fd").iterdir()))


# --- what earlier runs left


def _locked(path: Path) -> int | None:
    """Lock a file, made if need be; None if another process has the lock. It goes with the descriptor."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One process at a time makes or removes runs."""
    STATE.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(STATE / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _mounts() -> list[str]:
    """Where something is mounted."""
    return [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]


def _names(run: str) -> tuple[list[str], list[str]]:
    """Namespaces and links of a run."""
    namespaces = [path.name for path in NAMESPACES.glob(f"kvf-{run}-*")]
    links = [path.name for path in Path("/sys/class/net").glob(f"kvf{run}*")]
    return namespaces, links


def leftovers(run: str) -> list[str]:
    """All that is left of a run."""
    namespaces, links = _names(run)
    places = [path for path in (STATE / run, SHARED_MEMORY / f"kvf-{run}") if path.exists()]
    processes = [str(process) for name in namespaces for process in processes_in(name)]
    return [*namespaces, *links, *map(str, places), *processes, *(m for m in _mounts() if f"/{run}/" in m)]


def _remove(run: str) -> None:
    """End and remove all of a run, whatever state it is in."""
    namespaces, _ = _names(run)
    for namespace in namespaces:
        kill_all_in(namespace)
        command("ip", "netns", "delete", namespace)  # and the link in it, with its other end
    for link in _names(run)[1]:
        with contextlib.suppress(AssertionError):  # the ends of links go a moment after their namespace
            command("ip", "link", "delete", link)
    wait_for(lambda: not _names(run)[1], f"the links of {run} are gone")
    for mount in [mount for mount in _mounts() if mount.startswith(f"{STATE / run}/")]:
        command("umount", mount)
    shutil.rmtree(SHARED_MEMORY / f"kvf-{run}", ignore_errors=True)
    shutil.rmtree(STATE / run)


def _tidy() -> None:
    """With the last run go what `ip netns` mounted for it, and our own directory."""
    marker = STATE / "mounted"
    if not any(path.is_dir() for path in STATE.iterdir()):
        if marker.exists() and not any(NAMESPACES.iterdir()):
            command("umount", str(NAMESPACES))
            NAMESPACES.rmdir()
        shutil.rmtree(STATE)


def _sweep() -> None:
    for directory in [path for path in STATE.iterdir() if path.is_dir()]:
        lock = _locked(directory / "lock")
        if lock is not None:
            _remove(directory.name)
            os.close(lock)


def sweep() -> None:
    """Remove what is left of runs whose process is dead."""
    with _alone():
        _sweep()
        _tidy()


def begin_run(run: str) -> int:
    """Make a run's directory, after what is left of dead runs is removed. Its lock goes with the descriptor."""
    with _alone():
        _sweep()
        (STATE / run).mkdir(mode=0o700)
        lock = _locked(STATE / run / "lock")
        assert lock is not None
        if str(NAMESPACES) not in _mounts():
            (STATE / "mounted").touch()  # by the first `ip netns add`, which leaves it
        return lock


def end_run(run: str, lock: int) -> None:
    """End and remove all of a run."""
    with _alone():
        _remove(run)
        _tidy()
    os.close(lock)

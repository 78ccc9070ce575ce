"""SHA-256 of large files, kept between processes.

SHA-256 runs at 1.3 GB/s a core (1 GB file in the page cache, pieces of 4 MiB, Intel Xeon with SHA extensions,
2026-11-30). At that speed four threads would read a model of 140 GB in 27 s, if the drive can feed them; the next
time nothing is read.

    $XDG_CACHE_HOME/kvfleet/weights/
        <file>.json   {"sha256": hex}; <file> is a digest of device, inode, size and times
        <file>.lock   while a process reads the file

The directory is a cache: whatever is wrong with it, files are read instead. One file an entry, so that writers
need not agree.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from kvfleet.core.block import encode_fields
from kvfleet.errors import ConfigError, TierUnavailableError
from kvfleet.node.arenadir import FileLock

__all__ = ["cache_directory", "file_digest"]

_PIECE_BYTES = 4 << 20
_ENTRIES_MAX = 4096
_ENTRY_BYTES_MAX = 4096
_READS_MAX = 3
_WAIT_S = 600.0  # for another process's reading: 780 GB at the speed above
# A file written twice within a tick of its filesystem's clock looks the same; the coarsest ticks are 2 s.
_SETTLED_NS = 2_000_000_000


def cache_directory() -> Path:
    """Where kvfleet keeps what it can make again: `$XDG_CACHE_HOME/kvfleet`, or `~/.cache/kvfleet`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvfleet"


def file_digest(path: Path) -> bytes:
    """SHA-256 of a file's content, 32 bytes.

    Raises:
        ConfigError: the file changes while it is read, again and again.
        OSError: it cannot be read.

    Blocking: while this or another process of the node reads the file.
    Threads: any.
    """
    directory = cache_directory() / "weights"
    entry = directory / _name(path.stat())
    known = _recall(entry)
    if known is not None:
        return known
    with _reading_alone(entry):
        known = _recall(entry)
        if known is None:
            known, found = _read(path)
            _remember(directory / _name(found), known, found)
    return known


@contextlib.contextmanager
def _reading_alone(entry: Path) -> Iterator[None]:
    """Wait for the process that is reading the same file; others wait for this one."""
    lock = FileLock(entry.with_suffix(".lock"))
    try:
        entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        acquired = lock.acquire(_WAIT_S)
    except (OSError, TierUnavailableError):
        # No directory to write to, or no locks in it: two may read the same.
        acquired = False
    try:
        yield
    finally:
        if acquired:
            with contextlib.suppress(OSError):
                # Those who wait for the lock see that its file is gone, and make a new one.
                lock.path.unlink()
        lock.release()


def _name(found: os.stat_result) -> str:
    """An entry's file name: another one after each change of the file that its filesystem has noticed."""
    # The change time cannot be set back, unlike the modification time, which images and archives bring with them.
    facts = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return hashlib.sha256(encode_fields(("fact", fact) for fact in facts)).hexdigest()[:32] + ".json"


def _recall(entry: Path) -> bytes | None:
    try:
        with entry.open("rb") as file:
            digest = bytes.fromhex(json.loads(file.read(_ENTRY_BYTES_MAX))["sha256"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return digest if len(digest) == hashlib.sha256().digest_size else None


def _remember(entry: Path, digest: bytes, found: os.stat_result) -> None:
    if time.time_ns() - max(found.st_mtime_ns, found.st_ctime_ns) < _SETTLED_NS:
        return
    partial = entry.with_name(f".{entry.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        partial.write_text(json.dumps({"sha256": digest.hex()}))
        partial.replace(entry)
        _forget_oldest(entry.parent)
    except OSError:
        # Full or gone: the next process reads the file.
        with contextlib.suppress(OSError):
            partial.unlink()


def _forget_oldest(directory: Path) -> None:
    entries = list(directory.glob("*.json"))
    if len(entries) > _ENTRIES_MAX:
        entries.sort(key=lambda entry: entry.stat().st_mtime_ns)
        for entry in entries[: -_ENTRIES_MAX // 2]:
            entry.unlink(missing_ok=True)


def _read(path: Path) -> tuple[bytes, os.stat_result]:
    for _ in range(_READS_MAX):
        with path.open("rb", buffering=0) as file:
            before = os.fstat(file.fileno())
            digest = hashlib.sha256()
            buffer = bytearray(_PIECE_BYTES)
            view = memoryview(buffer)
            # hashlib lets other threads run meanwhile.
            while num_bytes := file.readinto(buffer):
                digest.update(view[:num_bytes])
        if _name(path.stat()) == _name(before):
            return digest.digest(), before
    raise ConfigError("model", f"{path} changes while it is read")

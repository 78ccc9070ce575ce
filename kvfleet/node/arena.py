"""The arena: one shared-memory file a node, mapped by every engine process and by the manager.

    header · slab table · record table · record table of the drives · slots

The file is allocated whole before anyone maps it, so that a lack of memory is an error at start and never a SIGBUS
later. It outlives the processes that use it: a restarted manager finds its blocks in it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvfleet.config import GIB, MIB
from kvfleet.errors import ConfigError, TierUnavailableError
from kvfleet.node.arenadir import make_directory
from kvfleet.node.arenafile import Geometry, read_header
from kvfleet.node.memory import free_bytes
from kvfleet.node.records import RecordTable, table_bytes

__all__ = ["ARENA_FILE", "Arena"]

ARENA_FILE = "arena"

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]

_POPULATE_STEP = 16 * MIB
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python's mmap module
_TIER = "dram"

_libc = ctypes.CDLL(None, use_errno=True)  # its calls release the GIL, mmap.madvise does not
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Arena:
    """A mapped arena file. Make one with `create` or `attach`.

    Threads: any, as far as `records` allows. The mapping stays while views of it live, also after `close`.

    Attributes:
        arena_id: 16 bytes, new with each arena.
        path: of the file.
        inode: which file it is, whatever is at that path by now.
        capacity_bytes: of the slot area.
        unit_bytes: what slabs are made of.
        slots_offset: where the slot area starts in the file; records hold file offsets.
        drive_records: what is on this node's drives, as far as there was room for it; None if it has none. Its
            generations guard nothing: a record says that a load will find the block, no more.
    """

    def __init__(self, path: Path, inode: int, arena_id: bytes, geometry: Geometry, mapping: mmap.mmap) -> None:
        self.path = path
        self.inode = inode
        self.arena_id = arena_id
        self.capacity_bytes = geometry.capacity_bytes
        self.unit_bytes = geometry.unit_bytes
        self.slots_offset = geometry.slots_offset
        self._mapping = mapping
        memory = np.frombuffer(mapping, np.uint8)
        assert len(memory) == geometry.file_bytes
        self._memory: Bytes | None = memory
        self._slab_table: Words | None = memory[geometry.slab_offset :][: geometry.num_units * 8].view(np.uint64)
        table = memory[geometry.records_offset :][: table_bytes(geometry.num_records)]
        self._records: RecordTable | None = RecordTable(table, geometry.num_records)
        self.drive_records: RecordTable | None = None
        if geometry.num_drive_records:
            table = memory[geometry.drive_records_offset :][: table_bytes(geometry.num_drive_records)]
            self.drive_records = RecordTable(table, geometry.num_drive_records)
        starts = range(0, geometry.file_bytes, _POPULATE_STEP)
        self._unpopulated = deque((start, min(_POPULATE_STEP, geometry.file_bytes - start)) for start in starts)

    @classmethod
    def create(
        cls, directory: Path, capacity_bytes: int, *, num_records: int | None = None, num_drive_records: int = 0
    ) -> Arena:
        """Make a new, empty arena, in place of any that is there.

        Only the holder of the directory's manager lock may call this. A crash on the way leaves no arena.

        Args:
            directory: from `directory_for`; made if missing.
            capacity_bytes: for slots, rounded down to whole units; the tables take up to 0.3 % more.
            num_records: most blocks the arena can hold; default one per 64 KiB.
            num_drive_records: blocks on the node's drives that clients are to see; each takes 128 to 192 bytes more.

        Raises:
            ConfigError: the memory is not there, or the directory is not safe. There is no arena then.

        Blocking: allocates at 4 to 5 GB/s.
        """
        make_directory(directory)
        geometry = Geometry.plan(capacity_bytes, num_records, num_drive_records)
        path, partial = directory / ARENA_FILE, directory / f"{ARENA_FILE}.partial"
        free = 0
        try:
            path.unlink(missing_ok=True)
            partial.unlink(missing_ok=True)
            free = free_bytes(directory)
            if geometry.file_bytes > free:
                raise _no_room(directory, geometry, free)
            inode, arena_id, mapping = _allocate(partial, geometry)
            partial.rename(path)
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG}:
                raise _no_room(directory, geometry, free) from error
            raise TierUnavailableError(_TIER, f"{directory}: {error}") from error
        return cls(path, inode, arena_id, geometry, mapping)

    @classmethod
    def attach(cls, path: Path, expected_arena_id: bytes | None = None) -> Arena:
        """Map an arena that exists.

        Args:
            path: of the file.
            expected_arena_id: refuse any other arena.

        Raises:
            TierUnavailableError: no file there, or none of ours: not a regular file of this user with mode 0600,
                another format, damaged, or another arena than expected.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise TierUnavailableError(_TIER, f"{path}: {error.strerror}") from error
        try:
            arena_id, geometry = read_header(path, fd)
            if expected_arena_id is not None and arena_id != expected_arena_id:
                raise TierUnavailableError(_TIER, f"{path}: another arena is there now")
            mapping = mmap.mmap(fd, geometry.file_bytes)
            inode = os.fstat(fd).st_ino
        except OSError as error:
            raise TierUnavailableError(_TIER, f"{path}: {error}") from error
        finally:
            os.close(fd)
        return cls(path, inode, arena_id, geometry, mapping)

    @property
    def records(self) -> RecordTable:
        """The index of the arena's blocks."""
        assert self._records is not None, "the arena is closed"
        return self._records

    @property
    def slab_table(self) -> Words:
        """One word per unit, shape (num_units,), for the manager's slab map; zero when new."""
        assert self._slab_table is not None, "the arena is closed"
        return self._slab_table

    def slot_view(self, offset: int, length: int) -> Bytes:
        """The bytes at a file offset in the slot area, shape (length,), writable, shared with all processes."""
        assert self._memory is not None, "the arena is closed"
        assert self.slots_offset <= offset <= offset + length <= len(self._memory)
        return self._memory[offset : offset + length]

    @property
    def populated_bytes(self) -> int:
        """Bytes of the file that `populate` has done or is doing, to within 16 MiB."""
        return max(0, self.slots_offset + self.capacity_bytes - len(self._unpopulated) * _POPULATE_STEP)

    def populate(self, stop: threading.Event, threads: int = 2) -> None:
        """Map all pages in advance, so that first use costs no page fault (5 to 10 times slower). Contents stay.

        Args:
            stop: set it to return early; the next call goes on from there.
            threads: that do it.

        Raises:
            TierUnavailableError: the kernel refused; what is not mapped yet will be on first use.

        Blocking: 1.5 to 2 GB/s for a new arena, faster for an old one. Releases the GIL.
        """
        memory = self._memory
        assert memory is not None, "the arena is closed"
        with ThreadPoolExecutor(threads, "kvfleet-populate") as pool:
            for done in [pool.submit(self._populate_some, memory, stop) for _ in range(threads)]:
                done.result()

    def _populate_some(self, memory: Bytes, stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                start, length = self._unpopulated.popleft()
            except IndexError:
                return
            if _libc.madvise(memory.ctypes.data + start, length, _MADV_POPULATE_WRITE) == 0:
                continue
            problem = ctypes.get_errno()
            if problem == errno.EINVAL:  # an older kernel: reading a byte of each page maps it too
                memory[start : start + length : mmap.PAGESIZE].max()
                continue
            self._unpopulated.append((start, length))
            if problem not in {errno.EINTR, errno.EAGAIN}:
                raise TierUnavailableError(_TIER, f"populate: {os.strerror(problem)}")

    def close(self) -> None:
        """Let go of the mapping; it ends when the last view of it does. Idempotent."""
        self._memory = self._slab_table = self._records = self.drive_records = None
        try:
            self._mapping.close()
        except BufferError:
            return  # views live on and keep it

    def unlink(self) -> None:
        """Remove the file. Memory is freed when the last process lets go of it."""
        self.path.unlink(missing_ok=True)


def _allocate(path: Path, geometry: Geometry) -> tuple[int, bytes, mmap.mmap]:
    arena_id = secrets.token_bytes(16)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, geometry.file_bytes)
        os.pwrite(fd, geometry.header(arena_id), 0)
        return os.fstat(fd).st_ino, arena_id, mmap.mmap(fd, geometry.file_bytes)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(fd)


def _no_room(directory: Path, geometry: Geometry, free: int) -> ConfigError:
    return ConfigError(
        "dram_bytes",
        f"an arena of {geometry.file_bytes / GIB:.3f} GiB does not fit into {directory}, {free / GIB:.3f} GiB are "
        "free. Ask for less, or give the mount more memory: `docker run --shm-size=...`, in Kubernetes an "
        "`emptyDir: {medium: Memory}` volume on /dev/shm, on a host `mount -o remount,size=... /dev/shm`",
    )

"""The data file of a drive: slots of whole pages, read and written past the page cache."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import numpy as np
import numpy.typing as npt

from kvfleet.config import MIB
from kvfleet.core.slabs import SLOT_ALIGN
from kvfleet.errors import CorruptBlockError, TierFullError, TierUnavailableError

__all__ = ["TIER", "DriveFile", "drive_errors", "read_through", "take_room"]

TIER = "nvme"

Bytes = npt.NDArray[np.uint8]
_Call = Callable[[int, "list[memoryview]", int], int]

_FULL = {errno.ENOSPC, errno.EDQUOT}
_UNABLE = {errno.EOPNOTSUPP, errno.EINVAL}


@contextmanager
def drive_errors(path: Path, what: str) -> Iterator[None]:
    """Turn what the system or LMDB raises into a TierError: foreign errors end here."""
    try:
        yield
    except (OSError, lmdb.Error) as error:
        full = isinstance(error, (lmdb.MapFullError, lmdb.DiskError)) or getattr(error, "errno", None) in _FULL
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise (TierFullError if full else TierUnavailableError)(TIER, f"{path}: {what}: {reason}") from error


class DriveFile:
    """A file that is read and written in whole pages at offsets that are multiples of a page.

    Memory must begin on a page, as the slots of an arena do: then the drive reads from it and writes to it, and no
    byte is copied. A last page that is not full goes through a page of its own.

    Blocking: every method.
    Threads: any, at the same time; but two writes to one place, or a `truncate` beside others, are bugs.

    Attributes:
        direct: False if the filesystem does not do direct I/O; then all goes through the page cache.
        num_bytes: allocated so far.
    """

    def __init__(self, path: Path) -> None:
        """Open the file; it is made if it is missing.

        Raises:
            TierUnavailableError: it cannot be.
        """
        self._path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with drive_errors(path, "open"):
            try:
                self._fd = os.open(path, flags | os.O_DIRECT, 0o600)
                self.direct = True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._fd = os.open(path, flags, 0o600)
                self.direct = False
            self.num_bytes = os.fstat(self._fd).st_size

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def allocate(self, num_bytes: int, step_bytes: int) -> None:
        """Make the file so large, with the room for it taken now; as large as there is room, in steps.

        On a filesystem that cannot take room in advance it is not taken: then writes may find the drive full.

        Raises:
            TierUnavailableError: the drive failed.
        """
        while self.num_bytes < num_bytes:
            with drive_errors(self._path, "allocate"):
                try:
                    os.posix_fallocate(self._fd, self.num_bytes, num_bytes - self.num_bytes)
                except OSError as error:
                    os.ftruncate(self._fd, self.num_bytes)  # what it got goes back
                    if error.errno in _UNABLE:
                        os.ftruncate(self._fd, num_bytes)
                        self.num_bytes = num_bytes
                        return
                    if error.errno not in _FULL:
                        raise
                    room = min(self.free_bytes(), (num_bytes - self.num_bytes) // 2)
                    num_bytes = self.num_bytes + room // step_bytes * step_bytes
                else:
                    self.num_bytes = num_bytes

    def truncate(self, num_bytes: int) -> None:
        """Make the file smaller.

        Raises:
            TierUnavailableError: the drive failed.
        """
        assert num_bytes <= self.num_bytes, "it shrinks"
        with drive_errors(self._path, "truncate"):
            os.ftruncate(self._fd, num_bytes)
            self.num_bytes = num_bytes

    def free_bytes(self) -> int:
        """What the filesystem has left.

        Raises:
            TierUnavailableError: the drive failed.
        """
        with drive_errors(self._path, "statvfs"):
            found = os.fstatvfs(self._fd)
            return found.f_bavail * found.f_frsize

    def write(self, offset: int, data: Bytes) -> None:
        """Write to a slot. The rest of its last page becomes zero.

        Args:
            offset: a multiple of a page.
            data: `(num_bytes,)`, uint8, contiguous, beginning on a page.

        Raises:
            TierFullError: the filesystem, one that allocates on each write, is full.
            TierUnavailableError: the drive failed. The slot holds anything.
        """
        whole, tail = _pages(data)
        if tail is not None:
            tail[: len(data) - len(whole)] = data[len(whole) :]
        with drive_errors(self._path, "write"):
            moved = self._transfer(os.pwritev, offset, whole, tail)
            if moved < len(data):
                raise OSError(errno.EIO, f"wrote {moved} of {len(data)} bytes")

    def read(self, offset: int, target: Bytes) -> None:
        """Fill `target` from a slot.

        Args:
            offset: a multiple of a page.
            target: `(num_bytes,)`, uint8, contiguous, beginning on a page.

        Raises:
            CorruptBlockError: the file ends before the block does.
            TierUnavailableError: the drive failed. `target` holds anything.
        """
        whole, tail = _pages(target)
        with drive_errors(self._path, "read"):
            moved = self._transfer(os.preadv, offset, whole, tail)
        if moved < len(target):
            raise CorruptBlockError(TIER, f"{self._path}: {moved} of {len(target)} bytes at {offset}")
        if tail is not None:
            target[len(whole) :] = tail[: len(target) - len(whole)]

    def probe(self) -> None:
        """See that the medium answers, by reading a page of it.

        Raises:
            TierUnavailableError: it does not.
        """
        with drive_errors(self._path, "read"):
            self._transfer(os.preadv, 0, *_pages(np.frombuffer(mmap.mmap(-1, SLOT_ALIGN), np.uint8)))

    def flush(self) -> None:
        """Have all that was written on the medium.

        Raises:
            TierUnavailableError: the drive failed.
        """
        with drive_errors(self._path, "flush"):
            os.fdatasync(self._fd)
            if not self.direct:  # the page cache is better used otherwise
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _transfer(self, call: _Call, offset: int, whole: Bytes, tail: Bytes | None) -> int:
        """Move all pages, as many as the system takes at a time. Returns the bytes moved; fewer at an end."""
        assert self._fd >= 0, "the file is open"
        assert offset % SLOT_ALIGN == 0, "slots begin on pages"
        rest = [] if tail is None else [tail.data]
        total = len(whole) + SLOT_ALIGN * len(rest)
        done = 0
        while done < total:
            pieces = [whole.data[done:], *rest] if done < len(whole) else rest
            try:
                moved = call(self._fd, pieces, offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self.direct:
                    raise
                self._give_up_direct()
                continue
            if done + moved >= total or moved < SLOT_ALIGN:
                return done + moved
            done += moved // SLOT_ALIGN * SLOT_ALIGN
        return done

    def _give_up_direct(self) -> None:
        """Some filesystems open a file for direct I/O and then refuse to do it."""
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        self.direct = False


def _pages(data: Bytes) -> tuple[Bytes, Bytes | None]:
    """The whole pages of some memory, and a page for the rest if there is one."""
    assert data.dtype == np.uint8
    assert data.ndim == 1
    assert data.flags.c_contiguous
    assert data.ctypes.data % SLOT_ALIGN == 0, "memory begins on a page"
    whole = data[: len(data) // SLOT_ALIGN * SLOT_ALIGN]
    if len(whole) == len(data):
        return whole, None
    return whole, np.frombuffer(mmap.mmap(-1, SLOT_ALIGN), np.uint8)


def read_through(path: Path) -> None:
    """Read all of a file: LMDB reads it by mapping it, and a page that cannot be read then ends the process."""
    with path.open("rb", buffering=0) as file:
        while file.read(MIB):
            pass


def take_room(path: Path, num_bytes: int) -> int:
    """Take the room now, so that a full filesystem cannot stop a deletion later. Returns how many bytes were written.

    What is new is written once: then a transaction does not have to wait for the filesystem's journal, which would note
    of each of its pages that it was written for the first time.
    """
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        before = done = os.fstat(fd).st_size
        os.posix_fallocate(fd, 0, num_bytes)
        if done < num_bytes:
            while done < num_bytes:
                done += os.pwrite(fd, bytes(min(MIB, num_bytes - done)), done)
            os.fsync(fd)
        return max(0, num_bytes - before)
    finally:
        os.close(fd)

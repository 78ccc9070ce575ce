"""Media that lie, fail and forget: the calls that drives and the shared tier make, with faults among them."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections import Counter

import pytest

from kvfleet.node.objects import ObjectStore

FAULTS = (
    "drive read is short", "drive reads another bit", "drive write is torn", "shared read fails",
    "shared read is short", "shared reads another bit", "shared write fails", "shared write is torn",
    "shared writes another bit", "shared write is not told of",
)  # fmt: skip
"""Those of which a long run has some. Drives that fail are rarer: each is away for a second or more."""


class Media:
    """Faults of the media, drawn at random, counted by name.

    Attributes:
        well: no fault happens.
        done: faults so far.
    """

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.well = True
        self.done: Counter[str] = Counter()
        self._chance = random.Random(seed)
        self._mutex = threading.Lock()
        self._preadv, self._pwritev = os.preadv, os.pwritev
        monkeypatch.setattr(os, "preadv", self.preadv)
        monkeypatch.setattr(os, "pwritev", self.pwritev)
        monkeypatch.setattr(ObjectStore, "_read_file", self._reading(ObjectStore._read_file))
        monkeypatch.setattr(ObjectStore, "_put_by_rename", self._putting(ObjectStore._put_by_rename))

    def happens(self, name: str, one_in: int) -> bool:
        """Whether a fault happens now."""
        with self._mutex:
            if self.well or self._chance.randrange(one_in):
                return False
            self.done[name] += 1
            return True

    def place(self, length: int) -> int:
        """Somewhere in so many bytes."""
        with self._mutex:
            return self._chance.randrange(length)

    def flipped(self, data: bytes) -> bytes:
        place = self.place(len(data))
        return data[:place] + bytes([data[place] ^ 0x40]) + data[place + 1 :]

    # Drives

    def preadv(self, fd, buffers, offset, *flags):
        if self.happens("drive read fails", 4000):
            raise OSError(errno.EIO, "medium")
        buffers = list(buffers)
        if len(buffers[0]) > 4096 and self.happens("drive read is short", 200):
            return self._preadv(fd, [memoryview(buffers[0])[:4096]], offset, *flags)
        moved = self._preadv(fd, buffers, offset, *flags)
        if self.happens("drive reads another bit", 150):
            where = self.place(len(buffers[0]))
            memoryview(buffers[0])[where] ^= 1
        return moved

    def pwritev(self, fd, buffers, offset, *flags):
        if self.happens("drive write fails", 4000):
            raise OSError(errno.EIO, "medium")
        buffers = list(buffers)
        total = sum(map(len, buffers))
        if self.happens("drive write is torn", 150):
            self._pwritev(fd, [memoryview(buffers[0])[: len(buffers[0]) // 8192 * 4096 or 4096]], offset, *flags)
            return total  # it says that all is there
        return self._pwritev(fd, buffers, offset, *flags)

    # The shared tier

    def _reading(self, real):
        def read(store, target, bytes_max):
            if self.happens("shared read fails", 100):
                raise OSError(errno.EIO, "server")
            data = real(store, target, bytes_max)
            if data and self.happens("shared read is short", 150):
                return data[: self.place(len(data))]
            if data and self.happens("shared reads another bit", 100):
                return self.flipped(data)
            return data

        return read

    def _putting(self, real):
        def put(store, rename, target, data):
            if self.happens("shared write fails", 100):
                raise OSError(errno.EIO, "server")
            if self.happens("shared write is torn", 100):
                data = data[: self.place(len(data))]
            elif self.happens("shared writes another bit", 100):
                data = self.flipped(data)
            real(store, rename, target, data)
            if self.happens("shared write is not told of", 100):
                raise OSError(errno.EIO, "server")

        return put

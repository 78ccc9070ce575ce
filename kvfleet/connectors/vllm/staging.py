"""Buffers between the engine's memory and the arena."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvfleet.errors import ConfigError

__all__ = ["Staging", "take_pages"]

Bytes: TypeAlias = npt.NDArray[np.uint8]

# Buffers begin on pages, as slots do: see `copying.py` for what distances between source and target cost.
_PAGE_BYTES = mmap.PAGESIZE


def take_pages(num_bytes: int) -> Bytes:
    """Take memory of this process, `(num_bytes,)`, from a page's start."""
    memory: Bytes = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
    return memory


class Staging:
    """A bounded set of buffers of one block each, its pages there from the start.

    One piece of memory, because drivers pin pieces at a price each. It is touched at construction: an untouched page
    costs about as much at the first copy, and the engine's step would wait for it.

    Threads: any.

    Attributes:
        block_bytes: bytes of one buffer.
        num_buffers: as many as `capacity_bytes` holds, but at least one, even if that is more than `capacity_bytes`:
            without one nothing could be stored.
    """

    def __init__(self, block_bytes: int, capacity_bytes: int, allocate: Callable[[int], Bytes] = take_pages) -> None:
        """Take the memory.

        Args:
            block_bytes: of one block.
            capacity_bytes: what all buffers may take together, unless a single one needs more.
            allocate: gives that many bytes, uint8, one-dimensional, contiguous, writable, from a page's start: pinned
                memory, for a GPU (`EnginePool.allocate`).

        Raises:
            ConfigError: a size that is not positive, or `allocate` gave something else.
        """
        if block_bytes < 1 or capacity_bytes < 1:
            raise ConfigError("staging", f"sizes must be positive, are {block_bytes} and {capacity_bytes} bytes")
        self.block_bytes = block_bytes
        stride = -(-block_bytes // _PAGE_BYTES) * _PAGE_BYTES
        self.num_buffers = max(1, capacity_bytes // stride)
        memory = allocate(self.num_buffers * stride)
        fits = memory.dtype == np.uint8 and memory.shape == (self.num_buffers * stride,)
        if not fits or memory.ctypes.data % _PAGE_BYTES or not memory.flags.writeable:
            raise ConfigError("allocate", f"gave {memory.dtype} {memory.shape} at {memory.ctypes.data:#x}")
        memory[::_PAGE_BYTES] = 0
        self._buffers: list[Bytes] = list(memory.reshape(self.num_buffers, stride)[:, :block_bytes])
        self._free = list(reversed(range(self.num_buffers)))
        self._lock = threading.Lock()

    def take(self, count: int) -> list[int]:
        """Take up to `count` buffers; fewer, or none, if no more are free. What they hold is what was left in them."""
        assert count >= 0, count
        with self._lock:
            keep = max(0, len(self._free) - count)
            taken = self._free[keep:]
            del self._free[keep:]
        # Those given back last, still in the processor's caches, come first.
        return taken[::-1]

    def view(self, index: int) -> Bytes:
        """See a buffer that is taken: `(block_bytes,)`, contiguous, from a page's start."""
        return self._buffers[index]

    def give(self, index: int) -> None:
        """Give a buffer back, once."""
        with self._lock:
            assert 0 <= index < self.num_buffers, index
            assert index not in self._free, index
            self._free.append(index)

    @property
    def num_free(self) -> int:
        """Buffers that `take` can give."""
        return len(self._free)

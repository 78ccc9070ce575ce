"""vLLM's paged KV memory on a GPU. Untested: no GPU has run this module, only the CPU under stand-ins for streams.

Blocks are gathered on the device, so that one copy a block crosses the bus, on streams of their own beside the
engine's.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from kvfleet.connectors.vllm.pool import Bytes, EnginePool

__all__ = ["DevicePool"]

logger = logging.getLogger(__name__)

_WORD_BYTES = 8


class DevicePool(EnginePool):
    """A pool in the memory of a GPU. Takes memory for two blocks on it.

    The engine's stream is the one that is current where `read` and `fence` are called.

    Threads: several calls of `write` run one after the other.
    """

    def __init__(self, grids: Sequence[torch.Tensor], blocks_per: int) -> None:
        super().__init__(grids, blocks_per)
        self._device = grids[0].device
        words = all(_in_words(grid) for grid in grids)
        # Made in inference mode, they could not be written outside it.
        with torch.inference_mode(mode=False):
            self._grids = [grid.view(torch.int64) if words else grid for grid in grids]
            self._read_scratch, self._write_scratch = (
                torch.empty(self.block_bytes, dtype=torch.uint8, device=self._device) for _ in range(2)
            )
        self._reading = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._writing = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._gathered: torch.cuda.Event | None = None
        self._fenced = torch.cuda.current_stream(self._device).record_event()
        self._write_lock = threading.Lock()
        self._pinned: Bytes | None = None

    @override
    def read(self, engine_blocks: Sequence[Sequence[int]], targets: Sequence[Bytes]) -> Callable[[], None]:
        assert len(engine_blocks) == len(targets), (len(engine_blocks), len(targets))
        assert all(len(block) == self.blocks_per for block in engine_blocks), self.blocks_per
        ids = self._ids(list(chain.from_iterable(engine_blocks)))
        reached = torch.cuda.current_stream(self._device).record_event()
        with torch.cuda.stream(self._reading):
            self._reading.wait_event(reached)
            blocks = self._sent(ids).view(len(targets), self.blocks_per)
            # The stream keeps order, so one scratch does: a block is gathered when the one before has left.
            for chosen, target in zip(blocks.unbind(), targets, strict=True):
                for grid, section in zip(self._grids, self._cut(self._read_scratch), strict=True):
                    torch.index_select(grid, 1, chosen, out=section)
                self._gathered = self._reading.record_event()
                _host_tensor(target).copy_(self._read_scratch, non_blocking=True)
            copied: Callable[[], None] = self._reading.record_event().synchronize
        return copied

    @override
    def fence(self) -> None:
        engine = torch.cuda.current_stream(self._device)
        if self._gathered is not None:
            engine.wait_event(self._gathered)
        self._fenced = engine.record_event()

    @override
    def write(self, engine_blocks: Sequence[int], first: int, source: Bytes) -> None:
        ids = self._ids(engine_blocks)
        assert 0 <= first <= first + len(ids) <= self.blocks_per, (first, len(ids), self.blocks_per)
        with self._write_lock, torch.cuda.stream(self._writing):
            # Steps that still run may use these blocks for the requests that had them before. Not later steps: each
            # write would wait for one.
            self._writing.wait_event(self._fenced)
            assert source.nbytes == self.block_bytes, (source.nbytes, self.block_bytes)
            self._write_scratch.copy_(_host_tensor(source), non_blocking=True)
            places = self._sent(ids)
            for grid, section in zip(self._grids, self._cut(self._write_scratch), strict=True):
                grid.index_copy_(1, places, section[:, first : first + len(ids)])
            self._writing.synchronize()

    @override
    def allocate(self, num_bytes: int) -> Bytes:
        try:
            memory: Bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
        except RuntimeError as error:
            logger.warning("no %d bytes of pinned memory for %s: copies are slow: %s", num_bytes, self._device, error)
            return super().allocate(num_bytes)
        return memory

    @override
    def pin(self, memory: Bytes) -> None:
        """Lock memory in place for the device; without it copies are slower, so a refusal is only logged.

        In one call: a copy must not cross from one registered range to another.
        """
        self._unpin()
        if self._succeeds("pin", _cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)):
            self._pinned = memory

    @override
    def close(self) -> None:
        self._unpin()

    def _unpin(self) -> None:
        memory, self._pinned = self._pinned, None
        if memory is not None:
            self._succeeds("unpin", _cudart().cudaHostUnregister(memory.ctypes.data))

    def _succeeds(self, what: str, outcome: Any) -> bool:  # noqa: ANN401 - a cudaError
        if int(outcome) == 0:
            return True
        logger.warning("cannot %s memory (CUDA error %d): copies are slow", what, int(outcome))
        # CUDA keeps this thread's error for who asks next. That must not be the engine's next kernel.
        try:
            torch.zeros(1, device=self._device)
        except RuntimeError as error:
            logger.debug("CUDA's error was %s", error)
        return False

    def _cut(self, block: torch.Tensor) -> list[torch.Tensor]:
        """Cut a block on the device into one tensor a grid, `(parts, blocks_per, run words)`."""
        return [
            block[extent].view(shape).view(grid.dtype)
            for grid, (extent, shape) in zip(self._grids, self._extents, strict=True)
        ]

    def _sent(self, ids: npt.NDArray[np.intp]) -> torch.Tensor:
        """Send block numbers to the device, from pinned memory: else the caller would wait for what its stream does."""
        return torch.from_numpy(ids).pin_memory().to(self._device, non_blocking=True)


def _in_words(grid: torch.Tensor) -> bool:
    """Whether a grid can be seen as aligned words of 8 bytes: kernels move an item a thread."""
    return all(number % _WORD_BYTES == 0 for number in (grid.shape[2], *grid.stride()[:2], grid.data_ptr()))


def _cudart() -> Any:  # noqa: ANN401 - torch has no types for it
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _host_tensor(memory: Bytes) -> torch.Tensor:
    """See memory as a tensor, read-only memory too, which torch would warn of. Keep `memory` while it is used."""
    assert memory.ndim == 1, memory.shape
    assert memory.flags.c_contiguous
    return torch.frombuffer((ctypes.c_uint8 * memory.nbytes).from_address(memory.ctypes.data), dtype=torch.uint8)

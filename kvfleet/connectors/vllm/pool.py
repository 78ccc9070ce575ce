"""vLLM's paged KV memory as bytes: blocks out of it and into it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from kvfleet.connectors.vllm.parts import find_grids
from kvfleet.connectors.vllm.staging import take_pages
from kvfleet.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["Bytes", "EnginePool", "make_pool"]

Bytes: TypeAlias = npt.NDArray[np.uint8]


class EnginePool(ABC):
    """The engine's paged KV memory of one rank, as bytes.

    A block's bytes are part after part (see `parts.py`), and in each part the runs of its engine blocks one after the
    other: `(num_parts, blocks_per, run_bytes)`, where `run_bytes` may differ from part to part.

    Threads: `write` from any, several at once if their engine blocks differ. All else from the engine's.

    Attributes:
        num_engine_blocks: blocks of the engine.
        blocks_per: engine blocks in one block.
        block_bytes: bytes of one block.
        num_parts: parts of an engine block.
    """

    def __init__(self, grids: Sequence[torch.Tensor], blocks_per: int) -> None:
        if blocks_per < 1:
            raise ConfigError("blocks_per", f"must be positive, is {blocks_per}")
        self.num_engine_blocks = int(grids[0].shape[1])
        self.blocks_per = blocks_per
        self.num_parts = sum(int(grid.shape[0]) for grid in grids)
        # Of each grid: where its bytes are in a block, and their shape, (parts, blocks_per, run_bytes).
        self._extents: list[tuple[slice, tuple[int, int, int]]] = []
        self.block_bytes = 0
        for grid in grids:
            shape = (int(grid.shape[0]), blocks_per, int(grid.shape[2]))
            start, self.block_bytes = self.block_bytes, self.block_bytes + math.prod(shape)
            self._extents.append((slice(start, self.block_bytes), shape))

    @abstractmethod
    def read(self, engine_blocks: Sequence[Sequence[int]], targets: Sequence[Bytes]) -> Callable[[], None]:
        """Copy blocks out of the pool, as the engine's work enqueued so far leaves them.

        Args:
            engine_blocks: of each block, the numbers of its `blocks_per` engine blocks.
            targets: of each block, where it goes: `(block_bytes,)`, contiguous. Not to be touched until the returned
                function has returned.

        Returns:
            a function that waits until the bytes are there. It may be called from any thread.
        """

    @abstractmethod
    def write(self, engine_blocks: Sequence[int], first: int, source: Bytes) -> None:
        """Copy engine blocks `[first, first + len(engine_blocks))` of a block into the pool.

        Args:
            engine_blocks: where they go, distinct numbers.
            first: the first engine block of the block to copy.
            source: the whole block, `(block_bytes,)`, contiguous, may be read-only.

        Blocking: until the bytes are in the pool. They come after what the engine had enqueued at the last `fence`.
        """

    def fence(self) -> None:
        """Put what the engine enqueued so far before all writes to come, and what it will after all reads begun.

        To be called in each step before its loads begin and before it is computed.

        Blocking: on a device never; on the CPU as long as reads last.
        """

    def allocate(self, num_bytes: int) -> Bytes:
        """Take memory for the targets of `read`, pinned where that is faster: `(num_bytes,)`, from a page's start."""
        return take_pages(num_bytes)

    def pin(self, memory: Bytes) -> None:
        """Tell the device of memory that will be copied from and to, such as an arena. Nothing to do on the CPU."""

    def close(self) -> None:
        """Undo `pin`, before that memory is unmapped, and end all reads. Fine to be called twice."""

    def _ids(self, engine_blocks: Sequence[int]) -> npt.NDArray[np.intp]:
        ids = np.asarray(engine_blocks, np.intp)
        assert ids.ndim == 1, ids.shape
        assert ids.size == 0 or (ids.min() >= 0 and ids.max() < self.num_engine_blocks), engine_blocks
        return ids


def make_pool(kv_caches: Mapping[str, torch.Tensor], num_engine_blocks: int, blocks_per: int) -> EnginePool:
    """See the tensors vLLM registers as a pool, on the device they are on.

    Args:
        kv_caches: layer's name -> `(blocks, kv_heads, tokens, content)`, as `register_kv_caches` gets them.
        num_engine_blocks: blocks the scheduler counts.
        blocks_per: engine blocks in one block.

    Raises:
        ConfigError: nothing to hold, a number that is not positive, or a device that is neither CPU nor CUDA.
        LayoutMismatchError: tensors that are no such, that overlap, or whose blocks are not made of runs of bytes.
    """
    grids = find_grids(kv_caches, num_engine_blocks)
    device = grids[0].device
    if device.type == "cpu":
        return _CpuPool(grids, blocks_per)
    if device.type != "cuda":
        raise ConfigError("kv_caches", f"KV on {device} is not supported, only on the CPU and on CUDA devices")
    from kvfleet.connectors.vllm.device import DevicePool

    return DevicePool(grids, blocks_per)


def _run(run_bytes: int) -> np.dtype[np.void]:
    """A run as one item, which numpy moves with one memmove."""
    return np.dtype((np.void, run_bytes))


class _CpuPool(EnginePool):
    """A pool in the memory of this process.

    Out by `np.take` and in by assignment to an index: of what numpy offers, these are the fastest, and they let other
    threads run meanwhile (assignment between arrays of up to 500 runs does not). Against 6.5 GB/s of memcpy, out 6.3
    and in 6.3 GB/s at runs of 48 KiB (SmolLM2: 30 parts, 8 engine blocks), 5.4 and 5.3 GB/s at 8 KiB (a 70B model's
    rank of 8: 80 parts, 16 engine blocks); a plain index reads at 4.0 and 3.3, as it allocates its result (Xeon with
    2 cores, numpy 2.4, 2026-11-30). Slots begin on pages and torch's memory on multiples of 64, so no copy has
    the distance that slows memmove down (see `copying.py`).

    Reads run on a thread of their own, while the engine samples and schedules: the first token does not wait for them.
    """

    def __init__(self, grids: Sequence[torch.Tensor], blocks_per: int) -> None:
        super().__init__(grids, blocks_per)
        self._grids: list[Bytes] = [grid.numpy() for grid in grids]
        self._reader = ThreadPoolExecutor(1, "kvfleet-read")
        self._reads: list[Future[None]] = []

    @override
    def read(self, engine_blocks: Sequence[Sequence[int]], targets: Sequence[Bytes]) -> Callable[[], None]:
        assert len(engine_blocks) == len(targets), (len(engine_blocks), len(targets))
        copies = [
            (self._ids(block), self._sections(target)) for block, target in zip(engine_blocks, targets, strict=True)
        ]
        assert all(len(ids) == self.blocks_per for ids, _ in copies), (engine_blocks, self.blocks_per)
        read = self._reader.submit(self._read, copies)
        self._reads.append(read)
        return read.result

    def _read(self, copies: list[tuple[npt.NDArray[np.intp], list[npt.NDArray[Any]]]]) -> None:
        for ids, sections in copies:
            for grid, section in zip(self._grids, sections, strict=True):
                _gather(grid, ids, section)

    @override
    def fence(self) -> None:
        wait(self._reads)
        self._reads.clear()

    @override
    def close(self) -> None:
        self._reader.shutdown()

    @override
    def write(self, engine_blocks: Sequence[int], first: int, source: Bytes) -> None:
        ids = self._ids(engine_blocks)
        assert 0 <= first <= first + len(ids) <= self.blocks_per, (first, len(ids), self.blocks_per)
        for grid, section in zip(self._grids, self._sections(source), strict=True):
            _as_runs(grid)[:, ids] = section[:, first : first + len(ids)]

    def _sections(self, block: Bytes) -> list[npt.NDArray[Any]]:
        """Cut a block into one array a grid, `(parts, blocks_per)`, whose items are whole runs."""
        assert block.shape == (self.block_bytes,), (block.shape, self.block_bytes)
        return [block[extent].view(_run(shape[2])).reshape(shape[:2]) for extent, shape in self._extents]


def _as_runs(grid: Bytes) -> npt.NDArray[np.void]:
    runs: npt.NDArray[np.void] = grid.view(_run(grid.shape[2]))[..., 0]
    return runs


def _gather(grid: Bytes, ids: npt.NDArray[np.intp], section: npt.NDArray[Any]) -> None:
    """Copy blocks `ids` of `(parts, blocks, run_bytes)` to `(parts, len(ids))` runs."""
    if grid.flags.c_contiguous:
        # The mode that checks no bounds needs no buffer; `_ids` has checked them.
        np.take(_as_runs(grid), ids, axis=1, out=section, mode="clip")
        return
    # take would first copy all of an array with gaps. Bytes, not runs, so that other threads may run.
    target = section.view(np.uint8).reshape(grid.shape[0], len(ids), grid.shape[2])
    for place, block in enumerate(ids.tolist()):
        target[:, place] = grid[:, block]

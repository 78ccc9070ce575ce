"""Copies between tensors and slots, at the speed of memory, with the checksum on the way.

KV never passes through a number type: tensors of any dtype, bfloat16 and float8 included, are seen as numpy arrays
of unsigned integers of the same size. torch is not imported; its tensors are recognised by what they can do.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash
from typing_extensions import TypeIs

from kvfleet.core.layout import BlockLayout
from kvfleet.errors import LayoutMismatchError

if TYPE_CHECKING:
    import torch

__all__ = ["as_array", "block_slice", "check_fits", "checksum", "copy_in", "copy_out"]

Words: TypeAlias = npt.NDArray[Any]  # unsigned integers of 1, 2, 4 or 8 bytes
Bytes: TypeAlias = npt.NDArray[np.uint8]

# Copying and checksumming a block by pieces reads it from memory once. Smaller pieces cost more in calls than they
# save in cache misses: 256 KiB stores about 10 % slower than 1 MiB (EPYC, 512 KiB of L2, 2026-11-30).
PIECE_BYTES = 1024 * 1024


def as_array(tensor: object) -> Words:
    """See a CPU tensor's own memory as unsigned integers of its item size; any strides, nothing is copied.

    Args:
        tensor: numpy array, or CPU torch tensor without gradient.

    Raises:
        LayoutMismatchError: not such a tensor.
    """
    array = _torch_words(tensor) if _is_torch(tensor) else tensor
    if not isinstance(array, np.ndarray):
        raise LayoutMismatchError("a numpy array or torch tensor", type(tensor).__name__)
    if array.dtype.hasobject or not array.dtype.isnative or array.dtype.itemsize not in (1, 2, 4, 8):
        raise LayoutMismatchError("plain numbers of 1, 2, 4 or 8 bytes", str(array.dtype))
    return array.view(f"u{array.dtype.itemsize}")


def _is_torch(tensor: object) -> TypeIs[torch.Tensor]:
    return hasattr(tensor, "data_ptr") and hasattr(tensor, "untyped_storage")


def _torch_words(tensor: torch.Tensor) -> npt.NDArray[Any]:
    if tensor.device.type != "cpu":
        raise LayoutMismatchError("a tensor in CPU memory", f"one on {tensor.device}")
    if tensor.requires_grad:
        raise LayoutMismatchError("a tensor without gradient", "one with requires_grad (use torch.no_grad or detach)")
    words = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}.get(tensor.element_size())
    if words is None or str(tensor.layout) != "torch.strided":
        raise LayoutMismatchError("a strided tensor of 1, 2, 4 or 8 byte numbers", f"{tensor.dtype}, {tensor.layout}")
    array: npt.NDArray[Any] = tensor.view(getattr(sys.modules["torch"], words)).numpy()
    return array


def check_fits(array: Words, tensor: object, layout: BlockLayout, num_blocks: int) -> None:
    """Refuse a tensor that does not hold blocks of a layout.

    Args:
        array: `as_array(tensor)`. Must have the layout's shape but for the token axis, which must cover
            `num_blocks` blocks; for an opaque layout `(num_blocks or more, *shape)`.
        tensor: must have the layout's dtype, or unsigned integers of that size: numpy has no bfloat16 or float8.
        layout: of the blocks.
        num_blocks: how many are to be read or written.

    Raises:
        LayoutMismatchError: it does not.
    """
    dtype = str(getattr(tensor, "dtype", None)).removeprefix("torch.")
    if array.itemsize != layout.itemsize or dtype not in (layout.dtype, array.dtype.name):
        raise LayoutMismatchError(layout.dtype, dtype)
    if layout.token_axis is None:
        axis, needed = 0, (num_blocks, *layout.shape)
    else:
        axis, tokens = layout.token_axis, num_blocks * layout.block_tokens
        needed = (*layout.shape[:axis], tokens, *layout.shape[axis + 1 :])
    if (
        array.ndim != len(needed)
        or array.shape[axis] < needed[axis]
        or _without(array.shape, axis) != _without(needed, axis)
    ):
        raise LayoutMismatchError(f"shape {needed} (axis {axis} may be longer)", f"shape {array.shape}")


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]


def block_slice(array: Words, layout: BlockLayout, index: int) -> Words:
    """View of block `index` of an array that passed `check_fits`; it has the layout's shape."""
    if layout.token_axis is None:
        block: Words = array[index]
    else:
        start = index * layout.block_tokens
        block = array[(slice(None),) * layout.token_axis + (slice(start, start + layout.block_tokens),)]
    assert block.shape == layout.shape, (index, array.shape, layout.shape)
    return block


def copy_in(slot: Bytes, source: Words) -> int:
    """Write a block to its slot, in C order of the block's shape.

    Args:
        slot: uint8, one-dimensional, contiguous, exactly as long as the block.
        source: the block, any strides.

    Returns:
        checksum of what was written.
    """
    target = _slot_words(slot, source)
    target, source = _rows(target, source)
    digest = xxhash.xxh3_64()
    written = 0
    for piece in _pieces(target.shape, target.itemsize):
        part = target[piece]
        np.copyto(part, source[piece])
        digest.update(slot[written : written + part.nbytes].data)
        written += part.nbytes
    assert written == slot.nbytes
    return digest.intdigest()


def copy_out(target: Words, slot: Bytes) -> None:
    """Read a block from its slot, the reverse of `copy_in`.

    Args:
        target: where the block goes, any strides.
        slot: uint8, one-dimensional, contiguous, exactly as long as the block.

    Raises:
        LayoutMismatchError: the target cannot be written.
    """
    if not target.flags.writeable:
        raise LayoutMismatchError("a target that can be written", "a read-only array")
    source = _slot_words(slot, target)
    if 0 < (target.ctypes.data - slot.ctypes.data) % 4096 < 64 and _as_u64(target, source):
        np.bitwise_or(source.view(np.uint64), np.uint64(0), out=target.view(np.uint64))
    else:
        np.copyto(*_rows(target, source))


def _as_u64(*arrays: Words) -> bool:
    """Whether rows of the arrays can be seen as aligned 8-byte words.

    For targets that lie less than 64 bytes behind their source modulo the page size, as numpy's large arrays lie to
    slots: there memmove's `rep movsb` is four times slower than a loop over words (1.5 against 6.5 GB/s; glibc 2.36,
    EPYC, 2026-11-30).
    """
    return all(
        array.strides[-1] == array.itemsize
        and (array.shape[-1] * array.itemsize) % 8 == 0
        and all(stride % 8 == 0 for stride in array.strides[:-1])
        and array.ctypes.data % 8 == 0
        for array in arrays
    )


def checksum(data: Bytes) -> int:
    """xxh3-64 of contiguous bytes, as `copy_in` returns."""
    return xxhash.xxh3_64_intdigest(data.data)


def _slot_words(slot: Bytes, block: Words) -> Words:
    assert slot.ndim == 1, slot.shape
    assert slot.nbytes == block.nbytes, (slot.nbytes, block.nbytes)
    words: Words = slot.view(block.dtype).reshape(block.shape)
    return words


def _rows(first: Words, second: Words) -> tuple[Words, Words]:
    """See the numbers of the last axis as one item, if they lie side by side in both arrays.

    numpy moves an item of any size with one memmove, but numbers one by one when the axes around them are permuted.
    """
    item = first.itemsize
    row = item * first.shape[-1]
    if first.ndim == 1 or row > PIECE_BYTES or not first.strides[-1] == second.strides[-1] == item:
        return first, second
    dtype = np.dtype((np.void, row))
    return first.view(dtype)[..., 0], second.view(dtype)[..., 0]


def _pieces(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[int | slice, ...]]:
    """Cut an array into parts of at most PIECE_BYTES that follow each other in C order."""
    axis, index_bytes = 0, itemsize * math.prod(shape[1:])
    while index_bytes > PIECE_BYTES:
        axis += 1
        index_bytes //= shape[axis]
    step = PIECE_BYTES // index_bytes
    for outer in np.ndindex(shape[:axis]):
        for start in range(0, shape[axis], step):
            yield (*outer, slice(start, start + step))

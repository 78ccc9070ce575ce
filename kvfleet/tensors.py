"""What callers give to load into and to store from, a tensor or a function, as a function of one block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvfleet import copying
from kvfleet.core.layout import BlockLayout
from kvfleet.node.messages import Bytes
from kvfleet.writing import Fill

__all__ = ["PutBlock", "TakeBlock", "filler", "taker"]

Array: TypeAlias = npt.NDArray[Any]
TakeBlock: TypeAlias = Callable[[int, Array], None]
"""Called by `Client.load` with a block's index in the prefix and a read-only view of it, of the layout's shape, as
unsigned integers of the dtype's width. It must copy: the memory is reused after it returns. What it was given may
turn out to have changed meanwhile: then the block is not among those that `load` counts."""
PutBlock: TypeAlias = Callable[[int, Array], None]
"""Called by `Client.store` with a block's index in the prefix and a view to fill, of the same form."""


def taker(into: object, layout: BlockLayout, num_blocks: int) -> Callable[[int, Bytes], None]:
    """Copies a block out of its slot, by its index in the prefix.

    Args:
        into: see `Client.load`.
        layout: of the blocks.
        num_blocks: of the prefix, that there must be room for.

    Raises:
        LayoutMismatchError: `into` has another shape or dtype.
    """
    if callable(into):
        user: TakeBlock = into
        word = np.dtype(f"u{layout.itemsize}")
        return lambda index, slot: user(index, slot.view(word).reshape(layout.shape))
    target = _checked(into, layout, num_blocks)
    return lambda index, slot: copying.copy_out(copying.block_slice(target, layout, index), slot)


def filler(kv: object, layout: BlockLayout, num_blocks: int, start_block: int) -> Fill:
    """Writes a block to its slot, by its index in the prefix.

    Args:
        kv: see `Client.store`.
        layout: of the blocks.
        num_blocks: of the prefix from `start_block` on, that `kv` must hold.
        start_block: the first that it holds.

    Raises:
        LayoutMismatchError: `kv` has another shape or dtype.
    """
    if callable(kv):
        user: PutBlock = kv
        word = np.dtype(f"u{layout.itemsize}")

        def fill(index: int, slot: Bytes) -> int:
            user(index, slot.view(word).reshape(layout.shape))
            return copying.checksum(slot)

        return fill
    source = _checked(kv, layout, num_blocks)
    return lambda index, slot: copying.copy_in(slot, copying.block_slice(source, layout, index - start_block))


def _checked(tensor: object, layout: BlockLayout, num_blocks: int) -> Array:
    array = copying.as_array(tensor)
    copying.check_fits(array, tensor, layout, num_blocks)
    return array

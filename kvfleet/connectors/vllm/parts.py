"""Where the bytes of an engine block lie in vLLM's KV memory, worked out from the strides of its tensors.

vLLM gives a connector one tensor a layer, `(blocks, kv_heads, tokens, content)`, whatever lies where in memory
(LBNHC, LBHNC, LHBNC, BLHNC, BLNHC and BHLNC, the letters from the outermost axis to the innermost). A *part* is a run
of bytes that lies in one piece in every block, so a block is moved with one copy a part: LBNHC and LBHNC have one part
a layer, LHBNC one a layer and head, and the layouts with B outside have one for the whole block.

What lies inside a block is never looked at: some backends keep keys transposed or packed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import TYPE_CHECKING

from kvfleet.errors import ConfigError, LayoutMismatchError

if TYPE_CHECKING:
    import torch

__all__ = ["find_grids"]


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes that lie in one piece in each block.

    Attributes:
        layer: whose they are; the first, if of several.
        storage: address of the allocation they are in.
        start: address of block 0's.
        stride: bytes from one block's to the next block's.
        length: bytes of one block.
    """

    layer: str
    storage: int
    start: int
    stride: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


def find_grids(kv_caches: Mapping[str, torch.Tensor], num_engine_blocks: int) -> list[torch.Tensor]:
    """See a rank's KV memory as parts of engine blocks.

    Parts are in the order of their layers' names, numbers in them counted as numbers, and inside a layer in the order
    of memory. The order of the mapping plays no role, so all processes that serve a model agree. Layers that share
    one tensor count once. Only where several layers lie inside a block do they follow each other as vLLM laid them;
    that follows from the model and the layout.

    Args:
        kv_caches: layer's name -> `(blocks, kv_heads, tokens, content)`, any strides, dtype and device. `blocks` may
            be a multiple of `num_engine_blocks`, where kernels use smaller blocks than the scheduler.
        num_engine_blocks: blocks the scheduler counts.

    Returns:
        views of the same memory, each `(num_parts, num_engine_blocks, run_bytes)`, uint8, its last axis contiguous.
        Parts of equal length that lie at equal distances share a view.

    Raises:
        ConfigError: no layers, or no blocks.
        LayoutMismatchError: tensors that are not such, that overlap, or whose items do not lie side by side.
    """
    if not kv_caches:
        raise ConfigError("kv_caches", "the engine registered no layer with KV")
    if num_engine_blocks < 1:
        raise ConfigError("num_engine_blocks", f"must be positive, is {num_engine_blocks}")
    storages: dict[int, torch.Tensor] = {}
    parts: list[_Part] = []
    seen = set()
    for layer in sorted(kv_caches, key=_natural):
        tensor = kv_caches[layer]
        _check_tensor(layer, tensor, num_engine_blocks)
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if place not in seen:
            seen.add(place)
            storages.setdefault(tensor.untyped_storage().data_ptr(), tensor)
            parts += _layer_parts(layer, tensor, num_engine_blocks)
    if len({tensor.device for tensor in storages.values()}) > 1:
        raise LayoutMismatchError("KV on one device", ", ".join(sorted({str(t.device) for t in storages.values()})))
    joined = _joined(parts, num_engine_blocks)
    return [_view(storages[row[0].storage], row, num_engine_blocks) for row in _rows(joined)]


def _natural(name: str) -> tuple[str, str]:
    return re.sub(r"\d+", lambda digits: digits[0].zfill(8), name), name


def _check_tensor(layer: str, tensor: torch.Tensor, num_engine_blocks: int) -> None:
    shape = getattr(tensor, "shape", None)
    if shape is None or str(getattr(tensor, "layout", None)) != "torch.strided":
        raise LayoutMismatchError(f"one strided tensor for layer {layer}", type(tensor).__name__)
    if len(shape) != 4 or 0 in shape:
        raise LayoutMismatchError(
            f"KV of layer {layer} as (blocks, kv_heads, tokens, content)", f"shape {tuple(shape)}"
        )
    if shape[0] % num_engine_blocks:
        raise LayoutMismatchError(f"{num_engine_blocks} blocks, or a multiple, in layer {layer}", f"{shape[0]} blocks")


def _layer_parts(layer: str, tensor: torch.Tensor, num_engine_blocks: int) -> list[_Part]:
    """Parts of one layer in the order of memory."""
    item = tensor.element_size()
    strides = [item * stride for stride in tensor.stride()]
    kernel_blocks = tensor.shape[0] // num_engine_blocks
    block_stride = strides[0] * kernel_blocks
    axes = sorted(
        axis for axis in zip(strides, (kernel_blocks, *tensor.shape[1:]), strict=True) if axis[1] > 1
    )  # (stride, size), innermost first
    extent = item
    for stride, size in sorted([*axes, (block_stride, num_engine_blocks)]):
        if size > 1 and stride < extent:
            raise LayoutMismatchError(f"a tensor of layer {layer} that does not overlap itself", _described(tensor))
        extent += stride * (size - 1)
    length = item
    while axes and axes[0][0] == length < block_stride:
        length *= axes.pop(0)[1]
    if axes and length == item:
        raise LayoutMismatchError(f"items of layer {layer} side by side in each block", _described(tensor))
    offsets = sorted(map(sum, product(*([stride * index for index in range(size)] for stride, size in axes))))
    base, storage = tensor.data_ptr(), tensor.untyped_storage().data_ptr()
    return [_Part(layer, storage, base + offset, block_stride, length) for offset in offsets]


def _described(tensor: torch.Tensor) -> str:
    return f"shape {tuple(tensor.shape)} with strides {tensor.stride()}"


def _joined(parts: Sequence[_Part], num_engine_blocks: int) -> list[_Part]:
    """Join parts that lie side by side inside a block, and check that no byte is in two parts."""
    place = {part: index for index, part in enumerate(parts)}
    groups = _interleaved(sorted(parts, key=lambda part: part.start))
    for group, after in pairwise(groups):
        end = group[-1].end + group[0].stride * (num_engine_blocks - 1)
        if after[0].start < end:
            raise _overlap(group[-1], after[0])
    groups.sort(key=lambda group: min(place[part] for part in group))
    return [part for group in groups for part in _merged(group)]


def _interleaved(parts: Iterable[_Part]) -> list[list[_Part]]:
    """Group parts that lie within one block's stride: those of one block lie between those of the next."""
    groups: list[list[_Part]] = []
    for part in parts:
        first = groups[-1][0] if groups else None
        if (
            first is not None
            and (part.storage, part.stride) == (first.storage, first.stride)
            and part.end <= first.start + first.stride
        ):
            groups[-1].append(part)
        else:
            groups.append([part])
    return groups


def _merged(group: Sequence[_Part]) -> list[_Part]:
    merged = [group[0]]
    for part in group[1:]:
        last = merged[-1]
        if part.start < last.end:
            raise _overlap(last, part)
        if part.start == last.end:
            merged[-1] = replace(last, length=last.length + part.length)
        else:
            merged.append(part)
    return merged


def _overlap(first: _Part, second: _Part) -> LayoutMismatchError:
    got = ", ".join(
        f"{part.layer} at {part.start - first.storage} + block * {part.stride}, {part.length} bytes"
        for part in (first, second)
    )
    return LayoutMismatchError("layers that do not overlap", got)


def _rows(parts: Iterable[_Part]) -> list[list[_Part]]:
    """Cut the parts into stretches of equal length and distance."""
    rows: list[list[_Part]] = []
    for part in parts:
        if rows and _continues(rows[-1], part):
            rows[-1].append(part)
        else:
            rows.append([part])
    return rows


def _continues(row: Sequence[_Part], part: _Part) -> bool:
    last = row[-1]
    step = part.start - last.start
    alike = (part.storage, part.stride, part.length) == (last.storage, last.stride, last.length)
    return alike and step > 0 and (len(row) == 1 or step == row[1].start - row[0].start)


def _view(tensor: torch.Tensor, row: Sequence[_Part], num_engine_blocks: int) -> torch.Tensor:
    """See parts in the storage of `tensor` as `(num_parts, num_engine_blocks, run_bytes)`."""
    import torch

    first = row[0]
    step = row[1].start - first.start if len(row) > 1 else first.length
    shape, strides = (len(row), num_engine_blocks, first.length), (step, first.stride, 1)
    # Made in inference mode, as engines run, it could be written in that mode only.
    with torch.inference_mode(mode=False):
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        return memory.as_strided(shape, strides, first.start - first.storage)

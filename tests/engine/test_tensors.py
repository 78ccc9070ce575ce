"""torch tensors are seen as they lie in memory, and as tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvfleet import copying
from kvfleet.core.block import token_buffer
from kvfleet.core.layout import BlockLayout
from kvfleet.errors import LayoutMismatchError

DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_are_seen_as_words(dtype):
    tensor = torch.arange(48).reshape(4, 6, 2).to(getattr(torch, dtype)).transpose(0, 1)
    words = copying.as_array(tensor)
    assert words.__array_interface__["data"][0] == tensor.data_ptr()
    assert words.shape == tensor.shape
    assert words.strides == tuple(step * tensor.element_size() for step in tensor.stride())
    assert words.tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_go_from_cache_to_cache(dtype):
    layout = BlockLayout.kv(num_layers=2, num_kv_heads=3, head_dim=4, dtype=dtype, block_tokens=8)
    source = torch.randn(2, 2, 3, 30, 4).to(getattr(torch, dtype))
    target = torch.zeros(2, 2, 3, 16, 4, dtype=source.dtype)
    for tensor in (source, target):
        copying.check_fits(copying.as_array(tensor), tensor, layout, 2)
    slot = np.zeros(layout.block_bytes, np.uint8)
    for index in range(2):
        copying.copy_in(slot, copying.block_slice(copying.as_array(source), layout, index))
        copying.copy_out(copying.block_slice(copying.as_array(target), layout, index), slot)
    assert torch.equal(target.view(torch.uint8), source[..., :16, :].contiguous().view(torch.uint8))


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (torch.zeros(2, requires_grad=True), "requires_grad"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        (torch.zeros(2, 2).to_sparse(), "sparse"),
    ],
)
def test_other_tensors_are_refused(tensor, problem):
    with pytest.raises(LayoutMismatchError, match=problem):
        copying.as_array(tensor)


def test_dtypes_of_one_size_are_told_apart():
    layout = BlockLayout.kv(num_layers=2, num_kv_heads=3, head_dim=4, dtype="bfloat16", block_tokens=8)
    tensor = torch.zeros(2, 2, 3, 8, 4, dtype=torch.float16)
    with pytest.raises(LayoutMismatchError, match="expected bfloat16, got float16"):
        copying.check_fits(copying.as_array(tensor), tensor, layout, 1)


def test_tensors_of_tokens():
    for dtype in (torch.int64, torch.int32, torch.uint8):
        assert token_buffer(torch.tensor([1, 2, 3], dtype=dtype)).tolist() == [1, 2, 3]
    for tensor, problem in (
        (torch.tensor([[1, 2]]), "no batch axis"),
        (torch.tensor([1.0]), "integers"),
        (torch.tensor([-1]), "2\\*\\*32"),
        (torch.tensor([1], device="meta"), "CPU memory"),
    ):
        with pytest.raises(ValueError, match=problem):
            token_buffer(tensor)

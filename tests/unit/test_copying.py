"""Every block comes out of its slot as it went in, whatever the strides."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from kvfleet import copying
from kvfleet.core.layout import BlockLayout
from kvfleet.errors import LayoutMismatchError

LAYOUT = BlockLayout.kv(num_layers=3, num_kv_heads=2, head_dim=8, dtype="bfloat16", block_tokens=16)
OPAQUE = BlockLayout.opaque(block_bytes=1001, block_tokens=16, inner_order="private")


def numbers(*shape, dtype="u2"):
    dtype = np.dtype(dtype)
    raw = np.random.default_rng(0).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    return raw.view(dtype)[..., 0]


def contiguous(layout):
    return numbers(*layout.shape, dtype=f"u{layout.itemsize}")


def part_of_a_cache(layout):
    """Tokens 16 to 32 of a longer cache."""
    shape = list(layout.shape)
    shape[3] *= 3
    return copying.block_slice(numbers(*shape, dtype=f"u{layout.itemsize}"), layout, 1)


def tokens_before_heads(layout):
    layers, parts, heads, tokens, dim = layout.shape
    return numbers(layers, parts, tokens, heads, dim, dtype=f"u{layout.itemsize}").transpose(0, 1, 3, 2, 4)


def numbers_before_tokens(layout):
    layers, parts, heads, tokens, dim = layout.shape
    return numbers(layers, parts, heads, dim, tokens, dtype=f"u{layout.itemsize}").swapaxes(3, 4)


def backwards(layout):
    return contiguous(layout)[::-1, :, :, :, ::-1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e5m2"])
@pytest.mark.parametrize("head_dim", [1, 5, 8])
@pytest.mark.parametrize(
    "block_of", [contiguous, part_of_a_cache, tokens_before_heads, numbers_before_tokens, backwards]
)
@pytest.mark.parametrize("piece_bytes", [8, 100, 1 << 20])
def test_blocks_come_back(monkeypatch, dtype, head_dim, block_of, piece_bytes):
    monkeypatch.setattr(copying, "PIECE_BYTES", piece_bytes)
    layout = BlockLayout.kv(num_layers=3, num_kv_heads=2, head_dim=head_dim, dtype=dtype, block_tokens=16)
    source = block_of(layout)
    before = source.copy()
    slot = np.zeros(layout.block_bytes, np.uint8)

    digest = copying.copy_in(slot, source)
    assert slot.tobytes() == before.tobytes()
    assert digest == copying.checksum(slot) == xxhash.xxh3_64_intdigest(before.tobytes())

    source[...] = 0
    copying.copy_out(source, slot)
    assert np.array_equal(source, before)
    assert slot.tobytes() == before.tobytes()


def test_copies_stay_within_their_tokens():
    cache = numbers(3, 2, 2, 48, 8)
    before = cache.copy()
    slot = np.zeros(LAYOUT.block_bytes, np.uint8)
    copying.copy_out(copying.block_slice(cache, LAYOUT, 1), slot)
    assert not cache[:, :, :, 16:32].any()
    cache[:, :, :, 16:32] = before[:, :, :, 16:32]
    assert np.array_equal(cache, before)


def test_opaque_blocks_come_back(monkeypatch):
    monkeypatch.setattr(copying, "PIECE_BYTES", 64)
    blocks = numbers(3, 1001, dtype="u1")
    copying.check_fits(blocks, blocks, OPAQUE, 3)
    slot = np.zeros(1001, np.uint8)
    assert copying.copy_in(slot, copying.block_slice(blocks, OPAQUE, 2)) == copying.checksum(slot)
    assert slot.tobytes() == blocks[2].tobytes()


def test_pieces_follow_each_other():
    array = np.arange(3 * 4 * 5 * 6, dtype=np.uint8).reshape(3, 4, 5, 6)
    for piece_bytes in (1, 6, 17, 100, 120, 1000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(copying, "PIECE_BYTES", piece_bytes)
            parts = [array[piece] for piece in copying._pieces(array.shape, 1)]
        assert max(part.nbytes for part in parts) <= piece_bytes
        assert b"".join(part.tobytes() for part in parts) == array.tobytes()


def test_slots_must_be_as_long_as_blocks():
    block = contiguous(LAYOUT)
    for num_bytes in (LAYOUT.block_bytes - 2, LAYOUT.block_bytes + 2):
        with pytest.raises(AssertionError):
            copying.copy_in(np.zeros(num_bytes, np.uint8), block)
        with pytest.raises(AssertionError):
            copying.copy_out(block, np.zeros(num_bytes, np.uint8))


def test_targets_must_be_writable():
    target = contiguous(LAYOUT)
    target.flags.writeable = False
    with pytest.raises(LayoutMismatchError, match="read-only"):
        copying.copy_out(target, np.zeros(LAYOUT.block_bytes, np.uint8))


@pytest.mark.parametrize("dtype", ["u1", "i2", "f2", "f4", "f8", "c8", "?"])
def test_arrays_are_seen_as_words(dtype):
    array = numbers(4, 6, dtype=dtype)[:, ::2]
    words = copying.as_array(array)
    assert words.dtype == f"u{array.itemsize}"
    assert words.strides == array.strides
    assert np.shares_memory(words, array)


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        ([1, 2], "list"),
        (None, "NoneType"),
        (np.array([object()]), "object"),
        (np.zeros(2, "c16"), "complex128"),
        (np.zeros(2, ">f4"), ">f4"),
    ],
)
def test_other_things_are_refused(tensor, problem):
    with pytest.raises(LayoutMismatchError, match=problem):
        copying.as_array(tensor)


@pytest.mark.parametrize(
    ("tensor", "num_blocks"),
    [
        (np.zeros((3, 2, 2, 32, 8), np.uint16), 2),
        (np.zeros((3, 2, 2, 40, 8), np.uint16), 2),
        (np.zeros((3, 2, 2, 0, 8), np.uint16), 0),
    ],
)
def test_tensors_that_fit(tensor, num_blocks):
    copying.check_fits(copying.as_array(tensor), tensor, LAYOUT, num_blocks)
    for index in range(num_blocks):
        assert copying.block_slice(tensor, LAYOUT, index).shape == LAYOUT.shape
    with pytest.raises(AssertionError):
        copying.block_slice(tensor, LAYOUT, num_blocks)


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (np.zeros((3, 2, 2, 31, 8), np.uint16), r"\(3, 2, 2, 32, 8\) \(axis 3 may be longer\)"),
        (np.zeros((3, 2, 1, 32, 8), np.uint16), "shape"),
        (np.zeros((4, 2, 2, 32, 8), np.uint16), "shape"),
        (np.zeros((2, 2, 32, 8), np.uint16), "shape"),
        (np.zeros((1, 3, 2, 2, 32, 8), np.uint16), "shape"),
        (np.zeros((3, 2, 2, 32, 8), np.float16), "bfloat16, got float16"),
        (np.zeros((3, 2, 2, 32, 8), np.int16), "bfloat16, got int16"),
        (np.zeros((3, 2, 2, 32, 8), np.float32), "bfloat16, got float32"),
    ],
)
def test_tensors_that_do_not_fit(tensor, problem):
    with pytest.raises(LayoutMismatchError, match=problem):
        copying.check_fits(copying.as_array(tensor), tensor, LAYOUT, 2)


def test_opaque_tensors_that_do_not_fit():
    for shape in ((1, 1001), (2, 1000), (2002,), (2, 1001, 1)):
        tensor = np.zeros(shape, np.uint8)
        with pytest.raises(LayoutMismatchError, match="shape"):
            copying.check_fits(tensor, tensor, OPAQUE, 2)

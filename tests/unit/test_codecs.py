from __future__ import annotations

import struct
import subprocess
import sys
import threading
import tracemalloc

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfleet.core.layout import ITEMSIZES
from kvfleet.errors import ConfigError, CorruptBlockError, LayoutMismatchError
from kvfleet.node import codecs
from kvfleet.node.codecs import Codec, Encoded, Raw, Zstd, codec_named, codec_numbered, codec_of

MIB = 1 << 20
CODECS = [Raw(), Zstd(1), Zstd(2), Zstd(3)]


def numbers(num_bytes: int, itemsize: int, seed: int = 0) -> np.ndarray:
    """Bytes of float32 numbers as KV has them, or of the higher or lower half of them."""
    rng = np.random.default_rng(seed)
    count = -(-num_bytes // itemsize)
    words = (rng.standard_normal(count) * np.exp(rng.standard_normal(count) / 2)).astype(np.float32).view(np.uint32)
    packed = words if itemsize == 4 else (words >> 16).astype(f"u{itemsize}")
    data: np.ndarray = packed.view(np.uint8)[:num_bytes].copy()
    return data


def joined(encoded: Encoded) -> bytes:
    data = b"".join(encoded.pieces)
    assert len(data) == encoded.num_bytes
    return data


def ids(codec: object) -> str:
    return f"{codec.name}{getattr(codec, 'level', '')}" if isinstance(codec, Codec) else str(codec)


@pytest.mark.parametrize("codec", CODECS, ids=ids)
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("num_bytes", [8, 64, 4096, MIB - 8, MIB, MIB + 8, 2 * MIB + 24])
def test_a_block_comes_back(codec: Codec, itemsize: int, num_bytes: int):
    block = numbers(num_bytes, itemsize)
    encoded = codec.encode(block, itemsize)
    checksum = xxhash.xxh3_64_intdigest(block.tobytes())
    assert encoded.checksum == (None if codec.name == "raw" else checksum)
    assert encoded.num_bytes <= codec.encoded_bytes_max(num_bytes, itemsize)
    target = np.full(num_bytes, 7, np.uint8)
    assert codec.decode(joined(encoded), target, itemsize) == checksum
    assert target.tobytes() == block.tobytes()


@settings(max_examples=60, deadline=None)
@given(data=st.binary(min_size=1, max_size=4000), itemsize=st.sampled_from([1, 2, 4, 8]), level=st.sampled_from([1, 3]))
def test_any_bytes_come_back(data: bytes, itemsize: int, level: int):
    data *= itemsize
    block, target = np.frombuffer(data, np.uint8), np.empty(len(data), np.uint8)
    assert Zstd().decode(joined(Zstd(level).encode(block, itemsize)), target, itemsize) is not None
    assert target.tobytes() == data


def test_kv_gets_smaller_and_noise_hardly_longer():
    for itemsize, ratio in ((2, 1.3), (4, 1.15)):
        block = numbers(2 * MIB, itemsize)
        assert len(block) / Zstd().encode(block, itemsize).num_bytes > ratio
    noise = np.random.default_rng(1).integers(0, 256, 2 * MIB, np.uint8)
    assert Zstd().encode(noise, 2).num_bytes == len(noise) + 24 + 4 * 4
    assert Zstd().encode(np.zeros(2 * MIB, np.uint8), 2).num_bytes < 1000


def test_raw_copies_nothing_and_zstd_keeps_what_it_has_read():
    block = numbers(4096, 2)
    before = block.tobytes()
    raw, zstd = Raw().encode(block, 2), Zstd().encode(block, 2)
    block[:] = 0
    assert joined(raw) == bytes(4096)
    target = np.empty(4096, np.uint8)
    assert Zstd().decode(joined(zstd), target, 2) == zstd.checksum
    assert target.tobytes() == before


def test_a_raw_block_of_another_length_is_refused():
    for length in (0, 7, 9):
        with pytest.raises(CorruptBlockError, match="raw block of 8"):
            Raw().decode(bytes(length), np.empty(8, np.uint8), 1)


def test_every_truncation_and_any_extra_byte_is_refused():
    block = numbers(256, 2)
    data = joined(Zstd().encode(block, 2))
    target = np.empty(256, np.uint8)
    for length in range(len(data)):
        with pytest.raises(CorruptBlockError):
            Zstd().decode(data[:length], target, 2)
    with pytest.raises(CorruptBlockError):
        Zstd().decode(data + b"\0", target, 2)


def test_a_flipped_bit_is_refused_or_shows_in_the_checksum():
    block = numbers(256, 2)
    encoded = Zstd().encode(block, 2)
    data, target = joined(encoded), np.empty(256, np.uint8)
    refused = 0
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            checksum = Zstd().decode(flipped, target, 2)
        except CorruptBlockError:
            refused += 1
            continue
        assert (checksum == encoded.checksum) == (target.tobytes() == block.tobytes())
    assert refused > 8 * 24  # at least what the header says is compared, but for the size of chunks


def test_a_block_of_another_size_or_itemsize_is_refused():
    data = joined(Zstd().encode(numbers(256, 2), 2))
    for num_bytes, itemsize in ((254, 2), (258, 2), (256, 1), (256, 4)):
        with pytest.raises(CorruptBlockError, match=f"no zstd block of {num_bytes}"):
            Zstd().decode(data, np.empty(num_bytes, np.uint8), itemsize)


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=300), chunk_bytes=st.sampled_from([1, 1 << 16, (1 << 16) + 1, MIB, 1 << 40]))
def test_garbage_is_refused(data: bytes, chunk_bytes: int):
    target = np.empty(64, np.uint8)
    for garbage in (data, struct.pack("<4sIQQ", b"kvz1", 2, 64, chunk_bytes) + data):
        with pytest.raises(CorruptBlockError):
            Zstd().decode(garbage, target, 2)


def block_with(frame: bytes, num_bytes: int) -> bytes:
    """A block of one plane in one chunk, compressed as `frame`."""
    return struct.pack("<4sIQQI", b"kvz1", 1, num_bytes, MIB, len(frame)) + frame


def bombs() -> list[bytes]:
    zeros = bytes(1 << 27)
    unsized = zstandard.ZstdCompressor(level=3, write_content_size=False)
    return [
        zstandard.ZstdCompressor(level=3).compress(zeros),  # says what it is
        unsized.compress(zeros),  # does not
        zstandard.ZstdCompressor(level=1).compress(bytes(1000)) * 2,  # two frames
        unsized.compress(bytes(1000)),  # of the right length, but does not say so
        # A header that says 1,000 bytes and a window of 2 GiB, and one that says 2**62 bytes.
        b"\x28\xb5\x2f\xfd" + bytes([0b01000000, 21 << 3]) + struct.pack("<H", 1000 - 256) + bytes(8),
        b"\x28\xb5\x2f\xfd" + bytes([0b11100000]) + struct.pack("<Q", 1 << 62) + bytes(8),
        b"\x50\x2a\x4d\x18" + struct.pack("<I", 4) + bytes(4),  # a frame to be skipped
        b"",
    ]


def test_a_bomb_takes_no_memory():
    blocks = [block_with(frame, 1000) for frame in bombs()]
    target = np.empty(1000, np.uint8)
    tracemalloc.start()
    try:
        for block in blocks:
            with pytest.raises(CorruptBlockError):
                Zstd().decode(block, target, 1)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def test_a_table_too_long_for_the_bytes_takes_no_memory():
    huge = struct.pack("<4sIQQ", b"kvz1", 1, 1 << 24, 1 << 16)  # 256 planes
    target = np.empty(1 << 24, np.uint8)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptBlockError, match="cut off"):
            Zstd().decode(huge, target, 1)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_many_threads_share_a_codec():
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            codec = codec_named("zstd")
            block, target = numbers(MIB + 64, 2, seed), np.empty(MIB + 64, np.uint8)
            for _ in range(3):
                encoded = codec.encode(block, 2)
                assert codec.decode(joined(encoded), target, 2) == encoded.checksum
                assert target.tobytes() == block.tobytes()
        except BaseException as error:  # noqa: BLE001 - shown by the test's thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_names_and_numbers_do_not_change():
    assert {codec.name: codec.number for codec in (codec_named("raw"), codec_named("zstd"))} == {"raw": 0, "zstd": 1}
    assert codec_numbered(0) is codec_named("raw")
    assert codec_numbered(1) is codec_named("zstd")


def test_an_unknown_codec_is_refused_as_another_layout():
    with pytest.raises(LayoutMismatchError, match=r"raw \(0\), zstd \(1\)"):
        codec_named("int8")
    with pytest.raises(LayoutMismatchError, match="200"):
        codec_numbered(200)


def test_a_name_or_a_number_is_given_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(codecs, "_by_name", dict(codecs._by_name))
    monkeypatch.setattr(codecs, "_by_number", dict(codecs._by_number))

    class Other(Raw):
        name = "other"
        number = 9

    codecs.register(Other())
    assert codec_numbered(9).name == "other"
    for name, number in (("other", 10), ("another", 9), ("another", 256)):
        again = Other()
        again.name, again.number = name, number
        with pytest.raises(AssertionError):
            codecs.register(again)


def test_settings_name_a_codec_and_a_level():
    assert codec_of("raw", "shared_codec") is codec_named("raw")
    assert codec_of("zstd", "shared_codec") is codec_named("zstd")
    three = codec_of("zstd:3", "shared_codec")
    assert isinstance(three, Zstd)
    assert three.level == 3
    for text in ("lz4", "zstd:0", "zstd:4", "zstd:", "raw:1", ""):
        with pytest.raises(ConfigError, match="raw, zstd") as caught:
            codec_of(text, "shared_codec")
        assert caught.value.setting == "shared_codec"


def test_wrong_arrays_are_bugs():
    for block, itemsize in (
        (np.empty(4, np.uint16), 2),
        (np.empty((2, 2), np.uint8), 2),
        (np.empty(0, np.uint8), 2),
        (np.empty(5, np.uint8), 2),
        (np.empty(6, np.uint8), 3),
        (np.empty(8, np.uint8)[::2], 2),
    ):
        for codec in (Raw(), Zstd()):
            with pytest.raises(AssertionError):
                codec.encode(block, itemsize)
            with pytest.raises(AssertionError):
                codec.decode(b"", block, itemsize)


def test_every_layouts_itemsize_can_be_coded():
    assert set(ITEMSIZES.values()) <= set(codecs._ITEMSIZES)


def test_importing_loads_no_compressor():
    code = "import sys, kvfleet.node.codecs; print('zstandard' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_format_does_not_change():
    data = bytes.fromhex(WRITTEN_BY_VERSION_1)
    target = np.empty(256, np.uint8)
    checksum = Zstd().decode(data, target, 2)
    assert target.tobytes() == bytes(range(64)) + b"\x3f\x80" * 96
    assert checksum == xxhash.xxh3_64_intdigest(target.tobytes())


# Zstd(1).encode(bytes(range(64)) + b"\x3f\x80" * 96, 2)
WRITTEN_BY_VERSION_1 = """
6b767a310200000000010000000000000000100000000000320000003200000028b52ffd20804d0100140200020406080a0c0e1012141618
1a1c1e20222426282a2c2e30323436383a3c3e3f0100e1093c0128b52ffd20804d0100140201030507090b0d0f11131517191b1d1f212325
27292b2d2f31333537393b3d3f800100e1093c01
"""

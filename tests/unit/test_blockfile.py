from __future__ import annotations

import base64
import dataclasses
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvfleet.errors import CorruptBlockError, LayoutMismatchError
from kvfleet.node.blockfile import FRAME_BYTES_MAX, BlockHeader, decode, encode, read_header
from kvfleet.node.blockstream import BlockStream
from kvfleet.node.codecs import Zstd

SIZES = [1, 7, 8, 9, 64, 4099]


def header_of(num_bytes: int) -> BlockHeader:
    return BlockHeader(
        namespace_id=bytes(range(16)),
        layout_json='{"dtype":"uint8"}',
        key=bytes(range(16, 32)),
        shard=1,
        num_shards=2,
        num_bytes=num_bytes,
    )


def block_of(num_bytes: int) -> tuple[np.ndarray, int]:
    data = np.arange(num_bytes, dtype=np.uint32).astype(np.uint8)
    return data, xxhash.xxh3_64_intdigest(data.tobytes())


@pytest.mark.parametrize("num_bytes", SIZES)
def test_a_block_comes_back(num_bytes: int):
    data, checksum = block_of(num_bytes)
    encoded = encode(header_of(num_bytes), data, checksum)
    found, found_checksum = decode(encoded, header_of(num_bytes))
    assert found.tobytes() == data.tobytes()
    assert found_checksum == checksum
    assert read_header(encoded) == (dataclasses.replace(header_of(num_bytes), coded_bytes=num_bytes), checksum)
    assert len(encoded) <= num_bytes + FRAME_BYTES_MAX


def test_decoding_copies_nothing_and_encoding_does():
    data, checksum = block_of(4096)
    encoded = encode(header_of(4096), data, checksum)
    data[:] = 0
    found, _ = decode(encoded, header_of(4096))
    assert np.shares_memory(found, np.frombuffer(encoded, np.uint8))
    assert found.tobytes() == block_of(4096)[0].tobytes()


@pytest.mark.parametrize("num_bytes", SIZES)
def test_any_arrow_tool_opens_it(num_bytes: int):
    data, checksum = block_of(num_bytes)
    table = pa.ipc.open_stream(encode(header_of(num_bytes), data, checksum)).read_all()
    table.validate(full=True)
    assert table.column_names == ["block"]
    assert table["block"].to_numpy().tobytes() == data.tobytes()
    assert table.schema.metadata == {
        b"kvfleet.version": b"2",
        b"kvfleet.namespace": b"000102030405060708090a0b0c0d0e0f",
        b"kvfleet.layout": b'{"dtype":"uint8"}',
        b"kvfleet.key": b"101112131415161718191a1b1c1d1e1f",
        b"kvfleet.shard": b"1",
        b"kvfleet.num_shards": b"2",
        b"kvfleet.num_bytes": str(num_bytes).encode(),
        b"kvfleet.codec": b"raw",
        b"kvfleet.coded_bytes": str(num_bytes).encode(),
        b"kvfleet.checksum": f"xxh3-64:{checksum:016x}".encode(),
    }


def test_bytes_without_their_checksum_are_not_encoded():
    data, checksum = block_of(64)
    with pytest.raises(CorruptBlockError, match="arena"):
        encode(header_of(64), data, checksum ^ 1)


@pytest.mark.parametrize("change", [{"namespace_id": bytes(16)}, {"key": bytes(16)}, {"shard": 0}])
def test_an_object_of_something_else_is_refused_by_name(change: dict[str, Any]):
    encoded = encode(header_of(64), *block_of(64))
    with pytest.raises(CorruptBlockError, match=f"another {next(iter(change))}"):
        decode(encoded, dataclasses.replace(header_of(64), **change))


@pytest.mark.parametrize(
    "change",
    [
        {"layout_json": "{}"},
        {"num_shards": 3},
        {"num_bytes": 56},
    ],
)
def test_a_block_in_another_layout_is_refused_for_that(change: dict[str, Any]):
    encoded = encode(header_of(64), *block_of(64))
    with pytest.raises(LayoutMismatchError, match=next(iter(change))):
        decode(encoded, dataclasses.replace(header_of(64), **change))
    damaged = bytearray(encoded)
    damaged[-20] ^= 1
    with pytest.raises(CorruptBlockError, match="checksum"):
        decode(bytes(damaged), dataclasses.replace(header_of(64), **change))


def test_every_truncation_and_any_extra_byte_is_refused():
    encoded = encode(header_of(9), *block_of(9))
    for length in range(len(encoded)):
        with pytest.raises(CorruptBlockError):
            decode(encoded[:length], header_of(9))
    with pytest.raises(CorruptBlockError):
        decode(encoded + b"\0", header_of(9))


def test_no_flipped_bit_gives_other_bytes():
    data, checksum = block_of(9)
    encoded = encode(header_of(9), data, checksum)
    harmless = 0
    for bit in range(8 * len(encoded)):
        flipped = bytearray(encoded)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            found, _ = decode(bytes(flipped), header_of(9))
        except (CorruptBlockError, LayoutMismatchError):
            continue
        harmless += 1
        assert found.tobytes() == data.tobytes()
    assert harmless < 8 * len(encoded) / 2


@given(data=st.binary(max_size=600))
def test_garbage_is_refused(data: bytes):
    for garbage in (data, b"\xff\xff\xff\xff\x08\x01\x00\x00" + data, b"\xff\xff\xff\xff\xff\xff\xff\xff" + data):
        with pytest.raises(CorruptBlockError):
            decode(garbage, header_of(64))
        with pytest.raises(CorruptBlockError):
            read_header(garbage)


def test_another_arrow_stream_is_refused():
    table = pa.table({"block": pa.array([1, 2, 3], pa.uint8())})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(CorruptBlockError, match="not a block's object"):
        decode(sink.getvalue().to_pybytes(), header_of(3))


def test_random_bytes_of_the_right_length_are_refused():
    encoded = encode(header_of(4099), *block_of(4099))
    with pytest.raises(CorruptBlockError):
        decode(os.urandom(len(encoded)), header_of(4099))


def test_the_format_does_not_change():
    data, checksum = block_of(9)
    for written in (WRITTEN_BY_VERSION_1, WRITTEN_BY_VERSION_2):
        found, found_checksum = decode(base64.b64decode(written), header_of(9))
        assert (found.tobytes(), found_checksum) == (data.tobytes(), checksum)


def coded_header(num_bytes: int) -> BlockHeader:
    return dataclasses.replace(header_of(num_bytes), layout_json='{"dtype":"bfloat16"}')


def test_a_block_coded_by_zstd_comes_back():
    data, checksum = block_of(4096)
    encoded = encode(coded_header(4096), data, checksum, Zstd())
    header, found_checksum = read_header(encoded)
    assert (header.codec, header.num_bytes, found_checksum) == ("zstd", 4096, checksum)
    assert header.coded_bytes is not None
    assert header.coded_bytes < 1000
    found, _ = decode(encoded, coded_header(4096))
    assert found.tobytes() == data.tobytes()
    table = pa.ipc.open_stream(encoded).read_all()
    assert (table.num_rows, table.schema.metadata[b"kvfleet.codec"]) == (header.coded_bytes, b"zstd")


def test_a_block_that_zstd_makes_no_smaller_stays_raw():
    data = np.frombuffer(np.random.default_rng(1).bytes(4096), np.uint8)
    encoded = encode(coded_header(4096), data, xxhash.xxh3_64_intdigest(data.tobytes()), Zstd())
    assert read_header(encoded)[0].codec == "raw"
    assert decode(encoded, coded_header(4096))[0].tobytes() == data.tobytes()


def test_bytes_without_their_checksum_are_not_coded():
    data, checksum = block_of(4096)
    with pytest.raises(CorruptBlockError, match="arena"):
        encode(coded_header(4096), data, checksum ^ 1, Zstd())


def test_no_flipped_bit_of_a_coded_block_gives_other_bytes():
    data = np.tile(block_of(64)[0], 4)
    encoded = encode(coded_header(256), data, xxhash.xxh3_64_intdigest(data.tobytes()), Zstd())
    assert read_header(encoded)[0].codec == "zstd"
    for bit in range(8 * len(encoded)):
        flipped = bytearray(encoded)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            found, _ = decode(bytes(flipped), coded_header(256))
        except (CorruptBlockError, LayoutMismatchError):
            continue
        assert found.tobytes() == data.tobytes()


@pytest.mark.parametrize(("old", "new"), [(b"zstd", b"zxtd"), (b"\x01\x00\x00\x002\x00", b"\x01\x00\x00\x003\x00")])
def test_a_codec_or_version_of_the_future_is_refused_and_not_called_corrupt(old: bytes, new: bytes):
    data, checksum = block_of(4096)
    encoded = encode(coded_header(4096), data, checksum, Zstd())
    assert encoded.count(old) >= 1
    with pytest.raises(LayoutMismatchError):
        decode(encoded.replace(old, new), coded_header(4096))


def streamed(encoded: bytes, header: BlockHeader, piece_bytes: int) -> tuple[bytes, int]:
    """The block of an object that arrives in pieces, and its checksum."""
    target = np.zeros(header.num_bytes, np.uint8)
    stream = BlockStream(header, target)
    for first in range(0, len(encoded), piece_bytes):
        if not stream.take(encoded[first : first + piece_bytes]):
            break
    stream.close()
    checksum = stream.finish()
    return target.tobytes(), checksum


@pytest.mark.parametrize("piece_bytes", [1, 7, 100, 1000, 1 << 20])
@pytest.mark.parametrize("num_bytes", SIZES)
def test_a_block_comes_back_from_pieces(num_bytes: int, piece_bytes: int):
    data, checksum = block_of(num_bytes)
    encoded = encode(header_of(num_bytes), data, checksum)
    assert streamed(encoded, header_of(num_bytes), piece_bytes) == (data.tobytes(), checksum)


@pytest.mark.parametrize("piece_bytes", [100, 1 << 20])
def test_a_coded_block_comes_back_from_pieces(piece_bytes: int):
    data, checksum = block_of(4096)
    encoded = encode(coded_header(4096), data, checksum, Zstd())
    assert streamed(encoded, coded_header(4096), piece_bytes) == (data.tobytes(), checksum)


def test_pieces_of_the_format_before_are_read():
    data, checksum = block_of(9)
    assert streamed(base64.b64decode(WRITTEN_BY_VERSION_1), header_of(9), 100) == (data.tobytes(), checksum)


def outcome(read: Callable[[], tuple[bytes, int]]) -> tuple[bytes, int] | str:
    try:
        return read()
    except (CorruptBlockError, LayoutMismatchError) as error:
        return repr(error)


def decoded(encoded: bytes, header: BlockHeader) -> tuple[bytes, int]:
    block, checksum = decode(encoded, header)
    return block.tobytes(), checksum


def damaged(encoded: bytes) -> Iterator[bytes]:
    for bit in range(8 * len(encoded)):
        flipped = bytearray(encoded)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)
    for length in range(len(encoded)):
        yield encoded[:length]
    for extra in (b"\0", bytes(8), encoded):
        yield encoded + extra
    yield os.urandom(len(encoded))


@pytest.mark.parametrize("piece_bytes", [400, 1 << 20])
def test_damage_is_found_in_pieces_as_in_one(piece_bytes: int):
    for encoded in damaged(encode(header_of(9), *block_of(9))):
        whole = outcome(partial(decoded, encoded, header_of(9)))
        pieces = outcome(partial(streamed, encoded, header_of(9), piece_bytes))
        assert pieces == whole


@pytest.mark.parametrize("change", [{"key": bytes(16)}, {"layout_json": "{}"}, {"num_shards": 3}, {"num_bytes": 56}])
def test_another_block_is_found_in_pieces_as_in_one(change: dict[str, Any]):
    encoded, header = encode(header_of(64), *block_of(64)), dataclasses.replace(header_of(64), **change)
    whole = outcome(partial(decoded, encoded, header))
    assert isinstance(whole, str)
    assert outcome(partial(streamed, encoded, header, 100)) == whole


@pytest.mark.parametrize("start", [b"", b"\xff" * 8, b"x" * (1 << 17)])
def test_no_more_is_taken_than_an_object_may_have(start: bytes):
    header, taken = header_of(1 << 18), 0
    stream = BlockStream(header, np.zeros(1 << 18, np.uint8))
    encoded = encode(header, *block_of(1 << 18))
    for piece in (start, encoded, *[bytes(10_000)] * 100):
        taken += 1
        if not stream.take(piece):
            break
    assert taken < 20
    assert not stream.take(b"x")
    stream.close()
    with pytest.raises(CorruptBlockError):
        stream.finish()


def test_a_closed_stream_writes_nothing():
    encoded, target = encode(header_of(4099), *block_of(4099)), np.zeros(4099, np.uint8)
    stream = BlockStream(header_of(4099), target)
    assert stream.take(encoded[:2000])
    before = target.tobytes()
    stream.close()
    assert not stream.take(encoded[2000:])
    assert target.tobytes() == before
    with pytest.raises(CorruptBlockError, match="does not end"):
        stream.finish()


# encode(header_of(9), *block_of(9))
WRITTEN_BY_VERSION_1 = """
/////4gCAAAQAAAAAAAKAA4ABgAFAAgACgAAAAABBAAQAAAAAAAKAAwAAAAEAAgACgAAABQCAAAEAAAACQAAAOABAACIAQAATAEAAAQBAADYAAAAqAAA
AHgAAABMAAAABAAAAEz+//8oAAAABAAAABgAAAB4eGgzLTY0OmU5NjEyNTk4MTQ1YmI5ZGMAAAAAEAAAAGt2ZmxlZXQuY2hlY2tzdW0AAAAAkP7//xAA
AAAEAAAAAwAAAHJhdwANAAAAa3ZmbGVldC5jb2RlYwAAALj+//8QAAAABAAAAAEAAAA5AAAAEQAAAGt2ZmxlZXQubnVtX2J5dGVzAAAA5P7//xAAAAAE
AAAAAQAAADIAAAASAAAAa3ZmbGVldC5udW1fc2hhcmRzAAAQ////EAAAAAQAAAABAAAAMQAAAA0AAABrdmZsZWV0LnNoYXJkAAAAOP///zAAAAAEAAAA
IAAAADEwMTExMjEzMTQxNTE2MTcxODE5MWExYjFjMWQxZTFmAAAAAAsAAABrdmZsZWV0LmtleQB8////IAAAAAQAAAARAAAAeyJkdHlwZSI6InVpbnQ4
In0AAAAOAAAAa3ZmbGVldC5sYXlvdXQAALT///8wAAAABAAAACAAAAAwMDAxMDIwMzA0MDUwNjA3MDgwOTBhMGIwYzBkMGUwZgAAAAARAAAAa3ZmbGVl
dC5uYW1lc3BhY2UAAAAIAAwABAAIAAgAAAAQAAAABAAAAAEAAAAxAAAADwAAAGt2ZmxlZXQudmVyc2lvbgABAAAAFAAAABAAFAAIAAAABwAMAAAAEAAQ
AAAAAAAAAhAAAAAcAAAABAAAAAAAAAAFAAAAYmxvY2sABgAIAAQABgAAAAgAAAD/////iAAAABQAAAAAAAAADAAWAAYABQAIAAwADAAAAAADBAAYAAAA
EAAAAAAAAAAAAAoAGAAMAAQACAAKAAAAPAAAABAAAAAJAAAAAAAAAAAAAAACAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAACQAAAAAAAAAAAAAAAQAA
AAkAAAAAAAAAAAAAAAAAAAAAAQIDBAUGBwgAAAAAAAAA/////wAAAAA=
"""

WRITTEN_BY_VERSION_2 = """
/////7gCAAAQAAAAAAAKAA4ABgAFAAgACgAAAAABBAAQAAAAAAAKAAwAAAAEAAgACgAAAEQCAAAEAAAACgAAABACAAC4AQAAfAEAADQBAAAIAQAA2AAAAKgA
AAB8AAAATAAAAAQAAAAg/v//KAAAAAQAAAAYAAAAeHhoMy02NDplOTYxMjU5ODE0NWJiOWRjAAAAABAAAABrdmZsZWV0LmNoZWNrc3VtAAAAAGT+//8QAAAA
BAAAAAEAAAA5AAAAEwAAAGt2ZmxlZXQuY29kZWRfYnl0ZXMAkP7//xAAAAAEAAAAAwAAAHJhdwANAAAAa3ZmbGVldC5jb2RlYwAAALj+//8QAAAABAAAAAEA
AAA5AAAAEQAAAGt2ZmxlZXQubnVtX2J5dGVzAAAA5P7//xAAAAAEAAAAAQAAADIAAAASAAAAa3ZmbGVldC5udW1fc2hhcmRzAAAQ////EAAAAAQAAAABAAAA
MQAAAA0AAABrdmZsZWV0LnNoYXJkAAAAOP///zAAAAAEAAAAIAAAADEwMTExMjEzMTQxNTE2MTcxODE5MWExYjFjMWQxZTFmAAAAAAsAAABrdmZsZWV0Lmtl
eQB8////IAAAAAQAAAARAAAAeyJkdHlwZSI6InVpbnQ4In0AAAAOAAAAa3ZmbGVldC5sYXlvdXQAALT///8wAAAABAAAACAAAAAwMDAxMDIwMzA0MDUwNjA3
MDgwOTBhMGIwYzBkMGUwZgAAAAARAAAAa3ZmbGVldC5uYW1lc3BhY2UAAAAIAAwABAAIAAgAAAAQAAAABAAAAAEAAAAyAAAADwAAAGt2ZmxlZXQudmVyc2lv
bgABAAAAFAAAABAAFAAIAAAABwAMAAAAEAAQAAAAAAAAAhAAAAAcAAAABAAAAAAAAAAFAAAAYmxvY2sABgAIAAQABgAAAAgAAAD/////iAAAABQAAAAAAAAA
DAAWAAYABQAIAAwADAAAAAADBAAYAAAAEAAAAAAAAAAAAAoAGAAMAAQACAAKAAAAPAAAABAAAAAJAAAAAAAAAAAAAAACAAAAAAAAAAAAAAAAAAAAAAAAAAAA
AAAAAAAACQAAAAAAAAAAAAAAAQAAAAkAAAAAAAAAAAAAAAAAAAAAAQIDBAUGBwgAAAAAAAAA/////wAAAAA=
"""

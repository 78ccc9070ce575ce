"""One block as the bytes of one object in storage: an Arrow IPC stream that any Arrow tool opens.

The stream holds one record batch with one column `block` of uint8, one row a byte of the block as its codec has made
it, and what the block is in its schema metadata. In bytes::

    schema message     8 + a    ffffffff, a as little-endian uint32, flatbuffer
    batch message      8 + b    ffffffff, b, flatbuffer
    body                        the coded block, padded with zeros to a multiple of 8
    end of stream      8        ffffffff 00000000

Version 1 knew the codec `raw` only, and did not say how many bytes the body has. It is read, and not written.

Reading parses the schema with Arrow, finds the body by the two lengths, and then compares everything: the header with
the one expected, the length of the object, the checksum of the block. The batch's flatbuffer is for other readers; ours
does not parse it, so no flipped bit in it can send Arrow outside of the object.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from kvfleet.core.layout import ITEMSIZES
from kvfleet.errors import CorruptBlockError, LayoutMismatchError
from kvfleet.node.codecs import RAW, Codec, codec_named

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "FORMAT_VERSION", "FRAME_BYTES_MAX", "BlockHeader", "decode", "encode", "raw_block", "read_header", "tail_of",
]  # fmt: skip

FORMAT_VERSION = 2
FRAME_BYTES_MAX = 1 << 16  # the longest object is its block and this much around it

_TIER = "shared"
_COLUMN = "block"
_PREFIX = "kvfleet."
_LENGTH = struct.Struct("<II")
_NUM_BYTES_MAX = 1 << 32  # of a block; so many are made room for if an object says so
_CONTINUATION = 0xFFFFFFFF
_END = _LENGTH.pack(_CONTINUATION, 0)
_IDENTITY = ("namespace_id", "key", "shard")
_LAYOUT = ("layout_json", "num_shards", "num_bytes")
_DIGEST = re.compile(r"xxh3-64:([0-9a-f]{16})")

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockHeader:
    """What the bytes of an object are.

    All but the last three is known before the object is read: of these, the object says what they are.

    Attributes:
        namespace_id: 16 bytes, public.
        layout_json: the block layout as canonical JSON.
        key: 16 bytes.
        shard: 0-based.
        num_shards: of the block.
        num_bytes: of this shard, as it is in the arena.
        codec: how the bytes are coded; `raw` is as they are in the arena.
        coded_bytes: of the coded shard; None if that is not known yet.
        version: of this format.
    """

    namespace_id: bytes
    layout_json: str
    key: bytes
    shard: int
    num_shards: int
    num_bytes: int
    codec: str = RAW.name
    coded_bytes: int | None = None
    version: int = FORMAT_VERSION


def encode(header: BlockHeader, data: Bytes, checksum: int, codec: Codec = RAW) -> bytes:
    """Return the object of a block.

    Args:
        header: what `data` is; of the last three fields nothing is taken.
        data: `(header.num_bytes,)`, uint8, contiguous. Copied before it is verified, so what is returned stays right
            even if the slot is given to another block meanwhile.
        checksum: xxh3-64 of `data`.
        codec: to code it with. A block that does not get smaller by it stays raw.

    Raises:
        CorruptBlockError: `data` is not what `checksum` was made of.
    """
    assert data.dtype == np.uint8
    assert data.shape == (header.num_bytes,)
    if codec is not RAW:
        coded = codec.encode(data, _itemsize(header.layout_json))
        if coded.num_bytes < len(data):
            _check(header, coded.checksum, checksum)
            made = replace(header, codec=codec.name, coded_bytes=coded.num_bytes, version=FORMAT_VERSION)
            return _stream(made, checksum, np.frombuffer(b"".join(coded.pieces), np.uint8))
    made = replace(header, codec=RAW.name, coded_bytes=len(data), version=FORMAT_VERSION)
    encoded = _stream(made, checksum, data)
    view = memoryview(encoded)
    start, stop = _body(view, len(data))
    _check(header, xxhash.xxh3_64_intdigest(view[start:stop]), checksum)
    return encoded


def _check(header: BlockHeader, found: int | None, checksum: int) -> None:
    if found != checksum:
        raise CorruptBlockError(_TIER, f"{header.key.hex()}: the arena's bytes do not have their checksum")


def _stream(header: BlockHeader, checksum: int, coded: Bytes) -> bytes:
    import pyarrow as pa

    schema = _schema(header, checksum)
    column = pa.Array.from_buffers(pa.uint8(), len(coded), [None, pa.py_buffer(coded)])
    pieces = _Pieces()
    with pa.PythonFile(pieces, mode="w") as sink, pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.record_batch([column], schema=schema))
    encoded = b"".join(pieces)
    assert len(encoded) <= header.num_bytes + FRAME_BYTES_MAX
    return encoded


class _Pieces(list["bytes | pa.Buffer"]):
    """A file that keeps what is written as it is, so that a block is copied once, by `bytes.join`."""

    closed = False

    def write(self, piece: bytes | pa.Buffer) -> None:
        self.append(piece)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def decode(data: bytes, header: BlockHeader) -> tuple[Bytes, int]:
    """Return the block in an object, verified, and its xxh3-64.

    Args:
        data: the whole object.
        header: what it must be; of the last three fields nothing is asked.

    Returns:
        `(header.num_bytes,)`, uint8, a view of `data` if the block is raw; and the checksum.

    Raises:
        CorruptBlockError: the object is shorter, longer or of another block, or its bytes do not have their checksum.
        LayoutMismatchError: it is of that block, in another layout, or of a codec or version that is not known here.
    """
    found, checksum = read_header(data)
    if wrong := _differing(found, header, _IDENTITY):
        raise CorruptBlockError(_TIER, f"{header.key.hex()}: the object has another {', '.join(wrong)}")
    codec, wrong = codec_named(found.codec), _differing(found, header, _LAYOUT)
    assert found.coded_bytes is not None
    start, stop = _body(memoryview(data), found.coded_bytes)
    block = np.frombuffer(memoryview(data)[start:stop], np.uint8)
    if codec is RAW:
        digest = xxhash.xxh3_64_intdigest(block.data)
    elif not wrong:
        coded, block = block, np.empty(header.num_bytes, np.uint8)
        digest = codec.decode(coded.data, block, _itemsize(header.layout_json))
    if (codec is RAW or not wrong) and digest != checksum:
        raise CorruptBlockError(_TIER, f"{header.key.hex()}: checksum mismatch")
    if wrong:
        expected, got = ({name: getattr(of, name) for name in wrong} for of in (header, found))
        raise LayoutMismatchError(f"{header.key.hex()} with {expected}", f"{got}")
    return block, checksum


def raw_block(data: bytes, header: BlockHeader) -> tuple[int, int]:
    """Return where the block begins in an object of which `data` is the beginning, and the xxh3-64 it says that has.

    Raises:
        CorruptBlockError: it is not raw, or not as `header` has it, or the block begins behind the end of `data`.
        LayoutMismatchError: it is of a version that is not known here.
    """
    start = _start(memoryview(data))
    found, checksum = read_header(data)
    if found.codec != RAW.name or _differing(found, header, _IDENTITY + _LAYOUT):
        raise CorruptBlockError(_TIER, f"{header.key.hex()}: the object is not its raw block")
    return start, checksum


def tail_of(num_bytes: int) -> bytes:
    """What an object has behind its coded block of so many bytes."""
    return bytes(-num_bytes % 8) + _END


def _differing(one: BlockHeader, other: BlockHeader, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if getattr(one, name) != getattr(other, name)]


@lru_cache(maxsize=1024)
def _itemsize(layout_json: str) -> int:
    """Bytes of one number of a block."""
    return ITEMSIZES[json.loads(layout_json)["dtype"]]


def read_header(data: bytes) -> tuple[BlockHeader, int]:
    """Return what an object says it is, and the xxh3-64 it says its block has. The block is not verified.

    Raises:
        CorruptBlockError: `data` does not begin with the header of a block.
        LayoutMismatchError: it is of a version that is not known here. Whether it is sound is not known either.
    """
    import pyarrow as pa

    size = _message_bytes(memoryview(data), 0)
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(data).slice(0, size))
        metadata = {name.decode(): value.decode() for name, value in (schema.metadata or {}).items()}
        version = int(metadata[_PREFIX + "version"])
        if version > FORMAT_VERSION:
            raise LayoutMismatchError(f"a block file of version {FORMAT_VERSION} at most", f"version {version}")
        digest = _DIGEST.fullmatch(metadata[_PREFIX + "checksum"])
        if digest is None or schema.names != [_COLUMN]:
            raise ValueError("no xxh3-64, or other columns")
        header = BlockHeader(
            namespace_id=bytes.fromhex(metadata[_PREFIX + "namespace"]),
            layout_json=metadata[_PREFIX + "layout"],
            key=bytes.fromhex(metadata[_PREFIX + "key"]),
            shard=int(metadata[_PREFIX + "shard"]),
            num_shards=int(metadata[_PREFIX + "num_shards"]),
            num_bytes=int(metadata[_PREFIX + "num_bytes"]),
            codec=metadata[_PREFIX + "codec"],
            coded_bytes=int(metadata[_PREFIX + ("coded_bytes" if version > 1 else "num_bytes")]),
            version=version,
        )
        if not _adds_up(header):
            raise ValueError("numbers that cannot be")
    except LayoutMismatchError:
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        why = "cannot be read" if isinstance(error, pa.ArrowException | OSError) else f"is wrong: {error}"
        raise CorruptBlockError(_TIER, f"not a block's object: its Arrow schema {why}") from error
    return header, int(digest.group(1), 16)


def _adds_up(header: BlockHeader) -> bool:
    coded_bytes = header.coded_bytes
    if coded_bytes is None or coded_bytes <= 0 or not 0 < header.num_bytes <= _NUM_BYTES_MAX or header.version < 1:
        return False
    return header.codec != RAW.name or coded_bytes == header.num_bytes


def _schema(header: BlockHeader, checksum: int) -> pa.Schema:
    import pyarrow as pa

    metadata = {
        "version": str(header.version),
        "namespace": header.namespace_id.hex(),
        "layout": header.layout_json,
        "key": header.key.hex(),
        "shard": str(header.shard),
        "num_shards": str(header.num_shards),
        "num_bytes": str(header.num_bytes),
        "codec": header.codec,
        "coded_bytes": str(header.coded_bytes),
        "checksum": f"xxh3-64:{checksum:016x}",
    }
    field = pa.field(_COLUMN, pa.uint8(), nullable=False)
    return pa.schema([field], {_PREFIX + name: value for name, value in metadata.items()})


def _message_bytes(data: memoryview, start: int) -> int:
    """Size of the message at `start`, its prefix included."""
    if len(data) < start + _LENGTH.size:
        raise CorruptBlockError(_TIER, f"object of {len(data)} bytes is cut off")
    mark, size = _LENGTH.unpack_from(data, start)
    if mark != _CONTINUATION or size == 0 or len(data) < start + _LENGTH.size + size:
        raise CorruptBlockError(_TIER, f"no Arrow message at byte {start} of {len(data)}")
    return _LENGTH.size + int(size)


def _start(data: memoryview) -> int:
    """Where the coded block of an object begins."""
    start = _message_bytes(data, 0)
    return start + _message_bytes(data, start)


def _body(data: memoryview, num_bytes: int) -> tuple[int, int]:
    """Where the coded block of so many bytes is in an object; everything around it is verified."""
    start = _start(data)
    if data[start + num_bytes :] != tail_of(num_bytes):
        raise CorruptBlockError(_TIER, f"object of {len(data)} bytes does not end with its block")
    return start, start + num_bytes

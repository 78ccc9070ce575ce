"""Blocks made smaller without loss: planes of bytes, each compressed by Zstandard.

Numbers of two or four bytes hardly repeat as a whole, but the bytes with their exponents do: each chunk of a block is
split into planes, the first bytes of all its numbers, the second bytes and so on, and each plane is compressed by
itself, or kept as it is where that is no longer. In bytes, all little-endian::

    header    24      magic "kvz1", itemsize as uint32, bytes of the block as uint64, bytes of a chunk as uint64
    table     4 * n   length of each plane as uint32, chunk by chunk; the highest bit: it is kept as it is
    planes            one after the other

All sizes follow from the block's size, which the reader knows, and the few that the bytes tell are compared with it
before anything is made of them: no damage makes a reader use more memory than a chunk takes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash
from typing_extensions import Buffer

from kvfleet.errors import CorruptBlockError

if TYPE_CHECKING:
    import zstandard

__all__ = ["compress", "compressed_bytes_max", "decompress"]

_TIER = "codec"
_CHUNK_BYTES = 1 << 20
_CHUNK_BYTES_READ = (1 << 16, 1 << 22)  # from, to: others may write others
_MAGIC = b"kvz1"
_HEADER = struct.Struct("<4sIQQ")
_AS_IS = 1 << 31

Bytes = npt.NDArray[np.uint8]


def compress(block: Bytes, itemsize: int, level: int) -> tuple[list[Buffer], int]:
    """Return the pieces of a compressed block, and the xxh3-64 of the block that is in them.

    What is compressed is what was hashed, even if the slot is given to another block meanwhile.
    """
    import zstandard

    compressor = zstandard.ZstdCompressor(level=level, write_content_size=True)
    copy, scratch = np.empty((2, min(_CHUNK_BYTES, len(block))), np.uint8)
    digest = xxhash.xxh3_64()
    lengths: list[int] = []
    planes: list[Buffer] = []
    for first in range(0, len(block), _CHUNK_BYTES):
        chunk = copy[: min(_CHUNK_BYTES, len(block) - first)]
        np.copyto(chunk, block[first : first + len(chunk)])
        digest.update(chunk.data)
        for plane, of_chunk in _planes(scratch, chunk, itemsize):
            np.copyto(plane, of_chunk)
            compressed = compressor.compress(plane.data)
            as_is = len(compressed) >= len(plane)
            lengths.append(len(plane) | _AS_IS if as_is else len(compressed))
            planes.append(plane.tobytes() if as_is else compressed)
    header = _HEADER.pack(_MAGIC, itemsize, len(block), _CHUNK_BYTES)
    return [header, np.array(lengths, "<u4").tobytes(), *planes], digest.intdigest()


def compressed_bytes_max(num_bytes: int, itemsize: int) -> int:
    """The most bytes that a block of `num_bytes` is compressed to."""
    return _HEADER.size + 4 * _num_planes(num_bytes, _CHUNK_BYTES, itemsize) + num_bytes


def decompress(encoded: Buffer, target: Bytes, itemsize: int) -> int:
    """Fill `target` and return the xxh3-64 of what is there now.

    Raises:
        CorruptBlockError: no block of that size; any bytes may be in `target`.
    """
    import zstandard

    data = memoryview(encoded).cast("B")
    chunk_bytes = _chunk_bytes(data, len(target), itemsize)
    planes = _stored_planes(data, _num_planes(len(target), chunk_bytes, itemsize))
    decompressor = zstandard.ZstdDecompressor()
    scratch = np.empty(min(chunk_bytes, len(target)), np.uint8)
    digest = xxhash.xxh3_64()
    for first in range(0, len(target), chunk_bytes):
        chunk = target[first : first + chunk_bytes]
        for plane, of_chunk in _planes(scratch, chunk, itemsize):
            stored, as_is = next(planes)
            if not as_is:
                stored = _expanded(decompressor, stored, len(plane))
            if len(stored) != len(plane):
                raise CorruptBlockError(_TIER, f"a plane of {len(plane)} bytes has {len(stored)}")
            np.copyto(of_chunk, np.frombuffer(stored, np.uint8))
        digest.update(chunk.data)
    return digest.intdigest()


def _num_planes(num_bytes: int, chunk_bytes: int, itemsize: int) -> int:
    return itemsize * -(-num_bytes // chunk_bytes)


def _planes(scratch: Bytes, chunk: Bytes, itemsize: int) -> Iterator[tuple[Bytes, Bytes]]:
    """Room for each plane of a chunk, in turn, and where its bytes are in the chunk."""
    room = scratch[: len(chunk) // itemsize]
    for plane in range(itemsize):
        yield room, chunk[plane::itemsize]


def _chunk_bytes(data: memoryview, num_bytes: int, itemsize: int) -> int:
    """The size of a chunk, after all of the header was compared with what it must be."""
    if len(data) < _HEADER.size:
        raise CorruptBlockError(_TIER, f"{len(data)} bytes are no zstd block")
    magic, *sizes, chunk_bytes = _HEADER.unpack_from(data)
    if magic != _MAGIC or sizes != [itemsize, num_bytes]:
        raise CorruptBlockError(_TIER, f"no zstd block of {num_bytes} bytes, {itemsize} a number")
    if not _CHUNK_BYTES_READ[0] <= chunk_bytes <= _CHUNK_BYTES_READ[1] or chunk_bytes % itemsize:
        raise CorruptBlockError(_TIER, f"chunks of {chunk_bytes} bytes")
    if len(data) < _HEADER.size + 4 * _num_planes(num_bytes, chunk_bytes, itemsize):
        raise CorruptBlockError(_TIER, f"a zstd block is cut off at {len(data)} bytes")
    return int(chunk_bytes)


def _stored_planes(data: memoryview, num_planes: int) -> Iterator[tuple[memoryview, bool]]:
    """The stored bytes of each plane, and whether they are the plane itself. Together they are all of `data`."""
    start = _HEADER.size + 4 * num_planes
    table = np.frombuffer(data[_HEADER.size : start], "<u4").astype(np.int64)
    stops = start + np.cumsum(table & ~_AS_IS)
    if stops[-1] != len(data):
        raise CorruptBlockError(_TIER, f"a zstd block ends at byte {stops[-1]}, there are {len(data)}")
    for length, stop in zip(table.tolist(), stops.tolist(), strict=True):
        yield data[stop - (length & ~_AS_IS) : stop], bool(length & _AS_IS)


def _expanded(decompressor: zstandard.ZstdDecompressor, frame: memoryview, num_bytes: int) -> memoryview:
    """The plane in a frame, which must say that it holds so many bytes: what it says would be allocated."""
    import zstandard

    try:
        said = zstandard.get_frame_parameters(frame)
        if said.content_size != num_bytes or said.window_size > num_bytes or said.dict_id:
            raise CorruptBlockError(_TIER, f"a frame says {said.content_size} bytes, it must hold {num_bytes}")
        return memoryview(decompressor.decompress(frame, max_output_size=num_bytes, allow_extra_data=False))
    except zstandard.ZstdError as error:
        raise CorruptBlockError(_TIER, f"a plane cannot be decompressed: {error}") from error

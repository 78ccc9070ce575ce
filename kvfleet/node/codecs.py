"""How the bytes of a block are coded where it rests: as they are, or smaller.

A codec has a name, which block files hold, and a number, which records hold; neither ever gets another meaning. Blocks
are coded for a tier and decoded into a slot of the arena, where they are always as the engine has them.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash
from typing_extensions import Buffer, override

from kvfleet.errors import ConfigError, CorruptBlockError, LayoutMismatchError
from kvfleet.node import planes

__all__ = [
    "LEVELS", "RAW", "Codec", "Encoded", "Raw", "Zstd", "codec_named", "codec_numbered", "codec_of", "copy_hashed",
    "register",
]  # fmt: skip

LEVELS = range(1, 4)

_TIER = "codec"
_HASHED_BYTES = 1 << 18  # hashed at once while they are in the processor's cache
_ITEMSIZES = (1, 2, 4, 8)
_NUMBER_MAX = 255  # a record has 8 bits for it
_SETTING = re.compile(r"zstd:([0-9])")

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A coded block.

    Attributes:
        pieces: the coded bytes are these, one after the other.
        num_bytes: of all of them.
        checksum: xxh3-64 of the block that was read, whatever has happened to its slot since; None if the piece is the
            block itself: who uses it copies it first and verifies the copy.
    """

    pieces: list[Buffer]
    num_bytes: int
    checksum: int | None


class Codec(ABC):
    """A way to code blocks.

    Threads: every method, from any thread, several at once. It computes mostly without Python's lock.

    Attributes:
        name: in block files.
        number: in records, 0 to 255.
    """

    name: str
    number: int

    @abstractmethod
    def encode(self, block: Bytes, itemsize: int) -> Encoded:
        """Code a block.

        Args:
            block: `(num_bytes,)`, uint8, contiguous.
            itemsize: bytes of one number in it, from its layout; `num_bytes` is a multiple.
        """

    @abstractmethod
    def decode(self, encoded: Buffer, target: Bytes, itemsize: int) -> int:
        """Fill `target` with a block and return the xxh3-64 of what is there now, which the caller compares.

        Args:
            encoded: all of the coded bytes. Nothing is believed of them.
            target: `(num_bytes,)`, uint8, contiguous.
            itemsize: as it was coded.

        Raises:
            CorruptBlockError: they are not a block of that size; any bytes may be in `target`.
        """

    @abstractmethod
    def encoded_bytes_max(self, num_bytes: int, itemsize: int) -> int:
        """The most bytes that a block of `num_bytes` is coded in."""


class Raw(Codec):
    """The bytes as they are."""

    name = "raw"
    number = 0

    @override
    def encode(self, block: Bytes, itemsize: int) -> Encoded:
        _check(block, itemsize)
        return Encoded([block.data], len(block), None)

    @override
    def decode(self, encoded: Buffer, target: Bytes, itemsize: int) -> int:
        _check(target, itemsize)
        source = np.frombuffer(memoryview(encoded), np.uint8)
        if len(source) != len(target):
            raise CorruptBlockError(_TIER, f"{len(source)} bytes are no raw block of {len(target)}")
        digest = xxhash.xxh3_64()
        copy_hashed(source, target, digest)
        return digest.intdigest()

    @override
    def encoded_bytes_max(self, num_bytes: int, itemsize: int) -> int:
        return num_bytes


class Zstd(Codec):
    """Lossless: planes of bytes, each compressed by Zstandard (`planes`). Any level reads what any other has written.

    Args:
        level: 1 is the fastest, and makes KV smallest too: there is little to find in it besides how often each byte
            occurs. SmolLM2-135M, bfloat16: 1.45, 1.42, 1.40 times smaller at levels 1 to 3, coded at 430, 300, 260
            MB/s, decoded at 1.0 to 1.1 GB/s; float32: 1.18, 1.17, 1.17 times (one core of a Xeon, zstandard 0.25,
            2026-11-30).
    """

    name = "zstd"
    number = 1

    def __init__(self, level: int = 1) -> None:
        assert level in LEVELS
        self.level = level

    @override
    def encode(self, block: Bytes, itemsize: int) -> Encoded:
        _check(block, itemsize)
        pieces, checksum = planes.compress(block, itemsize, self.level)
        num_bytes = sum(memoryview(piece).nbytes for piece in pieces)
        assert num_bytes <= self.encoded_bytes_max(len(block), itemsize)
        return Encoded(pieces, num_bytes, checksum)

    @override
    def decode(self, encoded: Buffer, target: Bytes, itemsize: int) -> int:
        _check(target, itemsize)
        return planes.decompress(encoded, target, itemsize)

    @override
    def encoded_bytes_max(self, num_bytes: int, itemsize: int) -> int:
        return planes.compressed_bytes_max(num_bytes, itemsize)


def copy_hashed(source: Bytes, target: Bytes, digest: xxhash.xxh3_64) -> None:
    """Copy bytes, and hash what is in `target` then, in one pass."""
    assert len(source) == len(target)
    given, taken = source.data, target.data  # cut and copied in a third of the time that small arrays take
    for first in range(0, len(target), _HASHED_BYTES):
        piece = taken[first : first + _HASHED_BYTES]
        piece[:] = given[first : first + _HASHED_BYTES]
        digest.update(piece)


def _check(block: Bytes, itemsize: int) -> None:
    assert block.dtype == np.uint8
    assert block.shape == (block.nbytes,)
    assert block.flags.c_contiguous
    assert itemsize in _ITEMSIZES
    assert len(block) > 0 == len(block) % itemsize


RAW = Raw()
_by_name: dict[str, Codec] = {}
_by_number: dict[int, Codec] = {}


def register(codec: Codec) -> None:
    """Make a codec known by its name and number, once, before blocks that it has coded are met."""
    assert 0 <= codec.number <= _NUMBER_MAX
    assert codec.name not in _by_name
    assert codec.number not in _by_number
    _by_name[codec.name] = _by_number[codec.number] = codec


def codec_named(name: str) -> Codec:
    """The codec that reads what a block file calls `name`.

    Raises:
        LayoutMismatchError: there is none here. The block may be sound.
    """
    return _found(_by_name.get(name), name)


def codec_numbered(number: int) -> Codec:
    """The codec that reads what a record calls `number`. Raises as `codec_named`."""
    return _found(_by_number.get(number), number)


def _found(codec: Codec | None, got: object) -> Codec:
    if codec is None:
        known = ", ".join(f"{name} ({codec.number})" for name, codec in sorted(_by_name.items()))
        raise LayoutMismatchError(f"a codec of {known}", repr(got))
    return codec


def codec_of(text: str, setting: str) -> Codec:
    """The codec that a setting asks for: a name, or `zstd:2` for another level than the default.

    Raises:
        ConfigError: it names none; `setting` is what it calls the setting.
    """
    level = _SETTING.fullmatch(text)
    if level is not None and int(level.group(1)) in LEVELS:
        return Zstd(int(level.group(1)))
    if text not in _by_name:
        names = ", ".join(sorted(_by_name))
        raise ConfigError(setting, f"must be one of {names}, zstd:{LEVELS[0]} to zstd:{LEVELS[-1]}, is {text!r}")
    return _by_name[text]


register(RAW)
register(Zstd())

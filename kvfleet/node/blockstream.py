"""A block from the pieces of its object as they arrive: copied and hashed on the way, and never all in one piece.

Joining what a client library has received, hashing it and copying it out are three passes over memory that no cache
holds any more. Here there is one, over what has just been received.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import xxhash

from kvfleet.errors import CorruptBlockError, LayoutMismatchError
from kvfleet.node.blockfile import FRAME_BYTES_MAX, BlockHeader, decode, raw_block, read_header, tail_of
from kvfleet.node.codecs import copy_hashed

__all__ = ["BlockStream"]

_TIER = "shared"

Bytes = npt.NDArray[np.uint8]


class BlockStream:
    """Takes the object of one block and fills `target` with the block.

    Only a raw block that is what it must be goes to `target` as it arrives. All else is kept, and decoded in the end.

    Threads: one calls `take`, another the other methods; `close` may come in the middle.

    Args:
        header: what the object must be; of its last three fields nothing is asked.
        target: `(header.num_bytes,)`, uint8, contiguous. After an error it may hold anything.
    """

    def __init__(self, header: BlockHeader, target: Bytes) -> None:
        import pyarrow  # noqa: F401  takes 0.1 s the first time, which is not for the thread that receives

        assert target.dtype == np.uint8
        assert target.shape == (header.num_bytes,)
        assert target.flags.c_contiguous
        self._header = header
        self._target = target
        self._lock = threading.Lock()
        self._is_open = True
        self._taken_bytes = 0
        self._kept: list[bytes] = []  # until it is known where the block is; if that is never known, all
        self._checksum: int | None = None  # as the object has it, once it is known where the block is
        self._digest = xxhash.xxh3_64()
        self._filled_bytes = 0
        self._tail = b""

    @property
    def bytes_max(self) -> int:
        """The bytes of an object to ask for: one more than the longest may have."""
        return self._header.num_bytes + FRAME_BYTES_MAX + 1

    def take(self, piece: bytes) -> bool:
        """Take the next piece. False: no more is wanted, and nothing was done with it if that was known before."""
        with self._lock:
            if not self._is_open or self._taken_bytes >= self.bytes_max:
                return False
            self._taken_bytes += len(piece)
            if self._checksum is not None:
                self._fill(piece, 0)
            else:
                self._keep(piece)
            return self._taken_bytes < self.bytes_max

    def _keep(self, piece: bytes) -> None:
        searching = self._taken_bytes - len(piece) <= FRAME_BYTES_MAX
        self._kept.append(piece)
        if not searching:
            return
        data = b"".join(self._kept)
        try:
            start, checksum = raw_block(data, self._header)
        except (CorruptBlockError, LayoutMismatchError):  # or it is not all there yet
            self._kept = [data]
            return
        self._kept.clear()
        self._checksum = checksum
        self._fill(data, start)

    def _fill(self, piece: bytes, first: int) -> None:
        """Take a piece from its byte `first` on."""
        filled = self._filled_bytes
        stop = min(len(piece), first + len(self._target) - filled)
        if stop > first:
            self._filled_bytes += stop - first
            source = np.frombuffer(piece, np.uint8, stop - first, first)
            copy_hashed(source, self._target[filled : self._filled_bytes], self._digest)
        self._tail += piece[stop:]

    def close(self) -> None:
        """From here on `take` does nothing. Waits for one that is at it: for as long as it takes to copy a piece."""
        with self._lock:
            self._is_open = False

    def finish(self) -> int:
        """Return the xxh3-64 of the block, which is in `target`. All pieces were taken, and it is closed.

        Raises: as `blockfile.decode`.
        """
        assert not self._is_open
        if self._checksum is None:
            data = b"".join(self._kept)
            if self._taken_bytes >= self.bytes_max:
                _refuse_other(data, self._header)
            block, checksum = decode(data, self._header)
            np.copyto(self._target, block)
            return checksum
        if self._filled_bytes < len(self._target) or self._tail != tail_of(len(self._target)):
            raise CorruptBlockError(_TIER, f"object of {self._taken_bytes} bytes does not end with its block")
        if self._digest.intdigest() != self._checksum:
            raise CorruptBlockError(_TIER, f"{self._header.key.hex()}: checksum mismatch")
        return self._checksum


def _refuse_other(data: bytes, header: BlockHeader) -> None:
    """Tell a longer block of the same key, in another layout, from damage: it is not read to its end to be verified.

    Raises:
        CorruptBlockError: it is no block at all.
        LayoutMismatchError: it is of another layout.
    """
    found, _ = read_header(data)
    if (found.namespace_id, found.key, found.shard) == (header.namespace_id, header.key, header.shard):
        expected, got = ((one.num_bytes, one.num_shards, one.layout_json) for one in (header, found))
        if expected != got:
            raise LayoutMismatchError(f"{header.key.hex()} with {expected}", f"{got}")

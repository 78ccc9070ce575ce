"""What every store of blocks does, in the plainest terms: a bounded map from records to bytes on one medium.

A node's own tiers do more than this, each in its own way, because each has its own reasons to hurry. What they all
promise is here, and `kvfleet.testing.tiers.TierContract` tells whether a tier keeps it: ours, and anybody else's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from typing_extensions import Self, override

from kvfleet.core.directory import RECORD_BYTES

__all__ = ["RECORD_BYTES", "Bytes", "Tier"]

Bytes = npt.NDArray[np.uint8]


class Tier(ABC):
    """Blocks of one size on one medium, named by their records: 16 bytes of key, the shard as little-endian uint16.

    A block is there whole or not at all, and equal records mean interchangeable blocks: writing one that is there
    keeps either of the two. No buffer of a caller is kept or looked at after a call returns.

    Subclasses do the work in methods with an underscore; what is asked of them has been checked.

    Blocking: every method.
    Threads: any, at the same time, but for `close`.

    Attributes:
        block_bytes: of each block.
    """

    def __init__(self, block_bytes: int) -> None:
        assert block_bytes > 0, "a block has bytes"
        self.block_bytes = block_bytes
        self._open = True

    def write(self, record: bytes, data: Bytes) -> None:
        """Have a block in the tier. Others may be evicted for it, if the tier does that.

        Args:
            record: 18 bytes.
            data: `(block_bytes,)`, uint8, contiguous.

        Raises:
            TierFullError: no room, and nothing may be evicted; the tier is unchanged.
            TierUnavailableError: the medium failed; the block is there whole or not at all.
        """
        self._check(record, data)
        self._write(record, data)

    def read(self, record: bytes, target: Bytes) -> bool:
        """Fill `target` with a block. False, and `target` untouched: it is not there.

        Args:
            record: 18 bytes.
            target: `(block_bytes,)`, uint8, contiguous.

        Raises:
            CorruptBlockError: what was there is not the block. It is not there any more; `target` holds anything.
            TierUnavailableError: the medium failed; `target` holds anything.
        """
        self._check(record, target)
        return self._read(record, target)

    def delete(self, records: Sequence[bytes]) -> int:
        """Delete blocks, and return how many of them were there.

        Raises:
            TierUnavailableError: the medium failed; some may be deleted.
        """
        self._check(*records)
        return self._delete(records)

    def find(self, records: Sequence[bytes]) -> list[bool]:
        """Which of some blocks are there.

        Raises:
            TierUnavailableError: the medium failed.
        """
        self._check(*records)
        return self._find(records)

    def __contains__(self, record: object) -> bool:
        assert isinstance(record, bytes)
        return self.find([record])[0]

    def __iter__(self) -> Iterator[bytes]:
        """The records that are there. Those that come or go meanwhile are among them or not."""
        self._check()
        return self._records()

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def close(self) -> None:
        """Let go of the medium. Twice is fine; other calls are bugs from here on."""
        if self._open:
            self._open = False
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @override
    def __reduce__(self) -> str:
        raise TypeError("a tier has its medium open and does not leave its process")

    def _check(self, *given: bytes | Bytes) -> None:
        assert self._open, "the tier is closed"
        for one in given:
            if isinstance(one, bytes):
                assert len(one) == RECORD_BYTES, "a record has 18 bytes"
            else:
                assert one.dtype == np.uint8, "a block is of bytes"
                assert one.shape == (self.block_bytes,), "a block has its length"
                assert one.flags.c_contiguous, "a block is contiguous"

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """What the blocks take of the medium, never more than `capacity_bytes`."""

    @property
    @abstractmethod
    def capacity_bytes(self) -> int | None:
        """What they may take; None if the tier has no limit of its own."""

    @abstractmethod
    def _write(self, record: bytes, data: Bytes) -> None:
        """See `write`."""

    @abstractmethod
    def _read(self, record: bytes, target: Bytes) -> bool:
        """See `read`."""

    @abstractmethod
    def _delete(self, records: Sequence[bytes]) -> int:
        """See `delete`."""

    @abstractmethod
    def _find(self, records: Sequence[bytes]) -> list[bool]:
        """See `find`."""

    @abstractmethod
    def _records(self) -> Iterator[bytes]:
        """See `__iter__`."""

    @abstractmethod
    def _close(self) -> None:
        """See `close`; called once."""

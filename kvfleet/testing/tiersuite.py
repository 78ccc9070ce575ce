"""How a contract suite sees a tier and its medium."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvfleet.errors import TierFullError
from kvfleet.node.tier import Bytes, Tier

__all__ = ["TierSuite", "content", "record_of"]


def record_of(number: int) -> bytes:
    """A record that looks like any other; equal numbers, equal records."""
    return xxhash.xxh3_128_digest(number.to_bytes(8, "little")) + (number % 7).to_bytes(2, "little")


def content(record: bytes, num_bytes: int) -> Bytes:
    """What a block of that record holds: any mix-up of blocks, or of places in one, shows."""
    words = np.arange(-(-num_bytes // 8), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words ^= np.uint64(xxhash.xxh3_64_intdigest(record))
    block: Bytes = words.view(np.uint8)[:num_bytes].copy()
    return block


class TierSuite(ABC):
    """What a suite has to be told of a tier, and what its tests are written with.

    Attributes:
        evicts: a full tier makes room by itself; else it raises TierFullError.
        persistent: blocks are there again when the tier is made anew, also after its process was killed.
        verifies: damage of a block is found when it is read.
        fails: its medium can fail at all; see `failing`.
    """

    evicts = False
    persistent = True
    verifies = True
    fails = True

    @abstractmethod
    def make(self, root: Path) -> Tier:
        """A tier on a medium below a directory; after a `close`, one on the same medium again."""

    @abstractmethod
    def raw_read(self, root: Path, record: bytes) -> bytes | None:
        """The bytes of a block as the medium has them, or None."""

    @abstractmethod
    def raw_write(self, root: Path, record: bytes, data: bytes) -> None:
        """Put other bytes of the same length into the place of a block, with all that belongs to them.

        A persistent tier is closed meanwhile.
        """

    @abstractmethod
    def raw_list(self, root: Path) -> dict[bytes, int]:
        """The records on the medium, and how many bytes each one's block takes there."""

    def raw_damage(self, root: Path, record: bytes, damage: Callable[[bytes], bytes]) -> bytes:
        """Replace what the medium has of a block by what `damage` makes of it; returns it as it was.

        Nothing else changes: no checksum is mended. Only asked of a tier that `verifies`.
        """
        raise NotImplementedError

    def failing(self, tier: Tier) -> AbstractContextManager[object]:
        """While it is entered, every call to the medium fails. Only asked of a tier whose medium `fails`."""
        raise NotImplementedError

    def recover(self, tier: Tier) -> None:
        """Wait until a tier whose medium has failed works again; most do at once."""

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        """Where the medium is."""
        return tmp_path

    @pytest.fixture
    def tier(self, root: Path) -> Iterator[Tier]:
        """A new tier."""
        with self.make(root) as tier:
            yield tier

    # What the tests are written with

    def fill(self, tier: Tier, numbers: range) -> list[bytes]:
        """Write blocks."""
        records = [record_of(number) for number in numbers]
        for record in records:
            tier.write(record, content(record, tier.block_bytes))
        return records

    def fill_up(self, tier: Tier) -> list[bytes]:
        """Write until it is full. Returns what it must hold now: all of it, or the last one if it evicts."""
        assert tier.capacity_bytes is not None
        records: list[bytes] = []
        for number in range(tier.capacity_bytes // tier.block_bytes + 2):
            record = record_of(number)
            try:
                tier.write(record, content(record, tier.block_bytes))
            except TierFullError:
                assert not self.evicts
                return records
            records.append(record)
        assert self.evicts, "a tier that does not evict is full at some time"
        return records[-1:]

    def check(self, tier: Tier, record: bytes) -> None:
        """A block is there, right to the last byte."""
        target = np.zeros(tier.block_bytes, np.uint8)
        assert tier.read(record, target)
        assert np.array_equal(target, content(record, tier.block_bytes))

    def check_missing(self, tier: Tier, record: bytes) -> None:
        """A block is not there, and nothing is read."""
        target = np.full(tier.block_bytes, 7, np.uint8)
        assert record not in tier
        assert not tier.read(record, target)
        assert (target == 7).all()

    def check_books(self, tier: Tier, root: Path) -> None:
        """What the tier says it holds is what the medium holds, and within its limit."""
        listed = self.raw_list(root)
        assert sorted(tier) == sorted(listed)
        assert len(tier) == len(listed)
        assert tier.used_bytes == sum(listed.values())
        assert tier.capacity_bytes is None or tier.used_bytes <= tier.capacity_bytes

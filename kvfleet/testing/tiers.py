"""What every tier must hold to, whatever its medium: subclass `TierContract` for one of your own.

The medium is also looked at and changed without the tier: else its writing and its reading could be wrong together.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvfleet.node.tier import RECORD_BYTES, Tier
from kvfleet.testing.tierfaults import TierFaults
from kvfleet.testing.tiersuite import content, record_of

__all__ = ["TierContract", "content", "record_of"]

_FAR = 1 << 20  # a number that no other block has


class TierContract(TierFaults):
    """Subclass it in a test module, name the class `Test...`, and say what `TierSuite` asks."""

    def test_empty(self, tier: Tier, root: Path) -> None:
        """Nothing is in a new tier."""
        assert len(tier) == 0
        assert list(tier) == []
        self.check_missing(tier, record_of(0))
        self.check_books(tier, root)

    def test_writes_reach_the_medium(self, tier: Tier, root: Path) -> None:
        """What was written can be seen there, and read."""
        (record,) = self.fill(tier, range(1))
        assert self.raw_read(root, record) == content(record, tier.block_bytes).tobytes()
        self.check(tier, record)
        self.check_books(tier, root)

    def test_reads_come_from_the_medium(self, root: Path) -> None:
        """What is there is read, not what was once written."""
        tier = self.make(root)
        other, target = content(record_of(1), tier.block_bytes), np.zeros(tier.block_bytes, np.uint8)
        try:
            (record,) = self.fill(tier, range(1))
            if self.persistent:
                tier.close()
            self.raw_write(root, record, other.tobytes())
            tier = self.make(root) if self.persistent else tier
            assert tier.read(record, target)
            assert np.array_equal(target, other)
        finally:
            tier.close()

    def test_a_miss_touches_nothing(self, tier: Tier) -> None:
        """A target stays as it is when there is nothing to fill it with."""
        self.fill(tier, range(2))
        self.check_missing(tier, record_of(_FAR))

    def test_buffers_are_the_callers(self, tier: Tier) -> None:
        """Changing one after the call changes nothing in the tier."""
        record = record_of(0)
        data = content(record, tier.block_bytes)
        tier.write(record, data)
        data[:] = 0
        target = np.zeros(tier.block_bytes, np.uint8)
        assert tier.read(record, target)
        target[:] = 0
        self.check(tier, record)

    def test_writing_again_adds_nothing(self, tier: Tier, root: Path) -> None:
        """Equal records mean equal blocks; of two that differ all the same, one is there, whole."""
        (record,) = self.fill(tier, range(1))
        other = content(record_of(1), tier.block_bytes)
        tier.write(record, other)
        assert list(tier) == [record]
        target = np.zeros(tier.block_bytes, np.uint8)
        assert tier.read(record, target)
        assert any(np.array_equal(target, block) for block in (other, content(record, tier.block_bytes)))
        self.check_books(tier, root)

    def test_a_full_tier(self, tier: Tier, root: Path) -> None:
        """It stays within its limit, and what it holds is right."""
        if tier.capacity_bytes is None:
            return
        kept = self.fill_up(tier)
        if not self.evicts:
            assert sorted(tier) == sorted(kept)
        for record in kept:
            self.check(tier, record)
        self.fill(tier, range(len(kept) - 1, len(kept)) if not self.evicts else range(1))
        self.check_books(tier, root)
        assert tier.delete(kept[-1:]) == 1
        self.check(tier, self.fill(tier, range(_FAR, _FAR + 1))[0])

    def test_deletes(self, tier: Tier, root: Path) -> None:
        """What was deleted is gone, once, and can come again."""
        records = self.fill(tier, range(3))
        assert tier.delete([records[1]]) == 1
        assert tier.delete([records[1]]) == 0
        self.check_missing(tier, records[1])
        assert self.raw_read(root, records[1]) is None
        self.check_books(tier, root)
        self.fill(tier, range(3))
        for record in records:
            self.check(tier, record)

    def test_iterating_while_it_changes(self, tier: Tier) -> None:
        """Iteration goes on, and tells each that was there all the time, once."""
        records = self.fill(tier, range(6))
        told = []
        for number, record in enumerate(tier):
            told.append(record)
            if number == 0:
                tier.delete([r for r in records[:3] if r != record])
                self.fill(tier, range(6, 9))
        assert len(set(told)) == len(told)
        assert set(records[3:]) <= set(told) <= {record_of(number) for number in range(9)}

    def test_bad_calls_are_bugs(self, tier: Tier, root: Path) -> None:
        """Wrong lengths, types and records do not pass, and do nothing."""
        right = np.zeros(tier.block_bytes, np.uint8)
        calls: list[Callable[[], object]] = [
            lambda: tier.write(record_of(0), right[1:]),
            lambda: tier.write(record_of(0), np.zeros(2 * tier.block_bytes, np.uint8)[::2]),
            lambda: tier.write(record_of(0), np.zeros(tier.block_bytes, np.int8)),
            lambda: tier.write(record_of(0)[1:], right),
            lambda: tier.read(record_of(0), np.zeros(tier.block_bytes + 1, np.uint8)),
            lambda: tier.delete([b""]),
            lambda: tier.find([bytes(RECORD_BYTES + 1)]),
        ]
        for call in calls:
            with pytest.raises(AssertionError):
                call()
        assert list(tier) == []
        self.check_books(tier, root)

    def test_all_records_are_alike(self, tier: Tier, root: Path) -> None:
        """Zeros, ones, and bytes that mean something elsewhere."""
        shards = [0, 1, 0xFFFE, 0xFFFF]
        keys = [bytes(16), b"\xff" * 16, b"../..%2f\x00\n*?\"'\\ ", bytes(15) + b"\x01", b"\x01" + bytes(15)]
        records = [key[:16] + shard.to_bytes(2, "little") for key, shard in zip(keys, shards * 2, strict=False)]
        for record in records:
            tier.write(record, content(record, tier.block_bytes))
        for record in records:
            self.check(tier, record)
        self.check_books(tier, root)

    def test_many_at_once(self, tier: Tier) -> None:
        """A call for many is as many calls; doubles count once where there is one to be had."""
        assert tier.find([]) == []
        assert tier.delete([]) == 0
        records = self.fill(tier, range(5))
        strange = record_of(_FAR)
        asked = [records[3], strange, records[0], records[3], strange]
        assert tier.find(asked) == [record in tier for record in asked] == [True, False, True, True, False]
        assert tier.delete(asked) == 2
        assert tier.find(records) == [False, True, True, False, True]

    def test_closing(self, root: Path) -> None:
        """Twice is fine; what comes after it is a bug."""
        tier = self.make(root)
        self.fill(tier, range(1))
        tier.close()
        tier.close()
        target = np.zeros(tier.block_bytes, np.uint8)
        calls: list[Callable[[], object]] = [
            lambda: tier.read(record_of(0), target),
            lambda: tier.write(record_of(0), target),
            lambda: tier.delete([record_of(0)]),
            lambda: tier.find([record_of(0)]),
            lambda: list(tier),
        ]
        for call in calls:
            with pytest.raises(AssertionError):
                call()

"""Every policy under the contract, and each one's own order by a worked trace."""

from __future__ import annotations

import pytest
from typing_extensions import override

from kvfleet.core.block import BlockKey
from kvfleet.core.policies.base import Policy
from kvfleet.core.policies.lru import LeafFirstLRU
from kvfleet.testing.policies import PolicyContract, block_key, everything

A, B, C, D, E = (BlockKey(bytes([letter]) * 16) for letter in b"abcde")


class TestLeafFirstLRU(PolicyContract):
    @override
    def make(self) -> Policy:
        return LeafFirstLRU()

    @pytest.fixture
    def lru(self) -> LeafFirstLRU:
        """The tree of the class's docstring."""
        lru = LeafFirstLRU()
        for now, (key, parent) in enumerate([(A, None), (B, A), (C, B), (D, A), (E, A)], start=1):
            lru.insert(key, parent, float(now))
        lru.touch(E, 6.0)
        return lru

    def test_trace(self, lru: LeafFirstLRU) -> None:
        assert lru.victims(1, everything) == [C]
        assert lru.victims(3, everything) == [C, B, D]
        lru.touch(C, 5.0)
        assert lru.victims(3, everything) == [D, C, B]
        lru.remove(B)
        assert lru.victims(2, everything) == [C, D]

    def test_a_new_child_shields_its_chain(self, lru: LeafFirstLRU) -> None:
        lru.insert(block_key(1), C, 7.0)
        assert lru.victims(2, everything) == [D, E]
        lru.remove(block_key(1))
        assert lru.victims(2, everything) == [C, B]

    def test_orphans_are_adopted_when_their_parent_comes(self, lru: LeafFirstLRU) -> None:
        above, parent, child = block_key(1), block_key(2), block_key(3)
        lru.insert(child, parent, 10.0)
        lru.insert(parent, above, 11.0)
        assert lru.victims(2, everything) == [child, parent]
        lru.insert(above, None, 12.0)
        assert lru.victims(4, everything) == [C, B, D, E]

    def test_equal_times_go_by_key(self) -> None:
        lru = LeafFirstLRU()
        for key in (C, A, B):
            lru.insert(key, None, 1.0)
        assert lru.victims(3, everything) == [A, B, C]

    def test_the_heap_stays_small(self) -> None:
        lru = LeafFirstLRU()
        for step in range(20_000):
            lru.insert(block_key(step), block_key(step - 1) if step % 7 else None, float(step))
            if step >= 100:
                lru.remove(block_key(step - 100))
            lru.touch(block_key(step), step + 0.5)
        assert len(lru) == 100
        assert len(lru._heap) <= 2 * 100 + 64

"""Every policy under the contract, and each one's own order by a worked trace."""

from __future__ import annotations

import pytest
from typing_extensions import override

from kvfleet.config import POLICY_NAMES, FleetConfig
from kvfleet.core.block import BlockKey
from kvfleet.core.policies import DEFAULT, POLICIES
from kvfleet.core.policies.arc import Arc
from kvfleet.core.policies.base import Newcomer, Policy
from kvfleet.core.policies.lfu import AgingLFU
from kvfleet.core.policies.lru import LeafFirstLRU
from kvfleet.core.policies.s3fifo import S3Fifo
from kvfleet.core.policies.secondsight import SecondSight
from kvfleet.testing.policies import PolicyContract, block_key, everything

A, B, C, D, E = (BlockKey(bytes([letter]) * 16) for letter in b"abcde")


def test_settings_name_all_policies():
    assert tuple(POLICIES) == POLICY_NAMES
    assert FleetConfig().policy == DEFAULT


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


def roots(policy: Policy, *keys: BlockKey, now: float = 1.0) -> None:
    """Insert blocks without parents, one after the other."""
    for index, key in enumerate(keys):
        policy.insert(key, None, now + index)


class TestS3Fifo(PolicyContract):
    @override
    def make(self) -> Policy:
        return S3Fifo(100)

    @override
    def remembered(self, policy: Policy) -> int:
        assert isinstance(policy, S3Fifo)
        return len(policy._ghosts)

    def test_trace(self) -> None:
        """That of the class's docstring."""
        policy = S3Fifo(10)
        roots(policy, A, B, C)
        assert policy.victims(1, everything) == [A]
        policy.touch(A, 4.0)
        policy.touch(A, 5.0)
        assert policy.victims(2, everything) == [B, C]
        policy.remove(B)
        policy.insert(D, None, 6.0)
        assert policy.victims(1, everything) == [D]
        policy.remove(D)
        policy.insert(D, None, 7.0)
        policy.touch(C, 8.0)
        assert policy.victims(3, everything) == [A, D, C]

    def test_the_main_queue_gives_what_it_has_too_much(self) -> None:
        policy = S3Fifo(2)
        roots(policy, A, B, C)
        for now in range(10, 16):
            policy.touch((A, B, C)[now % 3], float(now))
        assert policy.victims(1, everything) == [A], "all three would go to main, which holds two"

    def test_one_scan_leaves_what_is_used_often(self) -> None:
        policy = S3Fifo(20)
        roots(policy, A, B)
        for now in range(10, 14):
            policy.touch((A, B)[now % 2], float(now))
        for step in range(100):
            policy.insert(block_key(step), None, 20.0 + step)
            if len(policy) > 20:
                for victim in policy.victims(1, everything):
                    policy.remove(victim)
        assert A in policy
        assert B in policy


class TestArc(PolicyContract):
    @override
    def make(self) -> Policy:
        return Arc(100)

    @override
    def remembered(self, policy: Policy) -> int:
        assert isinstance(policy, Arc)
        return sum(map(len, policy._ghosts))

    def test_trace(self) -> None:
        """That of the class's docstring."""
        policy = Arc(2)
        roots(policy, A, B)
        assert policy.victims(1, everything) == [A]
        policy.touch(A, 3.0)
        assert policy.victims(2, everything) == [B, A]
        policy.remove(B)
        policy.insert(C, None, 4.0)
        assert policy.victims(1, everything) == [C]
        policy.remove(A)
        policy.insert(B, None, 5.0)
        assert policy.victims(1, everything) == [B]
        assert policy.victims(1, everything, newcomers=[Newcomer(A, None, 6.0)]) == [C]


class TestAgingLFU(PolicyContract):
    @override
    def make(self) -> Policy:
        return AgingLFU()

    def test_trace(self) -> None:
        """That of the class's docstring."""
        policy = AgingLFU()
        roots(policy, A, B, C)
        policy.touch(A, 4.0)
        policy.touch(A, 5.0)
        assert policy.victims(2, everything) == [B, C]
        policy.touch(B, 6.0)
        assert policy.victims(3, everything) == [C, B, A]
        policy.remove(C)
        policy.remove(B)
        policy.insert(D, None, 7.0)
        assert policy.victims(1, everything) == [A]
        policy.touch(A, 8.0)
        assert policy.victims(1, everything) == [D]


class TestSecondSight(PolicyContract):
    @override
    def make(self) -> Policy:
        return SecondSight(100)

    @override
    def remembered(self, policy: Policy) -> int:
        assert isinstance(policy, SecondSight)
        return len(policy._seen)

    def test_trace(self) -> None:
        """That of the class's docstring."""
        policy = SecondSight(2)
        roots(policy, A, B)
        newcomers = [Newcomer(C, None, 3.0), Newcomer(D, C, 3.0)]
        assert policy.victims(1, everything, newcomers=newcomers[:1]) == []
        policy.decline(newcomers[:1])
        assert policy.victims(2, everything, newcomers=newcomers) == [A]
        policy.remove(A)
        policy.insert(C, None, 4.0)
        assert policy.victims(1, everything, newcomers=[Newcomer(A, None, 5.0)]) == [B]
        assert policy.victims(1, everything) == [B]

    def test_useless_blocks_make_room_for_all(self) -> None:
        policy = SecondSight(3)
        roots(policy, A, B)
        policy.insert(D, C, 3.0)
        policy.retire([B])
        newcomers = [Newcomer(block_key(number), None, 4.0) for number in range(3)]
        assert policy.victims(3, everything, newcomers=newcomers) == [D, B]

"""What every eviction policy must hold to. Its order beyond that is shown by a worked trace of its own."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable

import pytest

from kvfleet.core.block import BlockKey
from kvfleet.core.hints import Hints
from kvfleet.core.policies.base import Newcomer, Policy

__all__ = ["PolicyContract", "block_key"]

Tree = dict[BlockKey, BlockKey | None]


def block_key(number: int) -> BlockKey:
    """A key that shows its number."""
    return BlockKey(number.to_bytes(16, "big"))


def everything(key: BlockKey) -> int:
    """Every key is worth one."""
    return 1


class PolicyContract(ABC):
    """Subclass it in a test module, name the class `Test...`, and say how to make a policy."""

    @abstractmethod
    def make(self) -> Policy:
        """A new, empty policy."""

    def remembered(self, policy: Policy) -> int:
        """How many keys a policy knows that are not resident; for one that is made for 100 blocks at most 1,000."""
        return 0

    def chain(self, policy: Policy, numbers: range, parent: BlockKey | None = None) -> list[BlockKey]:
        """Insert a prefix, at the times of its numbers."""
        keys = [block_key(number) for number in numbers]
        for number, key in zip(numbers, keys, strict=True):
            policy.insert(key, parent, float(number))
            parent = key
        return keys

    def test_empty(self) -> None:
        """Nothing is in an empty policy, and nothing can go."""
        policy = self.make()
        assert len(policy) == 0
        assert block_key(1) not in policy
        assert policy.victims(1, everything) == []

    def test_holds_what_was_inserted(self) -> None:
        """Length and membership follow insert and remove."""
        policy = self.make()
        keys = self.chain(policy, range(3))
        assert len(policy) == 3
        policy.remove(keys[2])
        assert len(policy) == 2
        assert [key in policy for key in keys] == [True, True, False]

    def test_children_go_first(self) -> None:
        """A chain goes from its end, whatever was used last."""
        policy = self.make()
        keys = self.chain(policy, range(6))
        policy.touch(keys[5], 100.0)
        assert policy.victims(6, everything) == keys[::-1]

    def test_parent_waits_for_all_children(self) -> None:
        """One child that stays keeps the whole chain above it."""
        policy = self.make()
        trunk = self.chain(policy, range(3))
        left = self.chain(policy, range(10, 12), trunk[-1])
        right = self.chain(policy, range(20, 22), trunk[-1])
        kept = right[-1]
        assert policy.victims(99, lambda key: int(key != kept)) == left[::-1]

    def test_orphans_go_before_all_others(self) -> None:
        """What no lookup can reach goes first, leaf first too, until its parent is back."""
        policy = self.make()
        whole = self.chain(policy, range(3))
        tail = self.chain(policy, range(11, 14), block_key(10))
        policy.touch(tail[-1], 100.0)
        assert policy.victims(4, everything) == [*tail[::-1], whole[-1]]
        policy.insert(block_key(10), None, 101.0)
        assert policy.victims(1, everything) != [tail[0]]
        assert block_key(10) not in policy.victims(6, everything)

    def test_removal_of_a_parent_orphans(self) -> None:
        """A hole in a chain makes all that is behind it unreachable."""
        policy = self.make()
        keys = self.chain(policy, range(4))
        other = self.chain(policy, range(10, 11))
        for key in keys:
            policy.touch(key, 50.0)
        policy.remove(keys[1])
        assert policy.victims(2, everything) == [keys[3], keys[2]]
        assert set(policy.victims(4, everything)) == {keys[0], keys[2], keys[3], *other}

    def test_worth_is_summed(self) -> None:
        """Enough is enough, and what is worth nothing stays."""
        policy = self.make()
        keys = self.chain(policy, range(8))
        assert policy.victims(5, lambda key: 2) == keys[:4:-1]
        assert policy.victims(5, lambda key: 0) == []

    def test_deciding_changes_nothing(self) -> None:
        """Asking again gives the same answer, also after an answer that fell short."""
        policy = self.make()
        self.chain(policy, range(5))
        self.chain(policy, range(10, 15))
        short = policy.victims(99, everything)
        assert len(short) == 10
        assert policy.victims(99, everything) == short
        assert policy.victims(3, everything) == short[:3]
        assert len(policy) == 10

    def test_descendants_come_children_first(self) -> None:
        """All below a key, none of it before its own children."""
        policy = self.make()
        trunk = self.chain(policy, range(3))
        left = self.chain(policy, range(10, 12), trunk[1])
        below = policy.descendants(trunk[0])
        assert sorted(below) == sorted([*trunk[1:], *left])
        assert below.index(trunk[1]) > max(below.index(trunk[2]), below.index(left[0]))
        assert policy.descendants(trunk[2]) == []
        assert [policy.is_leaf(key) for key in trunk] == [False, False, True]

    def test_time_does_not_go_back(self) -> None:
        """A late report of an early use changes nothing."""
        policy = self.make()
        for number in range(4):
            policy.insert(block_key(number), None, 10.0 + number)
        before = policy.victims(4, everything)
        policy.touch(block_key(3), 1.0)
        assert policy.victims(4, everything) == before

    def test_strangers_are_bugs(self) -> None:
        """Double inserts, and uses or removals of what is not there, do not pass."""
        policy = self.make()
        policy.insert(block_key(1), None, 0.0)
        calls: list[Callable[[], object]] = [
            lambda: policy.insert(block_key(1), None, 1.0),
            lambda: policy.touch(block_key(2), 1.0),
            lambda: policy.remove(block_key(2)),
        ]
        for call in calls:
            with pytest.raises((AssertionError, KeyError)):
                call()
        assert len(policy) == 1

    def test_retired_blocks_go_before_all_but_orphans(self) -> None:
        """Leaf first too; a use undoes it, and keys that are not there are ignored."""
        policy = self.make()
        old = self.chain(policy, range(3))
        new = self.chain(policy, range(10, 13))
        orphan = self.chain(policy, range(20, 21), block_key(19))
        policy.retire([*new, block_key(99)])
        assert policy.victims(4, everything) == [*orphan, *new[::-1]]
        assert policy.expected_uses(new[0]) == 0.0
        policy.touch(new[2], 50.0)
        assert policy.victims(2, everything)[1] == old[2]

    def test_a_parent_that_is_not_retired_stays(self) -> None:
        """What is retired and has children waits for them."""
        policy = self.make()
        keys = self.chain(policy, range(3))
        other = self.chain(policy, range(10, 12))
        policy.retire([keys[0], other[1]])
        assert policy.victims(1, everything) == [other[1]]
        assert set(policy.victims(5, everything)) == {*keys, *other}

    def test_parents_in_a_circle_end(self) -> None:
        """As a client may say that has a bug."""
        policy = self.make()
        for number in range(3):
            policy.insert(block_key(number), block_key((number + 1) % 3), 0.0)
        for number in range(3):
            policy.touch(block_key(number), 10.0 + number)
        policy.retire([block_key(0)])
        assert len(policy.victims(9, everything)) <= 3
        policy.remove(block_key(1))
        assert len(policy) == 2

    def test_final_blocks_are_retired(self) -> None:
        """As soon as they come."""
        policy = self.make()
        self.chain(policy, range(3))
        policy.insert(block_key(10), None, 10.0, Hints(final=True))
        assert policy.victims(1, everything) == [block_key(10)]

    def test_newcomers_get_no_more_than_they_need(self) -> None:
        """Whatever is decided for them, it changes nothing, and what was declined is not resident."""
        policy = self.make()
        keys = self.chain(policy, range(6))
        newcomers = [Newcomer(block_key(number), block_key(number - 1), 10.0) for number in range(20, 24)]
        for _ in range(3):
            chosen = policy.victims(4, everything, newcomers=newcomers)
            assert chosen == policy.victims(4, everything, newcomers=newcomers)
            assert chosen == keys[:1:-1][: len(chosen)]
            policy.decline(newcomers)
            assert (len(policy), newcomers[0].key in policy) == (6, False)
        assert len(policy.victims(4, everything)) == 4, "needed anyway"

    def test_what_is_remembered_is_bounded(self) -> None:
        """Blocks come and go without end."""
        policy = self.make()
        chance = random.Random(1)
        for step in range(10_000):
            key = block_key(chance.randrange(1, 5_000))
            if key in policy:
                policy.touch(key, float(step))
                continue
            if len(policy) >= 100:
                newcomer = Newcomer(key, None, float(step))
                victims = policy.victims(1, everything, newcomers=[newcomer])
                if not victims:
                    policy.decline([newcomer])
                    continue
                policy.remove(victims[0])
            policy.insert(key, None, float(step))
            assert self.remembered(policy) <= 1_000
        assert len(policy) == 100

    @pytest.mark.parametrize("seed", range(10))
    def test_random_walk(self, seed: int) -> None:
        """Against a plain dict: victims are resident, allowed, distinct, leaf first; the same walk gives the same."""
        first, second = self.make(), self.make()
        assert self.walk(first, seed) == self.walk(second, seed)

    def walk(self, policy: Policy, seed: int) -> list[BlockKey]:
        """Insert, touch, remove, decline and evict at random; returns all victims."""
        chance = random.Random(seed)
        tree: Tree = {}
        gone: list[BlockKey] = []
        for step in range(1500):
            key = block_key(chance.randrange(1, 200))
            now = 20.0 * (step // 3)
            if key not in tree and chance.random() < 0.6:
                number = int.from_bytes(key, "big")
                tree[key] = block_key(number // 2) if number > 1 else None
                policy.insert(key, tree[key], now)
            elif key in tree and chance.random() < 0.7:
                policy.touch(key, now)
            elif key in tree and chance.random() < 0.3:
                policy.remove(key)
                del tree[key]
            elif key in tree and chance.random() < 0.1:
                policy.retire([key, block_key(1000)])
            elif key not in tree and chance.random() < 0.2:
                policy.decline([Newcomer(key, block_key(int.from_bytes(key, "big") // 2), now)])
            elif chance.random() < 0.1:
                assert set(policy.victims(len(tree) + 1, everything)) == set(tree), "all may go"
                need, kept = chance.randrange(1, 20), set(chance.sample(sorted(tree), len(tree) // 8))
                coming = [Newcomer(block_key(number), None, now) for number in range(200, 200 + need)]
                victims = policy.victims(
                    need,
                    lambda key, kept=kept: int(key not in kept),  # type: ignore[misc]
                    newcomers=coming if chance.random() < 0.5 else (),
                )
                assert len(victims) <= need
                self.evict(policy, tree, victims, kept)
                gone += victims
            assert len(policy) == len(tree)
        return gone

    def evict(self, policy: Policy, tree: Tree, victims: list[BlockKey], kept: set[BlockKey]) -> None:
        """Check victims against the tree and remove them."""
        assert not kept.intersection(victims)
        for victim in victims:
            assert victim in tree
            assert victim not in tree.values(), "a parent before its child"
            policy.remove(victim)
            del tree[victim]

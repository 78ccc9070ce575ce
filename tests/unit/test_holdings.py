"""What a node holds in several tiers is told once, when it comes to the first and when it leaves the last."""

from __future__ import annotations

import random

from kvfleet.core.inventory import Digest, record_id
from kvfleet.node.holdings import Holdings

A, B = b"a" * 16, b"b" * 16


class Tiers:
    """Some tiers that are sets, and what they hold together."""

    def __init__(self, number: int) -> None:
        self.holdings = Holdings()
        self.sets: list[set[tuple[bytes, int]]] = [set() for _ in range(number)]
        self.numbers = [self._add(held) for held in self.sets]

    def _add(self, held: set[tuple[bytes, int]]) -> int:
        return self.holdings.add_tier(lambda key, shard: (key, shard) in held, lambda: held)

    def put(self, tier: int, key: bytes, shard: int = 0) -> None:
        self.sets[tier].add((key, shard))
        self.holdings.changed(key, shard, present=True, tier=self.numbers[tier])

    def take(self, tier: int, key: bytes, shard: int = 0) -> None:
        self.sets[tier].remove((key, shard))
        self.holdings.changed(key, shard, present=False, tier=self.numbers[tier])

    def changes(self) -> dict[bytes, bool]:
        return self.holdings.take_changes(1000)


def test_a_record_is_news_when_it_comes_first_and_leaves_last() -> None:
    tiers = Tiers(2)
    tiers.put(0, A)
    assert tiers.changes() == {record_id(A, 0): True}
    tiers.put(1, A)
    tiers.take(0, A)
    assert (tiers.holdings.num_changes, tiers.changes()) == (0, {})
    assert tiers.holdings.digest() == Digest.of(record_id(A, 0))
    tiers.take(1, A)
    assert tiers.changes() == {record_id(A, 0): False}
    assert tiers.holdings.digest() == Digest.of(b"")


def test_what_came_and_went_between_two_looks_is_no_news() -> None:
    tiers = Tiers(2)
    tiers.put(0, A)
    tiers.put(1, B)
    tiers.take(0, A)
    assert tiers.changes() == {record_id(B, 0): True}


def test_changes_are_taken_in_parts() -> None:
    tiers = Tiers(1)
    for shard in range(5):
        tiers.put(0, A, shard)
    assert list(tiers.holdings.take_changes(3)) == [record_id(A, shard) for shard in range(3)]
    assert tiers.holdings.num_changes == 2


def test_a_snapshot_is_of_all_tiers_and_takes_the_changes() -> None:
    tiers = Tiers(2)
    tiers.put(0, A)
    tiers.put(1, A)
    tiers.put(1, B, 7)
    assert sorted(tiers.holdings.snapshot()) == [record_id(A, 0), record_id(B, 7)]
    assert tiers.changes() == {}


def test_at_random_the_books_are_those_of_the_union() -> None:
    rng, tiers = random.Random(5), Tiers(3)
    told: set[bytes] = set()
    for _ in range(3000):
        tier, key, shard = rng.randrange(3), rng.choice([A, B]), rng.randrange(4)
        act = tiers.take if (key, shard) in tiers.sets[tier] else tiers.put
        act(tier, key, shard)
        assert tiers.holdings.audit() == []
        if rng.random() < 0.2:
            for record, present in tiers.changes().items():
                assert (record in told) is not present
                told.symmetric_difference_update({record})
            assert told == {record_id(*held) for held in set.union(*tiers.sets)}
    tiers.sets[0].symmetric_difference_update({(A, 9)})
    assert len(tiers.holdings.audit()) == 1

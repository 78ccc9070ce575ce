"""The directory step by step: deltas, inventories, epochs, digests, shards, bounds."""

from __future__ import annotations

from collections import Counter

import pytest

from kvfleet.core import rows
from kvfleet.core.directory import (
    Applied,
    Delta,
    Digest,
    Directory,
    InventoryPage,
    NodeId,
    NodeStats,
    Run,
    split_records,
)
from kvfleet.core.outcomes import Miss

A, B, C = NodeId("a" * 32), NodeId("b" * 32), NodeId("c" * 32)


def key(number: int) -> bytes:
    return number.to_bytes(2, "big") * 8


def keys(*numbers: int) -> bytes:
    return b"".join(key(number) for number in numbers)


def records(*numbers: int, shard: int = 0) -> bytes:
    return b"".join(key(number) + shard.to_bytes(2, "little") for number in numbers)


def inventory(  # noqa: PLR0913 one for each field of a page
    directory: Directory,
    node: NodeId,
    held: bytes = b"",
    epoch: int = 1,
    seq: int = 0,
    page: int = 0,
    last: bool = True,
) -> Applied:
    return directory.inventory(InventoryPage(node, epoch, seq, page, last, held))


def directory_with(**held: bytes) -> Directory:
    directory = Directory(1000)
    for name, packed in held.items():
        assert inventory(directory, NodeId(name * 32), packed) is Applied.OK
    return directory


def test_an_empty_directory_knows_nothing() -> None:
    directory = Directory(10)
    assert directory.locate(keys(1, 2), 0, 1) == []
    assert directory.locate(b"", 0, 1) == []
    stats = directory.stats()
    assert (stats.nodes, stats.rows, stats.shared, stats.refused, stats.memory_bytes) == ((), 0, 0, 0, 0)


def test_locate_gives_runs_up_to_the_first_miss() -> None:
    directory = directory_with(a=records(1, 2, 3, 5), b=records(2, 3))
    directory.apply(Delta(A, 1, 1, shared_added=records(3)))
    assert directory.locate(keys(1, 2, 3, 4, 5), 0, 1) == [
        Run(0, 1, (A,), False),
        Run(1, 2, (A, B), False),
        Run(2, 3, (A, B), True),
    ]
    assert directory.locate(keys(5), 0, 1) == [Run(0, 1, (A,), False)]
    assert directory.locate(keys(4, 5), 0, 1) == []


def test_what_only_the_shared_tier_has() -> None:
    directory = directory_with(a=records(1, 2), b=records(2))
    directory.apply(Delta(B, 1, 1, shared_added=records(3)))
    assert directory.locate(keys(2, 3), 0, 1) == [Run(0, 1, (A, B), False), Run(1, 2, (), True)]
    assert directory.shared_among(records(1, 3)) == records(3)


def test_a_block_counts_only_with_all_its_shards() -> None:
    directory = directory_with(a=records(1, 2), b=records(1, shard=1))
    assert directory.locate(keys(1, 2), 0, 2) == [Run(0, 1, (A,), False)]
    assert directory.locate(keys(1, 2), 1, 2) == [Run(0, 1, (B,), False)]
    directory.apply(Delta(A, 1, 1, shared_added=records(2, shard=1)))
    assert directory.locate(keys(1, 2), 0, 2) == [Run(0, 2, (A,), False)]
    assert directory.locate(keys(1, 2), 0, 3) == []


def test_deltas_add_and_remove() -> None:
    directory = directory_with(a=records(1, 2))
    assert directory.apply(Delta(A, 1, 1, added=records(3), removed=records(1))) is Applied.OK
    assert directory.locate(keys(1), 0, 1) == []
    assert directory.locate(keys(2, 3), 0, 1) == [Run(0, 2, (A,), False)]
    assert directory.stats().nodes == (NodeStats(A, 1, 1, 2, True),)


def test_a_delta_said_twice_counts_once() -> None:
    directory = directory_with(a=records(1))
    delta = Delta(A, 1, 1, added=records(2), digest=Digest.of(records(1, 2)))
    assert directory.apply(delta) is Applied.OK
    assert directory.apply(Delta(A, 1, 2, removed=records(2))) is Applied.OK
    assert directory.apply(delta) is Applied.OK
    assert directory.locate(keys(2), 0, 1) == []


def test_a_stranger_or_a_gap_needs_an_inventory() -> None:
    directory = directory_with(a=records(1))
    assert directory.apply(Delta(B, 1, 1, added=records(2))) is Applied.NEED_INVENTORY
    assert directory.apply(Delta(A, 1, 2, added=records(2))) is Applied.NEED_INVENTORY
    assert directory.apply(Delta(A, 1, 1, added=records(2))) is Applied.NEED_INVENTORY
    assert directory.locate(keys(1), 0, 1) == [Run(0, 1, (A,), False)]
    assert directory.locate(keys(2), 0, 1) == []
    assert inventory(directory, A, records(1, 2), seq=3) is Applied.OK
    assert directory.apply(Delta(A, 1, 4, added=records(3))) is Applied.OK
    assert directory.locate(keys(1, 2, 3), 0, 1) == [Run(0, 3, (A,), False)]


def test_shared_flags_are_nobodys_own() -> None:
    directory = directory_with(a=records(1), b=records(1))
    assert directory.apply(Delta(C, 1, 9, shared_added=records(1, 2))) is Applied.NEED_INVENTORY
    assert directory.locate(keys(1, 2), 0, 1) == [Run(0, 1, (A, B), True), Run(1, 2, (), True)]
    directory.drop_node(C)
    assert directory.stats().shared == 2
    assert directory.apply(Delta(A, 1, 1, shared_removed=records(2))) is Applied.OK
    assert directory.locate(keys(1, 2), 0, 1) == [Run(0, 1, (A, B), True)]
    assert (directory.stats().shared, directory.stats().rows) == (1, 1)


def test_a_digest_that_differs_needs_an_inventory() -> None:
    directory = directory_with(a=records(1, 2))
    assert directory.apply(Delta(A, 1, 1, digest=Digest.of(records(1, 2)))) is Applied.OK
    assert directory.apply(Delta(A, 1, 2, digest=Digest.of(records(1, 3)))) is Applied.NEED_INVENTORY
    assert directory.stats().nodes[0].synced is False
    assert inventory(directory, A, records(1, 3), seq=2) is Applied.OK
    assert directory.apply(Delta(A, 1, 3, digest=Digest.of(records(1, 3)))) is Applied.OK
    assert Digest.of(b"") == Digest(0, bytes(18))


def test_an_inventory_takes_effect_at_its_last_page() -> None:
    directory = directory_with(a=records(1, 2))
    assert inventory(directory, A, records(2, 3), seq=5, last=False) is Applied.OK
    assert directory.locate(keys(1, 2, 3), 0, 1) == [Run(0, 2, (A,), False)]
    assert inventory(directory, A, records(4), seq=5, page=1) is Applied.OK
    assert directory.locate(keys(1), 0, 1) == []
    assert directory.locate(keys(2, 3, 4), 0, 1) == [Run(0, 3, (A,), False)]
    assert directory.stats().nodes == (NodeStats(A, 1, 5, 3, True),)
    assert directory.stats().rows == 3


@pytest.mark.parametrize(("seq", "page"), [(5, 2), (5, 3), (6, 1)])
def test_a_page_out_of_order_voids_the_inventory(seq: int, page: int) -> None:
    directory = directory_with(a=records(1))
    inventory(directory, A, records(2), seq=5, last=False)
    assert inventory(directory, A, records(3), seq=seq, page=page) is Applied.NEED_INVENTORY
    assert inventory(directory, A, records(3), seq=5, page=1) is Applied.NEED_INVENTORY
    assert directory.locate(keys(1), 0, 1) == [Run(0, 1, (A,), False)]
    assert directory.locate(keys(2), 0, 1) == []
    assert directory.stats().rows == 1


def test_an_inventory_older_than_what_is_known_changes_nothing() -> None:
    directory = directory_with(a=records(1))
    directory.apply(Delta(A, 1, 1, added=records(2)))
    assert inventory(directory, A, records(1), seq=0) is Applied.OK
    assert directory.locate(keys(1, 2), 0, 1) == [Run(0, 2, (A,), False)]


def test_a_new_epoch_keeps_the_old_hints_until_its_inventory() -> None:
    directory = directory_with(a=records(1))
    inventory(directory, A, records(7), seq=1, last=False)
    assert directory.apply(Delta(A, 2, 1, added=records(2))) is Applied.NEED_INVENTORY
    assert inventory(directory, A, records(8), seq=1, page=1) is Applied.STALE_EPOCH
    assert directory.locate(keys(1), 0, 1) == [Run(0, 1, (A,), False)]
    assert inventory(directory, A, records(2), epoch=2) is Applied.OK
    assert directory.locate(keys(1), 0, 1) == []
    assert directory.locate(keys(2), 0, 1) == [Run(0, 1, (A,), False)]


def test_an_old_epoch_changes_nothing() -> None:
    directory = directory_with(a=records(1))
    inventory(directory, A, records(1), epoch=5)
    before = directory.stats()
    assert directory.apply(Delta(A, 4, 1, records(2), records(1), records(3), records(1))) is Applied.STALE_EPOCH
    assert inventory(directory, A, records(2), epoch=4) is Applied.STALE_EPOCH
    assert directory.stats() == before
    directory.drop_node(A)
    assert directory.apply(Delta(A, 4, 1, added=records(2))) is Applied.STALE_EPOCH
    assert inventory(directory, A, records(2), epoch=4) is Applied.STALE_EPOCH
    assert directory.stats().nodes == ()
    assert inventory(directory, A, records(2), epoch=5) is Applied.OK


def test_a_dead_node_is_forgotten_at_once() -> None:
    directory = directory_with(a=records(1, 2), b=records(2))
    inventory(directory, A, records(5), seq=3, last=False)
    directory.drop_node(A)
    directory.drop_node(C)
    assert directory.locate(keys(1), 0, 1) == []
    assert directory.locate(keys(2), 0, 1) == [Run(0, 1, (B,), False)]
    assert directory.stats().rows == 1


def test_a_full_directory_refuses_and_asks_again_when_it_has_room() -> None:
    directory = Directory(10)
    inventory(directory, A, records(*range(8)))
    assert inventory(directory, B, records(*range(6, 12))) is Applied.OK
    stats = directory.stats()
    assert (stats.rows, stats.refused, stats.nodes[1].records) == (10, 2, 4)
    whole = Digest.of(records(*range(6, 12)))
    assert directory.apply(Delta(B, 1, 1, digest=whole)) is Applied.OK
    directory.apply(Delta(A, 1, 1, removed=records(0, 1, 2)))
    assert directory.apply(Delta(B, 1, 2, digest=whole)) is Applied.NEED_INVENTORY
    assert inventory(directory, B, records(*range(6, 12)), seq=2) is Applied.OK
    assert directory.apply(Delta(B, 1, 3, digest=whole)) is Applied.OK
    assert directory.locate(keys(*range(6, 12)), 0, 1)[-1] == Run(2, 6, (B,), False)


def test_a_large_node_is_swept_out_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "SWEEP_ROWS", 4)
    directory = Directory(10_000)
    numbers = [number * 131 % 65521 for number in range(1000)]
    packed = records(*numbers)
    inventory(directory, A, packed)
    inventory(directory, B, packed)
    directory.drop_node(A)
    inventory(directory, C, packed[:18])
    assert directory.stats().rows == 1000
    assert directory.locate(keys(*numbers), 0, 1)[1:] == [Run(1, 1000, (B,), False)]
    directory.drop_node(B)
    assert directory.locate(keys(*numbers), 0, 1) == [Run(0, 1, (C,), False)]
    assert directory.stats().rows > 500
    for seq in range(1, 300):
        directory.apply(Delta(C, 1, seq))
    assert directory.stats().rows == 1
    assert inventory(directory, A, packed) is Applied.OK
    assert directory.stats().nodes[-1] == NodeStats(A, 1, 0, 1000, True)


def test_records_are_split() -> None:
    assert split_records(records(1, 2, shard=3)) == [records(1, shard=3), records(2, shard=3)]
    with pytest.raises(AssertionError, match="18 bytes"):
        split_records(bytes(17))


def test_arguments_of_locate_are_checked() -> None:
    directory = Directory(10)
    with pytest.raises(AssertionError, match="16 bytes"):
        directory.locate(bytes(15), 0, 1)
    with pytest.raises(AssertionError, match="num_shards"):
        directory.locate(bytes(16), 1, 1)


def test_of_very_many_holders_some_are_named_and_in_turn_all() -> None:
    directory = Directory(1000)
    nodes = [NodeId(f"{number:032x}") for number in range(100)]
    for node in nodes:
        assert inventory(directory, node, records(1, 2)) is Applied.OK
    named = Counter[NodeId]()
    for _ in range(400):
        [run] = directory.locate(keys(1, 2), 0, 1)
        assert len(run.nodes) == len({*run.nodes}) == 32
        named.update(run.nodes)
    assert named.keys() == {*nodes}
    assert max(named.values()) < 3 * min(named.values())
    assert {*directory.holders(records(1))} == {*nodes}


def test_what_is_missing_was_never_stored_only_while_all_have_told_all() -> None:
    directory = directory_with(a=b"")
    told = []

    def why() -> None:
        told.append(directory.why(key(9), 1) is Miss.NEVER_STORED)

    why()
    directory.expect(frozenset({A, B}))
    why()
    inventory(directory, B)
    why()
    assert directory.apply(Delta(A, 1, 5)) is Applied.NEED_INVENTORY
    why()
    inventory(directory, A, records(1), seq=5)
    why()
    assert directory.apply(Delta(C, 1, 1)) is Applied.NEED_INVENTORY
    why()
    directory.drop_node(C)
    why()
    directory.expect(frozenset({A, B, C}))
    why()
    directory.drop_node(C)
    directory.drop_node(B)
    why()
    assert inventory(directory, A, epoch=2, last=False) is Applied.OK
    why()
    directory.drop_node(A)
    why()
    assert told == [False, False, True, False, True, False, True, False, True, False, False]

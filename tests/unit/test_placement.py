"""Admission, eviction, demotion, restart of one node's blocks, step by step."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from kvfleet.config import MIB
from kvfleet.core.block import BlockKey
from kvfleet.core.placement import Admission, Counters, Evicted, Grant, NewBlock, Restored
from kvfleet.core.policies import POLICIES
from kvfleet.core.policies.secondsight import SecondSight
from kvfleet.core.slabs import SlabMap
from kvfleet.testing.policies import block_key
from tests.placing import Node, gone, number_of, wanted


def test_a_prefix_gets_slots_and_is_here_once_committed() -> None:
    node = Node(8)
    admission = node.ask([1, 2, 3])
    assert [grant.index for grant in admission.grants] == [0, 1, 2]
    assert len({grant.slot for grant in admission.grants}) == 3
    assert (admission.already, admission.refused, admission.evicted, admission.transfers) == ([], [], [], [])
    assert node.placement.pending(block_key(2), 0)
    assert node.placement.resident(block_key(2), 0) is None
    node.placement.commit(block_key(2), 0, 5.0)
    assert not node.placement.pending(block_key(2), 0)
    assert node.placement.resident(block_key(2), 0) == admission.grants[1].slot
    assert node.placement.records() == [Evicted(block_key(2), 0, admission.grants[1].slot)]
    assert node.placement.used_bytes == 3 * MIB


def test_what_is_here_or_being_written_or_asked_for_twice_is_admitted_once() -> None:
    node = Node(8)
    node.ask([1])
    node.store([2], parent=1)
    admission = node.ask([1, 2, 3, 3])
    assert admission.already == [0, 1, 3]
    assert [grant.index for grant in admission.grants] == [2]


def test_nothing_asked_nothing_given() -> None:
    assert Node(2).placement.admit([], 0.0) == Admission()


def test_eviction_is_for_the_exact_deficit_and_leaf_first() -> None:
    node = Node(6)
    node.store([1, 2, 3])
    node.store([11, 12])
    admission = node.store([21, 22, 23])
    assert gone(admission) == [3, 2]
    assert len(admission.grants) == 3
    assert node.held() == [1, 11, 12, 21, 22, 23]
    assert node.placement.counters == Counters(admitted=8, evicted=2, dropped_unsaved=2)


def test_a_use_saves_a_block() -> None:
    node = Node(4)
    node.store([1, 2])
    node.store([11, 12])
    node.touch(1, 2)
    assert gone(node.store([21])) == [12]


def test_a_use_seen_by_slot_saves_a_block_too() -> None:
    node = Node(2)
    slot = node.store([1]).grants[0].slot
    node.store([11])
    node.placement.touch_slot(slot, 10.0)
    node.placement.touch(block_key(99), 10.0)
    node.placement.touch_slot(4095, 10.0)
    assert gone(node.store([21])) == [11]


def test_a_prefix_longer_than_the_arena_keeps_its_head() -> None:
    node = Node(4)
    node.store([90, 91])
    admission = node.store(range(1, 8))
    assert [grant.index for grant in admission.grants] == [0, 1, 2, 3]
    assert admission.refused == [4, 5, 6]
    assert gone(admission) == [91, 90]
    assert node.store(range(5, 8), parent=4).refused == [0, 1, 2]
    assert node.held() == [1, 2, 3, 4]
    assert node.placement.counters.refused == 6


def test_the_parent_of_new_blocks_is_not_their_room() -> None:
    node = Node(2)
    node.store([1])
    node.store([11])
    node.touch(11)
    admission = node.store([2], parent=1)
    assert gone(admission) == [11]


def test_blocks_being_written_stay_and_shield_their_parents() -> None:
    node = Node(3)
    node.store([1, 2])
    node.ask([3], parent=2)
    assert node.ask([11]).refused == [0]
    node.placement.abort(block_key(3), 0)
    assert len(node.ask([11]).grants) == 1
    assert node.ask([12]).evicted == [Evicted(block_key(2), 0, 1)]


def test_abort_gives_the_slot_back() -> None:
    node = Node(1)
    slot = node.ask([1]).grants[0].slot
    assert node.placement.abort(block_key(1), 0) == slot
    assert node.placement.used_bytes == 0
    assert not node.placement.pending(block_key(1), 0)
    assert node.ask([1]).grants == [Grant(0, slot)]


def test_commit_and_abort_of_what_was_not_granted_are_bugs() -> None:
    node = Node(1)
    with pytest.raises(AssertionError, match="granted"):
        node.placement.commit(block_key(1), 0, 0.0)
    node.store([1])
    with pytest.raises(AssertionError, match="being written"):
        node.placement.commit(block_key(1), 0, 0.0)
    with pytest.raises(AssertionError, match="being written"):
        node.placement.abort(block_key(1), 0)


def test_held_blocks_stay_until_every_hold_is_released() -> None:
    node = Node(2)
    node.store([1])
    node.store([11])
    for _ in range(2):
        node.placement.hold(block_key(1))
    assert gone(node.store([21])) == [11]
    node.placement.release(block_key(1))
    node.touch(21)
    assert gone(node.store([31])) == [21]
    node.placement.release(block_key(1))
    assert gone(node.store([41])) == [1]


def test_holds_of_strangers_are_bugs() -> None:
    node = Node(2)
    with pytest.raises(AssertionError, match="can be held"):
        node.placement.hold(block_key(1))
    with pytest.raises(AssertionError, match="is held"):
        node.placement.release(block_key(1))


def test_drop_takes_held_blocks_and_their_hold_can_still_be_released() -> None:
    node = Node(2)
    slot = node.store([1]).grants[0].slot
    node.placement.hold(block_key(1))
    assert node.placement.drop(block_key(1)) == [Evicted(block_key(1), 0, slot)]
    assert node.placement.drop(block_key(1)) == []
    node.placement.release(block_key(1))
    assert node.placement.used_bytes == 0


def test_drop_leaves_what_is_being_written() -> None:
    node = Node(2)
    node.store([1], shard=0)
    node.ask([1], shard=1)
    assert [evicted.shard for evicted in node.placement.drop(block_key(1))] == [0]
    assert node.placement.pending(block_key(1), 1)
    node.placement.commit(block_key(1), 1, 9.0)
    assert node.placement.audit() == []


def test_a_dropped_parent_makes_orphans_that_go_first() -> None:
    node = Node(4)
    node.store([11])
    node.store([1, 2, 3])
    node.placement.drop(block_key(1))
    assert gone(node.store([21, 22])) == [3]
    assert gone(node.store([31])) == [2]


def test_all_shards_of_a_block_go_together() -> None:
    node = Node(6)
    for shard in range(3):
        node.store([1], shard=shard)
    node.store([11], shard=0)
    node.store([11], shard=1)
    admission = node.store([21, 22])
    assert [(number_of(e.key), e.shard) for e in admission.evicted] == [(1, 0), (1, 1), (1, 2)]
    assert node.held() == [11, 11, 21, 22]


def test_a_policy_is_told_of_room_in_blocks_however_many_shards_they_have() -> None:
    node = Node(8, policy="second-sight")
    node.store([1, 2])
    policy = node.placement._residents.policy(MIB)
    assert isinstance(policy, SecondSight)
    assert policy._seen_max == 8 * 8
    for shard in (1, 2, 3):
        node.store([1], shard=shard)
    assert policy._seen_max == 8 * 2, "room for two blocks of four shards"


@pytest.mark.parametrize("shard", [0, 1])
def test_what_was_declined_is_remembered_whichever_shard_is_here(shard: int) -> None:
    node = Node(2, policy="second-sight")
    node.store([1, 2], shard=shard)
    new = NewBlock(block_key(3), shard, None, MIB)
    assert node.placement.admit([new], 10.0, optional=True).declined == [0]
    assert [grant.index for grant in node.placement.admit([new], 20.0, optional=True).grants] == [0]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_shards_that_come_for_one_use_are_not_its_second(order: tuple[int, int]) -> None:
    node = Node(4, policy="second-sight")
    for shard in order:
        node.store([1, 2], shard=shard)
    declined: list[list[int]] = []
    for shard in order * 2:
        new = NewBlock(block_key(3), shard, None, MIB)
        declined.append(node.placement.admit([new], 100.0, optional=True).declined)
    assert declined == [[0], [0], [], []], "each shard once; then the first is known, and the other belongs to it"


def test_a_block_with_a_shard_being_written_stays() -> None:
    node = Node(3)
    node.store([1], shard=0)
    node.ask([1], shard=1)
    node.store([11])
    assert gone(node.store([21])) == [11]


# --- the tier below


def test_saved_blocks_go_at_once_unsaved_ones_are_demoted_first() -> None:
    node = Node(3, lower=["shared"])
    node.store([1])
    node.store([11])
    node.store([21])
    node.placement.saved(block_key(1), 0, "shared")
    admission = node.ask([31, 32])
    assert gone(admission) == [1]
    assert [grant.index for grant in admission.grants] == [0]
    assert admission.refused == [1]
    assert [(t.kind, number_of(t.key), t.num_bytes) for t in admission.transfers] == [("demote", 11, MIB)]
    assert node.placement.resident(block_key(11), 0) is not None
    node.placement.complete(admission.transfers[0], ok=True)
    again = node.ask([32], parent=31)
    assert gone(again) == [11]
    assert len(again.grants) == 1
    counters = node.placement.counters
    assert (counters.demoted, counters.evicted, counters.dropped_unsaved) == (1, 2, 0)


def test_what_cannot_be_demoted_is_dropped_and_counted() -> None:
    node = Node(1, lower=["shared"])
    node.store([1])
    admission = node.ask([11])
    node.placement.complete(admission.transfers[0], ok=False)
    assert node.held() == [1]
    assert gone(node.ask([11])) == [1]
    counters = node.placement.counters
    assert (counters.transfers_failed, counters.dropped_unsaved, counters.demoted) == (1, 1, 0)


def test_a_block_used_while_it_was_demoted_stays_if_others_can_go() -> None:
    node = Node(2, lower=["shared"])
    node.store([1])
    node.store([11])
    admission = node.ask([21])
    assert wanted(admission) == [1]
    node.touch(1)
    node.placement.complete(admission.transfers[0], ok=True)
    assert wanted(node.ask([21])) == [11]


def test_a_chain_is_demoted_whole_and_leaves_leaf_first() -> None:
    node = Node(3, lower=["shared"])
    node.store([1, 2, 3])
    admission = node.ask([11, 12, 13])
    assert wanted(admission) == [1, 2, 3]
    for transfer in reversed(admission.transfers):
        node.placement.complete(transfer, ok=True)
    assert gone(node.store([11, 12, 13])) == [3, 2, 1]


def test_a_saved_parent_waits_for_its_child_to_be_demoted() -> None:
    node = Node(2, lower=["shared"])
    node.store([1, 2])
    node.placement.saved(block_key(1), 0, "shared")
    admission = node.ask([11, 12])
    assert (wanted(admission), gone(admission), admission.refused) == ([2], [], [0, 1])
    node.placement.complete(admission.transfers[0], ok=True)
    assert gone(node.ask([11, 12])) == [2, 1]


def test_no_shard_leaves_before_all_are_saved() -> None:
    node = Node(2, lower=["shared"])
    for shard in range(2):
        node.store([1], shard=shard)
    node.placement.saved(block_key(1), 0, "shared")
    admission = node.ask([11])
    assert [(t.shard, number_of(t.key)) for t in admission.transfers] == [(1, 1)]
    assert admission.evicted == []
    node.placement.complete(admission.transfers[0], ok=True)
    assert len(node.ask([11]).evicted) == 2


def test_blocks_in_transfer_stay_and_are_not_asked_for_twice() -> None:
    node = Node(1, lower=["shared"])
    node.store([1])
    assert len(node.ask([11]).transfers) == 1
    again = node.ask([12])
    assert (again.refused, again.transfers, again.evicted) == ([0], [], [])
    assert node.placement.in_transfer == 1


def test_write_behind_takes_the_longest_committed_first() -> None:
    node = Node(8, lower=["shared"])
    node.store([1, 2])
    node.ask([3], parent=2)
    node.store([11, 12])
    assert [number_of(t.key) for t in node.placement.next_saves("shared", 3 * MIB)] == [1, 2, 11]
    assert [number_of(t.key) for t in node.placement.next_saves("shared", 1)] == [12]
    assert node.placement.next_saves("shared", 8 * MIB) == []
    assert (node.placement.in_transfer, node.placement.num_unsaved("shared")) == (4, 4)
    assert node.placement.audit() == []


def test_write_behind_tries_again_as_long_as_it_takes() -> None:
    node = Node(2, lower=["shared"])
    node.store([1, 2])
    for turn in range(20):
        [transfer] = node.placement.next_saves("shared", MIB)
        assert transfer.key == block_key(1 + turn % 2), "each in its turn"
        node.placement.complete(transfer, ok=False)
        assert node.placement.num_unsaved("shared") == 2
    [transfer] = node.placement.next_saves("shared", MIB)
    node.placement.complete(transfer, ok=True)
    assert node.placement.saved_records("shared") == [(block_key(1), 0)]
    assert node.placement.counters.saved == 1


def test_what_came_from_below_is_not_saved_again() -> None:
    node = Node(2, lower=["shared"])
    node.ask([1])
    node.placement.saved(block_key(1), 0, "shared")
    node.placement.commit(block_key(1), 0, 1.0)
    assert node.placement.next_saves("shared", MIB) == []


def test_news_of_strangers_is_ignored() -> None:
    node = Node(2, lower=["shared"])
    node.placement.saved(block_key(1), 0, "shared")
    assert node.placement.num_unsaved("shared") == 0


def test_without_a_tier_below_nothing_is_saved() -> None:
    node = Node(2)
    node.store([1])
    assert node.placement.next_saves("shared", MIB) == []
    assert node.placement.num_unsaved("shared") == 0


def test_the_end_of_a_dropped_blocks_transfer_is_void() -> None:
    node = Node(2, lower=["shared"])
    node.store([1])
    [stale] = node.placement.next_saves("shared", MIB)
    node.placement.drop(block_key(1))
    node.placement.complete(stale, ok=True)
    node.store([1])
    node.placement.complete(stale, ok=True)
    assert node.placement.saved_records("shared") == []
    [fresh] = node.placement.next_saves("shared", MIB)
    node.placement.complete(stale, ok=False)
    assert node.placement.in_transfer == 1
    node.placement.complete(fresh, ok=True)
    assert node.placement.saved_records("shared") == [(block_key(1), 0)]
    assert node.placement.audit() == []


def test_a_block_given_up_is_saved_all_the_same_once_that_works() -> None:
    node = Node(1, lower=["shared"])
    node.store([1])
    [demotion] = node.ask([11]).transfers
    node.placement.complete(demotion, ok=False)
    assert node.placement.num_unsaved("shared") == 1
    [transfer] = node.placement.next_saves("shared", MIB)
    node.placement.complete(transfer, ok=True)
    assert node.placement.saved_records("shared") == [(block_key(1), 0)]


def test_the_deepest_block_that_nobody_holds_gives_way() -> None:
    node = Node(3)
    node.store([1, 2, 3])
    node.placement.hold(block_key(3))
    admission = node.ask([4], parent=3)
    assert (admission.grants, admission.evicted) == ([], [])
    assert [number_of(gone.key) for gone in node.placement.give_way(MIB)] == [2]
    assert node.placement.counters.evicted == 1
    assert len(node.ask([4], parent=3).grants) == 1
    assert [number_of(gone.key) for gone in node.placement.give_way(MIB)] == [1]
    assert node.placement.give_way(MIB) == []
    assert node.placement.audit() == []


# --- several sizes in a small arena

BIG = 11_796_480
HALF = BIG // 2


def test_another_models_blocks_take_room_run_by_run_coldest_first() -> None:
    node = Node(64)
    node.store(range(1, 6), num_bytes=BIG)
    assert node.placement.used_bytes == 5 * BIG
    admission = node.store([101, 102, 103], num_bytes=HALF)
    assert len(admission.grants) == 3
    assert gone(admission) == [5, 4]
    admission = node.store([104], parent=103, num_bytes=HALF)
    assert (len(admission.grants), gone(admission)) == (1, [])
    node.touch(1, 2, 3)
    admission = node.store([11], num_bytes=BIG)
    assert gone(admission) == [104, 103]


def test_a_size_evicts_its_own_while_they_are_the_coldest() -> None:
    node = Node(24)
    node.store([1], num_bytes=BIG)
    node.store([101], num_bytes=HALF)
    node.store([102], num_bytes=HALF)
    node.touch(1)
    assert gone(node.store([103], num_bytes=HALF)) == [101]
    assert gone(node.store([11], num_bytes=BIG)) == [103, 102] or node.held() == [11, 102, 103]


def test_a_run_is_given_up_with_all_descendants_of_its_blocks() -> None:
    node = Node(12)
    node.store([1, 2, 3, 4, 5, 6])
    node.store([11, 12])
    node.store([7, 8], parent=6)
    node.store([21, 22])
    node.touch(11, 21)
    assert gone(node.store([101], num_bytes=HALF)) == [8, 7, 6, 5, 4, 3, 2, 1]
    assert node.held() == [11, 12, 21, 22, 101]


def test_a_use_warms_all_the_block_builds_on() -> None:
    node = Node(24)
    node.store([1], num_bytes=BIG)
    node.store([11], num_bytes=BIG)
    node.touch(1)
    node.placement.drop(block_key(1))
    node.store([1], num_bytes=HALF)
    node.store([2], parent=1, num_bytes=HALF)
    node.touch(11)
    node.touch(2)
    assert gone(node.store([101], num_bytes=MIB)) == [11]


def test_held_and_busy_blocks_keep_their_run() -> None:
    node = Node(24)
    node.store([1], num_bytes=BIG)
    node.store([2], num_bytes=BIG)
    node.placement.hold(block_key(1))
    node.placement.hold(block_key(2))
    assert node.ask([101], num_bytes=HALF).refused == [0]
    node.placement.release(block_key(2))
    assert gone(node.store([101], num_bytes=HALF)) == [2]


def test_a_run_is_demoted_before_it_is_given_up() -> None:
    node = Node(24, lower=["shared"])
    node.store([1], num_bytes=BIG)
    node.store([2], num_bytes=BIG)
    admission = node.ask([101, 102], num_bytes=HALF)
    assert (wanted(admission), gone(admission), admission.refused) == ([1], [], [0, 1])
    node.placement.complete(admission.transfers[0], ok=True)
    admission = node.store([101, 102], num_bytes=HALF)
    assert (gone(admission), len(admission.grants)) == ([1], 2)


def test_a_chain_over_several_runs_is_demoted_no_further_than_needed() -> None:
    node = Node(36, lower=["shared"])
    node.store([1, 2, 3], num_bytes=BIG)
    admission = node.ask([101, 102, 103], num_bytes=HALF)
    assert (wanted(admission), gone(admission)) == ([2, 3], [])
    for transfer in admission.transfers:
        node.placement.complete(transfer, ok=True)
    admission = node.store([101, 102, 103], num_bytes=HALF)
    assert (gone(admission), len(admission.grants)) == ([3, 2], 3)


def test_a_block_larger_than_the_arena_is_refused_and_evicts_nothing() -> None:
    node = Node(4)
    node.store([1, 2, 3, 4])
    admission = node.ask([11], num_bytes=5 * MIB)
    assert (admission.refused, admission.evicted) == ([0], [])


def test_blocks_of_one_call_have_one_size() -> None:
    node = Node(4)
    with pytest.raises(AssertionError, match="one size"):
        node.placement.admit([NewBlock(block_key(n), 0, None, n * MIB) for n in (1, 2)], 0.0)


# --- restart


def fingerprint(number: int | None) -> int:
    return 0 if number is None else int.from_bytes(hashed(number)[:4], "little")


def hashed(number: int) -> BlockKey:
    """A key whose first bytes tell it from others, as real ones do."""
    return BlockKey(number.to_bytes(4, "big") + bytes(12))


def found(slot: int, number: int, parent: int | None, depth: int, **changes: object) -> Restored:
    fields = {
        "slot": slot,
        "key": hashed(number),
        "shard": 0,
        "parent_fingerprint": fingerprint(parent),
        "depth": depth,
        "num_bytes": MIB,
        "last_access": float(slot),
        "committed": True,
    }
    return Restored(**(fields | changes))  # type: ignore[arg-type]


def restarted(num_units: int, slots: Iterable[int]) -> Node:
    """A node whose slots are taken as an earlier manager left them."""
    first = Node(num_units)
    table = [0] * num_units
    slabs = SlabMap(num_units * MIB, MIB, 4096, table.__setitem__)
    offsets = {slot: slabs.offset(slot) for slot in [slabs.take(MIB) for _ in range(num_units)] if slot is not None}
    node = Node(num_units, lower=["shared"])
    assert node.slabs.restore(table, {slot: offsets[slot] for slot in slots}) == []
    assert first.placement.used_bytes == 0
    return node


def test_restart_keeps_blocks_their_order_and_their_writers() -> None:
    node = restarted(6, range(5))
    refused = node.placement.restore(
        [
            found(3, 2, 1, 1),
            found(1, 1, None, 0),
            found(2, 11, None, 0),
            found(4, 3, 2, 2, committed=False),
            found(0, 77, 76, 5),
        ]
    )
    assert refused == []
    assert node.placement.audit() == []
    assert node.placement.used_bytes == 5 * MIB
    assert node.placement.resident(hashed(2), 0) == 3
    assert node.placement.pending(hashed(3), 0)
    assert [t.slot for t in node.placement.next_saves("shared", 9 * MIB)] == [0, 1, 2, 3]


def test_restored_orphans_go_first_and_chains_leaf_first() -> None:
    node = restarted(4, range(4))
    node.placement.restore([found(0, 1, None, 0), found(1, 2, 1, 1), found(2, 11, None, 0), found(3, 77, 76, 5)])
    for number in (1, 2, 11, 77):
        node.placement.saved(hashed(number), 0, "shared")
    order = []
    for number in (201, 202, 203, 204):
        node.clock.advance(10.0)
        admission = node.store([number])
        order += [int.from_bytes(evicted.key[:4], "big") for evicted in admission.evicted]
    assert order == [77, 2, 1, 11]


def test_restart_gives_back_slots_of_doubles_and_misfits() -> None:
    node = restarted(4, range(4))
    refused = node.placement.restore(
        [
            found(0, 1, None, 0, last_access=1.0),
            found(1, 1, None, 0, last_access=2.0),
            found(2, 2, None, 0, num_bytes=5 * MIB),
            found(3, 3, None, 0, num_bytes=0),
        ]
    )
    assert sorted(refused) == [1, 2, 3]
    assert node.placement.used_bytes == MIB
    assert node.placement.audit() == []


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("written_behind", [False, True])
def test_a_prefix_larger_than_the_arena_passes_through_to_the_tier_below(policy: str, written_behind: bool) -> None:
    node = Node(8, lower=["nvme"], policy=policy)
    node.store([101, 102])
    for first in range(1, 31, 2):
        assert node.offer([first, first + 1], first - 1 or None) == []
        if written_behind:
            node.write(node.placement.next_saves("nvme", 8 * MIB))
    assert node.placement.counters.dropped_unsaved == 0
    assert {*node.held()} | node.below >= {*range(1, 31)}
    assert {*range(1, 5), 29, 30} <= {*node.held()}, "its head stays: what came last makes room for what comes"


def test_what_the_tier_below_does_not_take_is_not_given_up_for_what_builds_on_it() -> None:
    node = Node(4, lower=["nvme"])
    assert node.offer([1, 2, 3, 4], None) == []
    assert node.offer([5, 6], 4, refusing=[4]) == [5, 6]
    assert node.held() == [1, 2, 3, 4]
    node.refusing.add("nvme")
    assert node.offer([5, 6], 4) == [5, 6]
    assert node.held() == [1, 2, 3, 4]


def test_without_a_tier_below_the_head_of_a_large_prefix_stays() -> None:
    node = Node(4)
    assert node.offer([1, 2], None) == []
    assert node.offer([3, 4, 5], 2) == [5]
    assert node.offer([6], 5) == [], "its parent is not here, that it builds on another block cannot be known"
    assert node.held() == [1, 2, 3, 6]


def test_nothing_passes_while_somebody_writes_what_it_builds_on() -> None:
    node = Node(4, lower=["nvme"])
    node.store([1, 2])
    node.ask([3], parent=2)
    node.store([4], parent=3)
    assert node.offer([5], 4) == [5]
    node.placement.commit(block_key(3), 0, node.clock.now())
    assert node.offer([5], 4) == []


def test_what_waits_for_demotions_takes_no_other_room() -> None:
    node = Node(6, lower=["nvme"])
    node.store([1, 2, 3])
    node.store([11, 12, 13])
    for number in (11, 12, 13):
        node.placement.saved(block_key(number), 0, "nvme")
    assert node.offer([21, 22], None) == []
    assert node.held() == [1, 11, 12, 13, 21, 22]


def test_a_declined_prefix_passes_through_a_few_slots() -> None:
    node = Node(8, lower=["nvme"], policy="second-sight")
    node.store(range(101, 109))
    node.touch(*range(101, 109))
    for first in range(1, 31, 2):
        assert node.offer([first, first + 1], first - 1 or None) == []
    assert node.below >= {*range(1, 29)}
    assert {*range(101, 107)} <= {*node.held()}, "it costs two slots, not as many as it is long"

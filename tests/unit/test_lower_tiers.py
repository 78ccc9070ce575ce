"""Two tiers below: what is saved to which, what is demoted to which, and what becomes of a copy that is lost."""

from __future__ import annotations

from kvfleet.config import MIB
from kvfleet.core.placement import LowerTier, Transfer
from kvfleet.testing.policies import block_key
from tests.placing import Node, gone, number_of

BOTH: list[LowerTier] = ["nvme", "shared"]


def saves(node: Node, tier: LowerTier, max_bytes: int = 99 * MIB) -> list[Transfer]:
    transfers = node.placement.next_saves(tier, max_bytes)
    assert all((t.kind, t.tier) == ("save", tier) for t in transfers)
    assert node.placement.audit() == []
    return transfers


def saved(node: Node, *tiers: LowerTier) -> None:
    """All that waits for some tiers is copied there."""
    for tier in tiers:
        for transfer in saves(node, tier):
            node.placement.complete(transfer, ok=True)


def numbers(transfers: list[Transfer]) -> list[int]:
    return [number_of(transfer.key) for transfer in transfers]


def test_each_tier_has_a_queue_of_its_own() -> None:
    node = Node(4, lower=BOTH)
    node.store([1, 2, 3])
    assert numbers(saves(node, "nvme", MIB)) == [1]
    assert numbers(saves(node, "shared", 2 * MIB)) == [1, 2]
    assert numbers(saves(node, "nvme")) == [2, 3]
    placement = node.placement
    assert (placement.in_transfer, placement.num_in_transfer("nvme"), placement.num_in_transfer("shared")) == (5, 3, 2)
    assert (placement.num_unsaved("nvme"), placement.num_unsaved("shared")) == (3, 3)


def test_a_block_is_busy_until_the_last_of_its_transfers_ends() -> None:
    node = Node(1, lower=BOTH)
    node.store([1])
    [to_drive], [to_all] = saves(node, "nvme"), saves(node, "shared")
    node.placement.complete(to_drive, ok=True)
    admission = node.ask([11])
    assert (admission.refused, admission.transfers, admission.evicted) == ([0], [], [])
    assert node.placement.in_transfer == 1
    node.placement.complete(to_all, ok=False)
    assert gone(node.ask([11])) == [1]
    assert node.placement.counters.dropped_unsaved == 0
    assert node.placement.audit() == []


def test_a_copy_in_any_tier_lets_a_block_go() -> None:
    node = Node(2, lower=BOTH)
    node.store([1])
    node.store([11])
    node.placement.saved(block_key(1), 0, "shared")
    node.placement.saved(block_key(11), 0, "nvme")
    assert gone(node.ask([21, 22])) == [1, 11]
    assert node.placement.counters.dropped_unsaved == 0


def test_a_block_is_demoted_to_the_first_tier_that_takes_it() -> None:
    node = Node(2, lower=BOTH)
    node.store([1])
    [to_drive] = node.ask([11, 12]).transfers
    assert (to_drive.kind, to_drive.tier) == ("demote", "nvme")
    node.placement.complete(to_drive, ok=True)
    node.store([11, 12])
    node.refusing = {"nvme"}
    assert {(t.kind, t.tier) for t in node.ask([21, 22]).transfers} == {("demote", "shared")}


def test_what_no_tier_takes_goes_at_once_and_is_counted() -> None:
    node = Node(1, lower=["nvme"])
    node.store([1])
    node.refusing = {"nvme"}
    admission = node.ask([11])
    assert (gone(admission), admission.transfers, len(admission.grants)) == ([1], [], 1)
    assert node.placement.counters.dropped_unsaved == 1


def test_where_one_tier_fails_the_next_is_tried_before_a_block_goes() -> None:
    node = Node(1, lower=BOTH)
    node.store([1])
    for tier in BOTH:
        [transfer] = node.ask([11]).transfers
        assert (transfer.kind, transfer.tier) == ("demote", tier)
        node.placement.complete(transfer, ok=False)
        assert node.held() == [1]
    assert gone(node.ask([11])) == [1]
    counters = node.placement.counters
    assert (counters.transfers_failed, counters.dropped_unsaved, counters.demoted) == (2, 1, 0)


def test_what_a_gate_refuses_leaves_its_queue_until_it_is_used_again() -> None:
    node = Node(4, lower=BOTH)
    node.uses_needed = 1
    slots = [grant.slot for grant in node.store([1, 2]).grants]
    assert saves(node, "nvme") == []
    assert (node.placement.num_unsaved("nvme"), node.placement.num_unsaved("shared")) == (0, 2)
    node.store([3], parent=2)  # as a parent it was of no use to anybody
    assert saves(node, "nvme") == []
    node.placement.touch_slot(slots[1], node.clock.now())
    assert numbers(saves(node, "nvme")) == [2]
    node.store([1, 2])  # computed again elsewhere
    assert numbers(saves(node, "nvme")) == [1]


def test_one_use_of_all_shards_counts_once() -> None:
    node = Node(4, lower=["nvme"])
    slots = [node.store([1], shard=shard).grants[0].slot for shard in range(3)]
    node.uses_needed = 2
    for slot in slots:
        node.placement.touch_slot(slot, 100.0)
    assert saves(node, "nvme") == []
    for slot in slots:
        node.placement.touch_slot(slot, 200.0)
    assert [t.shard for t in saves(node, "nvme")] == [0, 1, 2]


def test_all_is_queued_again_on_demand() -> None:
    node = Node(4, lower=["nvme"])
    node.store([1, 2])
    node.ask([3], parent=2)
    node.placement.saved(block_key(2), 0, "nvme")
    node.refusing = {"nvme"}
    assert saves(node, "nvme") == []
    node.refusing = set()
    node.placement.requeue("nvme")
    assert numbers(saves(node, "nvme")) == [1]


def test_a_failed_copy_is_tried_again_at_once_or_with_the_next_use() -> None:
    node = Node(2, lower=["nvme"])
    node.store([1])
    [transfer] = saves(node, "nvme")
    node.placement.complete(transfer, ok=False)
    [transfer] = saves(node, "nvme")
    node.placement.complete(transfer, ok=False, again=False)
    assert saves(node, "nvme") == []
    node.touch(1)
    assert numbers(saves(node, "nvme")) == [1]


def test_a_copy_that_is_lost_is_not_counted_on() -> None:
    node = Node(2, lower=BOTH)
    node.store([1])
    saved(node, *BOTH)
    node.placement.lost(block_key(1), 0, "nvme", again=False)
    assert (saves(node, "nvme"), node.placement.unsaved("nvme")) == ([], (1, MIB))
    assert (node.placement.unsaved("shared"), node.placement.unsaved("nvme", "shared")) == ((0, 0), (0, 0))
    node.placement.lost(block_key(1), 0, "shared", again=True)
    assert numbers(saves(node, "shared")) == [1]
    assert node.placement.unsaved("nvme", "shared") == (1, MIB)
    node.placement.lost(block_key(99), 0, "shared", again=True)


def test_a_block_whose_copies_are_lost_is_demoted_before_it_goes() -> None:
    node = Node(1, lower=BOTH)
    node.store([1])
    saved(node, *BOTH)
    for tier in BOTH:
        node.placement.lost(block_key(1), 0, tier, again=False)
    admission = node.ask([11])
    assert (gone(admission), [t.tier for t in admission.transfers]) == ([], ["nvme"])


def test_news_of_a_copy_while_another_is_made_is_believed() -> None:
    node = Node(1, lower=BOTH)
    node.store([1])
    [transfer] = saves(node, "shared")
    node.placement.saved(block_key(1), 0, "shared")
    node.placement.complete(transfer, ok=False)
    assert node.placement.saved_records("shared") == [(block_key(1), 0)]
    assert node.placement.num_unsaved("shared") == 0
    assert node.placement.saved_records("nvme") == []


def test_a_dropped_block_voids_its_transfers_to_all_tiers() -> None:
    node = Node(1, lower=BOTH)
    node.store([1])
    transfers = saves(node, "nvme") + saves(node, "shared")
    node.placement.drop(block_key(1))
    assert node.placement.in_transfer == 0
    node.store([1])
    for transfer in transfers:
        node.placement.complete(transfer, ok=True)
    assert (node.placement.saved_records("nvme"), node.placement.num_unsaved("shared")) == ([], 1)
    assert node.placement.audit() == []


def test_the_parent_of_a_block_is_known() -> None:
    node = Node(2)
    node.store([1, 2])
    assert (node.placement.parent(block_key(2)), node.placement.parent(block_key(1))) == (block_key(1), None)


def test_what_a_load_has_brought_goes_to_the_shared_tier_when_it_is_used_once_more() -> None:
    node = Node(4, lower=BOTH)
    for number in (1, 2):
        assert len(node.ask([number]).grants) == 1
        node.placement.commit(block_key(number), 0, node.clock.now(), brought=True)
    node.placement.saved(block_key(2), 0, "nvme")  # it came from there
    assert (numbers(saves(node, "nvme")), saves(node, "shared")) == ([1], [])
    node.touch(1, 2)  # read by the engine that has loaded them
    assert saves(node, "shared") == []
    node.placement.requeue("shared")  # the tier works again
    assert numbers(saves(node, "shared")) == [1, 2]


def test_what_a_load_has_brought_goes_to_the_drives_in_the_order_of_its_prefix_however_it_came() -> None:
    node = Node(8, lower=["nvme"])
    node.ask([1, 2, 3, 4, 5])
    for number in (5, 3, 1, 4, 2):
        node.placement.commit(block_key(number), 0, node.clock.now(), brought=True)
    assert [number_of(save.key) for save in node.placement.next_saves("nvme", 8 * MIB)] == [1, 2, 3, 4, 5]


def test_what_a_load_has_brought_is_saved_before_it_has_to_go_and_on_demand() -> None:
    node = Node(2, lower=["shared"])
    for number in (1, 11):
        node.ask([number])
        node.placement.commit(block_key(number), 0, node.clock.now(), brought=True)
    node.placement.requeue("shared")
    assert saves(node, "shared") == []
    [transfer] = node.ask([21]).transfers
    assert (transfer.kind, transfer.key) == ("demote", block_key(1))
    node.placement.requeue("shared", every=True)
    assert numbers(saves(node, "shared")) == [11]


def test_a_tier_that_drops_a_copy_gets_it_again_with_the_second_use() -> None:
    node = Node(2, lower=BOTH)
    node.store([1])
    saved(node, *BOTH)
    node.placement.lost(block_key(1), 0, "shared", again=False)
    node.touch(1)
    assert saves(node, "shared") == []
    node.touch(1)
    assert numbers(saves(node, "shared")) == [1]
    assert saves(node, "nvme") == []


def test_what_waits_for_a_copy_below_is_told_from_what_no_tier_took() -> None:
    node = Node(4, lower=BOTH)
    node.store([1, 2, 3, 4])
    assert node.placement.num_waiting([]) == 4
    saved(node, "nvme")
    assert (node.placement.num_waiting([]), node.placement.num_unsaved("shared")) == (0, 4)
    for number in (1, 2, 3):
        node.placement.lost(block_key(number), 0, "nvme", again=False)
    [first, *_] = saves(node, "shared", MIB)
    assert node.placement.num_waiting([]) == 3  # one is on its way
    node.placement.complete(first, ok=False, again=False)
    assert (node.placement.num_waiting([]), node.placement.num_waiting([(block_key(1), 0)])) == (2, 3)
    node.refusing = {"shared"}
    assert saves(node, "shared") == []
    assert (node.placement.num_waiting([]), node.placement.unsaved(*BOTH)) == (0, (3, 3 * MIB))


def test_the_read_for_which_a_load_has_brought_a_block_is_not_another_use_of_it() -> None:
    node = Node(3, policy="lfu")
    node.store([1])
    node.touch(1)
    node.ask([11])
    node.placement.commit(block_key(11), 0, node.clock.now(), brought=True)
    node.touch(11)
    node.store([21])
    node.touch(21)
    assert gone(node.ask([31])) == [11]  # 1 and 21 were used once more than it


def test_a_use_long_after_a_load_has_brought_a_block_is_another() -> None:
    node = Node(3, policy="lfu")
    node.store([1])
    node.ask([11])
    node.placement.commit(block_key(11), 0, node.clock.now(), brought=True)
    node.store([21])
    node.clock.advance(60.0)  # the load gave up
    node.touch(11)
    assert gone(node.ask([31])) == [1]

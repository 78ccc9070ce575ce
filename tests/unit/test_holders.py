"""Who is left alone, when probes are due, and who is asked first."""

from __future__ import annotations

import math

import pytest

from kvfleet.core.directory import NodeId
from kvfleet.core.holders import Holders

A, B, C = (NodeId(name) for name in "abc")


def test_a_holder_that_failed_is_avoided_until_it_answers():
    holders = Holders(NodeId("me"))
    assert holders.next_due() == math.inf
    holders.failed(A, 10.0)
    assert holders.avoided == {A}
    assert holders.next_due() == 10.5
    assert holders.due(10.4) == []
    assert holders.due(10.5) == [A]
    assert holders.due(99.0) == []  # a probe is under way
    holders.answered(A)
    assert (holders.avoided, holders.due(99.0)) == (frozenset(), [])
    holders.worked(A)
    assert holders.next_due() == math.inf


def test_one_that_answers_and_fails_again_is_left_alone_for_longer_until_it_has_worked():
    holders, now, pauses = Holders(NodeId("me")), 0.0, []
    for _ in range(6):
        holders.failed(A, now)
        pauses.append(holders.next_due() - now)
        now = holders.next_due()
        assert holders.due(now) == [A]
        holders.answered(A)
        assert (holders.order([A]), holders.due(now)) == ([A], [])
    assert pauses == [0.5, 2, 8, 15, 15, 15]
    holders.worked(A)
    holders.failed(A, now)
    assert holders.next_due() == now + 0.5


def test_pauses_between_probes_double_up_to_five_seconds():
    holders, now, pauses = Holders(NodeId("me")), 0.0, []
    holders.failed(A, now)
    for _ in range(9):
        pauses.append(holders.next_due() - now)
        now = holders.next_due()
        assert holders.due(now) == [A]
        holders.unanswered(A, now)
        assert holders.avoided == {A}
    assert pauses == [0.5, 1, 2, 4, 5, 5, 5, 5, 5]
    holders.answered(A)
    holders.worked(A)
    holders.failed(A, now)
    assert holders.next_due() == now + 0.5


def test_failures_of_others_who_waited_too_change_nothing():
    holders = Holders(NodeId("me"))
    holders.failed(A, 0.0)
    holders.due(0.5)
    holders.unanswered(A, 0.5)
    holders.failed(A, 0.6)
    assert holders.next_due() == 1.5


def test_a_doubted_holder_is_probed_at_once_and_used_meanwhile():
    holders = Holders(NodeId("me"))
    holders.doubted(A, 5.0)
    assert (holders.avoided, holders.due(5.0)) == (frozenset(), [A])
    holders.doubted(A, 5.1)
    assert holders.due(5.1) == []
    holders.unanswered(A, 6.0)
    assert (holders.avoided, holders.next_due()) == ({A}, 7.0)
    holders.answered(A)
    holders.unanswered(A, 8.0)  # a probe that came too late to matter
    assert holders.avoided == frozenset()


def test_one_that_nobody_names_is_forgotten_after_five_minutes():
    holders = Holders(NodeId("me"))
    holders.failed(A, 0.0)
    holders.failed(B, 0.0)
    holders.due(1.0)
    assert holders.order([B]) == []
    assert holders.next_due() == 300.0
    holders.due(300.0)
    assert holders.avoided == {B}
    holders.due(600.0)
    assert holders.avoided == frozenset()


def test_the_least_loaded_comes_first():
    holders = Holders(NodeId("me"))
    first, second, third = holders.order([A, B, C])
    assert {first, second, third} == {A, B, C}
    holders.began(first, 10)
    assert holders.order([A, B, C]) == [second, third, first]
    holders.began(second, 5)
    assert holders.order([A, B, C]) == [third, second, first]
    holders.failed(third, 0.0)
    assert holders.order([C, B, A]) == [second, first]
    holders.ended(first, 10)
    holders.ended(second, 5)
    assert holders.order([A, B, C]) == [first, second]
    assert holders.order([NodeId("me")]) == []


def test_different_nodes_prefer_different_holders():
    nodes = [NodeId(f"{number:032x}") for number in range(60)]
    first = [Holders(node).order([A, B, C])[0] for node in nodes]
    assert all(10 <= first.count(holder) <= 30 for holder in (A, B, C))


def test_what_is_remembered_is_bounded():
    holders = Holders(NodeId("me"))
    for number in range(2000):
        holders.failed(NodeId(f"{number}"), float(number) / 1000)
    assert len(holders.avoided) == 1024
    assert NodeId("1999") in holders.avoided
    with pytest.raises(AssertionError):
        holders.ended(A, 1)

"""The small books that saving keeps: claims, what waits for another try, what was lost, what nodes are told."""

from __future__ import annotations

from kvfleet.core.claims import Claims
from kvfleet.core.directory import NodeId
from kvfleet.core.lost import LostCopies
from kvfleet.core.notices import Notices
from kvfleet.core.postponed import Postponed

A, B = NodeId("a"), NodeId("b")
R = [bytes([number]) * 18 for number in range(10)]

# --- claims


def test_a_record_is_claimed_by_one_node_until_it_is_written():
    claims = Claims(100, 60.0)
    assert claims.claim(A, R[:3], 0.0) == []
    assert claims.claim(A, R[:3], 1.0) == []  # its own
    assert claims.claim(B, R[:5], 2.0) == R[:3]
    assert claims.claim(A, R[3:5], 2.0) == R[3:5]
    claims.end(R[:2])
    assert claims.claim(B, R[:3], 3.0) == R[2:3]


def test_a_claim_ends_with_its_time_or_its_node():
    claims = Claims(100, 60.0)
    claims.claim(A, R[:1], 0.0)
    claims.claim(A, R[1:2], 30.0)
    assert claims.claim(B, R[:2], 59.0) == R[:2]
    assert claims.claim(B, R[:2], 60.0) == R[1:2]
    claims.drop_node(A)
    assert claims.claim(B, R[1:2], 61.0) == []
    assert len(claims) == 2


def test_a_claim_that_is_given_back_is_another_nodes_at_once():
    claims = Claims(100, 60.0)
    assert claims.claim(A, R[:2], 0.0) == []
    claims.give_back(B, R[:1])
    assert claims.claim(B, R[:1], 1.0) == R[:1]
    claims.give_back(A, R[:1])
    assert claims.claim(B, R[:2], 2.0) == R[1:2]
    claims.give_back(A, R[:1])  # late: it is another's now
    assert claims.claim(A, R[:1], 3.0) == R[:1]


def test_a_claim_that_is_repeated_lasts_from_then_on():
    claims = Claims(100, 60.0)
    claims.claim(A, R[:2], 0.0)
    claims.claim(A, R[:1], 50.0)
    assert claims.claim(B, R[:2], 70.0) == R[:1]


def test_claims_are_bounded():
    claims = Claims(3, 60.0)
    claims.claim(A, R[:5], 0.0)
    assert len(claims) == 3
    assert claims.claim(B, R[:5], 0.0) == R[2:5]


# --- what waits for another try


def test_what_fails_waits_longer_each_time_and_then_has_its_rest():
    postponed, now, pauses = Postponed(), 0.0, []
    for _ in range(8):
        postponed.failed(R[0], now)
        assert postponed.waits(R[0])
        assert (postponed.num_waiting, postponed.take_due(now)) == (1, [])
        pause = next(s for s in (1, 2, 4, 8, 16, 32, 60, 600) if s not in pauses)
        assert postponed.take_due(now + pause - 0.1) == []
        assert postponed.num_soon == (len(pauses) < 2)
        now += pause
        pauses.append(pause)
        assert postponed.take_due(now) == ([R[0]] if pause < 600 else [])
        assert not postponed.waits(R[0])
    assert len(postponed) == 0


def test_what_worked_is_forgotten():
    postponed = Postponed()
    for _ in range(3):
        postponed.failed(R[0], 0.0)
    postponed.done(R[0])
    assert (len(postponed), postponed.take_due(100.0)) == (0, [])
    postponed.failed(R[0], 100.0)
    assert postponed.take_due(101.0) == [R[0]]


def test_what_another_node_writes_is_looked_at_again_soon():
    postponed = Postponed()
    postponed.failed(R[0], 0.0)
    postponed.elsewhere(R[0], 0.0)
    postponed.elsewhere(R[1], 0.0)
    assert postponed.num_soon == 2
    assert postponed.take_due(1.9) == []
    assert sorted(postponed.take_due(2.0)) == R[:2]
    assert postponed.num_soon == 0
    postponed.failed(R[0], 2.0)  # for the second time
    assert postponed.take_due(3.9) == []
    assert postponed.take_due(4.0) == [R[0]]


def test_all_may_be_tried_at_once():
    postponed = Postponed()
    postponed.failed(R[0], 0.0)
    postponed.elsewhere(R[1], 0.0)
    postponed.clear()
    assert (len(postponed), postponed.num_waiting, postponed.num_soon) == (0, 0, 0)
    assert postponed.take_due(1e9) == []


# --- what was lost


def test_a_lost_copy_is_remembered_until_it_is_written_or_for_a_while():
    lost = LostCopies(2, 60.0)
    lost.add(R[0], 0.0)
    lost.add(R[1], 1.0)
    assert (lost.has(R[0], 59.9), lost.has(R[0], 60.0), lost.has(R[1], 60.0)) == (True, False, True)
    lost.discard(R[1])
    assert not lost.has(R[1], 2.0)
    lost.add(R[2], 3.0)
    lost.add(R[3], 3.0)
    assert [lost.has(record, 3.0) for record in R[:4]] == [False, False, True, True]


# --- what nodes are told


def test_a_node_is_told_until_it_has_heard():
    notices = Notices(100)
    notices.post(A, R[0])
    notices.post(A, R[1])
    assert notices.take(B, (1, 1)) == b""
    assert notices.take(A, (1, 1)) == R[0] + R[1]
    notices.post(A, R[2])
    assert notices.take(A, (1, 1)) == R[0] + R[1]  # the answer was lost, it asks again
    assert notices.take(A, (1, 2)) == R[2]
    assert notices.take(A, (1, 3)) == b""
    assert notices._waiting == notices._told == {}


def test_notices_are_bounded_and_go_with_their_node():
    notices = Notices(3)
    for record in R:
        notices.post(A, record)
    assert notices.take(A, (1, 1)) == b"".join(R[:3])
    notices.drop_node(A)
    assert notices.take(A, (1, 2)) == b""

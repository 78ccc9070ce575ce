"""The circuit breakers."""

import math
from itertools import pairwise

import pytest

from kvfleet.core.breaker import Breaker, ProbedBreaker


def test_after_a_failure_one_tries_again_after_a_pause_that_doubles():
    breaker = Breaker(1.0, 3.0)
    assert breaker.allows(0.0)
    assert breaker.allows(0.0)
    assert not breaker.is_open
    breaker.failed(0.5)
    breaker.failed(0.6)  # asked before it was known
    assert breaker.is_open
    assert [breaker.allows(now) for now in (0.6, 1.4, 1.5, 1.5, 2.4)] == [False, False, True, False, False]
    breaker.failed(2.0)
    assert [breaker.allows(now) for now in (3.9, 4.0, 4.1)] == [False, True, False]
    breaker.failed(4.0)
    assert [breaker.allows(now) for now in (6.9, 7.0)] == [False, True]  # 3 s at most
    breaker.worked()
    assert [breaker.allows(7.0), breaker.allows(7.0), breaker.is_open] == [True, True, False]
    breaker.failed(8.0)
    assert [breaker.allows(now) for now in (8.9, 9.0)] == [False, True]  # the pause begins anew


def test_one_who_tries_and_never_reports_keeps_nobody_from_it_for_long():
    breaker = Breaker(1.0, 8.0)
    breaker.failed(0.0)
    assert [breaker.allows(now) for now in (1.0, 1.9, 2.0)] == [True, False, True]


# --- closed by probes


def probed(breaker: ProbedBreaker, now: float, *, answered: bool) -> None:
    assert breaker.due <= now
    breaker.begin(now)
    assert breaker.due == math.inf
    (breaker.answered if answered else breaker.unanswered)(now)


def test_no_request_tries_what_is_open_and_probes_close_it():
    breaker = ProbedBreaker(8.0, proven=True)
    assert (breaker.is_open, breaker.due) == (False, math.inf)
    breaker.failed(1.0, 2.0)
    assert (breaker.is_open, breaker.due) == (True, 2.8)
    probed(breaker, 2.8, answered=False)
    dues = []
    for _ in range(6):
        dues.append(breaker.due)
        probed(breaker, breaker.due, answered=False)
    pauses = [later - earlier for earlier, later in pairwise([2.8, *dues])]
    assert pauses == pytest.approx([0.8, 1.6, 3.2, 6.4, 8.0, 8.0])
    breaker.worked(breaker.due)  # was asked before; only a probe tells how it is now
    assert breaker.is_open
    probed(breaker, breaker.due, answered=True)
    assert (breaker.is_open, breaker.due) == (False, math.inf)


def test_a_slow_probe_costs_no_interval_of_its_own():
    breaker = ProbedBreaker(4.0, proven=False)
    for begun in range(0, 40, 4):
        breaker.begin(float(begun))
        breaker.unanswered(begun + 4.0)
        assert breaker.due <= begun + 4.0


def test_what_failed_by_its_own_fault_leaves_it_closed():
    breaker = ProbedBreaker(10.0, proven=True)
    breaker.doubted(5.0)
    assert (breaker.is_open, breaker.due) == (False, 5.0)
    probed(breaker, 5.0, answered=True)
    breaker.doubted(5.1)
    assert breaker.due == 6.0  # not one after the other
    breaker.worked(7.0)
    breaker.failed(6.5, 8.0)  # others had an answer meanwhile
    assert not breaker.is_open
    probed(breaker, 8.0, answered=False)
    assert breaker.is_open


def test_one_that_answers_probes_only_is_left_alone_for_longer():
    breaker = ProbedBreaker(10.0, proven=True)
    breaker.failed(0.0, 1.0)
    probed(breaker, 2.0, answered=True)
    breaker.failed(1.5, 3.0)  # began before
    assert not breaker.is_open
    probed(breaker, 3.0, answered=True)
    breaker.failed(3.5, 5.0)
    assert breaker.due == 5.0 + 15.0
    probed(breaker, 20.0, answered=True)
    breaker.worked(21.0)
    breaker.failed(22.0, 23.0)
    assert breaker.due == 24.0


def test_one_that_was_never_proven_is_open():
    breaker = ProbedBreaker(10.0, proven=False)
    assert (breaker.is_open, breaker.due) == (True, -math.inf)
    probed(breaker, 0.0, answered=True)
    assert not breaker.is_open

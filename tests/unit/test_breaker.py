"""The circuit breaker."""

from kvfleet.core.breaker import Breaker


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

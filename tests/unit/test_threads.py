"""Blocking functions with a time limit."""

from __future__ import annotations

import threading
from typing import NoReturn

import pytest

from kvfleet.node.threads import TimedThreads


def refuse(thread: threading.Thread) -> NoReturn:
    raise RuntimeError("can't start new thread")


def test_without_a_thread_nothing_is_run_and_no_place_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, ran = TimedThreads(1), []
    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", refuse)
        with pytest.raises(TimeoutError, match="no more threads"):
            threads.run(lambda: ran.append(1), 5.0)
    assert not ran
    assert threads.run(lambda: 7, 5.0) == 7

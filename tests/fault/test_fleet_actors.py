"""Calls to actors while Ray cannot find them, or they do not answer."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any
from unittest.mock import MagicMock

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

from kvfleet.actors import _DirectoryLink
from kvfleet.calls import DirectoryCalls, ManagerCalls, running_config
from kvfleet.config import FleetConfig
from kvfleet.errors import DeadlineExceededError, DirectoryUnavailableError, TierUnavailableError

FAILURES = [(GetTimeoutError(), 1), (ActorUnavailableError("restarting", None), 1), (ActorDiedError(), 2)]
FIND = ["find_manager", "find_directory", "get_directory"]


@pytest.mark.parametrize("call", ["locate", "attach", "config"])
def test_an_actor_that_cannot_be_found_is_not_waited_for(monkeypatch, call):
    """Ray waits a minute and longer for its control plane."""
    go_on, searches = threading.Event(), []

    def hang(*args: object) -> MagicMock:
        searches.append(args)
        assert go_on.wait(20)
        return MagicMock()

    for name in FIND:
        monkeypatch.setattr(f"kvfleet.calls.{name}", hang)
    manager, directory = ManagerCalls(FleetConfig(), "node"), DirectoryCalls("default")
    calls: dict[str, Any] = {
        "locate": lambda timeout_s: directory.locate(b"", 0, 1, timeout_s),
        "attach": manager.attach,
        "config": lambda timeout_s: running_config("default", timeout_s),
    }
    start = time.monotonic()
    for _ in range(8):
        with pytest.raises((DeadlineExceededError, DirectoryUnavailableError)):
            calls[call](0.05)
    assert time.monotonic() - start < 5
    assert len(searches) <= 4
    monkeypatch.setattr("ray.get", lambda answer, timeout: "answered")
    go_on.set()
    assert calls[call](10) == "answered"


@pytest.mark.parametrize(("error", "searches"), FAILURES)
def test_only_an_actor_that_died_is_searched_for_again(monkeypatch, error, searches):
    found: list[object] = []

    def find(*args: object) -> MagicMock:
        found.append(args)
        return MagicMock()

    def fail(answer: object, timeout: float) -> None:
        raise error

    for name in FIND:
        monkeypatch.setattr(f"kvfleet.calls.{name}", find)
    monkeypatch.setattr("ray.get", fail)
    manager, directory = ManagerCalls(FleetConfig(), "node"), DirectoryCalls("default")
    for _ in range(2):
        with pytest.raises(DirectoryUnavailableError):
            directory.locate(b"", 0, 1, 5.0)
    assert len(found) == searches
    for _ in range(2):
        with pytest.raises((TierUnavailableError, DeadlineExceededError)):
            manager.attach(5.0)
    assert len(found) == 2 * searches


@pytest.mark.parametrize(("error", "searches"), FAILURES)
def test_a_managers_link_too(monkeypatch, error, searches):
    found: list[object] = []

    def find(fleet: str) -> MagicMock:
        found.append(fleet)
        answer = asyncio.run_coroutine_threadsafe(failed(), loop)
        return MagicMock(locate=MagicMock(remote=lambda *args: asyncio.wrap_future(answer, loop=loop)))

    async def failed() -> None:
        raise error

    async def ask() -> None:
        link = _DirectoryLink("default")
        for _ in range(2):
            with pytest.raises(DirectoryUnavailableError):
                await link.locate(b"", 0, 1, 5.0)

    monkeypatch.setattr("kvfleet.actors.get_directory", find)
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(ask())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()
    assert len(found) == searches

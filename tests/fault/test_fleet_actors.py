"""Calls to actors while Ray cannot find them, or they do not answer."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import Any
from unittest.mock import MagicMock

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    ObjectFetchTimedOutError,
    ObjectLostError,
    OwnerDiedError,
)

from kvfleet.actors import _DirectoryLink, successor
from kvfleet.calls import DirectoryCalls, ManagerCalls, running_config
from kvfleet.config import FleetConfig
from kvfleet.core.directory import NodeId
from kvfleet.errors import DeadlineExceededError, DirectoryUnavailableError, TierUnavailableError
from kvfleet.node.messages import Attachment, FetchRequest
from kvfleet.node.transport import ObjectStoreTransport
from kvfleet.node.windows import ByteBudget

FAILURES = [(GetTimeoutError(), 1), (ActorUnavailableError("restarting", None), 1), (ActorDiedError(), 2)]
FIND = ["find_manager", "find_directory", "get_directory"]


@pytest.fixture(autouse=True)
def one_node(monkeypatch):
    monkeypatch.setattr("kvfleet.actors._nodes", lambda: [{"NodeID": "node", "Alive": True}])


def test_a_client_that_outlives_its_raylet_goes_on_with_the_next_one_at_its_address(monkeypatch):
    def entry(name: str, address: str, alive: bool) -> dict[str, Any]:
        return {"NodeID": name, "NodeManagerAddress": address, "Alive": alive}

    nodes = [entry("other", "10.0.0.2", True), entry("old", "10.0.0.1", False), entry("new", "10.0.0.1", True)]
    monkeypatch.setattr("kvfleet.actors._nodes", lambda: nodes)
    assert [successor(node) for node in ("old", "new", "unheard of")] == ["new", "new", "unheard of"]
    nodes.pop()
    assert successor("old") == "old"  # nothing there yet


@pytest.mark.parametrize("call", ["locate", "attach", "config"])
def test_an_actor_that_cannot_be_found_is_not_waited_for(monkeypatch, impatient, call):
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
    answer = MagicMock(problem="no arena")
    monkeypatch.setattr("ray.get", lambda call, timeout: answer)
    go_on.set()
    assert calls[call](10) is answer


@pytest.fixture
def impatient(monkeypatch):
    """A directory that failed is asked again at once."""
    for name in ("_DIRECTORY_PAUSE_S", "_DIRECTORY_PAUSE_MAX_S"):
        monkeypatch.setattr(f"kvfleet.calls.{name}", 1e-9)


def test_a_directory_that_does_not_answer_costs_the_next_lookup_nothing(monkeypatch):
    asked = []

    def hang(answer: object, timeout: float) -> None:
        asked.append(answer)
        raise GetTimeoutError

    monkeypatch.setattr("kvfleet.calls.get_directory", lambda fleet: MagicMock())
    monkeypatch.setattr("ray.get", hang)
    directory = DirectoryCalls("default")
    for _ in range(100):
        with pytest.raises(DirectoryUnavailableError):
            directory.locate(b"", 0, 1, 0.5)
    assert len(asked) == 1


def test_a_load_does_not_wait_for_a_manager_without_a_sign_of_life(monkeypatch, tmp_path):
    (tmp_path / "node.json").touch()
    attachment = Attachment("node", 1, str(tmp_path / "arena"), bytes(16), str(tmp_path / "clients"))
    waits = []

    def nothing(streams: object, timeout: float, **_: object) -> tuple[list[Any], Any]:
        waits.append(timeout)
        clock[0] += timeout
        return [], streams

    clock = [1000.0]
    monkeypatch.setattr("kvfleet.calls.time", MagicMock(monotonic=lambda: clock[0]))
    monkeypatch.setattr("kvfleet.calls.find_manager", lambda *args: MagicMock())
    monkeypatch.setattr("ray.get", lambda call, timeout: attachment)
    monkeypatch.setattr("ray.wait", nothing)
    monkeypatch.setattr("ray.cancel", lambda stream: None)
    manager = ManagerCalls(FleetConfig(heartbeat_s=1.0), "node")
    manager.attach(1.0)
    request = MagicMock(timeout_s=30.0)
    for expected in (4, 0, 0):  # seconds: three heartbeats missed, then known
        with pytest.raises(TierUnavailableError, match="sign of life"):
            next(manager.load(request))
        assert len(waits) == expected
        waits.clear()
    os.utime(tmp_path / "node.json", (1, 1))
    with pytest.raises(TierUnavailableError, match="sign of life"):
        next(manager.load(request))
    assert len(waits) == 4


@pytest.mark.parametrize(("error", "searches"), FAILURES)
def test_only_an_actor_that_died_is_searched_for_again(monkeypatch, impatient, error, searches):
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


@pytest.mark.parametrize(
    "error", [ObjectLostError("00", None, ""), OwnerDiedError("00", None, ""), ObjectFetchTimedOutError("00", None, "")]
)
def test_a_window_that_ray_loses_on_its_way_is_a_holder_that_failed(monkeypatch, error):
    async def lost(stream: object) -> None:
        raise error

    async def fetch() -> None:
        transport = ObjectStoreTransport(lambda node: MagicMock(), budget, holder_timeout_s=5.0, windows_in_flight=2)
        request = FetchRequest(bytes(16), 0, 1 << 20, 5.0)
        with pytest.raises(TierUnavailableError, match=type(error).__name__):
            await anext(transport.fetch(NodeId("node"), request, 1 << 20))

    budget, cancelled = ByteBudget(1 << 24), []
    monkeypatch.setattr("kvfleet.node.transport._next_window", lost)
    monkeypatch.setattr("ray.cancel", cancelled.append)
    asyncio.run(fetch())
    assert (budget.taken_bytes, len(cancelled)) == (0, 1)

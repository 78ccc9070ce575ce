"""Calls to actors while Ray cannot find them, or they do not answer."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any, NoReturn
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
from kvfleet.errors import (
    DeadlineExceededError,
    DirectoryAvoidedError,
    DirectoryUnavailableError,
    ManagerAvoidedError,
    TierUnavailableError,
)
from kvfleet.node.messages import Attachment, FetchRequest, Namespace
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
    with pytest.raises(DirectoryUnavailableError) as caught:
        directory.locate(b"", 0, 1, 0.5)
    assert type(caught.value) is DirectoryUnavailableError
    for _ in range(100):
        with pytest.raises(DirectoryAvoidedError):
            directory.locate(b"", 0, 1, 0.5)
    assert len(asked) == 1


class Silence:
    """A manager that stops after it was attached: it answers nothing, and its file is not touched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        self.file = directory / "node.json"
        self.file.touch()
        self.clock = 1000.0
        self.waits: list[float] = []
        self.actor = MagicMock()
        attachment = Attachment("node", 1, str(directory / "arena"), bytes(16), str(directory / "clients"))
        monkeypatch.setattr("kvfleet.calls.time", MagicMock(monotonic=lambda: self.clock))
        monkeypatch.setattr("kvfleet.calls.find_manager", lambda *args: self.actor)
        monkeypatch.setattr("ray.get", lambda call, timeout: attachment)
        self.manager = ManagerCalls(FleetConfig(heartbeat_s=1.0), "node")
        self.manager.attach(1.0)
        monkeypatch.setattr("ray.get", self._no_answer)
        monkeypatch.setattr("ray.wait", self._nothing)
        monkeypatch.setattr("ray.cancel", lambda stream: None)

    def _nothing(self, streams: object, timeout: float, **_: object) -> tuple[list[Any], Any]:
        self.waits.append(timeout)
        self.clock += timeout
        return [], streams

    def _no_answer(self, call: object, timeout: float) -> NoReturn:
        self._nothing(call, timeout)
        raise GetTimeoutError


@pytest.mark.parametrize("reserving", [True, False])
def test_a_store_does_not_wait_for_a_manager_without_a_sign_of_life(monkeypatch, tmp_path, reserving):
    silence = Silence(monkeypatch, tmp_path)
    actor, call = silence.actor, silence.manager.reserve if reserving else silence.manager.commit
    asked = (actor.reserve if reserving else actor.commit).remote
    heartbeats = 4 if reserving else 5  # three missed ones after that in which it was first looked for
    with pytest.raises(DeadlineExceededError, match=rf"took longer than {heartbeats}\.000 s"):
        call(MagicMock(), 30.0)
    assert (len(silence.waits), asked.call_count) == (heartbeats, 1)
    if reserving:  # nothing is sent to a manager that is known to be silent
        with pytest.raises(ManagerAvoidedError, match="sign of life"):
            call(MagicMock(), 30.0)
        assert (len(silence.waits), asked.call_count) == (heartbeats, 1)
    else:  # what was reserved is given back when it wakes
        with pytest.raises(DeadlineExceededError):
            call(MagicMock(), 1.0)
        assert (len(silence.waits), asked.call_count) == (heartbeats + 1, 2)
    monkeypatch.setattr("ray.get", lambda call, timeout: "reply")
    os.utime(silence.file, (1, 1))
    assert call(MagicMock(), 30.0) == "reply"


def test_a_store_outlives_a_restart_of_its_manager(monkeypatch, tmp_path):
    """An actor that starts again is away at once: that is no silence."""
    silence = Silence(monkeypatch, tmp_path)
    silence.clock += 60.0

    def away(call: object, timeout: float) -> NoReturn:
        raise ActorUnavailableError("restarting", None)

    monkeypatch.setattr("ray.get", away)
    with pytest.raises(TierUnavailableError, match="restarting") as caught:
        silence.manager.commit(MagicMock(), 30.0)
    assert type(caught.value) is TierUnavailableError


def test_a_load_does_not_wait_for_a_manager_without_a_sign_of_life(monkeypatch, tmp_path):
    silence = Silence(monkeypatch, tmp_path)
    manager, waits = silence.manager, silence.waits
    request = MagicMock(timeout_s=30.0)
    for expected in (4, 0, 0):  # seconds: three heartbeats missed, then known
        with pytest.raises(TierUnavailableError, match="sign of life") as caught:
            next(manager.load(request))
        assert (len(waits), type(caught.value) is ManagerAvoidedError) == (expected, not expected)
        waits.clear()
    os.utime(silence.file, (1, 1))
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
        request = FetchRequest(Namespace(bytes(16), "{}"), bytes(16), b"", 0, 0, 1 << 20, 1 << 20, 5.0)
        with pytest.raises(TierUnavailableError, match=type(error).__name__):
            await anext(transport.fetch(NodeId("node"), request, 1 << 20))

    budget, cancelled = ByteBudget(1 << 24), []
    monkeypatch.setattr("kvfleet.node.transport._next_window", lost)
    monkeypatch.setattr("ray.cancel", cancelled.append)
    asyncio.run(fetch())
    assert (budget.taken_bytes, len(cancelled)) == (0, 1)

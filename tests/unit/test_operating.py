"""Looking after a fleet of which some do not answer, and what `kvfleet down` says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvfleet import actors
from kvfleet.cli.down import Saving, summary
from kvfleet.cli.main import app
from kvfleet.errors import ConfigError
from kvfleet.node.status import NodeStatus
from kvfleet.operating import FleetStatus, Operator, join, join_ray

HANGS = object()


class Actor:
    """Answers each call with the next of what it is given for it; `HANGS` never comes, None is a call that fails."""

    def __init__(self, **answers: list[object]) -> None:
        self._answers = answers
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def remote(*args: object) -> object:
            self.calls.append(name)
            answers = self._answers[name]
            return answers.pop(0) if len(answers) > 1 else answers[0]

        method = SimpleNamespace(remote=remote)
        method.options = lambda **_: method
        return method


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Operator]:
    """`fleet(directory, **managers)`: an operator of such a fleet; `operator.waits` is how long it waited."""

    def collect(calls: Mapping[str, object], timeout_s: float) -> dict[str, Any]:
        hangs = [key for key, call in calls.items() if call is HANGS]
        if hangs:
            waits.append(timeout_s)
            clock[0] += timeout_s
        return {key: call for key, call in calls.items() if key not in hangs}

    def make(directory: Actor | None, **managers: Actor) -> Operator:
        monkeypatch.setattr(actors, "managers", lambda name: managers)
        monkeypatch.setattr(actors, "find_directory", lambda name: directory)
        operator = Operator("x")
        operator.waits = waits  # type: ignore[attr-defined]
        return operator

    waits: list[float] = []
    clock = [0.0]
    monkeypatch.setattr(actors, "collect", collect)
    monkeypatch.setattr("kvfleet.operating.time", MagicMock(monotonic=lambda: clock[0]))
    return make


NODE = NodeStatus("aaaaaaaaaaaa", 1, "", capacity_bytes=64 << 20)


def test_status_takes_seconds_whoever_does_not_answer(fleet):
    operator = fleet(Actor(status=[HANGS]), a=Actor(status=[NODE]), b=Actor(status=[HANGS]), c=Actor(status=[None]))
    assert operator.status() == FleetStatus("x", (NODE,), ("b", "c"), None)
    assert operator.waits == [3.0]  # for all at once


def test_saving_is_told_of_and_ends_with_the_last_that_saves(fleet):
    slow = Actor(num_unsaved=[10, 7, 3], flush=[HANGS])
    done = Actor(num_unsaved=[5], flush=[0])
    operator, told = fleet(None, slow=slow, done=done), []
    assert operator._flush(5.0, told.append) == 3
    assert told == [15, 7, 3, 3]
    assert sum(operator.waits) == 6.0
    assert (slow.calls.count("flush"), done.calls) == (1, ["num_unsaved", "flush"])


def test_a_manager_that_tells_nothing_is_not_waited_for_to_the_end(fleet):
    hung = Actor(num_unsaved=[HANGS], flush=[HANGS])
    starting = Actor(num_unsaved=[None, None, 6, HANGS], flush=[HANGS])
    operator, told = fleet(None, hung=hung, starting=starting), []
    assert operator._flush(600.0, told.append) == 6
    assert told[-1] == 6
    assert sum(operator.waits) < 40


def test_a_node_is_named_by_the_beginning_of_its_id(fleet):
    operator = fleet(None, abc1=Actor(), abd2=Actor())
    with pytest.raises(ConfigError, match=r"^no node with a manager has an id that begins with 'x'$"):
        operator.resume("x")
    with pytest.raises(ConfigError, match=r"^several nodes have ids that begin with 'ab': abc1, abd2$"):
        operator.drain("ab")
    for arguments in ({"timeout_s": -1.0}, {"bytes_max": -1}):
        with pytest.raises(ValueError, match="must not be negative, is -1"):
            operator.drain("abc", **arguments)


def test_a_fleet_that_is_gone(fleet, monkeypatch):
    fleet(None)
    monkeypatch.setattr("kvfleet.operating.join_ray", lambda address: False)
    with pytest.raises(ConfigError, match=r"^no fleet 'x' is running here; `kvfleet up` starts one$"):
        join("x")
    done = CliRunner().invoke(app, ["down", "--name", "x"])
    assert (done.exit_code, done.output) == (0, "fleet x does not run here: nothing to stop\n")
    assert CliRunner().invoke(app, ["status", "--name", "x"]).exit_code == 1


def test_down_says_what_was_saved(monkeypatch):
    def stop(drain_timeout_s: float, on_progress: Callable[[int], None]) -> int:
        for left in (3, 1, 1):
            on_progress(left)
        return 1

    found = FleetStatus("x", (NODE,), (), None)
    monkeypatch.setattr("kvfleet.operating.join", lambda *_, **__: SimpleNamespace(status=lambda: found, stop=stop))
    done = CliRunner().invoke(app, ["down", "--name", "x"])
    assert done.stdout == (
        "2 blocks saved\nfleet x is stopped: 1 manager and its directory; 64.0 MiB of memory are free again\n"
    )
    assert done.stderr == "saving 3 blocks\n1 block could not be saved in time\n"


def test_down_says_why_nothing_could_be_saved(monkeypatch):
    found = FleetStatus("x", (replace(NODE, shared_problem="shared: no credentials"),), (), None)
    fleet = SimpleNamespace(status=lambda: found, stop=lambda **_: 2)
    monkeypatch.setattr("kvfleet.operating.join", lambda *_, **__: fleet)
    done = CliRunner().invoke(app, ["down", "--name", "x"])
    assert done.stderr == "2 blocks could not be saved: shared: no credentials\n"


def test_what_is_left_of_a_silent_manager_is_said():
    found = FleetStatus("x", (NODE,), ("bbbbbbbbbbbb",), None)
    assert list(summary(found, 0, 0)) == [
        "fleet x is stopped: 2 managers and its directory; 64.0 MiB of memory are free again",
        "bbbbbbbb: its manager did not answer; the next fleet that starts there frees its memory",
    ]
    assert next(summary(FleetStatus("x", (), ("b",), None), 0, 0)) == "fleet x is stopped: 1 manager and its directory"


def test_saving_is_a_bar_on_a_terminal():
    for terminal in (True, False):
        console = Console(force_terminal=terminal, width=60)
        with console.capture() as capture, Saving(console, list) as saving:
            for left in (1200, 800):
                saving.show(left)
        assert saving.first == 1200
        assert ("400/1200" in capture.get()) is terminal
        assert ("saving 1,200 blocks\n" in capture.get()) is not terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_saving_that_does_not_get_on_says_why(monkeypatch, terminal):
    at = [0.0]
    monkeypatch.setattr("kvfleet.cli.down.time", SimpleNamespace(monotonic=lambda: at[0]))
    console = Console(force_terminal=terminal, width=200)
    with console.capture() as capture, Saving(console, lambda: ["shared: read-only"]) as saving:
        for left in (5, 5, 5, 5, 4, 4, 4, 4, 0, 0, 0, 0):
            saving.show(left)
            at[0] += 2.0
    said = [line for line in capture.get().splitlines() if "left to save" in line]
    assert [line.removeprefix("\x1b[2K") for line in said] == [
        f"{left} blocks left to save: shared: read-only" for left in (5, 4)
    ]


def test_a_ray_that_lets_nobody_in_is_one_sentence(monkeypatch):
    def init(**_: object) -> None:
        raise ConnectionError("ray's own text\nand its traces")

    monkeypatch.setattr("kvfleet.operating.ray.is_initialized", lambda: False)
    monkeypatch.setattr("kvfleet.operating.ray.init", init)
    with pytest.raises(ConnectionError, match=r"^no Ray cluster lets us in: ray's own text\. .*RAY_AUTH_MODE=token$"):
        join_ray("127.0.0.1:1")

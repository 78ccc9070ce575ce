"""Settings of the connector, and how an engine process finds its fleet."""

from __future__ import annotations

import logging
import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest

import kvfleet
from kvfleet import ConfigError
from kvfleet.connectors.vllm import joining
from kvfleet.connectors.vllm.joining import Membership, Settings


def test_settings_are_read():
    assert Settings.read({}) == Settings()
    read = Settings.read({"fleet": "f", "block_tokens": 64, "tenant": "t", "save_buffer_bytes": 1 << 20})
    assert (read.fleet, read.block_tokens, read.tenant, read.save_buffer_bytes) == ("f", 64, "t", 1 << 20)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"fleets": "f"}, "fleets: no such setting; there are address, block_tokens"),
        ({"block_tokens": 0}, "block_tokens: must be a positive integer, is 0"),
        ({"block_tokens": "64"}, "must be a positive integer"),
        ({"block_tokens": True}, "must be a positive integer"),
        ({"save_buffer_bytes": -1}, "must be a positive integer"),
        ({"fleet": 3}, "must be text"),
        ({"address": b"x"}, "must be text"),
    ],
)
def test_what_cannot_be_is_refused(extra, said):
    with pytest.raises(ConfigError) as refused:
        Settings.read(extra)
    assert said in str(refused.value)


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A fleet that is there or not; whoever connects to it loses SIGTERM, as to Ray."""
    closed: list[int] = []
    config = SimpleNamespace(name="f")
    fleet = SimpleNamespace(there=True, asked=[], closed=closed, close=lambda: closed.append(1), config=config)

    def connect(name: str, **options: Any) -> Any:
        fleet.asked.append((name, options))
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: None)
        if not fleet.there:
            raise ConnectionError("no Ray here")
        return fleet

    monkeypatch.setattr(kvfleet, "connect", connect)
    monkeypatch.setattr(joining, "_RETRY_S", 0.01)
    return fleet


def test_an_engine_starts_without_a_thread_to_look_for_a_fleet(fleet, monkeypatch, caplog):
    def no_more(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    fleet.there = False
    monkeypatch.setattr(threading.Thread, "start", no_more)
    Membership(Settings()).join(lambda _: None)
    assert "no fleet is looked for again: can't start new thread" in caplog.text


def test_a_fleet_that_is_there_is_joined_at_once(fleet):
    joined: list[Any] = []
    handler = signal.getsignal(signal.SIGTERM)
    membership = Membership(Settings(fleet="f", address="a", node_id="n"))
    membership.join(joined.append)
    assert joined == [fleet]
    assert fleet.asked == [("f", {"address": "a", "node_id": "n"})]
    assert signal.getsignal(signal.SIGTERM) is handler, "it is vLLM's"
    membership.close()
    assert fleet.closed == [1]


def test_a_fleet_that_comes_later_is_joined_then(fleet):
    fleet.there = False
    joined = threading.Event()
    membership = Membership(Settings())
    membership.join(lambda _: joined.set())
    assert not joined.is_set()
    fleet.there = True
    assert joined.wait(30.0)
    membership.close()


def test_what_fails_after_connecting_is_tried_again(fleet):
    joined = threading.Event()
    failures = [RuntimeError("the node went away")]

    def then(_: Any) -> None:
        if failures:
            raise failures.pop()
        joined.set()

    membership = Membership(Settings())
    membership.join(then)
    assert joined.wait(30.0)
    membership.close()


def test_nobody_tries_any_more_after_the_end(fleet):
    fleet.there = False
    membership = Membership(Settings())
    membership.join(lambda _: None)
    membership.close()
    for thread in threading.enumerate():
        if thread.name == "kvfleet-join":
            thread.join(30.0)
            assert not thread.is_alive()


def test_log_lines_look_like_vllms(monkeypatch):
    ours, theirs = logging.getLogger("kvfleet"), logging.getLogger("vllm")
    connectors = logging.getLogger("kvfleet.connectors")
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")
    for logger in (ours, theirs, connectors):
        for name in ("handlers", "propagate", "level"):
            monkeypatch.setattr(logger, name, getattr(logger, name))
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    theirs.handlers = [handler]
    theirs.setLevel(logging.INFO)
    Membership(Settings())
    connectors.info("joined")
    ours.getChild("storing").info("one of thousands")
    ours.getChild("client").warning("trouble")
    assert lines == ["INFO joined", "WARNING trouble"]
    logging.getLogger().handlers = [handler]
    ours.handlers = []
    Membership(Settings())
    assert ours.handlers == [], "this process has logging of its own"

"""What clients are asked, on its way into a trace."""

from __future__ import annotations

import fcntl
import io
import os
import time
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from kvfleet.cli.main import app
from kvfleet.cli.recorded import Told, TraceBook
from kvfleet.errors import ConfigError
from kvfleet.node import recording
from kvfleet.node.recording import ALIVE_S, Asked, Recorder, Recording, RecordReply, read_asked
from kvfleet.sim.trace import load_trace

ME, OTHER = b"m" * 16, b"o" * 16
KEYS = bytes(range(48))


@pytest.fixture
def arena(tmp_path):
    return SimpleNamespace(path=tmp_path / "arena")


@pytest.fixture
def manager(tmp_path):
    return Recording(tmp_path)


def begun(manager):
    assert manager.turn(ME, time.monotonic(), ends=False) == RecordReply()


def asked_since(manager, *, ends=False):
    reply = manager.turn(ME, time.monotonic(), ends=ends)
    assert not reply.problem
    return list(read_asked(reply.packed))


def test_what_is_asked_while_it_is_recorded(arena, manager):
    begun(manager)
    one, shard = Recorder(16), Recorder(16, shard=1)
    one.note(arena, 5, KEYS, 50)
    shard.note(arena, 5, KEYS, 50)
    one.note(arena, 6, KEYS[:16])
    one.note(arena, 7, b"", 3)
    one.note(None, 8, KEYS)
    assert asked_since(manager) == [
        (Asked(5, 50, 16, KEYS), 0),
        (Asked(6, 16, 16, KEYS[:16]), 0),
        (Asked(7, 3, 16, b""), 0),
    ]
    one.note(arena, 9, KEYS)
    assert asked_since(manager, ends=True) == [(Asked(9, 48, 16, KEYS), 0)]
    one.note(arena, 10, KEYS)
    assert asked_since(manager, ends=True) == []
    assert not any(arena.path.parent.iterdir())


def test_nothing_is_written_while_nobody_records(arena, manager):
    """And for half a second nobody looks again."""
    recorder = Recorder(16)
    recorder.note(arena, 1, KEYS)
    begun(manager)
    recorder.note(arena, 2, KEYS)
    assert asked_since(manager) == []
    recorder._look_at = 0.0
    recorder.note(arena, 3, KEYS)
    assert asked_since(manager) == [(Asked(3, 48, 16, KEYS), 0)]


def test_a_recording_that_nobody_reads_has_ended(arena, manager):
    now = time.monotonic()
    manager.turn(ME, now - ALIVE_S, ends=False)
    recorder = Recorder(16)
    recorder.note(arena, 1, KEYS)
    assert (arena.path.parent / "recording").stat().st_size == 32
    assert manager.turn(OTHER, now, ends=False) == RecordReply(), "another may begin"
    manager.tend(now + 1)
    assert (arena.path.parent / "recording").exists()
    manager.tend(now + ALIVE_S)
    assert not any(arena.path.parent.iterdir())
    manager.tend(now)


def test_a_file_is_not_removed_while_another_takes_its_place(arena, manager):
    begun(manager)
    late = time.monotonic() + 2 * ALIVE_S
    with manager._lock:  # as a turn has it
        manager.tend(late)
        assert (arena.path.parent / "recording").exists()
    manager.tend(late)
    assert not (arena.path.parent / "recording").exists()


def test_one_records_at_a_time(arena, manager):
    begun(manager)
    Recorder(16).note(arena, 1, KEYS)
    assert manager.turn(OTHER, time.monotonic(), ends=True).problem == "somebody else records this fleet"
    assert asked_since(manager) == [(Asked(1, 48, 16, KEYS), 0)]


def test_what_has_no_room_is_counted(arena, manager, monkeypatch):
    monkeypatch.setattr(recording, "FILE_BYTES_MAX", 32 + 2 * len(Asked(0, 48, 16, KEYS).pack(0)))
    begun(manager)
    recorder = Recorder(16)
    for number in range(5):
        recorder.note(arena, number, KEYS)
    assert asked_since(manager) == [(Asked(number, 48, 16, KEYS), 0) for number in range(2)]
    recorder.note(arena, 5, KEYS)
    recorder.note(arena, 6, KEYS)
    assert asked_since(manager) == [(Asked(5, 48, 16, KEYS), 3), (Asked(6, 48, 16, KEYS), 0)]


def test_a_fault_of_the_file_is_a_loss(arena, manager, monkeypatch):
    begun(manager)
    recorder = Recorder(16)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        recorder.note(arena, 1, KEYS)
    recorder.note(arena, 2, KEYS)
    assert asked_since(manager) == [(Asked(2, 48, 16, KEYS), 1)]


def test_a_client_with_the_old_file_takes_the_new_one(arena, manager, monkeypatch):
    """It was replaced between opening and locking."""
    begun(manager)
    lock, turned = fcntl.flock, []

    def lock_late(fd, how):
        if not turned:
            turned.append(True)
            assert asked_since(manager) == []
        lock(fd, how)

    recorder = Recorder(16)
    monkeypatch.setattr(fcntl, "flock", lock_late)
    recorder.note(arena, 1, KEYS)
    assert asked_since(manager) == [(Asked(1, 48, 16, KEYS), 0)]


@pytest.mark.parametrize("cut", [1, 20, 40, 71])
def test_what_was_half_written_is_counted(arena, manager, cut):
    begun(manager)
    recorder = Recorder(16)
    recorder.note(arena, 1, KEYS)
    recorder.note(arena, 2, KEYS)
    packed = manager.turn(ME, time.monotonic(), ends=True).packed
    assert list(read_asked(packed[:-cut])) == [(Asked(1, 48, 16, KEYS), 0), (None, 1)]
    assert list(read_asked(b"\0" * 30)) == [(None, 1)]


def packed_of(tmp_path, *asked, token_bytes=0):
    arena, manager, recorder = SimpleNamespace(path=tmp_path / "arena"), Recording(tmp_path), {}
    begun(manager)
    for block_tokens, *rest in asked:
        recorder.setdefault(block_tokens, Recorder(block_tokens, token_bytes=token_bytes)).note(arena, *rest)
    return manager.turn(ME, time.monotonic(), ends=True).packed


def test_a_trace_of_several_nodes(tmp_path):
    """In the order of times, with equal ids for equal keys, and nothing that a key can be known by."""
    other = KEYS[:16] + bytes(16)
    first = packed_of(tmp_path, (16, 3_000_000_000, other, 40), (32, 3_500_000_000, KEYS, 0))
    second = packed_of(tmp_path, (16, 2_500_000_000, KEYS, 50), (16, 900_000_000, KEYS[:16], 0))
    traces = []
    for name in ("one", "two"):
        path = tmp_path / name
        with path.open("w") as file:
            book = TraceBook(file, 1_000_000_000)
            book.write([first, second])
            book.write([])
        told = book.told
        assert (told.requests, told.blocks, told.lost, told.other) == (3, 6, 0, 1)
        assert told.num_bytes == path.stat().st_size
        assert KEYS[:8].hex() not in path.read_text()
        traces.append(path.read_text())
        trace = load_trace(path)
        assert trace.block_tokens == 16
        assert [(one.time_s, one.keys, one.prompt_tokens) for one in trace.requests] == [
            (0.0, (0,), 16),
            (1.5, (0, 1, 2), 50),
            (2.0, (0, 3), 40),
        ]
    assert traces[0] != traces[1], "each recording has a salt of its own"


def test_a_trace_is_of_tokens_of_one_size(tmp_path):
    small, large = (packed_of(tmp_path, (16, at, KEYS, 50), token_bytes=at) for at in (300, 400))
    path = tmp_path / "one"
    with path.open("w") as file:
        book = TraceBook(file, 0)
        book.write([large, small])
    assert (book.told.requests, book.told.other) == (1, 1)
    assert load_trace(path).token_bytes == 300


def test_losses_are_told():
    book = TraceBook(io.StringIO(), 0)
    book.write([b"torn"])
    assert (book.told.requests, book.told.lost, book.told.num_bytes) == (0, 1, 0)


def test_a_recording_that_fails_leaves_no_file(tmp_path, monkeypatch):
    class Refused:
        told = Told()

        def __init__(self, *_: object) -> None:
            pass

        def turn(self, *, ends: bool = False) -> None:
            raise ConfigError("", "somebody else records this fleet")

    monkeypatch.setattr("kvfleet.operating.join", lambda *_, **__: None)
    monkeypatch.setattr("kvfleet.cli.recorded.FleetRecording", Refused)
    path = tmp_path / "trace.jsonl"
    done = CliRunner().invoke(app, ["record", str(path)])
    assert (done.exit_code, "somebody else records" in done.stderr) == (1, True)
    assert not path.exists(), "else it could not be tried again"

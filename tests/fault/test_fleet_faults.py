"""A fleet under faults: right bytes or a counted miss, within the deadline, and nothing left over."""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvfleet.config import KIB, MIB
from kvfleet.core.block import split
from kvfleet.errors import DirectoryUnavailableError, TierUnavailableError
from kvfleet.node.messages import Miss, Outcome, Source
from tests.conftest import wait_for
from tests.rig import Rig, after, delayed, failing, hanging
from tests.workload import block, empty, kv, load, model, prompt, store

SPEC = model()
QUICK: dict[str, Any] = {
    "window_bytes_min": 128 * KIB, "window_bytes_max": 256 * KIB,
    "lookup_timeout_s": 0.3, "load_timeout_s": 1.0, "store_timeout_s": 1.0, "attach_timeout_s": 0.5,
    "holder_timeout_s": 0.3, "shared_timeout_s": 0.5,
}  # fmt: skip
AWAY = failing(TierUnavailableError("dram", "away"))
HANG_S = 8.0  # what nobody may wait for, however busy the machine


@pytest.fixture(autouse=True)
def _impatient_managers(monkeypatch):
    """Managers give the directory up sooner than they would."""
    for module in ("publishing", "saving", "writers"):
        monkeypatch.setattr(f"kvfleet.node.{module}.CALL_TIMEOUT_S", 0.3)
    monkeypatch.setattr("kvfleet.node.publishing._RETRY_S", 0.05)


@contextmanager
def soon():
    """What is done inside does not wait for a hanging call beyond deadlines of about a second."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < HANG_S


def recover(rig):
    """End the faults, and wait until the managers have reached the directory and each other."""
    rig.faults.clear()
    for number in rig.managers:
        assert rig.run(rig.part(number).publisher.flush(20))
        wait_for(lambda number=number: not rig.status(number).avoided, "all answer again")


def blocks_of(*clients):
    """Blocks of all loads of clients, by outcome."""
    totals: Counter[Outcome] = Counter()
    for client in clients:
        totals.update(client.stats().blocks)
    return totals


# --- any call, lost, late or answered in vain

CALLS = [
    "directory.locate", "directory.apply", "directory.inventory", "0.attach", "0.reserve", "0.commit",
    "1.attach", "1.load", "1.step", "0.fetch", "0.window",
]  # fmt: skip
FAULTS = {"lost": AWAY, "hanging": hanging, "slow": delayed(0.1)}


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("name", CALLS)
def test_any_call_may_fail(arena_root, name, kind):
    fault = failing(DirectoryUnavailableError("away")) if kind == "lost" and "directory" in name else FAULTS[kind]
    with Rig(arena_root, 2, **QUICK) as rig:
        writer, reader = rig.client(SPEC), rig.client(SPEC, 1)
        for passing in (0, 1):
            tokens = prompt(10, passing)
            rig.faults[name] = after(passing, fault)
            with soon():
                writer.store(tokens, kv(SPEC, tokens)).wait(HANG_S)
                got = load(reader, tokens)
            if kind == "slow" and got.outcomes:
                assert len(tokens) == got
            recover(rig)
        asked = sum(client.stats().asked_blocks for client in (writer, reader))
        assert sum(blocks_of(writer, reader).values()) == asked
        if "attach" in name:
            time.sleep(1.0)  # a client asks a manager that did not answer again only after a pause
        tokens = prompt(10, 2)
        store(writer, tokens)
        assert load(reader, tokens) == len(tokens)
        store(reader, prompt(4, 3))
        assert load(writer, prompt(4, 3)) == 64


@pytest.mark.parametrize("name", ["0.reserve", "0.commit", "directory.apply", "directory.locate"])
@pytest.mark.parametrize("kind", ["lost", "hanging"])
def test_any_answer_may_be_lost(arena_root, name, kind):
    error = DirectoryUnavailableError("away") if "directory" in name else TierUnavailableError("dram", "away")
    with Rig(arena_root, 1, **QUICK) as rig:
        client, tokens = rig.client(SPEC), prompt(10)
        rig.faults[f"{name}:reply"] = failing(error) if kind == "lost" else hanging
        with soon():
            client.store(tokens, kv(SPEC, tokens)).wait(HANG_S)
            assert load(client, prompt(12)) in {0, 160}
        recover(rig)
        store(client, tokens)
        assert load(client, tokens) == 160


# --- holders


def three_nodes(arena_root, tokens, **settings) -> Rig:
    """A rig with a prefix on nodes 0 and 1, and in the shared tier if there is one; node 2 is to load it."""
    rig = Rig(arena_root, 3, **{**QUICK, "load_timeout_s": 3.0, **settings})
    for number in (0, 1):
        store(rig.client(SPEC, number), tokens)
        rig.run(rig.managers[number].flush(10))
    return rig


def first_asked(rig, hit):
    """The holder that node 2 will ask first."""
    return int(rig.part(2).peers.holders.order(hit.runs[0].nodes)[0], 16)


@pytest.mark.parametrize("passing", [0, 2, 4])
@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_the_next_holder_goes_on_where_one_stops(arena_root, how, passing):
    tokens = prompt(20)
    with three_nodes(arena_root, tokens) as rig:
        reader = rig.client(SPEC, 2)
        first = first_asked(rig, reader.lookup(tokens))
        second = 1 - first
        fault = rig.killing(first) if how == "dies" else hanging
        rig.faults[f"{first}.window"] = after(passing, fault)
        with soon():
            assert load(reader, tokens).outcomes == (Source.PEER,) * 20
        sent = rig.status(second).sent_bytes
        if passing:
            assert 0 < sent < 20 * SPEC.layout.block_bytes
        else:
            assert sent == 20 * SPEC.layout.block_bytes


def test_after_the_last_holder_comes_the_shared_tier(arena_root):
    tokens = prompt(20)
    with three_nodes(arena_root, tokens, shared_url=f"file://{arena_root / 'shared'}") as rig:
        reader = rig.client(SPEC, 2)
        hit = reader.lookup(tokens)
        rig.faults["0.window"] = after(3, rig.killing(0))
        rig.faults["1.window"] = hanging
        target = empty(SPEC, 20)
        with soon():
            got = reader.load(hit, target)
        assert np.array_equal(target, kv(SPEC, tokens))
        assert set(got.outcomes) <= {Source.PEER, Source.SHARED}
        assert got.outcomes[-1] is Source.SHARED
        assert sum(got.bytes_by_source.values()) == 20 * SPEC.layout.block_bytes


@pytest.mark.parametrize(("how", "miss"), [("dies", Miss.UNREACHABLE), ("hangs", Miss.TOO_SLOW)])
def test_without_any_source_left_the_rest_is_a_counted_miss(arena_root, how, miss):
    tokens = prompt(20)
    with three_nodes(arena_root, tokens) as rig:
        reader = rig.client(SPEC, 2)
        for number in (0, 1):
            rig.faults[f"{number}.window"] = after(2, rig.killing(number) if how == "dies" else hanging)
        with soon():
            got = load(reader, tokens)
        assert 0 < got < len(tokens)
        num_blocks = int(got) // 16
        assert got.outcomes == (Source.PEER,) * num_blocks + (miss,) + (Miss.BEHIND_MISS,) * (19 - num_blocks)
        assert got.miss is miss
        assert rig.status(2).loaded_blocks == {"peer": num_blocks, miss.value: 1}
        assert sum(blocks_of(reader).values()) == 20
        assert load(reader, prompt(num_blocks)).outcomes == (Source.DRAM,) * num_blocks


def test_what_the_holder_no_longer_has_was_evicted(arena_root):
    with Rig(arena_root, 2, delta_interval_s=2.0) as rig:
        writer, reader, tokens = rig.client(SPEC), rig.client(SPEC, 1), prompt(6)
        store(writer, tokens)
        hit = reader.lookup(tokens)
        assert hit.num_blocks == 6

        async def drop():
            for key in split(SPEC.keys(tokens))[4:]:
                rig.part(0).dram.drop(key)

        rig.run(drop())
        target = empty(SPEC, 6)
        assert reader.load(hit, target).outcomes == (*(Source.PEER,) * 4, Miss.EVICTED, Miss.BEHIND_MISS)


def test_a_holder_with_other_bytes_is_passed_over(arena_root):
    tokens = prompt(6)
    with three_nodes(arena_root, tokens) as rig:
        reader = rig.client(SPEC, 2)
        hit = reader.lookup(tokens)
        first = first_asked(rig, hit)
        arena = rig.part(first).home.arena
        record = next(record for record in arena.records.live() if record.depth == 3)
        arena.slot_view(record.offset, record.length)[77] ^= 1
        assert load(reader, tokens).outcomes == (Source.PEER,) * 6
        rig.kill(1 - first)
        other = model(name="another")  # no second holder: the bad copy is a miss
        assert other.keys(tokens) != SPEC.keys(tokens)
        assert load(rig.client(SPEC, 2), tokens) == 96
        arena.slot_view(record.offset, record.length)[77] ^= 1


def test_when_the_named_holders_fail_the_directory_is_asked_once_more(arena_root):
    with Rig(arena_root, 3, **QUICK) as rig:
        reader, tokens = rig.client(SPEC, 2), prompt(6)
        store(rig.client(SPEC), tokens)
        hit = reader.lookup(tokens)
        store(rig.client(SPEC, 1), tokens)
        asked = rig.calls["directory.locate"]
        rig.faults["0.window"] = AWAY
        assert reader.load(hit, empty(SPEC, 6)).outcomes == (Source.PEER,) * 6
        assert rig.status(1).sent_bytes == 6 * SPEC.layout.block_bytes
        assert rig.calls["directory.locate"] == asked + 1


# --- the directory


@pytest.mark.parametrize("kind", ["away", "hanging"])
def test_without_the_directory_a_lookup_finds_what_is_here(arena_root, kind):
    with Rig(arena_root, 2, **QUICK) as rig:
        writer, reader, tokens = rig.client(SPEC), rig.client(SPEC, 1), prompt(9)
        store(writer, tokens)
        store(reader, prompt(4))
        if kind == "away":
            rig.stop_directory()
        else:
            rig.faults["directory.locate"] = rig.faults["directory.apply"] = hanging
        with soon():
            hit = reader.lookup(tokens)
        assert (hit.num_blocks, hit.fault) == (4, Miss.DIRECTORY_UNAVAILABLE)
        assert load(reader, prompt(4)) == 64
        assert reader.stats().faults == {Miss.DIRECTORY_UNAVAILABLE: 1}
        other = prompt(3, 1)
        with soon():
            result = reader.store(other, kv(SPEC, other)).wait(HANG_S)
        assert (result.stored, result.published, result.dropped) == (3, False, 0)
        assert load(reader, other) == 48
        if kind == "away":
            rig.start_directory()
        recover(rig)
        store(writer, prompt(2, 2))
        store(reader, prompt(2, 3))
        assert load(reader, tokens) == 9 * 16  # its view is back, by inventories
        assert load(writer, other) == 48


# --- the manager


@pytest.mark.parametrize("kind", ["lost", "hanging"])
def test_without_a_manager_nothing_is_found_and_nothing_hangs(arena_root, kind, wait_for_condition):
    with Rig(arena_root, 2, **QUICK) as rig:
        tokens = prompt(5)
        store(rig.client(SPEC), tokens)
        reader = rig.client(SPEC, 1)
        rig.faults["1.attach"] = FAULTS[kind]
        with soon():
            hit = reader.lookup(tokens)
            assert hit.fault is Miss.MANAGER_UNAVAILABLE
            got = reader.load(hit, empty(SPEC, hit.num_blocks))
            result = reader.store(tokens, kv(SPEC, tokens)).wait(HANG_S)
        assert set(got.outcomes) <= {Miss.MANAGER_UNAVAILABLE, Miss.BEHIND_MISS}
        assert len(got.outcomes) == hit.num_blocks
        assert (result.stored, result.dropped) == (0, 5)
        rig.faults.clear()
        wait_for_condition(lambda: load(reader, tokens) == 80, "the client asks again after a pause")


def test_a_lookup_does_not_wait_for_a_store_that_waits_for_the_manager(arena_root, wait_for_condition):
    with Rig(arena_root, 1, **{**QUICK, "attach_timeout_s": 60.0, "store_timeout_s": 60.0}) as rig:
        client, tokens = rig.client(SPEC), prompt(2)
        rig.faults["0.attach"] = hanging
        task = client.store(tokens, kv(SPEC, tokens))
        wait_for_condition(lambda: rig.calls["0.attach"], "the store has asked for the arena")
        with soon():
            for _ in range(30):
                assert client.lookup(tokens).fault is Miss.MANAGER_UNAVAILABLE
            client.close(0.1)
            client._node.close(0.1)
        assert not task.done


def test_a_short_deadline_bounds_the_attaching_too(arena_root):
    with Rig(arena_root, 2, **{**QUICK, "lookup_timeout_s": 60.0}) as rig:
        tokens = prompt(2)
        store(rig.client(SPEC, 1), tokens)
        hit = rig.client(SPEC, 1).lookup(tokens)
        rig.faults["0.attach"] = hanging
        with soon():
            assert rig.client(SPEC).load(hit, empty(SPEC, 2), 0.1).miss is Miss.MANAGER_UNAVAILABLE


def test_a_node_without_a_manager_is_logged_once_in_a_while(arena_root, caplog, monkeypatch):
    with Rig(arena_root, 1, **QUICK) as rig:
        client = rig.client(SPEC)
        rig.faults["0.attach"] = AWAY
        for _ in range(50):
            client.lookup(prompt(2))
        assert [record.levelname for record in caplog.records if record.name == "kvfleet.nearby"] == ["WARNING"]
        client._nearby._warn_at = 0.0  # some time later
        client.lookup(prompt(2))
        assert len([record for record in caplog.records if record.name == "kvfleet.nearby"]) == 2


def test_a_load_whose_stream_just_ends_is_a_counted_miss(arena_root, monkeypatch):
    with Rig(arena_root, 2, **QUICK) as rig:
        reader, tokens = rig.client(SPEC, 1), prompt(3)
        store(rig.client(SPEC), tokens)
        hit = reader.lookup(tokens)
        monkeypatch.setattr(reader._manager, "load", lambda request: (step for step in ()))
        got = reader.load(hit, empty(SPEC, 3))
        assert got.outcomes == (Miss.MANAGER_UNAVAILABLE, Miss.BEHIND_MISS, Miss.BEHIND_MISS)


def test_a_forked_child_drops_its_stores(arena_root, monkeypatch):
    with Rig(arena_root) as rig:
        client, tokens = rig.client(SPEC), prompt(2)
        store(client, tokens)
        pid = os.getpid()
        with monkeypatch.context() as patch:
            patch.setattr("os.getpid", lambda: pid + 1)
            result = client.store(tokens, kv(SPEC, tokens)).wait(5)
        assert (result.dropped, result.published, result.reason) == (2, False, "forked")


def test_local_blocks_are_read_while_the_manager_is_away(arena_root):
    with Rig(arena_root, 2, **QUICK) as rig:
        client, tokens = rig.client(SPEC), prompt(5)
        store(client, tokens)
        store(rig.client(SPEC, 1), prompt(9))
        rig.kill(0)
        assert load(client, tokens) == 80
        with soon():
            got = load(client, prompt(9))
        assert got.outcomes == (Source.DRAM,) * 5 + (Miss.MANAGER_UNAVAILABLE,) + (Miss.BEHIND_MISS,) * 3
        rig.start(0)
        assert load(client, prompt(9)) == 144


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_manager_lost_in_mid_load_costs_the_rest(arena_root, how):
    with Rig(arena_root, 2, **{**QUICK, "holder_timeout_s": 5.0}) as rig:
        reader, tokens = rig.client(SPEC, 1), prompt(20)
        store(rig.client(SPEC), tokens)
        rig.faults["0.window"] = after(3, hanging)  # not all can have come in the first step
        rig.faults["1.step"] = after(1, rig.killing(1) if how == "dies" else hanging)
        with soon():
            got = load(reader, tokens)
        assert got.miss is (Miss.MANAGER_UNAVAILABLE if how == "dies" else Miss.DEADLINE)
        assert 0 < got < len(tokens)
        rig.faults.clear()
        if how == "dies":
            rig.start(1)
        assert load(reader, tokens) == len(tokens)


def test_a_deadline_ends_a_load_that_gets_too_little(arena_root):
    with Rig(arena_root, 2, **{**QUICK, "holder_timeout_s": 5.0}) as rig:
        reader, tokens = rig.client(SPEC, 1), prompt(20)
        store(rig.client(SPEC), tokens)
        rig.faults["0.window"] = after(2, hanging)
        with soon():
            got = load(reader, tokens)
        assert got.miss is Miss.DEADLINE
        assert 0 < got < len(tokens)


# --- the shared tier


@contextmanager
def shared_only(arena_root, tokens, num_clients=1, **settings):
    """A rig whose shared tier has a prefix and whose nodes have nothing; with the objects' files, in order."""
    with Rig(arena_root, num_clients, shared_url=f"file://{arena_root / 'shared'}", **{**QUICK, **settings}) as rig:
        writer = rig.client(SPEC)
        store(writer, tokens)
        assert rig.run(rig.managers[0].flush(10)) == 0
        keys = split(SPEC.keys(tokens))

        async def drop():
            for key in keys:
                rig.part(0).dram.drop(key)
            assert await rig.part(0).publisher.flush(5)

        rig.run(drop())
        files = [next((arena_root / "shared").rglob(f"{key.hex()}.*")) for key in keys]
        yield rig, [rig.client(SPEC, number) for number in range(num_clients)], files


def flip(path: Path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], object], Miss]] = {
    "flipped": (flip, Miss.CORRUPT),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-100]), Miss.CORRUPT),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"x"), Miss.CORRUPT),
    "empty": (lambda path: path.write_bytes(b""), Miss.CORRUPT),
    "deleted": (Path.unlink, Miss.OBJECT_LOST),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_bad_object_is_a_counted_miss_and_gone_for_everyone(arena_root, kind, wait_for_condition):
    damage, miss = DAMAGE[kind]
    tokens = prompt(8)
    with shared_only(arena_root, tokens, 2) as (rig, (first, second), files):
        assert second.lookup(tokens).num_blocks == 8
        damage(files[5])
        got = load(first, tokens)
        assert got.outcomes == (Source.SHARED,) * 5 + (miss, *(Miss.BEHIND_MISS,) * 2)
        assert first.stats().blocks == {Source.SHARED: 5, miss: 1, Miss.BEHIND_MISS: 2}
        wait_for_condition(lambda: second.lookup(tokens).num_blocks == 5, "the entry is gone for the other client")
        assert second.lookup(tokens).missing is Miss.OBJECT_LOST
        assert not files[5].exists()
        assert load(second, tokens) == 80
        store(first, tokens)  # computed again, it comes back
        assert rig.run(rig.managers[0].flush(10)) == 0
        assert load(second, tokens) == 128


def test_an_object_with_another_blocks_bytes_is_a_miss(arena_root):
    with shared_only(arena_root, prompt(8)) as (_, (client,), files):
        files[3].write_bytes(files[4].read_bytes())
        assert load(client, prompt(8)).outcomes[:4] == (*(Source.SHARED,) * 3, Miss.CORRUPT)


def test_a_layout_that_cannot_be_read_costs_no_slot(arena_root, monkeypatch):
    def refuse(namespace):
        raise ValueError("no layout")

    with shared_only(arena_root, prompt(3)) as (rig, (client,), _):
        with monkeypatch.context() as patch:
            patch.setattr("kvfleet.node.sharedreads.layout_of", refuse)
            assert load(client, prompt(3)).miss is Miss.UNREACHABLE
        assert rig.status(0).reserved_blocks == rig.status(0).used_bytes == 0
        assert load(client, prompt(3)) == 48


def test_a_shared_tier_that_hangs_or_fails_is_a_counted_miss(arena_root, monkeypatch, wait_for_condition):
    tokens, go_on = prompt(8), threading.Event()
    with shared_only(arena_root, tokens) as (rig, (client,), _):
        files = rig.part(0).shared._objects._fs

        def hang(*args, **kwargs):
            go_on.wait(HANG_S)
            raise OSError("the mount is gone")

        with monkeypatch.context() as patch:
            patch.setattr(files, "open", hang)
            with soon():
                got = load(client, tokens)
            assert got.miss in {Miss.STORAGE_FAILED, Miss.DEADLINE}
            assert got.outcomes[1:] == (Miss.BEHIND_MISS,) * 7
            go_on.set()
            assert load(client, tokens).miss is Miss.STORAGE_FAILED
        wait_for_condition(lambda: not rig.status(0).avoided, "the shared tier answers")
        assert load(client, tokens) == 128


def test_a_shared_tier_that_hangs_does_not_stop_what_comes_from_peers(arena_root, monkeypatch):
    tokens, go_on = prompt(8), threading.Event()
    with shared_only(arena_root, tokens, 2, load_timeout_s=3.0, shared_timeout_s=3.0) as (rig, clients, _):
        other = prompt(8, 1)
        store(clients[1], other)
        assert rig.run(rig.managers[1].flush(10)) == 0
        with monkeypatch.context() as patch:
            patch.setattr(rig.part(0).shared._objects._fs, "open", lambda *args, **kwargs: go_on.wait(HANG_S))
            threads = [threading.Thread(target=load, args=(rig.client(SPEC), prompt(n))) for n in range(2, 8)]
            for thread in threads:
                thread.start()
            assert load(clients[0], other, 1.5).outcomes == (Source.PEER,) * 8
            go_on.set()
            for thread in threads:
                thread.join()


def test_stores_go_on_while_the_shared_tier_fails(arena_root):
    with Rig(arena_root, dram_bytes=MIB, shared_url=f"file://{arena_root}/shared", **QUICK) as rig:
        client = rig.client(SPEC)
        store(client, prompt(4))
        rig.run(rig.managers[0].flush(10))
        root = arena_root / "shared"
        root.rename(arena_root / "gone")
        root.write_bytes(b"no directory")
        try:
            for number in range(1, 9):
                tokens = prompt(4, number)
                with soon():
                    result = client.store(tokens, kv(SPEC, tokens)).wait(HANG_S)
                assert result.dropped == 0, (number, result)
                assert load(client, tokens) == 64
            status = rig.status(0)
            assert status.shared_problem
            assert status.lost_blocks > 0
        finally:
            root.unlink()
            (arena_root / "gone").rename(root)


def test_a_fill_that_raises_gives_its_slots_back(arena_root):
    with Rig(arena_root) as rig:
        client, tokens = rig.client(SPEC), prompt(40)
        keys = split(SPEC.keys(tokens))

        def fill(index, view):
            np.copyto(view, block(SPEC, keys[index]))
            if index == 35:
                raise ZeroDivisionError

        result = client.store(tokens, fill).wait(10)
        assert (result.stored, result.dropped, result.reason) == (32, 8, "ZeroDivisionError")
        assert rig.status(0).reserved_blocks == 0
        assert rig.status(0).used_bytes == 32 * SPEC.layout.block_bytes
        assert store(client, tokens).stored == 8


def test_without_more_threads_stores_are_dropped_and_lookups_go_on(arena_root, monkeypatch):
    def start(thread, begin=threading.Thread.start):
        if thread.name in {"kvfleet-store", "kvfleet-touch"}:
            raise RuntimeError("can't start new thread")
        begin(thread)

    with Rig(arena_root) as rig:
        client, tokens = rig.client(SPEC), prompt(2)
        with monkeypatch.context() as patch:
            patch.setattr("threading.Thread.start", start)
            result = client.store(tokens, kv(SPEC, tokens)).wait(10)
            assert (result.dropped, result.published, result.reason) == (2, False, "no_thread")
            hit = client.lookup(tokens)
            assert (hit.num_blocks, hit.fault) == (0, None)
        assert store(client, tokens).stored == 2
        assert load(client, tokens) == 32


def test_closing_a_client_finishes_its_stores(arena_root):
    with Rig(arena_root) as rig:
        client, tokens = rig.client(SPEC), prompt(8)
        keys, go_on = split(SPEC.keys(tokens)), threading.Event()

        def fill(index, view):
            assert go_on.wait(20)
            np.copyto(view, block(SPEC, keys[index]))

        tasks = [client.store(tokens, fill), client.store(prompt(4, 1), kv(SPEC, prompt(4, 1)))]
        closing = threading.Thread(target=client.close)
        closing.start()
        while not client._worker._closed:
            time.sleep(0.001)
        late = client.store(tokens, fill).wait(10)
        assert (late.dropped, late.reason) == (8, "closed")
        go_on.set()
        closing.join()
        assert [task.wait(0).stored for task in tasks] == [8, 4]
        assert load(rig.client(SPEC), tokens) == 128
        calls = dict(rig.calls)
        assert client.lookup(tokens).fault is Miss.MANAGER_UNAVAILABLE
        assert {name for name in rig.calls if rig.calls[name] != calls.get(name)} <= {
            "directory.locate",
            "directory.apply",
        }

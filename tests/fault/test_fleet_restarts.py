"""Managers, writers and the directory die and come back: contents stay, slots return, late messages change nothing."""

import dataclasses
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvfleet.config import KIB, MIB
from kvfleet.copying import checksum
from kvfleet.core.block import BlockKey, split
from kvfleet.core.directory import Applied, Delta
from kvfleet.core.placement import NewBlock
from kvfleet.errors import StaleEpochError, TierUnavailableError
from kvfleet.node.arena import Arena
from kvfleet.node.arenadir import FileLock
from kvfleet.node.dram import Incoming
from kvfleet.node.messages import CommitReply, CommitRequest, Miss, Source
from tests.fault.arena_process import running
from tests.rig import Rig, after
from tests.workload import block, kv, load, model, namespace, prompt, reserve_request, store

SPEC = model()
WRITER = 0xC1

# A client that was given slots and then hangs in mid-copy.
STUCK_WRITER = """
import sys, time
from pathlib import Path
from kvfleet.node.arena import Arena
from kvfleet.node.arenadir import FileLock
arena_path, lock_path = map(Path, sys.argv[1:])
arena = Arena.attach(arena_path)
lock = FileLock(lock_path)
assert lock.acquire()
print("ready", flush=True)
time.sleep(600)
"""


def stuck_writer(rig):
    directory = rig.part(0).home.directory
    lock = directory / "clients" / f"{WRITER:016x}"
    return running([sys.executable, "-c", STUCK_WRITER, directory / "arena", lock])


def reserve(rig, tokens, sequence=1, client_id=WRITER):
    return rig.run(rig.at_manager(0, "reserve", reserve_request(SPEC, tokens, client_id, sequence)))


def fill(rig, tokens, reply):
    """Write the granted slots; returns the request that commits them."""
    keys, arena = split(SPEC.keys(tokens)), rig.part(0).home.arena
    checksums = []
    for index, offset in zip(reply.indexes, reply.offsets, strict=True):
        view = arena.slot_view(offset, SPEC.layout.block_bytes)
        view[:] = block(SPEC, keys[index]).reshape(-1).view(np.uint8)
        checksums.append(checksum(view))
    return CommitRequest(WRITER, 1, reply.arena_id, reply.slots, reply.generations, tuple(checksums), 5.0)


def commit(rig, request):
    return rig.run(rig.at_manager(0, "commit", request))


# --- writers


def test_slots_of_a_killed_writer_come_back(arena_root, wait_for_condition):
    with Rig(arena_root, dram_bytes=MIB) as rig:
        with stuck_writer(rig) as writer:
            assert len(reserve(rig, prompt(16)).slots) == 16
            client = rig.client(SPEC)
            other = prompt(4, 1)
            assert client.store(other, kv(SPEC, other)).wait(10).reason == "no_room"
            for _ in range(3):  # as long as it lives they are its own, through a restart too
                rig.kill(0)
                rig.start(0)
                assert rig.status(0).reserved_blocks == 16
            writer.kill()
            wait_for_condition(lambda: rig.status(0).reserved_blocks == 0, "the slots are back")
            assert rig.status(0).used_bytes == 0
        store(client, other)
        assert load(client, other) == 64


def test_a_writer_in_mid_copy_commits_after_a_restart_of_the_manager(arena_root):
    with Rig(arena_root) as rig:
        client, tokens = rig.client(SPEC), prompt(8)
        store(client, prompt(5, 1))
        epoch = rig.status(0).epoch
        keys = split(SPEC.keys(tokens))
        writing, go_on = threading.Event(), threading.Event()

        def slow(index, view):
            np.copyto(view, block(SPEC, keys[index]))
            if index == 4:
                writing.set()
                assert go_on.wait(20)

        task = client.store(tokens, slow)
        assert writing.wait(10)
        rig.kill(0)
        rig.start(0)
        others = [rig.client(SPEC) for _ in range(3)]
        for number, other in enumerate(others):  # they get other slots
            store(other, prompt(20, 2 + number))
        go_on.set()
        result = task.wait(20)
        assert (result.stored, result.dropped) == (8, 0)
        assert load(client, tokens) == 128
        assert load(client, prompt(5, 1)) == 80
        assert rig.status(0).epoch > epoch


def test_a_writer_keeps_its_slots_if_somebody_removes_the_directory(arena_root, monkeypatch, wait_for_condition):
    with Rig(arena_root) as rig:
        client, tokens, node = rig.client(SPEC), prompt(8), rig.part(0)
        keys, tended = split(SPEC.keys(tokens)), []
        writing, go_on = threading.Event(), threading.Event()

        def slow(index, view):
            np.copyto(view, block(SPEC, keys[index]))
            writing.set()
            assert go_on.wait(20)

        task = client.store(tokens, slow)
        assert writing.wait(10)
        shutil.rmtree(node.home.directory)
        monkeypatch.setattr(node.recording, "tend", tended.append)
        wait_for_condition(lambda: len(tended) > 2, "the node looked after its clients", 10)
        assert rig.status(0).reserved_blocks == 8
        go_on.set()
        assert task.wait(20).stored == 8
        assert load(client, tokens) == 128


def test_a_commit_waits_for_a_manager_that_is_away(arena_root, wait_for_condition):
    with Rig(arena_root) as rig:
        client, tokens = rig.client(SPEC), prompt(8)
        rig.faults["0.commit"] = rig.killing(0)
        task = client.store(tokens, kv(SPEC, tokens))
        wait_for_condition(lambda: not rig.managers, "the manager is gone")
        rig.faults.clear()
        rig.start(0)
        assert task.wait(20).stored == 8
        assert load(client, tokens) == 128


def test_late_and_repeated_messages_change_nothing(arena_root):
    with Rig(arena_root) as rig, stuck_writer(rig):
        first, second = prompt(4), prompt(4, 1)
        reply = reserve(rig, first, 3)
        with pytest.raises(TierUnavailableError, match="late"):
            reserve(rig, first, 3)
        with pytest.raises(TierUnavailableError, match="late"):
            reserve(rig, second, 2)
        assert rig.status(0).reserved_blocks == 4
        request = fill(rig, first, reply)
        assert commit(rig, request) == CommitReply(4, published=True)
        used = rig.status(0)
        assert commit(rig, request) == CommitReply(4, published=True)
        newer = reserve(rig, second, 5)
        late_return = CommitRequest(WRITER, 4, reply.arena_id, (), (), (), 1.0)
        commit(rig, late_return)  # of a reservation before this one
        assert rig.status(0).reserved_blocks == 4
        foreign = CommitRequest(WRITER, 5, bytes(16), newer.slots, newer.generations, (0,) * 4, 1.0)
        assert commit(rig, foreign) == CommitReply(0, published=False)
        wrong = CommitRequest(
            WRITER, 5, newer.arena_id, newer.slots, tuple(g + 2 for g in newer.generations), (0,) * 4, 1.0
        )
        assert commit(rig, wrong).committed == 0
        assert rig.part(0).dram.num_reserved == 4
        commit(rig, CommitRequest(WRITER, 5, newer.arena_id, (), (), (), 1.0))
        assert rig.status(0).reserved_blocks == 0
        assert rig.status(0).used_bytes == used.used_bytes
        assert commit(rig, fill(rig, second, newer)).committed == 0  # given back before
        assert load(rig.client(SPEC), first) == 64


# --- managers


def test_a_restarted_manager_finds_all_blocks(arena_root):
    with Rig(arena_root, 2) as rig:
        client, reader = rig.client(SPEC), rig.client(SPEC, 1)
        specs = [SPEC, model(96, name="b")]
        for spec in specs:
            for number in range(5):
                store(rig.client(spec), prompt(6, number))
        before = rig.status(0)
        rig.kill(0)
        rig.start(0)
        now = rig.status(0)
        assert (now.blocks, now.used_bytes) == (before.blocks, before.used_bytes)
        assert now.epoch > before.epoch
        assert load(client, prompt(6)) == 96
        assert rig.run(rig.part(0).publisher.flush(10))
        for spec in specs:
            for number in range(5):
                assert load(rig.client(spec, 1), prompt(6, number)).outcomes == (Source.PEER,) * 6
        assert load(reader, prompt(6)) == 96


def test_slots_that_a_dead_manager_was_writing_come_back(arena_root):
    with Rig(arena_root) as rig:
        client, tokens = rig.client(SPEC), prompt(6)
        store(client, tokens)
        used = rig.status(0).used_bytes
        blocks = [
            Incoming(NewBlock(BlockKey(key), 0, None, SPEC.layout.block_bytes), 0)
            for key in split(SPEC.keys(prompt(9, 1)))
        ]

        async def begin():
            return rig.part(0).dram.reserve(blocks, namespace(SPEC), 0)

        assert len(rig.run(begin()).granted) == 9
        assert rig.status(0).used_bytes == used + 9 * SPEC.layout.block_bytes
        rig.kill(0)
        rig.start(0)
        assert rig.status(0).used_bytes == used
        assert load(client, tokens) == 96
        store(client, prompt(9, 1))


def test_a_manager_killed_at_any_step_of_a_load_leaves_whole_blocks(arena_root):
    small = {"window_bytes_min": 128 * KIB, "window_bytes_max": 256 * KIB}
    with Rig(arena_root, 2, dram_bytes=2 * MIB, **small) as rig:
        writer, reader = rig.client(SPEC), rig.client(SPEC, 1)
        for passing in range(6):
            tokens = prompt(12, passing)
            store(writer, tokens)
            rig.faults["0.window" if passing % 2 else "1.step"] = after(passing, rig.killing(1))
            assert 0 <= load(reader, tokens, 2.0) <= len(tokens)
            rig.faults.clear()
            if 1 not in rig.managers:
                rig.start(1)
            assert load(reader, tokens) == len(tokens)
            rig.check()


def test_a_client_follows_its_node_to_a_new_arena(arena_root):
    with Rig(arena_root) as rig:
        reader, writer, tokens = rig.client(SPEC), rig.client(SPEC), prompt(6)
        store(writer, tokens)
        assert load(reader, tokens) == 96
        arena = rig.part(0).home.arena
        rig.kill(0)
        assert load(reader, tokens) == 96
        arena.unlink()
        assert load(reader, tokens) == 96  # what is mapped is still there
        rig.start(0)
        assert rig.run(rig.part(0).publisher.flush(10))
        assert reader.lookup(tokens).num_blocks == 0
        assert store(writer, tokens).stored == 6
        assert FileLock.held(rig.part(0).home.directory / "clients" / f"{writer._node.client_id:016x}")
        assert load(reader, tokens) == 96
        assert reader._node.attach(1.0).arena_id == rig.part(0).home.arena.arena_id != arena.arena_id


def test_an_arena_replaced_between_attach_and_reserve(arena_root):
    with Rig(arena_root) as rig:
        client, tokens = rig.client(SPEC), prompt(20)
        attach = client._node.attach

        def attach_too_early(*args, **kwargs):
            client._node.attach = attach
            arena = attach(*args, **kwargs)
            rig.kill(0)
            arena.unlink()
            rig.start(0)
            return arena

        client._node.attach = attach_too_early
        assert store(client, tokens).stored == 20
        assert rig.calls["0.attach"] == rig.calls["0.reserve"] == 2
        assert load(client, tokens) == 320


def test_an_arena_that_is_elsewhere_now(arena_root):
    with Rig(arena_root) as rig:
        reader, writer, tokens = rig.client(SPEC), rig.client(SPEC), prompt(2)
        store(writer, tokens)
        assert load(reader, tokens) == 32
        rig.run(rig.managers.pop(0).shutdown())
        assert load(reader, tokens) == 32  # what is mapped is still there
        rig.config = dataclasses.replace(rig.config, arena_root=str(arena_root / "other"))
        (arena_root / "other").mkdir()
        rig.start(0)
        tokens = prompt(2, 1)
        store(rig.client(SPEC), tokens)
        assert rig.run(rig.part(0).publisher.flush(10))
        asked = rig.calls["0.attach"]
        assert load(reader, tokens).miss is Miss.EVICTED
        assert rig.calls["0.attach"] == asked
        assert load(reader, tokens) == 32
        assert rig.calls["0.attach"] == asked + 1


def test_an_arena_replaced_while_it_is_mapped(arena_root, monkeypatch):
    with Rig(arena_root) as rig:
        client, tokens, attach = rig.client(SPEC), prompt(2), Arena.attach

        def attach_and_replace(*args):
            arena = attach(*args)
            rig.kill(0)
            arena.unlink()
            rig.start(0)
            return arena

        with monkeypatch.context() as patch:
            patch.setattr("kvfleet.attachment.Arena.attach", attach_and_replace)
            client.attach()
        assert client._node.stale
        assert store(client, tokens).stored == 2
        assert not client._node.stale
        assert load(client, tokens) == 32


def test_a_shutdown_during_a_load_leaves_nothing(arena_root):
    with Rig(arena_root, 2, window_bytes_min=128 * KIB, window_bytes_max=256 * KIB) as rig:
        tokens = prompt(24)
        store(rig.client(SPEC), tokens)
        reader = rig.client(SPEC, 1)
        begun, go_on = threading.Event(), threading.Event()

        def take(index, view):
            begun.set()
            assert go_on.wait(20)

        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(lambda: reader.load(reader.lookup(tokens), take, 5.0))
            assert begun.wait(10)
            rig.run(rig.managers[1].shutdown())
            go_on.set()
            assert loading.result(20) <= len(tokens)  # all, if the last window had come before
        del rig.managers[1]
        rig.start(1)
        assert load(reader, tokens) == len(tokens)


# --- the directory


def test_a_directory_that_starts_empty_refills_itself(arena_root, wait_for_condition):
    with Rig(arena_root, 3, shared_url=f"file://{arena_root / 'shared'}", inventory_page_records=4) as rig:
        writer, tokens = rig.client(SPEC), prompt(9)
        store(writer, tokens)
        store(rig.client(SPEC, 1), prompt(5))
        assert rig.run(rig.managers[0].flush(10)) == 0
        assert rig.run(rig.managers[1].flush(10)) == 0

        async def drop():
            for key in split(SPEC.keys(tokens))[7:]:
                rig.part(0).dram.drop(key)

        rig.run(drop())
        assert rig.run(rig.part(0).publisher.flush(10))
        reader = rig.client(SPEC, 2)
        before = reader.lookup(tokens)
        assert before.num_blocks == 9
        assert [len(run.nodes) for run in before.runs] == [2, 1, 0]
        for _ in range(2):
            rig.start_directory()
            wait_for_condition(lambda: reader.lookup(tokens).num_blocks == 9, "the directory has refilled itself")
        wait_for_condition(lambda: len(reader.lookup(tokens).runs) == 3, "from both nodes")
        assert all(run.shared for run in reader.lookup(tokens).runs)
        assert load(reader, tokens) == 144


def test_a_lister_that_dies_lists_again(arena_root, wait_for_condition):
    shared = f"file://{arena_root / 'shared'}"
    with Rig(arena_root, shared_url=shared) as rig:
        store(rig.client(SPEC), prompt(6))
        assert rig.run(rig.managers[0].flush(10)) == 0
    with Rig(arena_root, shared_url=shared) as rig:
        rig.part(0).endpoint.works.clear()  # it is at it, and dies
        rig.kill(0)
        rig.start(0)
        wait_for_condition(lambda: rig.run(rig.at_directory("status")).shared_listed, "the shared tier is listed")
        assert load(rig.client(SPEC), prompt(6)) == 96


def test_a_manager_of_an_earlier_life_is_not_believed(arena_root):
    with Rig(arena_root, 2) as rig:
        writer, reader, tokens = rig.client(SPEC), rig.client(SPEC, 1), prompt(6)
        store(writer, tokens)
        zombie = rig.part(0)
        rig.kill(0)
        rig.start(0)
        store(writer, prompt(3, 1))

        async def speak():
            delta = Delta(zombie.home.node_id, 1, 99, removed=b"".join(zombie.dram.holdings.snapshot()))
            reply = await rig.at_directory("apply", delta)
            with pytest.raises(StaleEpochError):
                await zombie.publisher._send()
            return reply.applied

        assert rig.run(speak()) is Applied.STALE_EPOCH
        assert load(reader, tokens).outcomes == (Source.PEER,) * 6


def test_the_arena_goes_with_its_node_whatever_takes_long(arena_root, tmp_path, monkeypatch):
    """Whoever stops a fleet kills its managers after some seconds: what is left then nobody frees."""
    reading, end = threading.Event(), threading.Event()

    def read_long(*_: object) -> None:
        reading.set()
        end.wait()

    monkeypatch.setattr("kvfleet.node.catalog.CatalogBook.open", read_long)
    monkeypatch.setattr("kvfleet.node.node._WORKS_TIMEOUT_S", 0.05)
    monkeypatch.setattr("kvfleet.node.node._FINISH_TIMEOUT_S", 0.3)
    with Rig(arena_root, shared_url=f"file://{tmp_path}/shared") as rig:
        assert reading.wait(10)
        node = rig.part(0)
        store(rig.client(SPEC), prompt(2))
        rig.run(rig.managers.pop(0).shutdown())
        assert not node.home.directory.exists()
        assert node.home.arena.records.live()  # it is mapped as long as something may still use it
        end.set()

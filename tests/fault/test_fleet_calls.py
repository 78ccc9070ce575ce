"""What a fleet does when all is well: which calls it makes, where bytes come from, what fits into an arena."""

import asyncio
import dataclasses
import itertools
import re
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvfleet.config import KIB, MIB
from kvfleet.core.block import split
from kvfleet.node import landing
from kvfleet.node.messages import LoadProgress, Miss, Source
from tests.conftest import wait_for
from tests.rig import Rig, after
from tests.workload import block, empty, fetch_request, kv, load, load_request, model, prompt, store

SPEC = model()
SMALL_WINDOWS = {"window_bytes_min": 128 * KIB, "window_bytes_max": 256 * KIB}


TOLD = {"directory.apply", "directory.inventory"}


def calls_during(rig, work):
    """Calls made while some work is done, but for what managers tell the directory."""
    before = rig.calls.copy()
    work()
    return {
        name: n for name, n in (rig.calls - before).items() if name not in ("directory.apply", "directory.inventory")
    }


def test_a_store_is_two_calls_and_a_local_load_none(arena_root):
    with Rig(arena_root) as rig:
        client, tokens = rig.client(SPEC), prompt(6)
        client.attach()
        assert calls_during(rig, lambda: store(client, tokens)) == {"0.reserve": 1, "0.commit": 1}
        made = dict(client.stats().calls)
        assert calls_during(rig, lambda: load(client, tokens)) == {}
        assert client.stats().calls == made == {"attach": 1, "reserve": 1, "commit": 1}
        assert client.stats().blocks == {Source.DRAM: 6}
        assert calls_during(rig, lambda: store(client, tokens)) == {}  # all there


def test_any_other_lookup_asks_the_directory_once_and_any_other_load_the_manager_once(arena_root):
    with Rig(arena_root, 2) as rig:
        writer, reader = rig.client(SPEC), rig.client(SPEC, 1)
        writer.attach()
        reader.attach()
        store(writer, prompt(12))
        store(reader, prompt(5))
        assert calls_during(rig, lambda: writer.lookup(prompt(3, number=1))) == {"directory.locate": 1}
        calls = calls_during(rig, lambda: load(reader, prompt(12)))
        assert {name: calls[name] for name in ("directory.locate", "1.load", "0.fetch")} == {
            "directory.locate": 1,
            "1.load": 1,
            "0.fetch": 1,
        }
        assert reader.stats().blocks == {Source.DRAM: 5, Source.PEER: 7}
        assert rig.status(0).sent_bytes == 7 * SPEC.layout.block_bytes
        assert rig.status(1).loaded_bytes == {"peer": 7 * SPEC.layout.block_bytes}
        assert calls_during(rig, lambda: load(reader, prompt(12))) == {}  # loading left a copy
        assert reader.stats().num_bytes == {
            Source.DRAM: 17 * SPEC.layout.block_bytes,
            Source.PEER: 7 * SPEC.layout.block_bytes,
        }


def test_a_local_head_a_remote_middle_and_a_local_tail_are_one_hit(arena_root):
    with Rig(arena_root, 2) as rig:
        writer, reader, tokens = rig.client(SPEC), rig.client(SPEC, 1), prompt(9)
        store(writer, tokens)
        store(reader, prompt(3))
        whole = kv(SPEC, tokens)
        tail = reader.store(tokens, whole[:, :, :, 6 * 16 :], start_block=6).wait(10)
        assert tail.stored == 3
        hit = reader.lookup(tokens)
        assert [(run.start, run.stop, run.local) for run in hit.runs] == [(0, 3, True), (3, 6, False), (6, 9, False)]
        got = load(reader, tokens)
        assert got.outcomes == (Source.DRAM,) * 3 + (Source.PEER,) * 3 + (Source.DRAM,) * 3


@pytest.mark.parametrize("spec", [SPEC, model(dtype="float32")], ids=["bfloat16", "float32"])
def test_sources_and_targets_may_be_strided_or_functions(arena_root, spec):
    with Rig(arena_root) as rig:
        client = rig.client(spec)
        for number, order in enumerate(((0, 1, 2, 3, 4), (3, 0, 1, 2, 4), (4, 2, 3, 1, 0))):
            tokens = prompt(4, number)
            whole = kv(spec, tokens)
            source = np.ascontiguousarray(whole.transpose(order)).transpose(np.argsort(order))
            assert client.store(tokens, source).wait(10).stored == 4
            target = np.zeros([2 * n for n in np.take(whole.shape, order)], whole.dtype)
            target = target[tuple(slice(None, None, 2) for _ in order)].transpose(np.argsort(order))
            assert client.load(client.lookup(tokens), target) == len(tokens)
            assert np.array_equal(target, whole)
        tokens, taken = prompt(4, 9), {}
        keys = split(spec.keys(tokens))
        client.store(tokens, lambda index, view: np.copyto(view, block(spec, keys[index]))).wait(10)

        def take(index, view):
            assert not view.flags.writeable
            taken[index] = view.copy()

        assert client.load(client.lookup(tokens), take) == len(tokens)
        assert list(taken) == [0, 1, 2, 3]
        for index, key in enumerate(keys):
            assert np.array_equal(taken[index], block(spec, key))


def test_a_lost_arena_is_refilled_from_the_shared_tier(arena_root, wait_for_condition):
    shared = f"file://{arena_root / 'shared'}"
    with Rig(arena_root, 2, shared_url=shared) as rig:
        client, other, tokens = rig.client(SPEC), rig.client(SPEC, 1), prompt(12)
        store(client, tokens)
        assert rig.run(rig.managers[0].flush(10)) == 0
        rig.kill(0)
        next(arena_root.glob("kvfleet-*/*-0*0/arena")).unlink()
        rig.dead.add(rig.node_id(0))
        wait_for_condition(
            lambda: not rig.run(rig.at_directory("locate", SPEC.keys(tokens), 0, 1)).runs[0].nodes, "node 0 is out"
        )
        assert load(other, tokens).outcomes == (Source.SHARED,) * 12
        rig.dead.clear()
        rig.start(0)
        assert load(client, tokens).bytes_by_source == {Source.PEER: 12 * SPEC.layout.block_bytes}
    # The whole fleet is gone: a new one finds all of it by listing.
    with Rig(arena_root, shared_url=shared) as rig:
        wait_for_condition(lambda: rig.run(rig.at_directory("status")).shared_listed, "the shared tier is listed")
        client = rig.client(SPEC)
        assert client.lookup(tokens).num_blocks == 12
        assert load(client, tokens).outcomes == (Source.SHARED,) * 12
        assert rig.status(0).loaded_bytes == {"shared": 12 * SPEC.layout.block_bytes}


@pytest.mark.parametrize("where", ["peer", "shared"])
@pytest.mark.parametrize("resident", [0, 16], ids=["empty", "full"])
def test_a_prefix_larger_than_the_arena_passes_through(arena_root, where, resident):
    shared_url = f"file://{arena_root / 'shared'}" if where == "shared" else None
    with Rig(arena_root, 1, shared_url=shared_url, **SMALL_WINDOWS) as rig:
        tokens = prompt(100)
        store(rig.client(SPEC), tokens)
        if where == "shared":
            assert rig.run(rig.managers[0].flush(10)) == 0
        rig.config = dataclasses.replace(rig.config, dram_bytes=MIB)  # 16 blocks
        rig.start(1)
        if where == "shared":
            rig.kill(0)
        reader = rig.client(SPEC, 1)
        if resident:
            store(reader, prompt(resident))
        for _ in range(2):
            got = load(reader, tokens)
            assert got == len(tokens)
            assert {Source(where)} <= set(got.outcomes) <= {Source.DRAM, Source(where)}
            assert rig.status(1).used_bytes <= MIB


def test_loads_that_together_exceed_the_arena_do_not_wait_for_each_other(arena_root):
    with Rig(arena_root, 1, **SMALL_WINDOWS) as rig:
        prompts = [prompt(30, number) for number in range(4)]
        writer = rig.client(SPEC)
        for tokens in prompts:
            store(writer, tokens)
        rig.config = dataclasses.replace(rig.config, dram_bytes=MIB)
        rig.start(1)
        readers = [rig.client(SPEC, 1) for _ in prompts]
        with ThreadPoolExecutor(len(prompts)) as pool:
            assert list(pool.map(load, readers, prompts)) == [30 * 16] * 4


def anonymous_bytes():
    """Memory of this process that is neither a file's nor shared."""
    kib = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert kib is not None
    return int(kib.group(1)) * KIB


def test_64_mib_of_dram_serve_a_working_set_of_1_gib(arena_root):
    spec = model(block_kib=1024)
    with Rig(arena_root, dram_bytes=64 * MIB, shared_url=f"file://{arena_root / 'shared'}") as rig:
        client, peak = rig.client(spec), 0
        placement = rig.part(0).dram.placement
        before = anonymous_bytes()
        for number in range(32):
            tokens = prompt(32, number)
            keys = split(spec.keys(tokens))
            result = client.store(tokens, lambda i, view, keys=keys: np.copyto(view, block(spec, keys[i]))).wait(60)
            assert result.stored == 32
            assert placement.used_bytes <= 64 * MIB
            peak = max(peak, anonymous_bytes() - before)
        came = 0
        for number in range(32):
            tokens = prompt(32, number)
            keys = split(spec.keys(tokens))

            def take(index, view, keys=keys):
                nonlocal peak
                assert np.array_equal(view, block(spec, keys[index]))
                assert placement.used_bytes <= 64 * MIB
                peak = max(peak, anonymous_bytes() - before)

            came += client.load(client.lookup(tokens), take)
        assert came == 1024 * 16
        assert client.stats().num_bytes[Source.SHARED] >= 960 * MIB
        assert peak < 128 * MIB


def test_eight_loads_of_one_prefix_move_its_bytes_once(arena_root):
    with Rig(arena_root, 2, **SMALL_WINDOWS) as rig:
        tokens = prompt(24)
        store(rig.client(SPEC), tokens)
        readers = [rig.client(SPEC, 1) for _ in range(8)]
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(load, readers, [tokens] * 8)) == [len(tokens)] * 8
        assert rig.status(0).sent_bytes == 24 * SPEC.layout.block_bytes


@pytest.mark.parametrize("where", ["peer", "shared"])
def test_who_waits_for_an_abandoned_load_still_gets_its_blocks(arena_root, where):
    shared_url = f"file://{arena_root / 'shared'}" if where == "shared" else None
    with Rig(arena_root, 2, shared_url=shared_url, **SMALL_WINDOWS) as rig:
        tokens = prompt(24)
        store(rig.client(SPEC), tokens)
        if where == "shared":
            assert rig.run(rig.managers[0].flush(10)) == 0
            rig.kill(0)
        at_work, go_on = threading.Event(), threading.Event()

        def take(index, view):
            if index == 2:
                at_work.set()
                assert go_on.wait(20)
                raise KeyboardInterrupt  # the engine gives up in the middle

        starter = rig.client(SPEC, 1)
        with ThreadPoolExecutor(6) as pool:
            started = pool.submit(lambda: starter.load(starter.lookup(tokens), take))
            assert at_work.wait(10)
            others = [pool.submit(load, rig.client(SPEC, 1), tokens) for _ in range(5)]
            go_on.set()
            with pytest.raises(KeyboardInterrupt):
                started.result(20)
            assert [other.result(20) for other in others] == [len(tokens)] * 5
        if where == "peer":
            assert rig.status(0).sent_bytes <= 32 * SPEC.layout.block_bytes


def test_models_of_different_block_sizes_share_an_arena(arena_root):
    specs = [model(64), model(96, name="b"), model(1024, name="c")]
    with Rig(arena_root, 2, dram_bytes=6 * MIB) as rig:
        for number in range(4):
            for spec in specs:
                tokens = prompt(4, number)
                store(rig.client(spec), tokens)
                assert load(rig.client(spec), tokens) == 64
                assert load(rig.client(spec, 1), tokens) == 64
        assert rig.status(0).evicted_blocks > 0


def test_a_block_is_a_hit_only_with_all_its_shards(arena_root):
    spec, tokens = model(num_shards=2), prompt(6)
    with Rig(arena_root, 3) as rig:
        writers = [rig.client(spec, node, shard=node) for node in (0, 1)]
        readers = [rig.client(spec, 2, shard=shard) for shard in (0, 1)]
        store(writers[0], tokens)
        assert writers[0].lookup(tokens).num_blocks == 0
        assert readers[0].lookup(tokens).num_blocks == 0
        store(writers[1], prompt(4))
        for client in (*writers, *readers):
            assert client.lookup(tokens).num_blocks == 4
        assert load(writers[0], tokens).outcomes == (Source.DRAM,) * 4  # the other shard is elsewhere
        for reader in readers:
            assert load(reader, tokens).outcomes == (Source.PEER,) * 4
        for reader in readers:
            assert not any(run.nodes for run in reader.lookup(tokens).runs)
            assert load(reader, tokens).outcomes == (Source.DRAM,) * 4


def test_two_clients_that_store_the_same_blocks_at_once(arena_root):
    with Rig(arena_root) as rig:
        first, second, tokens = rig.client(SPEC), rig.client(SPEC), prompt(8)
        keys = split(SPEC.keys(tokens))
        writing, go_on = threading.Event(), threading.Event()

        def fill(index, view):
            np.copyto(view, block(SPEC, keys[index]))
            writing.set()
            assert go_on.wait(20)

        task = first.store(tokens, fill)
        assert writing.wait(10)
        assert (result := second.store(tokens, kv(SPEC, tokens)).wait(10)).already == 8, result
        assert second.load(second.lookup(tokens), empty(SPEC, 8), 0.0) == 0  # half-written is not readable
        go_on.set()
        assert task.wait(10).stored == 8
        assert load(second, tokens) == len(tokens)


@pytest.mark.parametrize("finishes", [True, False])
def test_the_next_turn_waits_for_the_blocks_of_this_one_as_long_as_they_are_being_written(arena_root, finishes):
    with Rig(arena_root) as rig:
        first, second, tokens = rig.client(SPEC), rig.client(SPEC), prompt(8)
        store(first, tokens[: 3 * 16])
        keys = split(SPEC.keys(tokens))
        writing, go_on = threading.Event(), threading.Event()

        def fill(index, view):
            np.copyto(view, block(SPEC, keys[index]))
            writing.set()
            assert go_on.wait(20)
            assert finishes, "the engine gives up"

        task = first.store(tokens, fill)
        assert writing.wait(10)
        hit = second.lookup(prompt(9))
        assert [(run.start, run.stop, run.local, run.pending) for run in hit.runs] == [
            (0, 3, True, False),
            (3, 8, False, True),
        ]
        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(load, second, tokens)
            wait_for(lambda: rig.calls["0.load"], "the load has begun")
            go_on.set()
            loaded = loading.result(20)
        assert task.wait(10).stored == (5 if finishes else 0)
        came = (Source.DRAM,) * 8 if finishes else (Source.DRAM,) * 3
        assert loaded.outcomes[: len(came)] == came
        assert loaded == len(came) * 16


def test_a_load_waits_for_a_client_that_is_writing_the_block(arena_root):
    with Rig(arena_root, 2, **SMALL_WINDOWS) as rig:
        writer, reader, tokens = rig.client(SPEC, 1), rig.client(SPEC, 1), prompt(8)
        store(rig.client(SPEC), tokens)
        keys = split(SPEC.keys(tokens))
        writing, go_on = threading.Event(), threading.Event()

        def fill(index, view):
            np.copyto(view, block(SPEC, keys[index]))
            writing.set()
            assert go_on.wait(20)

        task = writer.store(tokens, fill)
        assert writing.wait(10)
        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(load, reader, tokens)
            go_on.set()
            assert loading.result(20) == len(tokens)
        assert task.wait(10).stored == 8


def test_a_finished_store_lets_go_of_its_source(arena_root, wait_for_condition):
    with Rig(arena_root) as rig:
        client, tokens = rig.client(SPEC), prompt(2)
        source = kv(SPEC, tokens)
        alive = weakref.ref(source)
        task = client.store(tokens, source)
        assert task.wait(10).stored == 2
        del source
        wait_for_condition(lambda: alive() is None, "the source is free", 5)


def test_a_store_larger_than_the_arena_keeps_its_head(arena_root):
    with Rig(arena_root, dram_bytes=MIB) as rig:
        client, tokens = rig.client(SPEC), prompt(40)
        result = client.store(tokens, kv(SPEC, tokens)).wait(10)
        assert (result.stored, result.dropped, result.reason) == (16, 24, "no_room")
        assert load(client, tokens) == 16 * 16
        assert client.stats().dropped_blocks == {"no_room": 24}


def test_a_store_finds_no_room_among_held_blocks(arena_root):
    with Rig(arena_root, dram_bytes=MIB) as rig:
        client, tokens, dram = rig.client(SPEC), prompt(16), rig.part(0).dram
        store(client, tokens)
        keys = split(SPEC.keys(tokens))

        async def each(act):
            for key in keys:
                act(key)

        rig.run(each(dram.hold))
        other = prompt(4, 1)
        result = client.store(other, kv(SPEC, other)).wait(10)
        assert (result.stored, result.dropped, result.reason) == (0, 4, "no_room")
        rig.run(each(dram.release))
        store(client, other)
        assert load(client, other) == 64


def test_a_block_evicted_since_the_lookup_is_brought_again_if_anyone_has_it(arena_root):
    with Rig(arena_root, shared_url=f"file://{arena_root / 'shared'}", dram_bytes=MIB) as rig:
        client, tokens = rig.client(SPEC), prompt(8)
        store(client, tokens)
        hit = client.lookup(tokens)
        for number in (1, 2):
            store(client, prompt(8, number))
        target = empty(SPEC, 8)
        assert client.load(hit, target).outcomes == (Source.SHARED,) * 8
        assert np.array_equal(target, kv(SPEC, tokens))
    with Rig(arena_root, dram_bytes=MIB) as rig:
        client = rig.client(SPEC)
        store(client, tokens)
        hit = client.lookup(tokens)
        for number in (1, 2):
            store(client, prompt(8, number))
        got = client.load(hit, target)
        assert (got, got.outcomes[0]) == (0, Miss.EVICTED)


def test_blocks_evicted_since_the_lookup_come_from_another_holder(arena_root):
    with Rig(arena_root, 2) as rig:
        client, other, tokens = rig.client(SPEC), rig.client(SPEC, 1), prompt(8)
        store(client, tokens)
        store(other, prompt(10))
        hit = client.lookup(prompt(10))
        assert [(run.local, len(run.nodes)) for run in hit.runs] == [(True, 0), (False, 1)]

        async def drop():
            for key in split(SPEC.keys(tokens))[2:]:
                rig.part(0).dram.drop(key)

        rig.run(drop())
        target = empty(SPEC, 10)
        calls = calls_during(rig, lambda: client.load(hit, target))
        assert np.array_equal(target, kv(SPEC, prompt(10)))
        assert client.stats().blocks == {Source.DRAM: 2, Source.PEER: 8}
        assert calls["directory.locate"] == 1


def test_a_load_holds_blocks_until_its_client_has_copied_them_and_no_longer(arena_root, wait_for_condition):
    """Ray resumes a stream when its reader takes an item, which is before it has copied the blocks in it."""
    go_on = threading.Event()

    async def gate():
        assert await asyncio.to_thread(go_on.wait, 20)

    with Rig(arena_root, 2, **SMALL_WINDOWS) as rig:
        tokens = prompt(6)
        store(rig.client(SPEC), tokens)
        rig.faults["0.window"] = after(1, gate)
        stream = rig.part(1).loader.load(load_request(rig.client(SPEC, 1), tokens, 20.0))
        holds = rig.part(1).dram.placement._holds
        num_blocks = len(rig.run(anext(stream)).outcomes)
        assert 0 < num_blocks < 6
        assert rig.run(anext(stream)) == LoadProgress(())
        assert holds  # the client copies
        step = rig.begin(anext(stream))
        wait_for_condition(lambda: not holds, "the client has copied, and the load waits for more", 5)
        assert not step.done()
        go_on.set()
        while num_blocks < 6:
            num_blocks += len(step.result(20).outcomes)
            step = rig.begin(anext(stream))
        assert step.result(20) == LoadProgress(())
        assert holds
        assert rig.run(anext(stream, None)) is None
        assert not holds


def test_a_reader_gone_for_good_holds_nothing_beyond_its_deadline(arena_root, wait_for_condition):
    with Rig(arena_root, 2, **SMALL_WINDOWS) as rig:
        tokens = prompt(24)
        store(rig.client(SPEC), tokens)
        reader = rig.client(SPEC, 1)
        # Ray leaves the generators of a client, or of a manager, that died where they are: paused.
        streams = [
            rig.part(1).loader.load(load_request(reader, tokens, 1.0)),
            rig.part(0).server.fetch(fetch_request(SPEC, tokens, 1.0)),
        ]
        for stream in streams:
            assert rig.run(anext(stream))
        assert rig.part(0).server._budget.taken_bytes > 0
        wait_for_condition(lambda: not rig.part(0).server._budget.taken_bytes, "the holder's budget is free")
        wait_for_condition(lambda: not any(rig.part(n).dram.placement._holds for n in (0, 1)), "nothing is held")
        for stream in streams:
            rig.run(stream.aclose())


def test_a_load_whose_end_is_cancelled_holds_nothing(arena_root, monkeypatch):
    copying, go_on, windows = threading.Event(), threading.Event(), itertools.count()

    def take_all(steps, copy=landing._take_all):
        if next(windows):
            copying.set()
            assert go_on.wait(20)
        copy(steps)

    with Rig(arena_root, 2, **SMALL_WINDOWS) as rig:
        monkeypatch.setattr(landing, "_take_all", take_all)
        tokens, holds = prompt(24), rig.part(1).dram.placement._holds
        store(rig.client(SPEC), tokens)
        stream = rig.part(1).loader.load(load_request(rig.client(SPEC, 1), tokens, 20.0))
        assert rig.run(anext(stream)).outcomes
        assert copying.wait(10)
        assert holds

        async def end():
            ending = asyncio.ensure_future(stream.aclose())
            await asyncio.sleep(0)
            ending.cancel()  # it waits for the thread that copies
            go_on.set()
            await asyncio.wait({ending})
            assert ending.cancelled()

        rig.run(end())
        assert not holds

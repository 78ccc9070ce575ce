"""A node that is to leave: no more stores, the most valuable blocks saved within a budget, loads as before."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvfleet.config import MIB, DriveConfig
from kvfleet.core.block import split
from kvfleet.errors import DirectoryUnavailableError, TierUnavailableError
from kvfleet.node.messages import Source
from kvfleet.node.nvme import NvmeTier
from tests.conftest import wait_for
from tests.rig import Rig, failing
from tests.workload import kv, load, model, prompt, store

SPEC = model()
BLOCK_BYTES = SPEC.layout.block_bytes


def drain(rig, timeout_s=20.0, bytes_max=None, number=0):
    return rig.run(rig.managers[number].drain(timeout_s, bytes_max))


def unsaved(arena_root, num_prompts, **settings):
    """A rig of two nodes with prompts of 4 blocks on node 0, none of them saved."""
    rig = Rig(arena_root, 2, shared_url=f"file://{arena_root / 'shared'}", **settings)
    hold_back(rig)
    for number in range(num_prompts):
        store(rig.client(SPEC), prompt(4, number))
    return rig


def hold_back(rig):
    async def pause():
        rig.part(0).saver.pause()

    rig.run(pause())


def saved(arena_root, tokens):
    """Which blocks of a prompt are in the shared tier."""
    return [any((arena_root / "shared").rglob(f"{key.hex()}.*")) for key in split(SPEC.keys(tokens))]


def dropped(client, tokens):
    result = client.store(tokens, kv(SPEC, tokens)).wait(20)
    return result.stored, result.dropped, result.reason


def test_a_draining_node_takes_no_stores_and_serves_loads(arena_root):
    with unsaved(arena_root, 2) as rig:
        client, other = rig.client(SPEC), rig.client(SPEC, 1)
        assert not rig.status(0).draining
        done = drain(rig)
        assert (done.saved_blocks, done.saved_bytes, done.left_blocks, done.left_bytes) == (8, 8 * BLOCK_BYTES, 0, 0)
        assert rig.status(0).draining
        assert dropped(client, prompt(4, 7)) == (0, 4, "draining")
        assert client.stats().dropped_blocks == {"draining": 4}
        assert load(other, prompt(4)).outcomes == (Source.PEER,) * 4
        store(other, prompt(3, 8))
        assert load(client, prompt(3, 8)).outcomes == (Source.PEER,) * 3
        assert drain(rig).left_blocks == 0  # what it has loaded since, too

        rig.kill(0)
        rig.start(0)
        assert rig.status(0).draining
        assert dropped(client, prompt(4, 7)) == (0, 4, "draining")

        rig.run(rig.managers[0].resume())
        assert not rig.status(0).draining
        store(client, prompt(4, 7))
        assert rig.run(rig.managers[0].flush(20)) == 0
        assert all(saved(arena_root, prompt(4, 7)))
        rig.kill(0)
        rig.start(0)
        assert not rig.status(0).draining


def test_the_most_valuable_blocks_are_saved_first(arena_root):
    with unsaved(arena_root, 4) as rig:
        assert load(rig.client(SPEC), prompt(4, 1)) == 64  # prompt 1 is used last, after 3 and 2 and 0
        done = drain(rig, bytes_max=6 * BLOCK_BYTES + 1)
        assert (done.saved_blocks, done.left_blocks) == (6, 10)
        assert done.left_bytes == 10 * BLOCK_BYTES
        assert saved(arena_root, prompt(4, 1)) == [True] * 4
        assert saved(arena_root, prompt(4, 3)) == [True, True, False, False]
        assert not any(saved(arena_root, prompt(4, 0)) + saved(arena_root, prompt(4, 2)))
        # Nothing is written beyond the budget afterwards; a second drain goes on with a new one.
        assert rig.run(rig.managers[0].flush(20)) == 10
        assert drain(rig, bytes_max=4 * BLOCK_BYTES).left_blocks == 6
        assert saved(arena_root, prompt(4, 3)) == [True] * 4
        assert saved(arena_root, prompt(4, 2)) == [True, True, False, False]


def test_room_is_made_without_writing_beyond_the_budget(arena_root):
    with unsaved(arena_root, 4, dram_bytes=MIB) as rig:
        assert drain(rig, bytes_max=0).left_blocks == 16
        store(rig.client(SPEC, 1), prompt(12, 9))
        assert load(rig.client(SPEC), prompt(12, 9)) == 12 * 16
        assert rig.status(0).saved_blocks == 0
        assert rig.status(0).lost_blocks >= 12


def test_a_write_that_hangs_takes_the_time_and_no_more(arena_root, monkeypatch):
    with unsaved(arena_root, 3, shared_timeout_s=5.0) as rig:
        write, go_on = rig.part(0).shared.write, threading.Event()

        def hang(*args):
            assert go_on.wait(20)
            return write(*args)

        monkeypatch.setattr(rig.part(0).shared, "write", hang)
        done = drain(rig, timeout_s=0.3)
        assert (done.saved_blocks, done.left_blocks) == (0, 12)
        go_on.set()
        wait_for(lambda: not rig.part(0).dram.placement.in_transfer, "the writes under way have ended")
        assert 0 < rig.status(0).saved_blocks <= rig.config.save_inflight_max


def test_a_failed_write_is_tried_again_within_the_budget(arena_root, monkeypatch):
    with unsaved(arena_root, 1) as rig:
        write, failures = rig.part(0).shared.write, iter(range(3))

        def fail(*args):
            if next(failures, None) is not None:
                raise TierUnavailableError("shared", "away")
            return write(*args)

        monkeypatch.setattr(rig.part(0).shared, "write", fail)
        assert drain(rig, bytes_max=4 * BLOCK_BYTES).left_blocks == 0
        assert rig.status(0).save_failures == 3


def test_blocks_that_are_being_written_are_not_given_up(arena_root):
    with Rig(arena_root, shared_url=f"file://{arena_root / 'shared'}") as rig:
        client, tokens = rig.client(SPEC), prompt(4)
        keys = split(SPEC.keys(tokens))
        writing, go_on = threading.Event(), threading.Event()

        def fill(index, view):
            view[...] = kv(SPEC, tokens)[:, :, :, 16 * index : 16 * index + 16]
            writing.set()
            assert go_on.wait(20)

        task = client.store(tokens, fill)
        assert writing.wait(20)
        assert drain(rig).saved_blocks == 0
        go_on.set()
        assert task.wait(20).stored == len(keys)
        assert load(client, tokens) == 64
        assert drain(rig).saved_blocks == 4


def test_without_a_shared_tier_all_is_left(arena_root):
    with Rig(arena_root) as rig:
        store(rig.client(SPEC), prompt(5))
        done = drain(rig)
        assert (done.saved_blocks, done.left_blocks, done.left_bytes) == (0, 5, 5 * BLOCK_BYTES)


def test_drains_at_once_share_the_last_budget(arena_root):
    with unsaved(arena_root, 4) as rig:

        async def both():
            return await asyncio.gather(*(rig.managers[0].drain(10.0, bytes_max) for bytes_max in (None, 0)))

        first, second = rig.run(both())
        assert second.left_blocks == first.left_blocks
        assert first.saved_blocks + first.left_blocks == 16


def test_a_node_that_goes_on_while_it_is_drained_saves_again(arena_root, monkeypatch):
    with Rig(arena_root, shared_url=f"file://{arena_root / 'shared'}", shared_timeout_s=5.0) as rig:
        write, go_on = rig.part(0).shared.write, threading.Event()

        def hang(*args):
            assert go_on.wait(20)
            return write(*args)

        monkeypatch.setattr(rig.part(0).shared, "write", hang)
        store(rig.client(SPEC), prompt(4))
        wait_for(lambda: rig.part(0).dram.placement.in_transfer, "a write is under way")

        async def drained_and_not():
            draining = asyncio.ensure_future(rig.managers[0].drain(20.0, None))
            await asyncio.sleep(0)
            await rig.managers[0].resume()
            go_on.set()
            return await draining

        assert rig.run(drained_and_not()).saved_blocks == 0
        assert rig.run(rig.managers[0].flush(20.0)) == 0
        assert rig.status(0).saved_blocks == 4


@pytest.mark.parametrize("method", ["drain", "resume"])
def test_a_node_without_an_arena_cannot_be_drained(arena_root, method):
    with Rig(arena_root) as rig:
        manager = rig.managers[0]
        rig.run(manager.shutdown())
        with pytest.raises(TierUnavailableError):
            rig.run(manager.drain(1.0, None) if method == "drain" else manager.resume())
        del rig.managers[0]


def with_drive(arena_root, tmp_path):
    """A rig whose node 0 has three prompts of 4 blocks on its drive and nowhere else, the last one used last."""
    (tmp_path / "drive").mkdir()
    drives = (DriveConfig(directory=str(tmp_path / "drive"), max_bytes=16 * MIB),)
    rig = Rig(arena_root, nvme=drives, shared_url=f"file://{arena_root / 'shared'}")
    hold_back(rig)
    keys = [key for number in range(3) for key in split(SPEC.keys(prompt(4, number)))]
    for number in range(3):
        store(rig.client(SPEC), prompt(4, number))
        wait_for(lambda: not rig.part(0).dram.placement.num_unsaved("nvme"), "it is on the drive")

    async def forget():
        for key in keys:
            rig.part(0).dram.drop(key)

    rig.run(forget())
    return rig


def test_what_only_the_drives_have_is_saved_too_the_most_valuable_first(arena_root, tmp_path):
    with with_drive(arena_root, tmp_path) as rig:
        store(rig.client(SPEC), prompt(2, 7))
        assert load(rig.client(SPEC), prompt(4, 0)).outcomes == (Source.NVME,) * 4  # also in the arena now
        done = drain(rig, bytes_max=8 * BLOCK_BYTES)
        assert (done.saved_blocks, done.left_blocks, done.left_bytes) == (8, 6, 6 * BLOCK_BYTES)
        assert saved(arena_root, prompt(4, 0)) == [True] * 4
        assert saved(arena_root, prompt(4, 2)) == [True, True, False, False]
        assert not any(saved(arena_root, prompt(4, 1)))
        assert drain(rig).left_blocks == 0
        assert all(saved(arena_root, prompt(4, number))[0] for number in range(3))
        assert rig.status(0).saved_blocks == 14
        done = drain(rig)
        assert (done.saved_blocks, done.left_blocks) == (0, 0)


def test_without_the_directory_no_block_of_the_drives_is_taken_for_unsaved(arena_root, tmp_path):
    with with_drive(arena_root, tmp_path) as rig:
        rig.faults["directory.claim"] = failing(DirectoryUnavailableError("away"))
        assert drain(rig).left_blocks == 12
        assert rig.status(0).saved_blocks == 0
        del rig.faults["directory.claim"]
        wait_for(lambda: drain(rig).left_blocks == 0, "the directory is asked again")
        assert rig.status(0).saved_blocks == 12


def test_a_drive_that_hangs_does_not_hold_up_a_drain(arena_root, tmp_path, monkeypatch):
    with with_drive(arena_root, tmp_path) as rig:
        read, go_on = NvmeTier.read, asyncio.Event()

        async def hang(self, *args):
            await go_on.wait()
            return await read(self, *args)

        monkeypatch.setattr(NvmeTier, "read", hang)
        assert drain(rig, timeout_s=0.3).left_blocks == 12
        rig.loop.call_soon_threadsafe(go_on.set)
        assert drain(rig).left_blocks == 0
        assert rig.status(0).saved_blocks == 12

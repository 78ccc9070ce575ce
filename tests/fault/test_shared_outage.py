"""The shared tier fails or hangs for a while: loads go on, nothing is given up that could still be saved."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

import pytest

from kvfleet.config import MIB
from kvfleet.core.directory import Run
from kvfleet.errors import TierUnavailableError
from kvfleet.node.messages import Miss, Source
from kvfleet.node.shared import SharedTier
from tests.conftest import wait_for
from tests.rig import Rig
from tests.workload import empty, fetch_request, model, prompt, store

BLOCK = model(256)
ARENA_BLOCKS = 8 * MIB // BLOCK.layout.block_bytes


class Writes:
    """Switches writes to every shared tier: they "work", "fail", or "hang" until they are switched again."""

    def __init__(self) -> None:
        self._mode = "work"
        self._over = threading.Event()

    def now(self, mode: str) -> None:
        self._over.set()
        self._mode, self._over = mode, threading.Event()

    def pass_or_fail(self) -> None:
        if self._mode == "hang":
            self._over.wait(30)
        if self._mode != "work":
            raise TierUnavailableError("shared", "an outage of the test's making")


@pytest.fixture
def writes(monkeypatch):
    switch, write = Writes(), SharedTier.write

    def switched(self, *args):
        switch.pass_or_fail()
        return write(self, *args)

    monkeypatch.setattr(SharedTier, "write", switched)
    yield switch
    switch.now("work")


@pytest.mark.parametrize("how", ["fail", "hang"])
def test_an_arena_full_of_unsaved_blocks_takes_blocks_of_a_peer(arena_root, tmp_path, writes, how):
    with Rig(arena_root, 2, shared_url=f"file://{tmp_path}") as rig:
        reader, holder = rig.client(BLOCK, 0), rig.client(BLOCK, 1)
        store(holder, prompt(4))
        writes.now(how)
        store(reader, prompt(ARENA_BLOCKS, 1))
        hit = reader.lookup(prompt(4))
        started = time.monotonic()
        loaded = reader.load(hit, empty(BLOCK, 4), timeout_s=15.0)
        assert loaded.outcomes == (Source.PEER,) * 4
        assert time.monotonic() - started < 10.0, "it waited for a tier that is bad, block by block"
        assert rig.status(0).lost_blocks >= 4, "what made room is counted"
        writes.now("work")


def test_an_outage_gives_up_nothing_that_is_still_here(arena_root, tmp_path, writes):
    with Rig(arena_root, 1, shared_url=f"file://{tmp_path}") as rig:
        writes.now("fail")
        store(rig.client(BLOCK), prompt(6))

        wait_for(lambda: rig.status(0).save_failures >= 6, "writes have failed")
        assert rig.status(0).unsaved_blocks == 6
        assert rig.run(rig.managers[0].flush(0.2)) == 6
        writes.now("work")
        assert rig.run(rig.managers[0].flush(20.0)) == 0
        assert rig.status(0).saved_blocks == 6


def test_a_block_too_large_for_the_arena_has_no_room_at_once(arena_root):
    with Rig(arena_root, 2, dram_bytes=2 * MIB) as rig:
        large = model(4096)
        started = time.monotonic()
        result = rig.client(large).store(prompt(1), lambda index, view: None).wait(10)
        assert (result.dropped, result.reason) == (1, "no_room")

        def large_elsewhere(keys, shard, num_shards):
            return [Run(0, 1, (rig.node_id(1),), shared=False)]

        rig.directory._directory.locate = large_elsewhere
        client = rig.client(large)
        loaded = client.load(client.lookup(prompt(1)), empty(large, 1), timeout_s=15.0)
        assert loaded.outcomes == (Miss.EVICTED,)  # the other node has it not
        assert time.monotonic() - started < 10.0


def test_readers_that_never_take_a_window_keep_their_share(arena_root):
    """The bytes of windows that wait in the holder's object store are counted until they were taken."""
    with Rig(arena_root, 1) as rig:
        client = rig.client(BLOCK)
        store(client, prompt(2))
        server = rig.part(0).server
        request = replace(fetch_request(BLOCK, prompt(2), 5.0), window_bytes_max=32 * MIB)

        async def read() -> tuple[list[int], int]:
            taken, windows = [], server.fetch(request)
            async for window in windows:
                taken.append(sum(len(part.data) for part in window.parts))
                if not window.parts:
                    assert server._budget.taken_bytes > 0
            await asyncio.sleep(0)
            return taken, server._budget.taken_bytes

        sizes, left = rig.run(read())
        assert sizes == [2 * BLOCK.layout.block_bytes] + [0] * rig.config.windows_in_flight
        assert left == 0

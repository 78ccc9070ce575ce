"""Loads and peers that read from a node's drives, whatever becomes of the reads. The drives are simulated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from typing_extensions import override

from kvfleet.client import Client
from kvfleet.config import MIB, DriveConfig, FleetConfig
from kvfleet.copying import checksum
from kvfleet.core.block import BlockKey, split
from kvfleet.core.inventory import record_id
from kvfleet.errors import CorruptBlockError, TierUnavailableError
from kvfleet.node.drivereads import _AHEAD
from kvfleet.node.messages import Bytes, Miss, Source
from kvfleet.node.nvme import NvmeTier, Stored
from tests.conftest import wait_for
from tests.rig import Rig
from tests.workload import block, fetch_request, load, model, prompt, store

SPEC = model()
INFLIGHT = 2 + _AHEAD  # that are under way in the drives, or wait for them


class Drives(NvmeTier):
    """What a node's drives hold. `before` is called with each block that is to be read, and may raise."""

    def __init__(self, drives: Sequence[DriveConfig], config: FleetConfig) -> None:
        super().__init__((), config)
        self.blocks: dict[tuple[bytes, int], Any] = {}
        self.reading: list[bytes] = []
        self.most = 0
        self.begun: list[bytes] = []
        self.before: Callable[[bytes], Any] = passing
        self.place: Callable[[bytes], str] = lambda key: "the only one"

    @override
    def find(self, key: BlockKey, shard: int) -> Stored | None:
        data = self.blocks.get((key, shard))
        return None if data is None else Stored(key, shard, len(data), checksum(data), bytes(16), 0, 0)

    @override
    def where(self, key: BlockKey, shard: int) -> str:
        return self.place(key)

    @override
    def records(self) -> list[bytes]:
        return [record_id(*record) for record in self.blocks]

    @override
    async def read(self, key: BlockKey, shard: int, target: Bytes, itemsize: int) -> int | None:
        assert itemsize == SPEC.layout.itemsize
        self.begun.append(key)
        self.reading.append(key)
        self.most = max(self.most, len(self.reading))
        try:
            await self.before(key)
        finally:
            self.reading.remove(key)
        data = self.blocks.get((key, shard))
        if data is None:
            return None
        target[:] = data
        return checksum(data)

    def lose(self, key: bytes) -> None:
        """A block is not there any more."""
        gone = self.find(BlockKey(key), 0)
        assert gone is not None
        del self.blocks[key, 0]
        self.on_change(gone, False)


async def passing(key: bytes) -> None:
    """A read that takes a moment."""
    await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvfleet.node.localdrives.NvmeTier", Drives)


def fleet(root: Path, num_nodes: int = 1, **settings: Any) -> Rig:
    """Nodes that have drives."""
    drive = DriveConfig(directory="/simulated", max_bytes=MIB)
    return Rig(root, num_nodes, nvme=(drive,), nvme_inflight_max=INFLIGHT - _AHEAD, **settings)


def drives_of(rig: Rig, number: int = 0) -> Drives:
    drives: Drives = rig.part(number).nvme
    return drives


def put(rig: Rig, tokens: Any, number: int = 0, *, start: int = 0, num_bytes: int | None = None) -> Drives:
    """Have a prompt's blocks on a node's drives."""
    drives = drives_of(rig, number)

    async def enter() -> None:
        for key in split(SPEC.keys(tokens))[start:]:
            drives.blocks[key, 0] = block(SPEC, key).reshape(-1).view(np.uint8)[:num_bytes]
            found = drives.find(key, 0)
            assert found is not None
            drives.on_change(found, True)

    rig.run(enter())
    return drives


def hanging(rig: Rig) -> tuple[Callable[[bytes], Any], Callable[[], None]]:
    """Reads that do not end, and what ends them."""
    end = rig.loop.create_future()

    async def hang(key: bytes) -> None:
        await asyncio.shield(end)

    return hang, lambda: rig.loop.call_soon_threadsafe(end.set_result, None)  # type: ignore[return-value]


def failing(error: Exception, *keys: bytes) -> Callable[[bytes], Any]:
    async def fail(key: bytes) -> None:
        if not keys or key in keys:
            raise error

    return fail


def test_blocks_come_from_the_drives_several_at_once_and_in_order(arena_root):
    with fleet(arena_root) as rig:
        tokens, client = prompt(16), rig.client(SPEC)
        drives = put(rig, tokens)
        loaded = load(client, tokens)
        assert loaded.outcomes == (Source.NVME,) * 16
        assert (drives.begun, drives.most) == (split(SPEC.keys(tokens)), INFLIGHT)
        assert loaded.bytes_by_source == {Source.NVME: 16 * SPEC.layout.block_bytes}
        assert rig.status(0).loaded_blocks == {"nvme": 16}
        assert load(client, tokens).outcomes == (Source.DRAM,) * 16  # they were promoted
        assert len(drives.begun) == 16
        request = rig.run(rig.managers[0].requests("", 1))[0]
        assert (request.local, request.nvme, request.from_dram, request.from_nvme) == (16, 0, 16, 0)
        assert client.stats().outcomes == {"nvme": 16, "dram": 16}


def test_blocks_come_from_the_drives_without_a_directory(arena_root):
    with fleet(arena_root, lookup_timeout_s=0.2) as rig:
        tokens, client = prompt(4), rig.client(SPEC)
        client.attach()
        put(rig, tokens)
        rig.stop_directory()
        assert load(client, tokens).outcomes == (Source.NVME,) * 4
        rig.start_directory()


def test_what_is_in_memory_is_not_read(arena_root):
    with fleet(arena_root) as rig:
        tokens, client = prompt(8), rig.client(SPEC)
        store(client, prompt(3))
        drives = put(rig, tokens, start=3)
        assert load(client, tokens).outcomes == (Source.DRAM,) * 3 + (Source.NVME,) * 5
        assert drives.begun == split(SPEC.keys(tokens))[3:]


def test_a_prefix_larger_than_the_arena_passes_through_it(arena_root):
    with fleet(arena_root, dram_bytes=MIB) as rig:
        put(rig, prompt(40))
        assert load(rig.client(SPEC), prompt(40)).outcomes == (Source.NVME,) * 40


ERRORS = [
    (CorruptBlockError("nvme", "flipped"), Miss.CORRUPT),
    (TierUnavailableError("nvme", "EIO"), Miss.STORAGE_FAILED),
]


@pytest.mark.parametrize(("error", "miss"), ERRORS)
def test_a_block_that_cannot_be_read_is_a_miss(arena_root, error, miss):
    with fleet(arena_root) as rig:
        tokens, client = prompt(8), rig.client(SPEC)
        drives = put(rig, tokens)
        drives.before = failing(error, split(SPEC.keys(tokens))[3])
        assert load(client, tokens).outcomes == (Source.NVME,) * 3 + (miss,) + (Miss.BEHIND_MISS,) * 4


@pytest.mark.parametrize(("error", "miss"), ERRORS)
def test_blocks_that_cannot_be_read_come_from_elsewhere(arena_root, error, miss):
    with fleet(arena_root, 2) as rig:
        tokens, client = prompt(8), rig.client(SPEC)
        store(rig.client(SPEC, 1), tokens)
        drives = put(rig, tokens)
        drives.before = failing(error, split(SPEC.keys(tokens))[3])
        outcomes = load(client, tokens).outcomes
        assert outcomes[:4] == (Source.NVME,) * 3 + (Source.PEER,)
        rest = {Source.NVME} if miss is Miss.CORRUPT else {Source.PEER}
        assert set(outcomes[4:]) <= {Source.DRAM, *rest}  # some were read ahead, by then
        other = prompt(4, 1)
        store(rig.client(SPEC, 1), other)
        put(rig, other).before = failing(error)
        assert load(client, other).outcomes == (Source.PEER,) * 4


def test_blocks_that_have_left_come_from_elsewhere(arena_root):
    with fleet(arena_root, 2, shared_url=f"file://{arena_root}/shared") as rig:
        tokens, client = prompt(4), rig.client(SPEC)
        drives = put(rig, tokens)

        async def leaves(key: bytes) -> None:
            drives.lose(key)

        drives.before = leaves
        assert load(client, tokens).miss in {Miss.EVICTED, Miss.NEVER_STORED}
        store(rig.client(SPEC, 1), tokens)
        wait_for(lambda: rig.status(1).unsaved_blocks == 0, "they are saved")
        rig.kill(1)
        for key in split(SPEC.keys(tokens)):
            if (key, 0) in drives.blocks:
                rig.loop.call_soon_threadsafe(drives.lose, key)
        put(rig, tokens)
        assert load(client, tokens).outcomes == (Source.SHARED,) * 4


def test_blocks_of_another_size_are_not_read(arena_root):
    with fleet(arena_root) as rig:
        drives = put(rig, prompt(2), num_bytes=4096)
        loaded = load(rig.client(SPEC), prompt(2))
        assert isinstance(loaded.miss, Miss)
        assert drives.begun == []


def test_a_drive_that_hangs_holds_up_a_load_once(arena_root):
    with fleet(arena_root, 2, holder_timeout_s=0.3) as rig:
        client = rig.client(SPEC)
        for number in range(3):
            store(rig.client(SPEC, 1), prompt(6, number))
            drives = put(rig, prompt(6, number))
        drives.before, end = hanging(rig)
        first = split(SPEC.keys(prompt(6)))[:INFLIGHT]
        assert load(client, prompt(6), timeout_s=1.0).miss is not None  # their slots may still be written to
        assert drives.begun == first
        loaded = load(client, prompt(6, 1), timeout_s=5.0)
        assert loaded.load_s < 5.0
        end()
        wait_for(lambda: not drives.reading, "the reads have ended")
        drives.before = passing
        assert load(client, prompt(6, 2)).outcomes == (Source.NVME,) * 6


def test_a_drive_that_hangs_keeps_no_load_from_another_drive(arena_root):
    with fleet(arena_root, holder_timeout_s=0.2) as rig:
        client = rig.client(SPEC)
        for number in range(3):
            drives = put(rig, prompt(6, number))
        hang, end = hanging(rig)
        well = set(split(SPEC.keys(prompt(6, 2))))
        drives.place = lambda key: "well" if key in well else "hung"
        drives.before = lambda key: passing(key) if key in well else hang(key)
        for number in range(2):
            assert load(client, prompt(6, number), timeout_s=1.0) == 0
        assert len(drives.reading) == INFLIGHT
        assert load(client, prompt(6, 2), timeout_s=5.0).outcomes == (Source.NVME,) * 6
        begun = len(drives.begun)
        assert load(client, prompt(6, 1), timeout_s=5.0) == 0
        assert len(drives.begun) == begun, "a hung drive is not asked again"
        end()
        wait_for(lambda: not rig.part(0).loader.drive_reads._adopted, "the reads have ended")


def test_a_deadline_ends_a_load_and_leaves_its_reads_to_themselves(arena_root):
    with fleet(arena_root) as rig:
        tokens, client = prompt(6), rig.client(SPEC)
        drives = put(rig, tokens)
        drives.before, end = hanging(rig)
        assert load(client, tokens, timeout_s=0.2).miss is Miss.DEADLINE
        assert len(drives.reading) == INFLIGHT
        end()
        wait_for(lambda: not rig.part(0).loader.drive_reads._adopted, "the reads have ended")
        assert load(client, tokens).outcomes[:INFLIGHT] == (Source.DRAM,) * INFLIGHT


def test_reads_that_have_not_begun_end_with_their_loads(arena_root):
    with fleet(arena_root, dram_bytes=8 * MIB) as rig:
        client, placement = rig.client(SPEC), rig.part(0).dram.placement
        for number in range(3):
            drives = put(rig, prompt(6, number))
        drives.before, end = hanging(rig)
        for number in range(3):
            assert load(client, prompt(6, number), timeout_s=0.2).miss is Miss.DEADLINE
        wait_for(lambda: len(placement.slots()) == INFLIGHT, "only those that threads write to are reserved")
        end()
        wait_for(lambda: not rig.part(0).loader.drive_reads._adopted, "the reads have ended")
        assert len(placement.records()) == INFLIGHT


def test_the_end_of_a_node_does_not_wait_long_for_reads_that_hang(arena_root):
    with fleet(arena_root, holder_timeout_s=0.2) as rig:
        drives = put(rig, prompt(6))
        drives.before, end = hanging(rig)
        assert load(rig.client(SPEC), prompt(6), timeout_s=0.1).miss is Miss.DEADLINE
        rig.run(asyncio.wait_for(rig.part(0).loader.drive_reads.end(), 10))
        assert len(drives.reading) == INFLIGHT
        end()
        wait_for(lambda: not rig.part(0).loader.drive_reads._adopted, "the reads have ended")


def test_a_block_that_a_drive_lost_as_it_was_read_has_no_copy_there(arena_root, monkeypatch):
    with fleet(arena_root) as rig:
        drives = put(rig, prompt(1))
        (key,) = split(SPEC.keys(prompt(1)))
        read = drives.read

        async def read_and_lose(*arguments: Any) -> int | None:
            got: int | None = await read(*arguments)
            drives.lose(key)
            return got

        monkeypatch.setattr(drives, "read", read_and_lose)
        assert load(rig.client(SPEC), prompt(1)).outcomes == (Source.NVME,)
        assert not rig.part(0).dram.placement.is_saved(key, 0, "nvme")


def test_loads_of_one_prefix_read_it_once(arena_root):
    with fleet(arena_root) as rig, ThreadPoolExecutor(2) as pool:
        tokens, clients = prompt(8), [rig.client(SPEC), rig.client(SPEC)]
        drives = put(rig, tokens)
        drives.before, end = hanging(rig)
        loads = [pool.submit(load, client, tokens) for client in clients]
        wait_for(lambda: rig.calls["0.load"] == 2, "both have asked")
        end()
        assert [int(one.result(20)) for one in loads] == [8 * SPEC.block_tokens] * 2
        assert sorted(drives.begun) == sorted(split(SPEC.keys(tokens)))


def test_a_peer_gets_what_is_on_the_drives(arena_root):
    with fleet(arena_root, 2) as rig:
        tokens, client = prompt(12), rig.client(SPEC)
        store(rig.client(SPEC, 1), prompt(2))
        drives = put(rig, tokens, 1, start=2)
        wait_for(lambda: client.lookup(tokens).num_blocks == 12, "the directory knows")
        assert load(client, tokens).outcomes == (Source.PEER,) * 12
        assert drives.begun == split(SPEC.keys(tokens))[2:]
        assert 1 < drives.most <= INFLIGHT
        assert rig.status(1).blocks == 12


def test_a_peer_gets_the_blocks_before_one_that_cannot_be_read(arena_root):
    with fleet(arena_root, 2) as rig:
        tokens, client = prompt(6), rig.client(SPEC)
        drives = put(rig, tokens, 1)
        drives.before = failing(CorruptBlockError("nvme", "flipped"), split(SPEC.keys(tokens))[4])
        wait_for(lambda: client.lookup(tokens).num_blocks == 6, "the directory knows")
        assert load(client, tokens).outcomes == (Source.PEER,) * 4 + (Miss.EVICTED, Miss.BEHIND_MISS)


def test_a_peer_gets_more_than_the_arena_holds(arena_root):
    with fleet(arena_root, 2, dram_bytes=MIB) as rig:
        client = rig.client(SPEC)
        put(rig, prompt(40), 1)
        wait_for(lambda: client.lookup(prompt(40)).num_blocks == 40, "the directory knows")
        assert load(client, prompt(40)).outcomes == (Source.PEER,) * 40


def test_a_peer_that_goes_away_while_drives_are_read_leaves_nothing(arena_root):
    with fleet(arena_root) as rig:
        drives = put(rig, prompt(8))
        drives.before, end = hanging(rig)
        windows = rig.part(0).server.fetch(fetch_request(SPEC, prompt(8), 5.0))
        pull = asyncio.run_coroutine_threadsafe(anext(windows), rig.loop)
        wait_for(lambda: bool(drives.reading), "they are read")
        pull.cancel()
        end()
        wait_for(lambda: not drives.reading, "the reads have ended")
        rig.run(windows.aclose())


def test_a_reader_that_stops_asking_is_let_go_at_its_deadline(arena_root):
    with fleet(arena_root) as rig:
        put(rig, prompt(8))
        windows = rig.part(0).server.fetch(fetch_request(SPEC, prompt(8), 0.2))

        async def first() -> int:
            return len((await anext(windows)).parts)

        assert rig.run(first()) > 0
        wait_for(lambda: not rig.part(0).dram.placement._holds, "nothing is held any more")
        rig.run(windows.aclose())


async def fated(drives: Drives, random: Random, key: bytes) -> None:
    """A read that takes a while, fails, or finds the block gone or damaged."""
    await asyncio.sleep(random.choice((0.0, 0.0, 0.001, 0.01)))
    fate = random.random()
    if fate < 0.03 and (key, 0) in drives.blocks:
        drives.lose(key)
        if fate < 0.015:
            raise CorruptBlockError("nvme", "flipped")
    elif fate < 0.06:
        raise TierUnavailableError("nvme", "EIO")


def test_whatever_becomes_of_reads_no_byte_is_wrong_and_nothing_is_left(arena_root, seed):
    """Loads of two nodes that read from their own drives and from each other's, through arenas of 16 blocks."""
    random = Random(seed)

    def loads(client: Client, turns: list[tuple[int, int]]) -> int:
        return sum(int(load(client, prompt(*turn), timeout_s=5.0)) for turn in turns)

    with fleet(arena_root, 2, dram_bytes=MIB) as rig, ThreadPoolExecutor(6) as pool:
        for talk in range(4):
            for number in (0, 1):
                drives = put(rig, prompt(24, talk), number, start=random.choice((0, 0, 8)))
                drives.before = partial(fated, drives, random)
        clients = [rig.client(SPEC, index % 2) for index in range(6)]
        turns = [[(random.randrange(1, 25), random.randrange(4)) for _ in range(8)] for _ in clients]
        assert sum(pool.map(loads, clients, turns)) > 0
        for number in (0, 1):
            wait_for(lambda number=number: not drives_of(rig, number).reading, "all reads have ended")

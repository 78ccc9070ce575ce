"""Blocks that must leave the arena go to the drives, or where else there is room; nobody waits for a drive in vain."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvfleet.config import MIB, DriveConfig
from kvfleet.core.admission import PREFIX_PART
from kvfleet.errors import TierUnavailableError
from kvfleet.hits import StoreResult
from kvfleet.node.messages import Source
from kvfleet.node.nvme import NvmeTier
from kvfleet.node.shared import SharedTier
from tests.conftest import wait_for
from tests.rig import Rig
from tests.workload import kv, load, model, prompt, store

SPEC = model()
ARENA_BLOCKS = 2 * MIB // SPEC.layout.block_bytes
MANY = 3 * ARENA_BLOCKS // 4  # prompts of four blocks: three times what the arena holds


def fleet(root: Path, directory: Path, *, max_bytes: int = 32 * MIB, **settings: Any) -> Rig:
    nvme = (DriveConfig(directory=str(directory), max_bytes=max_bytes),)
    rig = Rig(root, dram_bytes=2 * MIB, nvme=nvme, **settings)
    wait_for(rig.part(0).nvme.opened.is_set, "the drives were tried", 10)
    return rig


def store_many(rig: Rig, first: int = 0) -> None:
    client = rig.client(SPEC)
    for number in range(first, first + MANY):
        store(client, prompt(4, number))


def load_many(rig: Rig) -> Counter[Any]:
    """What became of the blocks of all prompts; what was loaded is right."""
    client = rig.client(SPEC)
    return Counter(outcome for number in range(MANY) for outcome in load(client, prompt(4, number)).outcomes)


def on_drives(rig: Rig) -> int:
    return sum(drive.blocks for drive in rig.status(0).drives)


def lost(rig: Rig) -> int:
    count: int = rig.status(0).lost_blocks
    return count


def test_more_than_the_arena_holds_is_kept_on_the_drives(arena_root, tmp_path):
    with fleet(arena_root, tmp_path) as rig:
        store_many(rig)
        assert rig.run(rig.managers[0].flush(20.0)) == 0
        assert (on_drives(rig), lost(rig)) == (4 * MANY, 0)
        outcomes = load_many(rig)
        assert outcomes.keys() <= {Source.DRAM, Source.NVME}
        assert outcomes[Source.NVME] >= 4 * MANY - ARENA_BLOCKS


def test_blocks_that_were_not_worth_a_write_are_demoted_when_they_go(arena_root, tmp_path, monkeypatch):
    monkeypatch.setattr("kvfleet.core.saves.Saves.next", lambda *_: [])  # no write-behind
    with fleet(arena_root, tmp_path) as rig:
        store_many(rig)
        assert lost(rig) == 0
        placement = rig.part(0).dram.placement
        assert placement.counters.demoted == on_drives(rig) == 4 * MANY - ARENA_BLOCKS
        assert load_many(rig)[Source.NVME] >= 4 * MANY - ARENA_BLOCKS


def test_a_drive_that_is_not_there_costs_blocks_and_no_time(arena_root, tmp_path):
    with fleet(arena_root, tmp_path / "absent") as rig:
        store_many(rig)
        placement = rig.part(0).dram.placement
        assert (lost(rig), placement.counters.transfers_failed) == (4 * MANY - ARENA_BLOCKS, 0)
        assert "No such file" in rig.status(0).drives[0].problem
        assert rig.run(rig.managers[0].flush(20.0)) == ARENA_BLOCKS
        assert sum(load_many(rig)[source] for source in Source) == ARENA_BLOCKS


def test_what_the_drives_refuse_goes_to_the_shared_tier(arena_root, tmp_path, monkeypatch):
    monkeypatch.setattr(NvmeTier, "admits", lambda *_: False)
    with fleet(arena_root, tmp_path, shared_url=f"file://{arena_root / 'shared'}") as rig:
        store_many(rig)
        assert rig.run(rig.managers[0].flush(20.0)) == 0
        assert (on_drives(rig), lost(rig)) == (0, 0)
        assert load_many(rig).keys() <= {Source.DRAM, Source.SHARED}


@pytest.mark.parametrize("hangs", [False, True])
def test_a_shared_tier_that_is_down_costs_nothing_where_there_are_drives(arena_root, tmp_path, monkeypatch, hangs):
    over = threading.Event()

    def write(*_: Any) -> int:
        if hangs:
            over.wait(30)
        raise TierUnavailableError("shared", "an outage of the test's making")

    monkeypatch.setattr(SharedTier, "write", write)
    with fleet(arena_root, tmp_path, shared_url=f"file://{arena_root / 'shared'}") as rig:
        store_many(rig)
        assert lost(rig) == 0
        rig.run(rig.managers[0].flush(0.5))
        wait_for(lambda: rig.part(0).dram.placement.unsaved("nvme", "shared") == (0, 0), "all is on the drives", 10)
        assert rig.run(rig.managers[0].num_unsaved()) == 0
        over.set()


def test_what_a_small_drive_dropped_is_demoted_again_before_it_goes(arena_root, tmp_path):
    with fleet(arena_root, tmp_path, max_bytes=8 * MIB) as rig:
        store_many(rig)
        wait_for(lambda: not rig.part(0).dram.placement.num_unsaved("nvme"), "all that is new was written", 10)
        [drive] = rig.status(0).drives
        assert drive.counts.evicted_blocks > 0
        assert drive.used_bytes <= drive.capacity_bytes < 4 * MANY * SPEC.layout.block_bytes
        assert lost(rig) == 0
        store_many(rig, MANY)
        assert lost(rig) == 0


@pytest.mark.parametrize("policy", ["lru", "hold-turn"])
@pytest.mark.parametrize("at_once", [3 * ARENA_BLOCKS, 1])
def test_a_prompt_larger_than_the_arena_is_kept_below_it(arena_root, tmp_path, policy, at_once):
    with fleet(arena_root, tmp_path, policy=policy) as rig:
        client, tokens = rig.client(SPEC), prompt(3 * ARENA_BLOCKS)
        for stop in range(at_once, 3 * ARENA_BLOCKS + 1, at_once):
            so_far = prompt(stop)
            source = kv(SPEC, so_far)[:, :, :, (stop - at_once) * SPEC.block_tokens :]
            task = client.store(so_far, source, start_block=stop - at_once)
            assert task.wait(60).stored == at_once
        assert lost(rig) == 0
        outcomes = Counter(load(client, tokens).outcomes)
        assert outcomes[Source.DRAM] + outcomes[Source.NVME] == 3 * ARENA_BLOCKS
        assert outcomes[Source.NVME] >= 2 * ARENA_BLOCKS


@pytest.mark.parametrize("policy", ["lru", "hold-turn"])
def test_a_prompt_larger_than_the_arena_is_kept_in_the_shared_tier(arena_root, tmp_path, policy):
    url = f"file://{tmp_path / 'shared'}"
    with Rig(arena_root, dram_bytes=2 * MIB, shared_url=url, policy=policy) as rig:
        client, tokens = rig.client(SPEC), prompt(3 * ARENA_BLOCKS)
        store(client, tokens)
        outcomes = Counter(load(client, tokens).outcomes)
        assert outcomes[Source.DRAM] + outcomes[Source.SHARED] == 3 * ARENA_BLOCKS


@pytest.mark.parametrize("num_drives", [1, 2])
def test_a_prompt_larger_than_any_tier_keeps_its_head(arena_root, tmp_path, num_drives):
    nvme = tuple(DriveConfig(directory=str(tmp_path / f"{n}"), max_bytes=16 * MIB) for n in range(num_drives))
    for drive in nvme:
        Path(drive.directory).mkdir()
    with Rig(arena_root, dram_bytes=2 * MIB, nvme=nvme) as rig:
        wait_for(rig.part(0).nvme.opened.is_set, "the drives were tried", 10)
        drives_bytes = sum(drive.capacity_bytes for drive in rig.status(0).drives)
        room = int(PREFIX_PART * drives_bytes) // SPEC.layout.block_bytes
        assert room > ARENA_BLOCKS
        client, tokens = rig.client(SPEC), prompt(room + 20)
        for _ in range(2):
            result = client.store(tokens, kv(SPEC, tokens)).wait(60)
            assert (result.stored + result.already, result.dropped, result.reason) == (room, 20, "no_room")
            assert lost(rig) == 0
            assert load(client, tokens) == room * SPEC.block_tokens


def test_a_long_prompt_goes_to_full_drives_in_order(arena_root, tmp_path):
    """A block that came before the one it builds on would be the first to go."""
    with fleet(arena_root, tmp_path, max_bytes=16 * MIB) as rig:
        store_many(rig)
        store_many(rig, MANY)
        room = rig.status(0).drives[0].capacity_bytes // SPEC.layout.block_bytes
        client, tokens = rig.client(SPEC), prompt(int(PREFIX_PART * room), 2 * MANY)
        store(client, tokens)
        assert rig.status(0).drives[0].counts.evicted_blocks > 0
        assert load(client, tokens) == len(tokens)


def test_nothing_is_stored_that_builds_on_a_dropped_block(arena_root):
    with Rig(arena_root, dram_bytes=2 * MIB) as rig:
        client, tokens = rig.client(SPEC), prompt(ARENA_BLOCKS + 6)
        source = kv(SPEC, tokens)

        def go_on(first: int, stop: int) -> StoreResult:
            part = source[:, :, :, first * SPEC.block_tokens : stop * SPEC.block_tokens]
            result: StoreResult = client.store(tokens[: stop * SPEC.block_tokens], part, start_block=first).wait(60)
            return result

        assert go_on(0, ARENA_BLOCKS + 2).dropped == 2
        for first in (ARENA_BLOCKS + 2, ARENA_BLOCKS + 4):
            result = go_on(first, first + 2)
            assert (result.stored, result.dropped, result.reason) == (0, 2, "no_room")
        assert load(client, tokens) == ARENA_BLOCKS * SPEC.block_tokens
        other = prompt(8, 1)
        store(client, other)  # takes the place of the last blocks
        assert go_on(ARENA_BLOCKS - 8, ARENA_BLOCKS + 2).stored == 8, "what is before them is here"

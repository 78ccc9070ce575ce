"""Blocks that must leave the arena go to the drives, or where else there is room; nobody waits for a drive in vain."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvfleet.config import MIB, DriveConfig
from kvfleet.errors import TierUnavailableError
from kvfleet.node.messages import Source
from kvfleet.node.nvme import NvmeTier
from kvfleet.node.shared import SharedTier
from tests.conftest import wait_for
from tests.rig import Rig
from tests.workload import load, model, prompt, store

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

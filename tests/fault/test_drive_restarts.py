"""Real drives, as a node uses them: what they hold outlives the manager, the arena and the fleet."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvfleet.client import Client
from kvfleet.config import MIB, DriveConfig
from kvfleet.node.arenadir import directory_for
from kvfleet.node.messages import Source
from tests.conftest import wait_for
from tests.rig import Rig
from tests.workload import load, model, prompt, store

SPEC = model()
NUM_BLOCKS = 12


def fleet(root: Path, *directories: Path, num_nodes: int = 1, **settings: Any) -> Rig:
    for directory in directories:
        directory.mkdir(exist_ok=True)
    nvme = tuple(DriveConfig(directory=str(directory), max_bytes=16 * MIB) for directory in directories)
    return Rig(root, num_nodes, nvme=nvme, **settings)


def drives(rig: Rig, number: int = 0) -> tuple[Any, ...]:
    found: tuple[Any, ...] = rig.status(number).drives
    return found


def wait_for_blocks(rig: Rig, num_blocks: int) -> None:
    wait_for(lambda: sum(drive.blocks for drive in drives(rig)) == num_blocks, f"{num_blocks} are on the drives", 10)


def kept(rig: Rig) -> Client:
    """Have a prompt's blocks on the drives of node 0."""
    client = rig.client(SPEC)
    store(client, prompt(NUM_BLOCKS))
    wait_for_blocks(rig, NUM_BLOCKS)
    return client


def lose_arena(rig: Rig, number: int = 0) -> None:
    """A node dies with its memory; its drives stay."""
    rig.kill(number)
    shutil.rmtree(directory_for(Path(rig.config.arena_root), rig.config.name, rig.node_id(number)))


def test_blocks_are_spread_over_the_drives(arena_root, tmp_path):
    with fleet(arena_root, tmp_path / "a", tmp_path / "b") as rig:
        kept(rig)
        assert [drive.blocks for drive in drives(rig)] == [NUM_BLOCKS // 2] * 2
        assert [(drive.works, drive.problem) for drive in drives(rig)] == [(True, "")] * 2


def test_a_manager_finds_memory_and_drives_as_they_were(arena_root, tmp_path):
    with fleet(arena_root, tmp_path / "a", tmp_path / "b") as rig:
        client = kept(rig)
        rig.kill(0)
        rig.start(0)
        assert load(client, prompt(NUM_BLOCKS)).outcomes == (Source.DRAM,) * NUM_BLOCKS
        wait_for_blocks(rig, NUM_BLOCKS)


@pytest.mark.parametrize("directory", [True, False])
def test_a_node_that_lost_its_memory_finds_its_drives(arena_root, tmp_path, directory):
    with fleet(arena_root, tmp_path / "a", tmp_path / "b", lookup_timeout_s=0.2) as rig:
        kept(rig)
        lose_arena(rig)
        if not directory:
            rig.stop_directory()
        rig.start(0)
        wait_for_blocks(rig, NUM_BLOCKS)  # until then only the directory may speak of them, from before
        client = rig.client(SPEC)
        wait_for(lambda: client.lookup(prompt(NUM_BLOCKS)).num_blocks == NUM_BLOCKS, "they are found", 10)
        assert load(client, prompt(NUM_BLOCKS)).outcomes == (Source.NVME,) * NUM_BLOCKS
        rig.start_directory()


def test_other_nodes_read_what_a_node_has_on_its_drives_only(arena_root, tmp_path):
    with fleet(arena_root, tmp_path / "a", num_nodes=1) as rig:
        kept(rig)
        lose_arena(rig)
        rig.start(0)
        wait_for_blocks(rig, NUM_BLOCKS)
        rig.start(1)
        other = rig.client(SPEC, 1)
        wait_for(lambda: other.lookup(prompt(NUM_BLOCKS)).num_blocks == NUM_BLOCKS, "the directory knows", 10)
        assert load(other, prompt(NUM_BLOCKS)).outcomes == (Source.PEER,) * NUM_BLOCKS


def test_a_fleet_finds_what_each_medium_holds(arena_root, tmp_path):
    """The drives first; what they have lost comes from the shared tier."""
    paths, shared = (tmp_path / "a", tmp_path / "b"), f"file://{tmp_path}/shared"
    with fleet(arena_root, *paths, shared_url=shared) as rig:
        kept(rig)
        assert rig.run(rig.managers[0].flush(20.0)) == 0  # a fleet that stops: all are saved, and in the manifests
    for lost, sources in (((), {Source.NVME: 12}), (paths[:1], {Source.NVME: 6, Source.SHARED: 6})):
        for path in lost:
            shutil.rmtree(path)
        with fleet(arena_root, *paths, shared_url=shared) as rig:
            client = rig.client(SPEC)
            wait_for(lambda client=client: client.lookup(prompt(NUM_BLOCKS)).num_blocks == NUM_BLOCKS, "found", 10)
            assert load(client, prompt(NUM_BLOCKS)).counts == sources


def test_a_second_manager_is_refused_a_drive_and_serves_without(arena_root, tmp_path):
    with fleet(arena_root, tmp_path / "a") as rig:
        kept(rig)
        rig.start(1)
        refused = "another process has this drive open"
        wait_for(lambda: refused in drives(rig, 1)[0].problem, "the second manager is refused", 10)
        assert (drives(rig, 1)[0].works, drives(rig, 1)[0].blocks) == (False, 0)
        assert drives(rig)[0].works
        other = rig.client(SPEC, 1)
        assert load(other, prompt(NUM_BLOCKS)).outcomes == (Source.PEER,) * NUM_BLOCKS
        store(other, prompt(4, 1))
        assert load(other, prompt(4, 1)).outcomes == (Source.DRAM,) * 4


def test_an_arena_that_was_made_without_drives_is_replaced(arena_root, tmp_path):
    with fleet(arena_root) as rig:
        store(rig.client(SPEC), prompt(4))
        rig.kill(0)
        (tmp_path / "a").mkdir()
        rig.config = replace(rig.config, nvme=(DriveConfig(directory=str(tmp_path / "a"), max_bytes=16 * MIB),))
        rig.start(0)
        client = kept(rig)
        assert load(client, prompt(NUM_BLOCKS)).outcomes == (Source.DRAM,) * NUM_BLOCKS

"""Drives under Ray: what each medium holds is served again after a restart, of whatever it is."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from kvfleet import DriveConfig, Fleet
from kvfleet.core.directory import NodeId
from kvfleet.node.arenadir import directory_for
from kvfleet.node.messages import Source
from tests.cluster.engine_process import (
    MIB,
    Engine,
    elsewhere,
    have_ended,
    here,
    manager_process,
    new_seed,
    node_status,
)
from tests.conftest import wait_for

pytestmark = pytest.mark.usefixtures("ray_cluster")

NUM_BLOCKS = 8


def on_drives(fleet: Fleet) -> list[int]:
    """How many blocks each drive of this node has."""
    nodes = {node.node_id: node for node in fleet.status().nodes}
    return [drive.blocks for drive in nodes[here()].drives] if here() in nodes else []


def wait_for_drives(fleet: Fleet) -> None:
    wait_for(lambda: sum(on_drives(fleet)) == NUM_BLOCKS, "the drives have all blocks", 20)


def load(engine: Engine, seed: int) -> dict[Source, int]:
    """Where the blocks come from, with the right bytes, once they are found: in seconds."""
    wait_for(lambda: engine.lookup(seed, NUM_BLOCKS).num_blocks == NUM_BLOCKS, "they are found", 10)
    answer = engine.load(seed, NUM_BLOCKS)
    assert (answer.num_blocks, answer.wrong) == (NUM_BLOCKS, ())
    return answer.sources


def test_what_each_medium_holds_is_served_again(make_fleet, engine_here, engine_on, tmp_path):
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    settings = {
        "nvme": tuple(DriveConfig(directory=str(path), max_bytes=64 * MIB) for path in paths),
        "shared_url": f"file://{tmp_path}/shared",
    }
    fleet, seed = make_fleet(**settings), new_seed()
    engine = engine_here(fleet)
    engine.store(seed, NUM_BLOCKS)
    wait_for_drives(fleet)
    assert on_drives(fleet) == [NUM_BLOCKS // 2] * 2

    end_manager(fleet)
    assert load(engine, seed) == {Source.DRAM: NUM_BLOCKS}
    wait_for_drives(fleet)

    engine.close()  # engines die with their node
    end_manager(fleet, lambda: shutil.rmtree(arena_of(fleet)))
    assert load(engine_here(fleet), seed) == {Source.NVME: NUM_BLOCKS}
    other = engine_on(fleet, elsewhere())  # of a node that is refused the drives that this one has open
    assert other.load(seed, NUM_BLOCKS).sources == {Source.PEER: NUM_BLOCKS}
    refused = {node.node_id: node.drives for node in fleet.status().nodes}[elsewhere()]
    assert all("another process has this drive open" in drive.problem for drive in refused)

    wait_for(lambda: all(node.unsaved_blocks == 0 for node in fleet.status().nodes), "all is saved", 20)
    assert fleet.stop() == 0
    shutil.rmtree(paths[0])
    paths[0].mkdir()
    fleet = make_fleet(**settings)
    assert load(engine_here(fleet), seed) == {Source.NVME: NUM_BLOCKS // 2, Source.SHARED: NUM_BLOCKS // 2}


def arena_of(fleet: Fleet) -> Path:
    return directory_for(Path(fleet.config.arena_root), fleet.config.name, NodeId(here()))


def end_manager(fleet: Fleet, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Kill this node's manager, and wait for the next one."""
    process = manager_process(fleet.config.name, here())
    os.kill(process, signal.SIGKILL)
    wait_for(lambda: have_ended([process]), "the manager has ended")
    meanwhile()
    wait_for(lambda: node_status(fleet, here()) is not None, "the next manager answers")

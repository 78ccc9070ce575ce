"""A fleet on two raylets: it starts, serves, and leaves nothing behind."""

from __future__ import annotations

import pytest
import ray

import kvfleet
from kvfleet import ConfigError, FleetConfig
from kvfleet.node.messages import Source
from tests.cluster.engine_process import BLOCK_BYTES, MIB, elsewhere, fleet_actors, here, running, spilled_bytes

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_bytes_come_from_the_other_node(make_fleet, engine_here, engine_on):
    fleet = make_fleet()
    assert set(fleet_actors(fleet.config.name)) == {"directory", f"tier-manager-{here()}"}
    engine, other = engine_here(fleet), engine_on(fleet, elsewhere())
    stored = engine.store(1, 12)
    assert (stored.stored, stored.dropped, stored.published) == (12, 0, True)
    assert other.lookup(1, 12).num_blocks == 12
    first, again = other.load(1, 12), other.load(1, 12)
    assert (first.num_blocks, first.wrong, first.sources) == (12, (), {Source.PEER: 12})
    assert (again.num_blocks, again.wrong, again.sources) == (12, (), {Source.DRAM: 12})
    assert other.stats().calls == {"attach": 1, "locate": 2, "load": 1}
    nodes = {node.node_id: node for node in fleet.status().nodes}
    assert nodes[here()].sent_bytes == 12 * BLOCK_BYTES
    assert nodes[elsewhere()].loaded_bytes == {"peer": 12 * BLOCK_BYTES}


def test_a_local_hit_makes_no_call(make_fleet, engine_here):
    engine = engine_here(make_fleet())
    engine.store(1, 8)
    before = engine.stats().calls
    assert before == {"attach": 1, "reserve": 1, "commit": 1}
    for _ in range(3):
        answer = engine.load(1, 8)
        assert (answer.num_blocks, answer.wrong, answer.sources) == (8, (), {Source.DRAM: 8})
    assert engine.stats().calls == before


def test_nothing_spills(make_fleet, engine_here, engine_on):
    """Half as much again as the object stores hold goes through them, both ways at once."""
    fleet = make_fleet(dram_bytes=800 * MIB)
    engine, other = engine_here(fleet), engine_on(fleet, elsewhere())
    assert engine.store(1, 384).stored == 384
    assert other.store(2, 384).stored == 384
    spilled = spilled_bytes()
    pending = other.begin("load", 1, 384)
    mine, its = engine.load(2, 384), ray.get(pending, timeout=120)
    for answer in (mine, its):
        assert (answer.num_blocks, answer.wrong, answer.sources) == (384, (), {Source.PEER: 384})
    assert spilled_bytes() == spilled


def test_a_working_set_larger_than_all_arenas(make_fleet, engine_here, engine_on, tmp_path):
    """1 GiB through two arenas of 64 MiB and the shared tier."""
    fleet = make_fleet(shared_url=f"file://{tmp_path}")
    engine, other = engine_here(fleet), engine_on(fleet, elsewhere())
    for seed in range(32):
        result = engine.store(seed, 32)
        assert (result.stored, result.dropped) == (32, 0), result
    for seed in range(32):
        answer = other.load(seed, 32)
        assert (answer.num_blocks, answer.wrong) == (32, ())
        assert answer.sources.get(Source.SHARED, 0) + answer.sources.get(Source.PEER, 0) == 32
    for node in fleet.status().nodes:
        assert node.used_bytes <= node.capacity_bytes <= 64 * MIB
        assert node.lost_blocks == 0


def test_a_prefix_larger_than_the_arena(make_fleet, engine_here, engine_on, tmp_path):
    fleet = make_fleet(shared_url=f"file://{tmp_path}")
    engine, other = engine_here(fleet), engine_on(fleet, elsewhere())
    assert engine.store(1, 160).stored == 160
    for reader in (other.load, engine.load):
        answer = reader(1, 160)
        assert (answer.num_blocks, answer.wrong) == (160, ())

"""The benchmarks run, at sizes too small to say anything."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvfleet.bench import directory, local, lookup, managers, peer, store
from kvfleet.bench.workload import running_fleet
from kvfleet.fleet import Fleet

MIB = 1 << 20


@pytest.fixture(scope="module")
def fleet(ray_cluster) -> Iterator[Fleet]:
    with running_fleet(64 * MIB, None) as running:
        yield running


def test_local(fleet):
    rows = local.rows(fleet, block_tokens=8, num_blocks=2, repeats=1)
    assert [(row.name, row.moved_bytes) for row in rows] == [("memcpy", 2 * MIB), ("load", 2 * MIB)]


def test_store(fleet):
    rows = store.rows(fleet, block_tokens=8, num_blocks=2, repeats=1)
    assert [(row.name, row.moved_bytes) for row in rows] == [("memcpy", 2 * MIB), ("store", 2 * MIB)]


def test_lookup(fleet):
    rows = lookup.rows(fleet, num_blocks=4, repeats=1)
    assert [row.name for row in rows] == [
        "SHA-256 alone",
        "lookup, buffer",
        "lookup, list",
        "lookup, asks the directory",
        "lookup, all actors gone",
    ]


def test_managers(fleet):
    one = managers.compare("hold-turn", fleet, fleet, num_requests=2, num_warm=1)
    assert one.policy == "hold-turn"
    assert one.requests_per_s > 0
    assert one.share > 0
    assert sum(node.blocks for node in fleet.status().nodes) >= managers.BLOCKS  # they were stored


def test_peer(fleet):
    rows = peer.rows(fleet, peer.choose_pair(), block_tokens=8, num_blocks=3, repeats=1)
    names = ("object store", "TCP", "fetch", "load")
    assert [(row.name, row.moved_bytes) for row in rows] == [(name, 3 * MIB) for name in names]


def test_directory(fleet):
    with directory.running_directory(None, num_records=5000, num_blocks=64) as site:
        rows, caller_cpu_s = directory.rows(site, num_callers=3, calls=2, repeats=1)
    names = ("nothing", "locate", "locate, inventories")
    assert [(row.name, row.num_blocks, len(row.seconds), row.keys_per_call) for row in rows] == [
        (name, 3, 6, 64) for name in names
    ]
    assert all(row.calls_per_s > 0 for row in rows)
    assert caller_cpu_s > 0

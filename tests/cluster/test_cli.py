"""`kvfleet up`, `status` and `down` on a cluster of two nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvfleet


def run(*arguments: str, address: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).with_name("kvfleet"), *arguments],
        check=False,
        env={**os.environ, "RAY_ADDRESS": address, "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def address(ray_cluster) -> str:
    return str(ray_cluster.address)


def test_a_fleet_outlives_the_command_that_started_it(address, arena_root):
    up = run("up", "--name", "cli", "--dram-bytes", "32MiB", "--arena-root", str(arena_root), address=address)
    assert up.returncode == 0, up.stderr
    try:
        status = run("status", "--name", "cli", "--json", address=address)
        found = json.loads(status.stdout)
        assert [node["capacity_bytes"] for node in found["nodes"]] == [32 << 20] * 2
        assert found["silent"] == []
        assert all(node["node_id"][:8] in up.stdout for node in found["nodes"])
        assert "directory: 0 records of 2 nodes" in run("status", "--name", "cli", address=address).stdout
    finally:
        down = run("down", "--name", "cli", address=address)
    assert down.returncode == 0, down.stderr
    assert not list(arena_root.rglob("arena"))
    with pytest.raises(kvfleet.ConfigError, match="no fleet 'cli'"):
        kvfleet.connect("cli", address=address)


def test_a_fleet_that_is_not_there(address):
    done = run("status", "--name", "nowhere", address=address)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.strip() == "kvfleet: name: no fleet 'nowhere' is running here; `kvfleet up` starts one"

"""`kvfleet up`, `status` and `down` on a cluster of two nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kvfleet
from kvfleet.cli.main import app
from tests.cluster.engine_process import BLOCK_TOKENS, here, prompt
from tests.conftest import wait_for


def run(*arguments: str, address: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).with_name("kvfleet"), *arguments],
        check=False,
        env={**os.environ, "RAY_ADDRESS": address, "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def shown(*arguments: str, columns: int = 160) -> tuple[int, str]:
    """Exit code and output of a command in this process, which has connected to the cluster already."""
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": str(columns)})
    return done.exit_code, done.output


def told(*arguments: str) -> Any:
    """What a command says in JSON."""
    code, text = shown(*arguments, "--json")
    assert code == 0, text
    return json.loads(text)


@pytest.fixture
def address(ray_cluster) -> str:
    return str(ray_cluster.address)


def test_a_fleet_outlives_the_command_that_started_it(address, arena_root, tmp_path):
    """Both nodes are on one machine here, so that one is refused the drive that the other has."""
    arenas, drive = ("--dram-bytes", "32MiB", "--arena-root", str(arena_root)), ("--nvme", str(tmp_path))
    up = run("up", "--name", "cli", *arenas, *drive, "--nvme-bytes", "64MiB", address=address)
    assert up.returncode == 0, up.stderr
    try:
        status = run("status", "--name", "cli", "--json", address=address)
        found = json.loads(status.stdout)
        assert [node["capacity_bytes"] for node in found["nodes"]] == [32 << 20] * 2
        assert found["silent"] == []
        assert all(node["node_id"][:8] in up.stdout for node in found["nodes"])
        assert sorted(drive["works"] for node in found["nodes"] for drive in node["drives"]) == [False, True]
        _, text = shown("status", "--name", "cli")
        assert "directory: 0 of at most 20,000,000 records of 2 nodes" in text
        assert f"{tmp_path}: another process has this drive open" in text.replace("\n", "")
        assert shown("explain", "--name", "cli") == (0, "no request is remembered\n")
    finally:
        down = run("down", "--name", "cli", address=address)
    assert down.returncode == 0, down.stderr
    assert down.stdout == ("fleet cli is stopped: 2 managers and its directory; 64.0 MiB of memory are free again\n")
    assert not list(arena_root.rglob("arena"))
    with pytest.raises(kvfleet.ConfigError, match=r"^no fleet 'cli'"):
        kvfleet.connect("cli", address=address)
    assert shown("down", "--name", "cli") == (0, "fleet cli does not run here: nothing to stop\n")


def test_storage_that_does_not_work_is_said(address, arena_root):
    arenas = ("--dram-bytes", "32MiB", "--arena-root", str(arena_root))
    try:
        code, text = shown("up", "--name", "deaf", *arenas, "--shared", "file:///dev/null/kv")
    finally:
        shown("down", "--name", "deaf")
    assert code == 1
    assert "the fleet is up, but the shared tier can be used on no node: " in text


def test_a_fleet_that_is_not_there(address):
    done = run("status", "--name", "nowhere", address=address)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.strip() == "kvfleet: no fleet 'nowhere' is running here; `kvfleet up` starts one"


def test_what_became_of_requests_is_told(address, make_fleet, engine_here):
    engine = engine_here(make_fleet(name="told"))
    assert engine.store(1, 4).stored == 4
    hit = engine.client.lookup(prompt(1, 6), label="chatcmpl-7")
    assert engine.client.load(hit, lambda index, view: None) == 4 * BLOCK_TOKENS
    assert engine.load(2, 3).num_blocks == 0

    listed = run("explain", "--name", "told", address=address)
    assert listed.returncode == 0, listed.stderr
    lines = listed.stdout.splitlines()[2:]
    assert [line.split()[1] for line in lines] == [here()[:8]] * 2
    assert "chatcmpl-7" in lines[1]
    assert "dram 4" in lines[1]
    for wanted in ("chatcmpl", hit.keys[-16:].hex()[:10]):
        _, text = shown("explain", wanted, "--name", "told")
        assert "6 blocks of" in text
        assert "4: 4 in this node's memory" in text
        (request,) = told("explain", wanted, "--name", "told")
        assert (request["label"], request["node"], request["from_dram"]) == ("chatcmpl-7", here(), 4)
        assert request["missing"] == hit.missing
    assert "begins with 'none'" in shown("explain", "none", "--name", "told")[1]

    totals = told("status", "--name", "told")["totals"]
    assert (totals["lookups"], totals["asked_blocks"]) == (2, 9)
    assert sum(totals["outcomes"].values()) == 9
    assert totals["outcomes"]["dram"] == 4
    _, text = shown("status", "--name", "told")
    assert "blocks asked for" in text
    assert "blocks that did not come" in text


def test_a_node_is_drained(address, arena_root, make_fleet, engine_here, tmp_path):
    fleet = make_fleet(name="drained", shared_url=f"file://{tmp_path}")
    engine = engine_here(fleet)
    assert engine.store(1, 6).stored == 6
    node = here()
    done = run("drain", node[:12], "--name", "drained", "--seconds", "30", "--bytes", "1GiB", address=address)
    assert done.returncode == 0, done.stderr
    assert f"node {node[:12]}: draining; " in done.stdout
    assert " saved, 0 (0 B) left without a copy in the shared tier" in done.stdout
    assert len(list(tmp_path.rglob("*.arrow"))) == 6
    nodes = told("status", "--name", "drained")["nodes"]
    assert {found["node_id"]: found["draining"] for found in nodes}[node]
    assert engine.store(2, 3).reason == "draining"
    assert engine.load(1, 6).num_blocks == 6
    assert shown("drain", node, "--name", "drained", "--resume") == (0, f"node {node}: takes stores again\n")
    assert engine.store(2, 3).stored == 3
    done = run("drain", "x", "--name", "drained", address=address)
    assert done.returncode == 1
    assert "no node with a manager has an id that begins with 'x'" in done.stderr


def test_blocks_are_inspected_and_nodes_looked_over(address, make_fleet, engine_here, tmp_path):
    def of_looked(*arguments):
        return shown(*arguments, "--name", "looked", columns=80)

    engine = engine_here(make_fleet(name="looked", shared_url=f"file://{tmp_path}"))
    assert engine.store(1, 2).stored == 2
    wait_for(lambda: len(list(tmp_path.rglob("*.arrow"))) == 2, "both blocks are in the shared tier")
    key = engine.client.lookup(prompt(1, 2)).keys[-16:].hex()
    code, text = of_looked("inspect", key)
    assert code == 0
    assert [line.split()[-1] for line in text.splitlines()[2:]] == ["sound", "sound"]
    assert of_looked("inspect", "0" * 32) == (0, f"{'0' * 32}: nowhere in fleet looked\n")

    code, text = of_looked("doctor", "--json")
    assert code == 0, text
    checks = {check["name"]: check["text"] for node in json.loads(text)["nodes"] for check in node["checkup"]["checks"]}
    assert {"arena", "books", "blocks", "memory", "shared tier", "directory"} <= checks.keys()
    (path,) = tmp_path.rglob(f"{key}*.arrow")
    path.write_bytes(b"spoilt")
    code, text = of_looked("doctor")
    assert code == 1
    assert max(map(len, text.splitlines())) <= 80
    assert "all 2 copies of blocks in this node's memory read, 1 is damaged" in " ".join(text.split())
    code, text = of_looked("inspect", key)
    assert code == 1
    assert "cut off" in text

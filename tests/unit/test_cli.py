"""The `kvfleet` command, as far as it needs no cluster."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from kvfleet.cli import explain
from kvfleet.cli.console import parse_bytes, plain_errors, show_bytes
from kvfleet.cli.main import app
from kvfleet.cli.status import (
    as_dict,
    catalog_lines,
    directory_line,
    drives_table,
    misses_table,
    nodes_table,
    notes,
    requests_table,
    show_nodes,
)
from kvfleet.config import DriveConfig, FleetConfig
from kvfleet.core.directory import DirectoryStats, NodeId, NodeStats
from kvfleet.core.outcomes import Miss
from kvfleet.core.totals import Totals
from kvfleet.errors import ConfigError
from kvfleet.fleet import FleetStatus
from kvfleet.node.catalogstatus import CatalogStatus
from kvfleet.node.directory import DirectoryStatus
from kvfleet.node.drivestatus import DriveStatus
from kvfleet.node.status import NodeStatus
from kvfleet.node.tallies import Request


def test_help_names_the_subcommands():
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for name in ("up", "down", "status", "explain", "drain", "inspect", "doctor", "demo", "bench"):
        assert f" {name} " in result.output


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4096", 4096), ("512MiB", 512 << 20), ("48 GiB", 48 << 30), ("1.5Ki", 1536), ("1TiB", 1 << 40)],
)
def test_sizes_are_read(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "4GB", "four", "9" * 400])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(typer.BadParameter, match="is no size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 29, "1.5 GiB"), (5 << 50, "5120.0 TiB")],
)
def test_sizes_are_shown(num_bytes, text):
    assert show_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ConfigError("", "no fleet 'x' is running here"), "kvfleet: no fleet 'x' is running here\n"),
        (ConfigError("dram_bytes", "too much"), "kvfleet: dram_bytes: too much\n"),
        (ConnectionError("no Ray there"), "kvfleet: no Ray there\n"),
    ],
)
def test_errors_become_one_line(capsys, error, line):
    with pytest.raises(typer.Exit) as exit_info, plain_errors():
        raise error
    assert exit_info.value.exit_code == 1
    assert capsys.readouterr().err.startswith(line)


TOTALS = Totals(
    lookups=12,
    asked_blocks=1000,
    outcomes={"dram": 400, "peer": 200, "evicted": 300, "too_slow": 1, "unclaimed": 99},
    bytes_by_source={"dram": 3 << 30},
)
WELL = NodeStatus(
    "aaaaaaaaaaaa", 1, "", capacity_bytes=128 << 30, used_bytes=96 << 30, blocks=123_456, evicted_blocks=1_234_567,
    saved_blocks=765_432, unsaved_blocks=12_345, sent_bytes=3 << 30, totals=TOTALS,
)  # fmt: skip
ODD = replace(
    WELL, node_id="bbbbbbbbbbbb", draining=True, shared_problem="timed out", avoided=("cccccccccccc", "shared"),
    audit=("slot 7 is nobody's",),
)  # fmt: skip
ILL = NodeStatus("dddddddddddd", 0, "too little memory")
FLEET = FleetStatus("default", (WELL, ODD, ILL), ("eeeeeeeeeeee",), None)
DRIVE = DriveStatus(
    "/mnt/nvme0", works=True, problem="", capacity_bytes=3 << 40, used_bytes=1 << 40, blocks=1_234_567,
    day_bytes=7 << 40, today_bytes=7 << 38, total_bytes=40 << 40, life_days=3650.0,
)  # fmt: skip
GONE = DriveStatus("[/mnt/nvme1]", works=False, problem="EIO", slow=True, direct=False, life_days=float("inf"))


def shown(what: Any, width: int) -> dict[str, list[str]]:
    """Rows of a table as printed, by their first word."""
    console = Console(width=width)
    with console.capture() as capture:
        console.print(what)
    lines = capture.get().splitlines()
    assert "…" not in capture.get()
    return {words[0]: words[1:] for words in map(str.split, lines) if words}


@pytest.mark.parametrize("width", [80, 120])
def test_status_shows_every_node(width):
    rows = shown(nodes_table(FLEET), width)
    assert rows["node"] == ["dram", "fill", "blocks", "evicted", "saved", "unsaved", "sent"]
    assert rows["aaaaaaaa"] == ["128.0", "GiB", "75.0%", "123,456", "1,234,567", "765,432", "12,345", "3.0", "GiB"]
    assert rows["bbbbbbbb"] == rows["aaaaaaaa"]
    assert rows["dddddddd"] == ["0", "B", "-", "0", "0", "0", "0", "0", "B"]
    assert rows["eeeeeeee"] == ["?"] * 7


@pytest.mark.parametrize("width", [80, 120])
def test_status_shows_the_drives(width):
    found = replace(FLEET, nodes=(replace(WELL, drives=(DRIVE,)), replace(ODD, drives=(GONE,)), ILL))
    rows = shown(drives_table(found), width)
    assert rows["node"] == ["size", "fill", "blocks", "today", "of", "budget", "lasts", "directory"]
    assert " ".join(rows["aaaaaaaa"]) == "3.0 TiB 33.3% 1,234,567 1.8 TiB 25.0% 10 years /mnt/nvme0"
    assert " ".join(rows["bbbbbbbb"]) == "0 B - 0 0 B - - [/mnt/nvme1]"
    assert next(notes(found)) == (
        "bbbbbbbb: draining: it takes no stores; shared tier: timed out; [/mnt/nvme1]: EIO; [/mnt/nvme1]: much slower "
        "than the others, not written; [/mnt/nvme1]: no direct I/O there; does not ask cccccccc, shared: no answer; "
        "slot 7 is nobody's"
    )
    console = Console(width=width)
    with console.capture() as capture:
        show_nodes(console, found)
    assert "/mnt/nvme0" in capture.get()
    assert [node["drives"][0]["life_days"] for node in as_dict(found)["nodes"][:2]] == [3650.0, None]


@pytest.mark.parametrize(("days", "text"), [(30.4, "30 days"), (364, "364 days"), (730, "2 years"), (1e9, "-")])
def test_how_long_a_drive_lasts_is_shown(days, text):
    lasting = replace(WELL, drives=(replace(DRIVE, life_days=days),))
    assert f" {text} " in " ".join(shown(drives_table(replace(FLEET, nodes=(lasting,))), 120)["aaaaaaaa"])


def test_drives_are_given_to_the_fleet(monkeypatch):
    seen = []

    def start(config: FleetConfig, *, address: str) -> Any:
        seen.append(config)
        raise ConfigError("name", "seen")

    monkeypatch.setattr("kvfleet.start", start)
    options = "--nvme /mnt/0 --nvme /mnt/1 --nvme-bytes 2TiB --nvme-dwpd 3 --nvme-codec zstd --shared s3://b"
    more = "--shared-codec zstd:3 --shared-bytes 1GiB"
    assert CliRunner().invoke(app, ["up", *options.split(), *more.split()]).exit_code == 1
    assert CliRunner().invoke(app, ["up"]).exit_code == 1
    drives = tuple(DriveConfig(directory=path, max_bytes=2 << 40, dwpd=3) for path in ("/mnt/0", "/mnt/1"))
    assert seen == [
        FleetConfig(
            nvme=drives, nvme_codec="zstd", shared_url="s3://b", shared_codec="zstd:3", shared_bytes_max=1 << 30
        ),
        FleetConfig(),
    ]


def up(*options: str) -> tuple[int, str]:
    """Exit status and what is said of errors, in one line."""
    done = CliRunner().invoke(app, ["up", *options], env={"COLUMNS": "200"})
    return done.exit_code, " ".join(done.output.split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--nvme-bytes 1TiB", "--nvme-bytes: is about drives, and there are none: name them by --nvme DIR"),
        ("--nvme-dwpd 3", "--nvme-dwpd: is about drives, and there are none"),
        ("--nvme /d --nvme /d", "--nvme: each drive once"),
        ("--nvme /d --nvme-dwpd -1", "--nvme-dwpd of /d must be positive"),
        ("--nvme /d --nvme-dwpd inf", "--nvme-dwpd of /d must be at most 1,000,000"),
        ("--shared x", "--shared: needs a scheme"),
        ("--dram-bytes 1", "--dram-bytes: must be at least 1 MiB"),
        ("--shared s3://b --shared-codec gzip", "--shared-codec: raw, zstd"),
        ("--name a/b", "--name: letters, digits"),
    ],
)
def test_wrong_settings_are_named_as_they_were_typed(options, said):
    code, shown = up(*options.split())
    assert code == 1
    assert said in shown


def test_settings_that_nodes_refuse_are_named_as_they_were_typed(monkeypatch):
    def start(config: FleetConfig, *, address: str) -> Any:
        raise ConfigError("", "node abc: dram_bytes: does not fit into /dev/shm; node def: arena_root: not private")

    monkeypatch.setattr("kvfleet.start", start)
    assert "node abc: --dram-bytes: does not fit into /dev/shm; node def: --arena-root: not private" in up()[1]


def test_a_drive_that_no_node_can_use_is_an_error(monkeypatch):
    bad = replace(GONE, directory="/d0", problem="max_bytes: a drive needs 9 bytes at least, may take 1")
    found = FLEET
    monkeypatch.setattr("kvfleet.start", lambda config, address: SimpleNamespace(up=lambda: found))

    def drives(*each: DriveStatus) -> FleetStatus:
        nodes = (WELL, ODD, ILL)
        return replace(FLEET, nodes=tuple(replace(node, drives=(one,)) for node, one in zip(nodes, each, strict=True)))

    found = drives(bad, bad, bad)
    code, shown = up("--nvme", "/d0")
    assert code == 1
    assert "the fleet is up, but this drive can be used on no node: /d0 (--nvme-bytes: a drive needs 9 bytes" in shown
    for other in (drives(bad, replace(bad, works=True), bad), drives(bad, bad, replace(bad, tried=False)), FLEET):
        found = other
        assert up("--nvme", "/d0")[0] == 0


def test_storage_that_no_node_can_use_is_an_error(monkeypatch):
    bad = replace(WELL, shared_problem="NoCredentialsError")
    monkeypatch.setattr("kvfleet.start", lambda config, address: SimpleNamespace(up=lambda: found))
    found = replace(FLEET, nodes=(bad, bad, ILL))
    code, shown = up("--shared", "s3://b")
    assert code == 1
    assert "the fleet is up, but the shared tier can be used on no node: NoCredentialsError" in shown
    for other in (WELL, replace(bad, shared_tried=False)):
        found = replace(FLEET, nodes=(bad, other, ILL))
        assert up("--shared", "s3://b")[0] == 0
    found = replace(FLEET, nodes=(replace(WELL, shared_tried=False),))
    assert "aaaaaaaa: shared tier: no answer yet" in up("--shared", "s3://b")[1]


def test_status_says_what_is_not_as_usual():
    assert list(notes(FLEET)) == [
        "bbbbbbbb: draining: it takes no stores; shared tier: timed out; does not ask cccccccc, shared: no answer; "
        "slot 7 is nobody's",
        "dddddddd: too little memory",
        "eeeeeeee: no answer from its manager; engines there read what its memory holds, and store nothing",
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_status_shows_what_was_asked_for(width):
    rows = shown(requests_table(FLEET), width)
    assert rows["node"] == ["lookups", "asked", "hit", "dram", "nvme", "peer", "shared", "unclaimed", "loaded"]
    assert rows["aaaaaaaa"] == ["12", "1,000", "60.0%", "40.0%", "0.0%", "20.0%", "0.0%", "99", "3.0", "GiB"]
    assert rows["dddddddd"] == ["0", "0", "-", "-", "-", "-", "-", "0", "0", "B"]
    assert rows["all"] == ["24", "2,000", "60.0%", "40.0%", "0.0%", "20.0%", "0.0%", "198", "6.0", "GiB"]


@pytest.mark.parametrize("width", [80, 120])
def test_status_shows_why_blocks_did_not_come(width):
    rows = shown(misses_table(FLEET.totals), width)
    assert list(rows)[-3:] == ["evicted", "unclaimed", "too_slow"]
    assert " ".join(rows["evicted"]) == "600 30.0% it was there, and had to make room"
    assert " ".join(rows["too_slow"]) == "2 0.1% its holder sent nothing for too long"


def test_status_tells_of_the_directory():
    nodes = (NodeStats(NodeId("n1"), epoch=1, seq=2, records=5, synced=True),)
    stats = DirectoryStats(nodes, rows=12345, shared=7, refused=0, capacity=20_000, departed=0)
    found = FleetStatus("default", (), (), DirectoryStatus(stats, shared_listed=False, lookups=1))
    size = show_bytes(stats.memory_bytes)
    assert directory_line(found) == (
        f"directory: 12,345 of at most 20,000 records of 1 node in {size}; 7 in the shared tier; "
        "the shared tier is being listed"
    )
    full = replace(found, directory=DirectoryStatus(replace(stats, refused=9), shared_listed=True, lookups=1))
    assert directory_line(full) == (
        f"directory: 12,345 of at most 20,000 records of 1 node in {size}, 9 refused; 7 in the shared tier"
    )
    everything = json.loads(json.dumps(as_dict(full)))
    assert everything["directory"]["stats"]["memory_bytes"] == stats.memory_bytes
    assert "no answer" in directory_line(FleetStatus("default", (), (), None))


def test_status_tells_of_the_shared_tier():
    node = NodeStatus("ab" * 16, 1, "", catalog=CatalogStatus(1234, 5 << 30, 10 << 30, 0, 7, 0, False, ""))
    found = FleetStatus("default", (node,), (), None)
    assert list(catalog_lines(found)) == [
        "shared tier: 1,234 objects in 5.0 GiB of at most 10.0 GiB; abababab keeps the catalog"
    ]
    node = replace(node, catalog=CatalogStatus(1, 512, None, 3, 0, 2, True, "no answer"))
    assert list(catalog_lines(replace(found, nodes=(node,)))) == [
        "shared tier: 1 object in 512 B, 3 more are not known; abababab keeps the catalog; no answer"
    ]


def test_json_has_everything():
    everything = json.loads(json.dumps(as_dict(FLEET)))
    assert everything["totals"]["asked_blocks"] == 2000
    assert everything["nodes"][0]["totals"]["outcomes"]["evicted"] == 300
    assert everything["nodes"][1]["draining"]


REQUEST = Request(
    asked_ns=1_700_000_000_000_000_000, label="chatcmpl-0123456789abcdef", block_tokens=16, block_bytes=1 << 20,
    start_block=1, asked_blocks=11, hit_blocks=8, local=4, remote=2, shared=0, pending=1, missing=Miss.NEVER_STORED,
    lookup_s=0.002, loaded=True, from_dram=4, from_peer=1, miss=Miss.TOO_SLOW, load_s=5.0,
    first_key=bytes(range(16)), last_key=bytes(range(16, 32)),
)  # fmt: skip
FOUND = [
    (NodeId("a" * 56), REQUEST),
    (NodeId("b" * 56), replace(REQUEST, asked_ns=2, label="", miss=None, missing=None)),
    (NodeId("c" * 56), replace(REQUEST, asked_ns=3, label="r3", loaded=False, miss=None)),
]


def printed(what: Any, width: int) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(what)
    return capture.get()


def test_requests_are_listed():
    wide = printed(explain.requests_table(FOUND), 130).splitlines()[2:]
    assert [re.split(r" {2,}", line.strip())[1:] for line in wide] == [
        ["aaaaaaaa", "chatcmpl-012…", "160", "112", "dram 4, peer 1",
         "too_slow: its holder sent nothing for too long"],
        ["bbbbbbbb", "10111213", "160", "112", "dram 4, peer 1"],
        ["cccccccc", "r3", "160", "112", "not loaded", "never_stored: nobody has stored it"],
    ]  # fmt: skip
    narrow = printed(explain.requests_table(FOUND, in_words=False), 80).splitlines()
    assert len(narrow) == 5
    assert narrow[2].rstrip().endswith("dram 4, peer 1  too_slow")


def test_a_request_is_shown_in_full():
    assert [re.split(r" {2,}", line.strip()) for line in printed(explain.request_table(*FOUND[0]), 120).splitlines()][
        2:
    ] == [
        ["node", "a" * 56],
        ["asked for", "10 blocks of 16 tokens, from block 1 on"],
        ["found", "7: 4 in this node's memory, 1 being written on this node, 2 on other nodes"],
        ["missing", "3: never_stored: nobody has stored it"],
        ["loaded", "5, 5.0 MiB: 4 from this node's memory, 1 from another node"],
        ["not loaded", "2: too_slow: its holder sent nothing for too long"],
        ["lookup took", "2.00 ms"],
        ["load took", "5.00 s"],
        ["keys", f"{bytes(range(16)).hex()} to {bytes(range(16, 32)).hex()}"],
    ]
    assert "not, or not yet" in printed(explain.request_table(*FOUND[2]), 80)


def test_a_plan_and_what_became_of_it_are_shown():
    planned = replace(
        REQUEST, miss=Miss.SLOWER_THAN_COMPUTE, load_s=0.06, planned_blocks=5, predicted_load_s=0.05,
        predicted_ready_s=1.25, recompute_s=2.0, ready_s=1.5, reason="loading from shared takes 80 ms, computing 60 ms",
    )  # fmt: skip
    lines = printed(explain.request_table(NodeId("a" * 56), planned), 130).splitlines()
    assert [re.split(r" {2,}", line.strip()) for line in lines][-5:-1] == [
        ["lookup took", "2.00 ms"],
        ["load took", "60.00 ms, 50.00 ms expected"],
        ["plan", "5 blocks to load: loading from shared takes 80 ms, computing 60 ms"],
        ["prompt", "ready after 1.50 s, 1.25 s expected, 2.00 s without the cache"],
    ]


@pytest.mark.parametrize("label", ["a[/b]", "[bold]x", ":warning:", "[link=x]"])
def test_labels_are_shown_as_they_are(label, monkeypatch, capsys):
    labelled = [(NodeId("a" * 56), replace(REQUEST, label=label))]
    assert label in printed(explain.requests_table(labelled), 130)
    assert label in printed(explain.request_table(*labelled[0]), 130)
    fleet = SimpleNamespace(requests=lambda request, limit: [])
    monkeypatch.setattr("kvfleet.operating.join", lambda name, address: fleet)
    explain.explain(label)
    assert f"begins with {label!r} is remembered" in " ".join(capsys.readouterr().out.split())


def test_status_shows_errors_as_they_are():
    console = Console(width=200)
    with console.capture() as capture:
        show_nodes(console, FleetStatus("default", (replace(ILL, problem="[Errno 2] :x: [/dev/shm]"),), (), None))
    assert "dddddddd: [Errno 2] :x: [/dev/shm]" in capture.get()


def test_a_request_that_another_client_loaded_is_listed_once():
    scheduler = replace(REQUEST, loaded=False, from_dram=0, from_peer=0, miss=None)
    assert explain.merged([(FOUND[0][0], scheduler), FOUND[0], FOUND[2]]) == [FOUND[0], FOUND[2]]
    assert json.loads(json.dumps(explain.as_dict(*FOUND[0])))["last_key"] == bytes(range(16, 32)).hex()

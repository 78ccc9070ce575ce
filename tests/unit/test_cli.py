"""The `kvfleet` command, as far as it needs no cluster."""

from __future__ import annotations

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from kvfleet.cli.console import parse_bytes, plain_errors, show_bytes
from kvfleet.cli.main import app
from kvfleet.cli.status import directory_line, nodes_table
from kvfleet.core.directory import DirectoryStats, NodeId, NodeStats
from kvfleet.errors import ConfigError
from kvfleet.fleet import FleetStatus
from kvfleet.node.directory import DirectoryStatus
from kvfleet.node.manager import NodeStatus


def test_help_names_the_subcommands():
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for name in ("up", "down", "status", "demo", "bench"):
        assert f" {name} " in result.output


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4096", 4096), ("512MiB", 512 << 20), ("48 GiB", 48 << 30), ("1.5Ki", 1536), ("1TiB", 1 << 40)],
)
def test_sizes_are_read(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "4GB", "four"])
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
        (ConfigError("name", "no fleet 'x' is running here"), "kvfleet: name: no fleet 'x' is running here\n"),
        (ConnectionError("ray's own text"), "kvfleet: no Ray cluster lets us in: ray's own text. Start one with"),
    ],
)
def test_errors_become_one_line(capsys, error, line):
    with pytest.raises(typer.Exit) as exit_info, plain_errors():
        raise error
    assert exit_info.value.exit_code == 1
    assert capsys.readouterr().err.startswith(line)


def test_status_shows_every_node():
    well = NodeStatus("aaaaaaaaaaaa", 1, "", capacity_bytes=1 << 30, used_bytes=3 << 20, blocks=1234)
    ill = NodeStatus("bbbbbbbbbbbb", 0, "too little memory")
    console = Console(width=160)
    with console.capture() as capture:
        console.print(nodes_table(FleetStatus("default", (well, ill), ("cccccccccccc",), None)))
    row = {line.split()[1]: line for line in capture.get().splitlines() if line.count("│") == 11}
    assert "3.0 MiB │ 1.0 GiB │  1,234" in row["aaaaaaaa"]
    assert "too little memory" in row["bbbbbbbb"]
    assert "did not answer" in row["cccccccc"]


def test_status_tells_of_the_directory():
    nodes = (NodeStats(NodeId("n1"), epoch=1, seq=2, records=5, synced=True),)
    stats = DirectoryStats(nodes, rows=12345, shared=7, refused=0, memory_bytes=0)
    well = FleetStatus("default", (), (), DirectoryStatus(stats, shared_listed=False, lookups=1))
    assert directory_line(well) == (
        "directory: 12,345 records of 1 nodes, 7 in the shared tier; the shared tier is being listed"
    )
    assert "did not answer" in directory_line(FleetStatus("default", (), (), None))

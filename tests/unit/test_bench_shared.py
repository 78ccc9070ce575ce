from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvfleet.cli.main import app


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_bench_shared_measures_both_ways_and_leaves_nothing(tmp_path: Path, codec: str):
    storage, report = tmp_path / "storage", tmp_path / "report.json"
    storage.mkdir()
    options = ["--block-tokens", "1", "--blocks", "2", "--repeats", "1", "--codec", codec, "--json", str(report)]
    result = CliRunner().invoke(app, ["bench", "shared", f"file://{storage}", *options])
    assert result.exit_code == 0, result.output
    rows = json.loads(report.read_text())["rows"]
    assert [row["name"] for row in rows] == ["bare put", "write", "bare get", "read"]
    assert [row["moved_bytes"] for row in rows] == [2 << 17] * 4
    assert "read" in json.loads(report.read_text())["measures"]
    assert list(storage.iterdir()) == []


def test_bench_shared_says_what_does_not_work():
    result = CliRunner().invoke(app, ["bench", "shared", "nonsense://x"])
    assert result.exit_code == 1
    assert "nonsense" in result.output

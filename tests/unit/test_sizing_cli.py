"""`kvfleet size`, and the traffic it makes up."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvfleet.cli.main import app
from kvfleet.errors import ConfigError
from kvfleet.sim.trace import Request, write_trace
from kvfleet.sizing.traffic import reuse_of
from kvfleet.sizing.workloads import traffic_of_workload

SEVENTY = "llama-3-70b"


@pytest.fixture
def trace(tmp_path):
    """Ten prompts of 4 blocks of 512 tokens, each asked twice."""
    path = tmp_path / "trace.jsonl"
    asked = [Request(float(at), tuple(range(4 * (at // 2), 4 * (at // 2) + 4)), 2048, 1) for at in range(20)]
    write_trace(path, 512, asked)
    return str(path)


def size(*arguments, columns=120):
    return CliRunner().invoke(app, ["size", *arguments], env={"COLUMNS": str(columns)})


def test_json_has_all(trace):
    done = size(SEVENTY, "--trace", trace, "--context", "128k", "--sessions", "3", "--dram", "500GB", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["kv"]["token_bytes"] == 327_680
    assert found["kv"]["session_bytes"] == 41_943_040_000
    assert found["kv"]["all_bytes"] == 3 * 41_943_040_000
    assert found["requests"]["repeated"] == pytest.approx(0.5)
    assert found["hit_rate"] == pytest.approx(0.5)
    assert [tier["name"] for tier in found["tiers"]] == ["dram"]
    assert [source["name"] for source in found["sources"]] == ["dram", "peer", "nvme", "shared"]
    assert found["advice"]


def test_one_screen(trace):
    tiers = ["--nodes", "4", "--nvme", "1TB", "--shared", "10TB"]
    done = size(SEVENTY, "--trace", trace, "--kv-dtype", "int8", *tiers, "--ttft", "1", columns=80)
    assert done.exit_code == 0, done.output
    assert "174,080 bytes a token" in done.stdout
    assert len(done.stdout.splitlines()) <= 30


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["llama-9"], "neither a known model nor a config.json"),
        ([SEVENTY, "--kv-dtype", "fp7"], "must be one of fp32"),
        ([SEVENTY, "--gpu", "voodoo2"], "must be one of l4"),
        ([SEVENTY, "--policy", "magic"], "must be one of"),
        ([SEVENTY, "--trace", "/nowhere"], "/nowhere"),
        ([SEVENTY, "--prefill-speed", "nan"], "prefill_speed: must be from"),
        ([SEVENTY, "--prefill-speed", "inf"], "prefill_speed: must be from"),
        ([SEVENTY, "--prefill-speed", "1e-300"], "prefill_speed: must be from"),
        ([SEVENTY, "--ttft", "nan"], "ttft: must be more than 0"),
        ([SEVENTY, "--ttft", "-1"], "ttft: must be more than 0"),
    ],
)
def test_what_is_wrong_is_said(arguments, text):
    done = size(*arguments)
    assert done.exit_code == 1
    assert text in done.stderr
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["--dram", "much"],
        ["--dram", "9" * 400],
        ["--network-speed", "0"],
        ["--context", "long"],
        ["--context", "0"],
        ["--context", "100M"],
        ["--shared-latency", "inf"],
        ["--dram-price", "inf"],
        ["--dwpd", "inf"],
    ],
)
def test_sizes_that_are_none(arguments):
    assert size(SEVENTY, *arguments).exit_code == 2


def test_a_ttft_that_needs_no_cache_needs_no_memory(trace):
    done = size(SEVENTY, "--trace", trace, "--ttft", "1000")
    assert "p90 TTFT of 1000.0 s: nothing to buy for that" in done.stdout


def test_more_memory_than_there_are_blocks_is_no_more_work(trace):
    done = size(SEVENTY, "--trace", trace, "--nodes", "10000", "--dram", "900PB", "--nvme", "900PB", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["hit_rate"] == pytest.approx(0.5)


@pytest.mark.parametrize("name", ["chat", "rag", "agents", "code", "unique"])
def test_made_up_sessions_are_as_many_and_as_long_as_asked(name):
    traffic = traffic_of_workload(name, 32_000, 1000, seed=3, requests=1200)
    longest = {}
    for request in traffic.requests:
        longest[request.session] = max(longest.get(request.session, 0), request.prompt_tokens)
        assert len(request.keys) == request.prompt_tokens // traffic.block_tokens
    assert max(longest.values()) <= 32_000
    # Sessions that are there at the end are shorter: nine in ten of all would stay below.
    lengths = sorted(longest.values())
    assert lengths[-1] > 0.8 * 32_000
    assert 0 < traffic.share <= 1
    assert traffic.counted()
    assert (reuse_of(traffic).repeated == 0) == (name == "unique")


def test_few_sessions_are_simulated_all():
    assert traffic_of_workload("chat", 8_000, 20).share == 1


def test_a_class_that_is_none():
    with pytest.raises(ConfigError, match="must be one of chat"):
        traffic_of_workload("poetry", 8_000, 20)

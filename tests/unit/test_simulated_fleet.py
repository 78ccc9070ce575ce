"""The simulator: small fleets by hand, and large ones whose books must add up."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvfleet.cli.main import app
from kvfleet.config import MIB
from kvfleet.core.outcomes import Miss, Source
from kvfleet.core.speeds import PrefillSpeed, Speed
from kvfleet.errors import ConfigError
from kvfleet.sim.config import EngineConfig, SimConfig, SimDrives
from kvfleet.sim.fleet import SimFleet, key_of
from kvfleet.sim.formats import Line, OwnWriter
from kvfleet.sim.links import Link, across
from kvfleet.sim.report import report_of, to_json
from kvfleet.sim.router import PrefixAware, RoundRobin
from kvfleet.sim.sweep import grid, simulate
from kvfleet.sim.trace import Request

TOKENS = 16
AT_ONCE = Speed(0.0, float("inf"))
UNPLANNED = EngineConfig(prefill=PrefillSpeed(token_s=0.001), planned=False)
CONFIG = SimConfig(
    block_bytes=MIB, dram_bytes=8 * MIB, dram=AT_ONCE, network=AT_ONCE, engine=UNPLANNED, router="round-robin",
    policy="lru",
)  # fmt: skip
DRIVES = SimDrives(max_bytes=64 * MIB, rated_bytes=1 << 40, read=Speed(0.0, 10 * MIB))


def request(time_s: float, *keys: int, rest: int = 8) -> Request:
    return Request(time_s=time_s, keys=keys, prompt_tokens=len(keys) * TOKENS + rest, output_tokens=1)


def served(config: SimConfig, *requests: Request) -> SimFleet:
    fleet = SimFleet(config, TOKENS)
    fleet.run(requests)
    return fleet


def books(fleet: SimFleet) -> list[str]:
    """What does not add up: placements, and the directory against what the nodes hold."""
    findings = [line for node in fleet.nodes for line in node.arena.placement.audit()]
    for node in fleet.nodes:
        tiers = [node.arena.placement] + ([node.drive.placement] if node.drive is not None else [])
        held = {record.key + bytes(2) for tier in tiers for record in tier.records()}
        known = {r for table in fleet.directory.tables() for r in table if node.node_id in fleet.directory.holders(r)}
        if held != known:
            findings.append(f"{node.node_id}: {len(held)} held, {len(known)} known")
    return findings


def conversations(num_requests: int, seed: int = 1) -> list[Request]:
    """Sessions that grow by a block or two and share their first two blocks."""
    rng, ids = random.Random(seed), iter(range(10, 1 << 20))
    going: list[tuple[int, ...]] = [(1, 2)]
    requests = []
    for number in range(num_requests):
        at = rng.randrange(len(going))
        going[at] = (*going[at], *(next(ids) for _ in range(rng.randint(1, 2))))
        requests.append(request(0.1 * number, *going[at]))
        if rng.random() < 0.3:
            going = [*going[-5:], (1, 2)]
    return requests


def test_a_link_serves_one_after_the_other():
    link = Link(Speed(0.5, 10.0))
    first, second = link.take(1.0, 20), link.take(2.0, 10)
    assert (first.first_s, first.end) == (0.5, 3.5)
    assert (second.first_s, second.end) == (1.5, 4.5)
    assert (link.queued_bytes(3.5), link.num_bytes) == (5, 30)
    link.give_up(3.5, 5)
    assert (link.free_at, link.num_bytes) == (3.5, 25)


def test_both_ends_of_a_way_between_nodes_are_taken():
    out, into = Link(Speed(0.0, 10.0)), Link(Speed(0.1, 5.0))
    out.take(0.0, 10)
    passage = across(out, into, 0.0, 10)
    assert (passage.first_s, passage.end) == (1.1, 3.1)
    assert out.free_at == into.free_at == 3.0


def test_round_robin_takes_turns():
    router = RoundRobin(3)
    assert [router.choose([], lambda _: 0.0) for _ in range(4)] == [0, 1, 2, 0]


def test_a_prefix_stays_where_it_was_unless_that_is_busy():
    router, keys = PrefixAware(8), [key_of(n) for n in range(4)]
    first = router.choose(keys[:2], lambda _: 0.0)
    assert router.choose(keys, lambda node: float(node == first)) == first
    assert router.choose(keys, lambda node: 10.0 * (node == first)) != first


def test_time_to_first_token_by_hand():
    fleet = served(CONFIG, request(0.0, 1, 2), request(1.0, 1, 2), request(1.0, 1, 3))
    tally = fleet.tally
    # 40 tokens; then 8, as two blocks are loaded; then 24 behind those 8, in the queue of the one engine.
    assert list(tally.ttft_s) == pytest.approx([0.040, 0.008, 0.032])
    assert tally.blocks == {Source.DRAM: 3, Miss.NEVER_STORED: 3}
    assert (tally.prompt_tokens, tally.loaded_tokens) == (120, 48)
    assert (tally.prefill_s, tally.recompute_s) == pytest.approx((0.072, 0.120))
    assert tally.calls == {"locate": 2, "reserve or commit": 4, "delta": 2}
    assert not books(fleet)


def test_another_node_sends_what_it_has():
    config = replace(CONFIG, num_nodes=2, network=Speed(0.25, 4 * MIB))
    fleet = served(config, request(0.0, 1, 2), request(1.0, 1, 2))
    # Asked 0.25, first bytes 0.25, two blocks 0.5, eight tokens 0.008.
    assert list(fleet.tally.ttft_s) == pytest.approx([0.25 + 0.040, 1.008])
    assert fleet.tally.blocks[Source.PEER] == 2
    assert (fleet.nodes[0].out.num_bytes, fleet.nodes[1].into.num_bytes) == (2 * MIB, 2 * MIB)
    assert not books(fleet)


def test_what_leaves_memory_comes_from_the_drives_and_then_from_the_shared_tier():
    config = replace(CONFIG, drives=DRIVES, shared=Speed(0.0, 10 * MIB))
    first = request(0.0, *range(8))
    fleet = served(config, first, request(10.0, *range(100, 108)), replace(first, time_s=20.0))
    assert fleet.tally.blocks[Source.NVME] == 8
    assert fleet.tally.ttft_s[2] == pytest.approx(0.8 + 0.008)
    assert not books(fleet)
    small = replace(config, drives=SimDrives())
    fleet = served(small, first, request(10.0, *range(100, 108)), replace(first, time_s=20.0))
    assert fleet.tally.blocks[Source.SHARED] == 8
    assert fleet.shared is not None
    assert fleet.shared.written_bytes == 16 * MIB


def test_a_shared_tier_with_a_limit_forgets_what_was_unused_longest():
    config = replace(CONFIG, shared=AT_ONCE, shared_bytes_max=32 * MIB)
    fleet = served(config, *(request(float(n), *range(8 * n, 8 * n + 8)) for n in range(8)))
    assert fleet.shared is not None
    left = fleet.shared.written_bytes - fleet.shared.deleted_bytes
    assert 0 < left <= 32 * MIB < fleet.shared.written_bytes
    assert fleet.directory.stats().shared == left // MIB


def test_a_drive_with_no_budget_left_takes_nothing():
    config = replace(CONFIG, drives=replace(DRIVES, rated_bytes=4 * MIB))
    fleet = served(config, *conversations(40))
    assert fleet.nodes[0].drive is not None
    assert fleet.nodes[0].drive.written_bytes <= 4 * MIB
    assert not books(fleet)


def test_nothing_is_loaded_that_is_slower_than_computing():
    engine = replace(UNPLANNED, planned=True)
    slow = replace(CONFIG, dram_bytes=4 * MIB, shared=Speed(0.0, MIB), engine=engine)  # 1 s a block; computed in 16 ms
    requests = [request(float(20 * n), *range(4 * (n % 2), 4 * (n % 2) + 4)) for n in range(12)]
    with_cache = served(slow, *requests)
    without = served(replace(slow, shared=None, dram_bytes=MIB), *requests)
    assert with_cache.tally.blocks[Miss.SLOWER_THAN_COMPUTE] > 0
    assert max(with_cache.tally.ttft_s) <= 1.05 * max(without.tally.ttft_s)
    report, hits = report_of(with_cache, TOKENS), with_cache.tally.blocks[Source.SHARED]
    assert report.shared_look_bytes > 0, "it is looked at again"
    assert report.shared_read_bytes == hits * MIB + report.shared_look_bytes, "all that is read is a hit or a look"


def test_an_engine_that_can_computes_while_the_rest_is_loaded():
    engine = replace(UNPLANNED, planned=True, can_split=True)
    # A block is computed in 16 ms and read in 20 ms.
    config = replace(CONFIG, dram_bytes=8 * MIB, shared=Speed(0.0, 50 * MIB), engine=engine)
    requests = [request(float(20 * n), *range(8 * (n % 2), 8 * (n % 2) + 8)) for n in range(8)]
    fleet = served(config, *requests)
    assert fleet.tally.blocks[Source.SHARED] > 0
    assert min(fleet.tally.ttft_s) < 0.9 * 0.136  # all computed
    assert all(fleet.nodes[0].arena.has(key_of(block)) for block in requests[-1].keys), "computed ones are stored too"


@pytest.mark.parametrize("policy", ["lru", "hold-turn"])
@pytest.mark.parametrize("router", ["round-robin", "prefix"])
def test_the_books_add_up(policy, router):
    config = replace(
        CONFIG, num_nodes=3, drives=DRIVES, shared=Speed(0.01, 100 * MIB), shared_bytes_max=64 * MIB, policy=policy,
        router=router, engine=replace(UNPLANNED, planned=True, can_split=True), network=Speed(0.001, 1000 * MIB),
    )  # fmt: skip
    fleet = served(config, *conversations(300))
    tally = fleet.tally
    assert not books(fleet)
    assert tally.requests == len(tally.ttft_s) == 300
    assert sum(tally.blocks.values()) == sum(len(request.keys) for request in conversations(300))
    report = report_of(fleet, TOKENS)
    assert 0 < report.hit_rate < 1
    assert 0 < report.token_hit_rate < 1
    assert report.ttft_s == tuple(sorted(report.ttft_s))
    assert 50 < report.directory_bytes < 1000
    assert json.loads(to_json([report]))[0]["blocks"] == report.blocks


def test_the_same_trace_gives_the_same_report():
    config = replace(CONFIG, num_nodes=4, drives=DRIVES, router="prefix")
    told: list[int] = []
    reports = [simulate(conversations(300), TOKENS, config, on_progress=told.append) for _ in range(2)]
    assert reports[0] == reports[1]
    assert told == [256, 300] * 2


def test_calls_and_rows_do_not_grow_with_the_fleet():
    reports = [simulate(conversations(300), TOKENS, one) for one in grid(CONFIG, [2, 64], [8 * MIB], ["lru"])]
    few, many = reports
    assert sum(many.calls.values()) <= 1.5 * sum(few.calls.values())
    assert many.directory_bytes <= 1.5 * few.directory_bytes


@pytest.mark.parametrize(
    ("change", "name"),
    [({"num_nodes": 0}, "num_nodes"), ({"block_bytes": 0}, "block_bytes"), ({"dram_bytes": 1}, "dram_bytes")],
)
def test_a_fleet_that_cannot_be_is_refused(change, name):
    with pytest.raises(ConfigError, match=name):
        replace(CONFIG, **change)


# the command


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": int(1000 * one.time_s), "input_length": 512 * len(one.keys) + 7, "output_length": 9,
         "hash_ids": [*one.keys, 10**6 + number]}
        for number, one in enumerate(conversations(40))
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)], terminal_width=120)


def test_the_command_shows_all_combinations(trace_file, tmp_path):
    done = command(
        trace_file, "--nodes", 1, "--nodes", 2, "--dram", "1GiB", "--policy", "lru", "--policy", "hold-turn",
        "--nvme", "8GiB", "--shared", "--json", tmp_path / "all.json", "--plots", tmp_path / "plots",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "40 requests" in done.output
    reports = json.loads((tmp_path / "all.json").read_text())
    assert [(one["config"]["policy"], one["config"]["num_nodes"]) for one in reports] == [
        ("lru", 1), ("lru", 2), ("hold-turn", 1), ("hold-turn", 2),
    ]  # fmt: skip
    assert all(one["requests"] == 40 and one["hit_rate"] > 0.3 for one in reports)
    pictures = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert pictures == ["hits_over_capacity.png", "policies.png", "ttft_over_capacity.png"]


def test_the_command_takes_the_size_of_a_token_from_a_recording(tmp_path):
    path, found = tmp_path / "recorded.jsonl", []
    with path.open("w") as file:
        writer = OwnWriter(file, 16, 4096)
        writer.write(Line(1.0, [1, 2], 40, 0))
    for options in ((), ("--token-bytes", "1KiB")):
        done = command(path, "--dram", "1GiB", "--json", tmp_path / "all.json", *options)
        assert done.exit_code == 0, done.output
        found.append(json.loads((tmp_path / "all.json").read_text())[0]["config"]["block_bytes"])
    assert found == [16 * 4096, 16 * 1024]


def test_what_cannot_be_is_said_before_anything_is_simulated(trace_file, tmp_path, monkeypatch):
    done = command(trace_file, "--rate", 3)
    assert (done.exit_code, "a trace has its own times" in done.output) == (2, True)
    monkeypatch.setattr("kvfleet.sim.plots.find_spec", lambda _name: None)
    monkeypatch.setattr("kvfleet.sim.sweep.simulate", lambda *_, **__: pytest.fail("it was simulated"))
    done = command(trace_file, "--plots", tmp_path / "plots")
    assert (done.exit_code, "they need matplotlib" in done.output) == (1, True)


def test_the_command_makes_traffic_up():
    done = command("--workload", "unique", "--requests", 20, "--dram", "1GiB")
    assert done.exit_code == 0, done.output
    assert "miss: never_stored" in done.output


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "give a trace or a --workload"),
        (("--workload", "unique", "--dram", "1MiB"), "dram_bytes"),
        (("--workload", "unique", "--policy", "best"), "best"),
        (("--workload", "unique", "--dram", "much"), "much"),
        (("--workload", "unique", "--dram", "900000TiB"), "dram_bytes: is the memory of one node"),
        (("--workload", "unique", "--rate", "inf"), "--rate"),
        (("--workload", "unique", "--requests", 9, "--json", "/proc/no/file"), "/proc/no/file: No such file"),
        (("--workload", "unique", "--requests", 9, "--plots", "/proc/no"), "/proc/no: No such file"),
    ],
)
def test_the_command_says_what_is_wrong(arguments, problem):
    done = command(*arguments)
    assert done.exit_code != 0
    assert problem in done.output.replace("\n", "")

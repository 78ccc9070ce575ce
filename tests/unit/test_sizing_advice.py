"""What to buy: hits by the simulator, the rest by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from kvfleet.cli.sized import show
from kvfleet.core.speeds import PrefillSpeed, Speed
from kvfleet.errors import ConfigError
from kvfleet.sim.trace import Request
from kvfleet.sizing.advice import Question, advise
from kvfleet.sizing.hardware import GB, GPUS, TB, Drives, Engine, Fleet, Prices
from kvfleet.sizing.kv import FORMATS
from kvfleet.sizing.models import find_model
from kvfleet.sizing.search import STEPS, least
from kvfleet.sizing.traffic import Traffic, reuse_of
from kvfleet.sizing.verdict import verdict

TOKEN = 131_072  # bytes of Llama-3-8B
BLOCK = 256 * TOKEN
ENGINE = Engine(GPUS["h100"], 1, PrefillSpeed(1e-4), measured=True)


def two_turns(pause_s: float = 5.0, *, same: bool = True) -> list[Request]:
    """Ten sessions, 10 s apart: a prompt of 8 blocks, and later one of 16 that begins with them, or with others."""
    requests = []
    for session in range(10):
        blocks = range(100 * session, 100 * session + 16)
        later = blocks if same else range(blocks.start + 50, blocks.start + 66)
        requests.append(Request(10.0 * session, tuple(blocks[:8]), 2048, 1, str(session), 1))
        requests.append(Request(10.0 * session + pause_s, tuple(later), 4096, 1, str(session), 2))
    return sorted(requests, key=lambda request: request.time_s)


def question(requests=None, fleet=None, **changes):
    asked = Question(
        model=find_model("llama-3-8b"),
        kv=FORMATS["bf16"],
        context_tokens=8_192,
        sessions=4,
        traffic=Traffic(name="two turns", block_tokens=256, requests=two_turns() if requests is None else requests),
        fleet=fleet or Fleet(dram_bytes=64 * GB),
        engine=ENGINE,
        policy="lru",
    )
    return replace(asked, **changes)


def test_each_figure_by_hand():
    found = advise(question(prices=Prices(gpu_hour=2.0, dram_gb_month=0.5)))
    assert (found.kv.token_bytes, found.kv.session_bytes, found.kv.all_bytes) == (TOKEN, 8192 * TOKEN, 4 * 8192 * TOKEN)
    assert (found.prefill.tokens_per_s, found.prefill.session_s) == (pytest.approx(10_000), pytest.approx(0.8192))
    assert found.requests.per_s == pytest.approx(0.2)  # 19 in 95 s
    assert found.requests.prompt_tokens == 3072
    assert found.requests.repeated == pytest.approx(1 / 3)
    assert found.requests.working_bytes == 160 * BLOCK
    assert (found.hit_rate, found.loaded_rate, found.compute_saved) == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    (tier,) = found.tiers
    assert (tier.name, tier.num_bytes, tier.month_price) == ("dram", 64 * GB, pytest.approx(32))  # 64 GB x 0.5
    assert tier.sessions == pytest.approx(64e9 / (8192 * TOKEN))
    assert tier.read_bytes_per_s == pytest.approx(0.2 * 1024 * TOKEN)  # 1,024 of 3,072 tokens of a request
    # Nine in ten are second turns or first ones: 204.8 ms for 2,048 tokens, and the load of as many at 20 GB/s.
    assert found.plain_ttft_s == pytest.approx((0.4096, 0.4096, 0.4096))
    assert found.ttft_s == pytest.approx((0.2048 + 2048 * TOKEN / 20e9,) * 3)
    # 0.2 a second, 0.3072 s each, on GPUs busy for 70 % of the time
    assert found.gpus.without == pytest.approx(0.2 * 0.3072 / 0.7)
    assert found.gpus.needed == pytest.approx(found.gpus.without * 2 / 3)
    assert found.gpus.saved_month_price == pytest.approx(found.gpus.saved * 2.0 * 730)
    assert found.cache_month_price == pytest.approx(32)
    assert found.wear is None
    assert found.worth_it
    assert found.advice[0].startswith("Worth it")


def test_the_memory_that_is_wanted():
    found = advise(question())
    assert found.wanted.hit_rate == pytest.approx(0.9 / 3)
    assert found.wanted.num_bytes is not None
    # One session's first prompt is enough to keep, all of it to be stored: 16 blocks and what slots cost.
    assert 8 * BLOCK <= found.wanted.num_bytes < 40 * BLOCK


def test_a_time_that_is_wanted():
    found = advise(question(ttft_s=0.25))
    assert found.wanted.num_bytes is not None
    found = advise(question(ttft_s=0.1))
    assert found.wanted.num_bytes is None


def test_unique_prompts_are_not_worth_it():
    found = advise(question(two_turns(same=False)))
    assert (found.hit_rate, found.requests.repeated, found.gpus.saved) == (0, 0, 0)
    assert not found.worth_it
    assert "hardly repeat" in found.advice[0]


def test_too_dear_is_said():
    found = advise(question(prices=Prices(gpu_hour=2.0, dram_gb_month=100.0)))
    assert not found.worth_it
    assert "Not worth the money" in found.advice[0]


def test_too_slow_is_said():
    slow = Fleet(dram_bytes=16 * BLOCK, shared_bytes=1 * TB, shared=Speed(0.03, 1e8))
    found = advise(question(two_turns(100.0), slow))
    shared = found.tiers[-1]
    assert shared.name == "shared"
    assert found.hit_rate > 0.3
    assert found.loaded_rate < 0.05
    assert shared.read_bytes_per_s == 0
    assert next(source for source in found.sources if source.name == "shared").crossover_tokens is None
    assert not found.worth_it
    assert "faster than it is loaded" in found.advice[0]
    assert any("the shared tier is slower" in line for line in found.advice)


@pytest.mark.parametrize("name", ["nvme", "shared"])
def test_what_the_tiers_below_memory_read_by_hand(name: str):
    fast = Speed(0.0, 20e9)
    drives, shared_bytes = Drives(num_bytes=64 * GB if name == "nvme" else 0, speed=fast), TB if name == "shared" else 0
    fleet = Fleet(dram_bytes=16 * BLOCK, drives=drives, shared_bytes=shared_bytes, shared=fast)
    prices = Prices(shared_gb_month=0.02, put=3e-6, get=2e-6)
    memory, tier = advise(question(two_turns(100.0), fleet, prices=prices)).tiers
    assert (memory.name, memory.read_bytes_per_s, tier.name) == ("dram", 0, name)
    assert tier.hit_rate == pytest.approx(1 / 3)
    # 20 requests, the last one 190 s after the first; each second one loads 2,048 tokens.
    assert tier.read_bytes_per_s == pytest.approx(19 / 190 * 2048 / 2 * TOKEN)
    if name == "shared":  # 8 blocks are read by each second request, and 160 are written in 190 s
        month = 730 * 3600
        assert tier.month_price == pytest.approx(1000 * 0.02 + month * (19 / 190 * 4 * 2e-6 + 160 / 190 * 3e-6))


def test_too_small_is_said():
    found = advise(question(two_turns(100.0), Fleet(dram_bytes=16 * BLOCK)))
    assert not found.worth_it
    assert "too small" in found.advice[0]


def test_drives_wear():
    drives = Drives(num_bytes=64 * GB, dwpd=1.0)
    found = advise(question(fleet=Fleet(dram_bytes=4 * BLOCK, drives=drives)))
    assert found.wear is not None
    assert found.wear.dwpd == pytest.approx(found.wear.day_bytes / (64 * GB))
    assert found.wear.life_bytes == pytest.approx(found.wear.day_bytes * 365 * 5)
    assert (found.wear.rated_dwpd, found.wear.rated_life_bytes) == (1.0, 64 * GB * 365 * 5)
    assert any("rated for 1:" in line for line in found.advice) == (found.wear.dwpd > 1)


def test_a_share_of_the_fleet_stands_for_all():
    whole = advise(question())
    tenth = Traffic(name="a tenth", block_tokens=256, requests=two_turns(), share=0.1)
    found = advise(question(traffic=tenth, fleet=Fleet(dram_bytes=640 * GB)))
    assert found.hit_rate == whole.hit_rate
    assert found.requests.per_s == pytest.approx(10 * whole.requests.per_s)
    assert found.gpus.saved == pytest.approx(10 * whole.gpus.saved)
    assert found.requests.working_bytes == 10 * whole.requests.working_bytes


def test_what_only_fills_the_cache_does_not_count():
    traffic = Traffic(name="late", block_tokens=256, requests=two_turns(), counted_from_s=5.0)
    assert reuse_of(traffic).repeated == pytest.approx(10 * 2048 / (10 * 4096 + 9 * 2048))
    assert len(traffic.counted()) == 19


@pytest.mark.parametrize("dram", [BLOCK, 5 * BLOCK])
def test_next_to_nothing_still_has_an_answer(dram):
    found = advise(question(fleet=Fleet(dram_bytes=dram, shared_bytes=BLOCK, drives=Drives(num_bytes=9 * BLOCK))))
    assert [tier.name for tier in found.tiers] == ["dram", "nvme", "shared"]
    assert any("room for 0." in line and "goes to the tiers below" in line for line in found.advice)


@pytest.mark.parametrize(
    ("fleet", "setting"),
    [
        (Fleet(dram_bytes=BLOCK - 1), "dram"),
        (Fleet(dram_bytes=BLOCK, shared_bytes=1), "shared"),
        (Fleet(dram_bytes=BLOCK, drives=Drives(num_bytes=BLOCK)), "nvme"),
    ],
)
def test_a_tier_without_room_for_a_block_is_refused(fleet, setting):
    with pytest.raises(ConfigError, match="of the fleet has") as caught:
        advise(question(fleet=fleet))
    assert caught.value.setting == setting


@pytest.mark.parametrize(
    ("with_s", "text"),
    [
        ((0.01, 0.2, 2.0), "TTFT p50 falls from 35 ms to 10 ms"),
        ((0.0351, 0.28, 2.0), "TTFT p90 falls from 300 ms to 280 ms"),
        ((0.0351, 0.3, 2.4), "TTFT stays as it is"),
    ],
)
def test_the_time_that_falls_is_told(with_s, text):
    found = replace(advise(question()), plain_ttft_s=(0.035, 0.3, 2.4), ttft_s=with_s)
    assert text in verdict(found, Prices(), Fleet(dram_bytes=64 * GB))[1][0]


def test_a_question_that_makes_no_sense():
    for changes, name in (
        ({"context_tokens": 0}, "context"), ({"sessions": 0}, "sessions"), ({"target": 1.5}, "target"),
        ({"traffic": Traffic(name="", block_tokens=1, requests=[])}, "trace"),
        ({"traffic": Traffic(name="", block_tokens=256, requests=two_turns()[:1])}, "trace"),
        ({"traffic": Traffic(name="", block_tokens=256, requests=[Request(t, (), 0, 1) for t in (0, 1)])}, "trace"),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            question(**changes)
        assert caught.value.setting == name


def test_it_fits_on_a_screen():
    drives = Drives(num_bytes=64 * GB)
    found = advise(question(fleet=Fleet(dram_bytes=64 * GB, drives=drives, shared_bytes=TB)))
    text = StringIO()
    show(found, Console(file=text, width=80))
    lines = text.getvalue().splitlines()
    assert len(lines) <= 30
    assert any("131,072 bytes a token" in line for line in lines)
    assert any(line.endswith(" 256 tokens") for line in map(str.rstrip, lines))


def test_it_says_what_it_assumed():
    given = question(prices=Prices(gpu_hour=2.0))
    assert len(advise(given).advice) == 1
    fleet = Fleet(num_nodes=2, dram_bytes=32 * GB, shared_bytes=GB, network=Speed(0.0, 1e9))
    made_up = replace(given, engine=replace(ENGINE, measured=False), fleet=fleet, prices=Prices())
    *_, assumed, nodes = advise(replace(made_up, traffic=replace(given.traffic, name="chat"))).advice
    assert re.findall(r"--[a-z-]+", assumed) == ["--trace", "--prefill-speed", "--shared-speed", "--gpu-price"]
    assert nodes.startswith("The 2 nodes are simulated as one")


@pytest.mark.parametrize("wanted", [0.3, 5.9, 6.1, 12.4, 19.9, 20.0])
def test_the_least_that_will_do_is_found_however_far_down_it_is(wanted):
    told = []
    found = least(lambda size: size >= wanted, 0.0, 20.0, lambda done, most: told.append((done, most)))
    assert wanted <= found <= wanted + 7 / 2**STEPS
    assert [done for done, _ in told] == [*range(len(told))]
    assert told[-1] == (len(told) - 1, len(told))

"""What the planner learns, and what it makes of it."""

from __future__ import annotations

import random

import pytest

from kvfleet.core.planner import Leg, Piece, Plan, Planner
from kvfleet.core.speeds import Line, PrefillSpeed, SourceSpeeds, Speed

MB = 1_000_000
TOKENS = 100  # in a block


def planner(token_s: float = 1e-3, context_s: float = 0.0, **speeds: Speed) -> Planner:
    made = Planner()
    made.tell_prefill(PrefillSpeed(token_s, context_s))
    for source, speed in speeds.items():
        made.tell(source, speed)
    return made


def plan(made: Planner, *pieces: Piece, tokens: int | None = None, can_split: bool = False) -> Plan:
    stop = pieces[-1].stop * TOKENS if pieces else 0
    return made.plan(pieces, MB, TOKENS, stop if tokens is None else tokens, can_split=can_split)


# what is learned


@pytest.mark.parametrize(("latency_s", "rate"), [(0.1, 50 * MB), (0.0, MB), (2.0, 1000 * MB)])
def test_a_sources_latency_and_bandwidth_are_found(latency_s, rate):
    speeds = SourceSpeeds()
    for size in (1, 7, 3, 20, 5):
        speeds.observe("shared", size * MB, latency_s + size * MB / rate)
    found = speeds.speed("shared")
    assert found.latency_s == pytest.approx(latency_s, abs=1e-9)
    assert found.bytes_per_s == pytest.approx(rate)


def test_the_first_block_tells_latency_from_bandwidth_where_all_loads_are_alike():
    speeds = SourceSpeeds()
    for _ in range(5):
        speeds.observe("shared", 10 * MB, 0.6, first_s=0.1)
    assert speeds.speed("shared").seconds(20 * MB) == pytest.approx(1.1)
    speeds.observe("nvme", 10 * MB, 0.5)
    assert speeds.speed("nvme") == Speed(0.0, 20 * MB)


def test_recent_loads_count_most():
    speeds = SourceSpeeds()
    for _ in range(50):
        speeds.observe("shared", MB, 10.0)
    for _ in range(12):
        speeds.observe("shared", MB, 0.1)
    assert speeds.speed("shared").seconds(MB) == pytest.approx(0.1, abs=0.2)


def test_no_noise_makes_a_speed_negative():
    dice, speeds = random.Random(1), SourceSpeeds()
    for _ in range(500):
        speeds.observe("shared", dice.randrange(1, 50) * MB, dice.random(), first_s=dice.choice([None, dice.random()]))
        found = speeds.speed("shared")
        assert found.latency_s >= 0
        assert found.bytes_per_s > 0


def test_a_node_that_was_not_read_yet_is_taken_for_the_mean_of_the_others():
    speeds = SourceSpeeds()
    assert speeds.speed("peer:a") is None
    speeds.observe("peer:a", MB, 1.0)
    speeds.observe("peer:b", MB, 3.0)
    assert speeds.speed("peer:a") == Speed(0.0, MB)
    assert MB / 3 < speeds.speed("peer:c").bytes_per_s < MB


def test_what_is_known_of_sources_is_bounded():
    speeds = SourceSpeeds()
    for number in range(3000):
        speeds.observe(f"peer:{number}", MB, 1.0)
    assert len(speeds.speeds()) == 1024
    assert "peer:2999" in speeds.speeds()
    assert "peer" in speeds.speeds()


def test_what_was_told_holds_until_something_is_measured():
    speeds = SourceSpeeds()
    speeds.tell("shared", Speed(0.5, MB))
    assert speeds.speed("shared") == Speed(0.5, MB)
    speeds.observe("shared", MB, 0.1)
    assert speeds.speed("shared") == Speed(0.0, 10 * MB)


def test_prefill_slows_with_the_context():
    made = Planner()
    assert made.prefill_s(0, 100) is None
    for context in range(0, 4096, 256):
        made.observe_prefill(context, 256, 256 * (1e-4 + 1e-8 * (context + 128)))
    assert made.prefill_s(0, 1000) == pytest.approx(1000 * (1e-4 + 1e-8 * 500))
    assert made.prefill_s(8000, 1000) == pytest.approx(1000 * (1e-4 + 1e-8 * 8500))


def test_one_length_of_context_is_all_that_is_known_at_first():
    made = Planner()
    made.observe_prefill(0, 100, 0.5)
    assert made.prefill_s(0, 200) == pytest.approx(1.0)


def test_a_line_through_nothing_is_flat():
    assert Line(0.9).solve() == (0.0, 0.0)


# what follows


def test_without_a_known_prefill_all_is_loaded_and_nothing_is_paced():
    made = Planner()
    made.observe("shared", MB, 1.0)
    found = plan(made, Piece(0, 4, ("dram",)), Piece(4, 8, ("shared",)))
    assert found == Plan(Leg(0, 8), sources=("dram", "shared"))


def test_no_hit_is_no_load():
    found = planner().plan((), MB, TOKENS, 500, can_split=True)
    assert (found.num_blocks, found.recompute_s) == (0, pytest.approx(0.5))


@pytest.mark.parametrize(("rate", "blocks"), [(5 * MB, 2), (50 * MB, 10)])
def test_a_run_is_loaded_only_if_that_is_faster_than_computing_it(rate, blocks):
    made = planner(dram=Speed(0.0, 1000 * MB), shared=Speed(0.0, rate))  # computing makes 10 MB/s
    found = plan(made, Piece(0, 2, ("dram",)), Piece(2, 10, ("shared",)))
    assert (found.head.start, found.head.stop, found.tail) == (0, blocks, None)
    load_s = 0.002 + (8 * MB / rate if blocks == 10 else 0.0)
    assert found.predicted_load_s == pytest.approx(load_s)
    assert found.predicted_ttft_s == pytest.approx(load_s + (10 - blocks) * 0.1)
    assert found.recompute_s == pytest.approx(1.0)
    assert ("loading from shared takes 1600 ms, computing 800 ms" in found.reason) == (blocks == 2)


def test_the_cheapest_of_the_sources_is_expected():
    slow, fast = Speed(0.0, 20 * MB), Speed(0.01, 100 * MB)
    made = planner(**{"peer:a": slow, "peer:b": fast, "shared": Speed(1.0, 1000 * MB)})
    found = plan(made, Piece(0, 10, ("peer:a", "peer:b", "shared")))
    assert (found.sources, found.predicted_load_s) == (("peer:b",), pytest.approx(0.11))


def test_a_slow_run_is_loaded_for_what_is_behind_it():
    made = planner(dram=Speed(0.0, 1000 * MB), shared=Speed(0.0, 5 * MB))
    found = plan(made, Piece(0, 1, ("shared",)), Piece(1, 50, ("dram",)))
    assert found.head == Leg(0, 50, pytest.approx(0.15), pytest.approx(0.1), pytest.approx(0.249))
    assert found.reason == ""


def test_latency_alone_can_be_too_much():
    made = planner(shared=Speed(0.5, 1000 * MB))
    assert plan(made, Piece(0, 4, ("shared",))).num_blocks == 0
    assert plan(made, Piece(0, 8, ("shared",))).num_blocks == 8


def test_a_long_prompt_is_worth_loading_where_a_short_one_is_not():
    made = planner(1e-4, 1e-6, shared=Speed(0.0, 20 * MB))
    assert plan(made, Piece(0, 4, ("shared",))).num_blocks == 0
    assert plan(made, Piece(0, 40, ("shared",))).num_blocks == 40


def test_the_tail_is_loaded_while_the_head_is_computed():
    made = planner(shared=Speed(0.0, 10 * MB))  # as fast as computing
    found = plan(made, Piece(0, 10, ("shared",)), can_split=True)
    assert (found.head.num_blocks, found.tail.start, found.tail.stop) == (0, 5, 10)
    assert found.predicted_ttft_s == pytest.approx(0.5)
    assert found.reason == "blocks 0 to 4 are computed while those behind them are loaded"
    assert found.tail.grace_s == pytest.approx(0.5 + 0.03), "it may take as long as computing does"
    assert plan(made, Piece(0, 10, ("shared",))).num_blocks == 0, "an engine that cannot computes it all"


def test_no_other_split_is_faster():
    dice = random.Random(2)
    for _ in range(200):
        token_s, context_s = dice.uniform(1e-4, 1e-3), dice.choice([0.0, 1e-7])
        latency_s, block_s = dice.choice([0.0, 0.02, 0.2]), dice.uniform(0.001, 0.3)
        made = planner(token_s, context_s, shared=Speed(latency_s, MB / block_s))
        blocks, speed = dice.randrange(1, 40), PrefillSpeed(token_s, context_s)
        tokens = blocks * TOKENS + dice.randrange(300)
        found = plan(made, Piece(0, blocks, ("shared",)), tokens=tokens, can_split=True)
        ways = [speed.seconds(0, tokens)]
        for first in range(blocks):
            for stop in range(first + 1, blocks + 1):
                head_s, load_s = speed.seconds(0, first * TOKENS), latency_s + (stop - first) * block_s
                ways.append(max(head_s, load_s) + speed.seconds(stop * TOKENS, tokens - stop * TOKENS))
        assert min(ways) * 0.999999 <= found.predicted_ttft_s <= min(ways) * 1.02


def test_the_reason_names_who_is_too_slow():
    made = planner(**{"peer:0123456789abcdef": Speed(0.0, MB)})
    assert plan(made, Piece(0, 5, ("peer:0123456789abcdef",))).reason == (
        "loading from peer 01234567 takes 5000 ms, computing 500 ms"
    )


# what a load may cost


def test_a_source_that_is_not_known_is_tried_within_a_grace():
    found = plan(planner(), Piece(0, 10, ("shared",)), tokens=2000)
    assert found.head == Leg(0, 10, pytest.approx(0.06), pytest.approx(0.1), None)
    assert (found.predicted_load_s, found.predicted_ttft_s) == (None, None)
    assert found.recompute_s == pytest.approx(2.0)


@pytest.mark.parametrize("known", [0, 4])
def test_an_engine_that_can_split_waits_for_no_source_that_is_not_known(known):
    made = planner(dram=Speed(0.0, 1000 * MB))
    pieces = [Piece(0, known, ("dram",))] * bool(known) + [Piece(known, 20, ("shared",))]
    found = plan(made, *pieces, tokens=2100, can_split=True)
    assert found.head == Leg(0, known, found.head.grace_s, found.head.pace_s, pytest.approx(0.001 * known))
    middle = known + (20 - known) // 2
    assert found.tail == Leg(middle, 20, pytest.approx((middle - known) * 0.05), pytest.approx(0.05), None)
    assert (found.predicted_load_s, found.predicted_ttft_s) == (None, None)


def test_one_block_cannot_be_split():
    found = plan(planner(), Piece(0, 1, ("shared",)), can_split=True)
    assert (found.num_blocks, found.predicted_ttft_s) == (0, pytest.approx(0.1))
    assert found.reason == "shared was not measured yet, and there are too few blocks to compute some meanwhile"
    assert plan(planner(), Piece(0, 1, ("shared",))).num_blocks == 1


def test_this_nodes_memory_is_faster_than_computing_though_not_measured():
    found = plan(planner(), Piece(0, 10, ("dram",)), can_split=True)
    assert (found.head.num_blocks, found.tail) == (10, None)


def test_a_latency_that_is_known_is_waited_for():
    found = plan(planner(shared=Speed(0.2, 1000 * MB)), Piece(0, 10, ("shared",)))
    assert found.head.grace_s == pytest.approx(0.03 + 0.25)


def test_what_a_load_may_lose_is_for_all_sources_that_may_have_a_run():
    one, two = Piece(0, 5, ("peer:a",)), Piece(5, 10, ("peer:b", "shared"))
    assert plan(planner(), one, tokens=1000).head.spare_s == 0.0
    found = plan(planner(), one, two)
    assert (found.head.grace_s, found.head.spare_s) == (pytest.approx(0.03), pytest.approx(0.015))
    made = planner()
    made.observe("peer:b", 0, 0.1)
    assert plan(made, one, two).head.spare_s == 0.0
    tail = plan(planner(), two, tokens=1000, can_split=True).tail
    assert (tail.grace_s, tail.spare_s) == (pytest.approx(0.15), pytest.approx(0.075))


def test_no_block_is_worth_more_than_the_first_while_the_source_is_not_known():
    made = planner(1e-3, 1e-6)
    found = plan(made, Piece(0, 10, ("shared",)))
    assert found.head.pace_s == pytest.approx(PrefillSpeed(1e-3, 1e-6).seconds(0, TOKENS))


def test_a_source_that_brought_nothing_is_not_asked_until_it_was_looked_at():
    made = planner(shared=Speed(0.0, 1000 * MB))
    made.observe("shared", 0, 0.3)
    found = plan(made, Piece(0, 10, ("shared",)))
    assert found.num_blocks == 0
    assert found.reason == "shared brought nothing in its time when it was last asked"
    made.observe("shared", MB, 0.01)
    assert plan(made, Piece(0, 10, ("shared",))).num_blocks == 10


def test_a_source_that_is_not_read_is_forgotten():
    made = planner(**{"peer:a": Speed(0.0, 1000 * MB), "shared": Speed(0.0, 100 * MB)})
    made.sources.forget_unread()
    assert made.sources.speeds().keys() == {"peer:a", "shared"}, "nobody wanted them"
    plan(made, Piece(0, 10, ("peer:a", "shared")))
    made.sources.forget_unread()
    assert made.sources.speeds() == {}
    made.observe("shared", MB, 0.01)
    made.observe("peer:a", 0, 0.3)
    plan(made, Piece(0, 10, ("peer:a", "shared")))
    made.sources.forget_unread()
    assert made.sources.speeds().keys() == {"shared"}
    assert not made.sources.stalled("peer:a")
    made.sources.forget()
    assert made.sources.speeds() == {}


def test_another_source_is_used_meanwhile():
    made = planner(**{"peer:a": Speed(0.0, 1000 * MB), "shared": Speed(0.0, 100 * MB)})
    made.observe("peer:a", 0, 0.3)
    assert plan(made, Piece(0, 10, ("peer:a", "shared"))).sources == ("shared",)


def test_a_source_that_is_not_used_is_looked_at_more_and_more_seldom():
    made = planner(shared=Speed(0.0, MB))
    pieces = (Piece(0, 10, ("shared",)),)
    looks = [now for now in range(200) if made.look(plan(made, *pieces), pieces, float(now)) == range(4)]
    assert looks == [0, 5, 15, 35, 65, 95, 125, 155, 185]


def test_a_source_that_is_used_is_not_looked_at():
    made = planner(shared=Speed(0.3, 100 * MB))
    long, short = (Piece(0, 10, ("shared",)),), (Piece(0, 2, ("shared",)),)
    assert made.look(plan(made, *short), short, 0.0) == range(2)
    assert made.look(plan(made, *short), short, 5.0) == range(2)
    assert made.look(plan(made, *long), long, 14.0) is None
    assert made.look(plan(made, *short), short, 18.0) is None
    assert made.look(plan(made, *short), short, 19.0) == range(2), "again soon, as it was used"

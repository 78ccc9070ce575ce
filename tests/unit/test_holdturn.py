"""Hold-turn: what it learns, what it holds, and what it lets in."""

from __future__ import annotations

import itertools

import pytest
from typing_extensions import override

from kvfleet.bench import policies as bench
from kvfleet.core.block import BlockKey
from kvfleet.core.hints import Hints
from kvfleet.core.policies import POLICIES, Newcomer, Policy
from kvfleet.core.policies.holdturn import HoldTurn
from kvfleet.core.reuse import ReuseModel
from kvfleet.core.reuseclasses import NUM_KINDS, kind_of_shared, kind_of_turn
from kvfleet.core.reuserates import Floats
from kvfleet.sim.generators import WORKLOADS, generate
from kvfleet.sim.replay import Replay, replay
from kvfleet.sim.trace import Request, Trace
from kvfleet.testing.policies import PolicyContract, block_key, everything

BLOCK_TOKENS = 16


class TestHoldTurn(PolicyContract):
    @override
    def make(self) -> Policy:
        return HoldTurn(100)


def key(name: str) -> BlockKey:
    return BlockKey(name.encode().ljust(16, b"."))


def test_trace() -> None:
    """The example of the class's docstring."""
    policy = HoldTurn(10)
    policy.insert(key("a1"), None, 0.0)
    policy.insert(key("a2"), key("a1"), 0.0)
    for name in ("a1", "a2"):
        policy.touch(key(name), 100.0)
    policy.insert(key("a3"), key("a2"), 100.0)
    policy.insert(key("b1"), key("a1"), 100.0)
    policy.insert(key("c1"), None, 100.0)
    policy.insert(key("c2"), key("c1"), 100.0)
    turns = {name: policy._nodes[key(name)].life.turn for name in ("a1", "a2", "a3", "b1", "c1", "c2")}
    assert [None if turn is None else (turn.number, turn.growth) for turn in turns.values()] == [
        None, (2, 1), (2, 1), (1, 1), (1, 2), (1, 2),
    ]  # fmt: skip
    assert policy.victims(2, everything) == [key("b1"), key("c2")]
    policy.retire([key("a3")])
    assert policy.victims(1, everything) == [key("a3")]


def request(time_s: float, keys: list[int], *, final: bool = False) -> Request:
    return Request(time_s, tuple(keys), len(keys) * BLOCK_TOKENS, 0, final=final)


def scans_and_talks(minutes: int) -> Trace:
    """Each second a document of 8 blocks that nobody asks for again; each 5 s a talk of three turns, 20 s apart."""
    requests = []
    for second in range(60 * minutes):
        requests.append(request(second, list(range(1_000_000 + 8 * second, 1_000_008 + 8 * second))))
        if second % 5 == 0:
            talk = 100 * second
            requests += [request(second + 20 * turn, list(range(talk, talk + 2 + turn))) for turn in range(3)]
    return Trace(BLOCK_TOKENS, sorted(requests, key=lambda one: one.time_s))


def test_conversations_are_held_against_scans() -> None:
    trace = scans_and_talks(10)
    capacity = 60  # a talk's pause brings 160 blocks of documents
    least = replay(trace, POLICIES["lru"](capacity), capacity)
    held = replay(trace, POLICIES["hold-turn"](capacity), capacity)
    assert least < 0.05 * held
    assert held > 0.6 * sum(2 + 3 for second in range(0, 600, 5))  # it learns for the first third


@pytest.mark.parametrize(
    ("name", "percent", "points"), [("chat", 10, 3.0), ("rag", 5, 2.5), ("agents", 2, 7.0), ("code", 5, 8.0)]
)
def test_it_keeps_more_than_lru_of_traffic_it_was_not_made_for(name: str, percent: int, points: float) -> None:
    """Hits of all blocks beyond those of LRU, in points, with room for a share of the blocks."""
    requests = list(generate(WORKLOADS[name], requests=3000, rate=4.0, block_tokens=512))
    capacity = len({block for one in requests for block in one.keys}) * percent // 100
    asked = sum(len(one.keys) for one in requests)
    least, held = (replay(Trace(512, requests), POLICIES[one](capacity), capacity) for one in ("lru", "hold-turn"))
    assert 100 * (held - least) / asked >= points


def test_declined_blocks_teach_it_too() -> None:
    policy = HoldTurn(60)
    node = Replay(policy, 60)
    trace = scans_and_talks(10)
    half = len(trace.requests) // 2
    for one in trace.requests[:half]:
        node.request(one)
    assert policy._model.ready
    # The talks have longer documents now: classes change places, and the policy follows.
    before = policy._model.worth(kind_of_turn(1, 2), 0.0)
    for one in trace.requests[half:]:
        if one.keys[0] < 1_000_000:
            node.request(
                Request(
                    one.time_s,
                    tuple(k + 5_000_000 for k in range(8 * one.keys[0], 8 * one.keys[0] + 8 + len(one.keys))),
                    0,
                    0,
                )
            )
        else:
            node.request(Request(one.time_s, one.keys[:2], 0, 0))
    assert policy._model.worth(kind_of_turn(1, 2), 0.0) < before
    assert policy._model.worth(kind_of_turn(1, 10), 0.0) > policy._model.worth(kind_of_turn(1, 2), 0.0)


def test_a_newcomer_whose_parent_is_gone_is_declined_once_there_is_data() -> None:
    policy = HoldTurn(60)
    node = Replay(policy, 60)
    for one in scans_and_talks(10).requests:
        node.request(one)
    assert policy._model.rules
    now = 1_000.0
    stranger = Newcomer(block_key(1), block_key(2), now)
    assert policy.victims(1, everything, newcomers=[stranger]) == []
    assert len(policy.victims(1, everything)) == 1
    policy.decline([stranger])
    assert block_key(1) not in policy


def test_a_leaf_that_is_of_another_class_now_is_offered_at_once() -> None:
    policy = HoldTurn(10)
    policy.insert(key("a1"), None, 0.0)
    assert policy.victims(1, everything) == [key("a1")]  # it has its entry now
    policy.decline([Newcomer(key("a2"), key("a1"), 100.0)])  # a1 is of turn 2
    assert policy.victims(1, everything) == [key("a1")]
    policy.insert(key("b1"), None, 101.0)
    policy.decline([Newcomer(key("a3"), key("a2"), 200.0)])  # of turn 3
    assert policy.victims(2, everything) == [key("a1"), key("b1")]


def test_memory_is_bounded() -> None:
    policy = HoldTurn(50)
    node = Replay(policy, 50)
    for number in range(5_000):
        node.request(request(number / 10, [3 * number, 3 * number + 1, 3 * number + 2]))
    assert len(policy) == 50
    assert len(policy._lives) <= 1024
    assert policy._leaves._num_entries <= 2 * 50 + 64 + 3
    assert len(policy._model._cohorts) <= 512


@pytest.mark.parametrize("hints", [Hints(final=True), Hints(turn=7), Hints(priority=1), Hints(priority=-1, turn=1)])
def test_hints_are_not_trusted(hints: Hints) -> None:
    """Wrong hints for all cost hits, and nothing else."""
    policy = HoldTurn(40)
    for number in range(400):
        fresh = [Newcomer(block_key(2 * number), None, float(number), hints)]
        if len(policy) >= 40:
            for victim in policy.victims(1, everything, newcomers=fresh):
                policy.remove(victim)
        if len(policy) < 40:
            policy.insert(fresh[0].key, None, float(number), hints)
        else:
            policy.decline(fresh)
    assert len(policy) == 40


class TestReuse:
    def model(self, gap_s: float, share: float) -> ReuseModel:
        """Of one class 100 lives a minute begin, of which a share ends after a gap."""
        model, number = ReuseModel(1000), kind_of_turn(1, 1)
        model.tick(0.0)
        for minute in range(60):
            start = 60.0 * minute
            for life in range(100):
                if life < 100 * share:
                    model.ended(number, gap_s, follows=False)
                else:
                    model.began(number, start)
            model.tick(start + 30.0)
        return model

    def test_rare_reuse_is_worth_less(self) -> None:
        often, seldom = self.model(60.0, 0.8), self.model(60.0, 0.1)
        number = kind_of_turn(1, 1)
        assert often.ready
        assert often.worth(number, 0.0) > 2 * seldom.worth(number, 0.0) > 0
        assert often.chance(number, 0.0) > 2 * seldom.chance(number, 0.0)

    def test_what_was_not_used_in_its_time_is_worth_less(self) -> None:
        model, number = self.model(60.0, 0.3), kind_of_turn(1, 1)
        assert model.worth(number, 1000.0) < 0.5 * model.worth(number, 50.0)
        assert model.chance(number, 1000.0) < model.chance(number, 0.0) <= 1.0

    def test_a_pause_costs_a_few_steps_and_says_the_same(self) -> None:
        paused, busy = self.model(60.0, 0.3), self.model(60.0, 0.3)
        with pytest.MonkeyPatch.context() as patch:
            steps = list[float]()
            whole = ReuseModel._expose

            def counted(model: ReuseModel, at: float, passed_s: float, going: tuple[Floats, Floats]) -> None:
                steps.append(passed_s)
                whole(model, at, passed_s, going)

            patch.setattr(ReuseModel, "_expose", counted)
            paused.tick(8000.0)
        assert len(steps) <= 32 < sum(steps) / 10.0
        for time_s in range(3600, 8001, 10):
            busy.tick(float(time_s))
        assert paused.due == busy.due
        number = kind_of_turn(1, 1)
        for age_s in (1.0, 60.0, 1000.0, 7000.0):
            assert paused.worth(number, age_s) == pytest.approx(busy.worth(number, age_s), rel=0.1)

    def test_prefixes_count_not_their_blocks(self) -> None:
        """Blocks of a quarter of the size are four times as many, and say as much."""
        few, many = kind_of_turn(1, 1), kind_of_turn(2, 1)

        def model(blocks: int) -> ReuseModel:
            """Of 12 turns a minute 3 are used again after a minute, and in the first 4 minutes another after 20 s."""
            model = ReuseModel(1000)
            for minute in range(30):
                for turn, block in itertools.product(range(12), range(blocks)):
                    if turn < 3:
                        model.ended(few, 60.0, follows=block > 0)
                    elif turn == 3 and minute < 4:
                        model.ended(many, 20.0, follows=block > 0)
                    else:
                        model.began(few, 60.0 * minute)
                model.tick(60.0 * minute + 30.0)
            return model

        whole, quarters = model(1), model(4)
        for number in (few, many):
            for age_s in (1.0, 50.0, 500.0):
                assert quarters.worth(number, age_s) == pytest.approx(whole.worth(number, age_s), rel=1e-6)

    def test_those_that_are_left_of_a_busy_class_are_like_others(self) -> None:
        model = ReuseModel(1000)
        busy, idle = kind_of_turn(4, 1), kind_of_turn(1, 1)
        for minute in range(60):
            for number, share in ((busy, 0.9), (idle, 0.1)):
                for life in range(100):
                    if life < 100 * share:
                        model.ended(number, 5.0 + 2.0 * (life % 50), follows=False)
                    else:
                        model.began(number, 60.0 * minute)
            model.tick(60.0 * minute + 30.0)
        young, old = (model.worth(busy, age_s) / model.worth(idle, age_s) for age_s in (5.0, 20_000.0))
        assert young > 4.0
        assert old < young / 2

    @pytest.mark.parametrize(("capacity", "rules"), [(40, True), (100_000, False)])
    def test_worth_rules_where_it_promises_more_hits(self, capacity: int, rules: bool) -> None:
        """Of what begins, half is never used again; with room for all of it, nothing is won by knowing which."""
        model = ReuseModel(capacity)
        used, unused = kind_of_turn(2, 1), kind_of_turn(1, 100)
        for minute in range(60):
            for _ in range(20):
                model.ended(used, 90.0, follows=False)
                model.began(used, 60.0 * minute)
                model.began(unused, 60.0 * minute)
                if minute >= 1:
                    model.forgotten(used, 60.0 * (minute - 1))  # that is the one that ended
            model.tick(60.0 * minute + 59.0)
        assert model.ready
        assert model.rules == rules

    def test_classes(self) -> None:
        numbers = {kind_of_turn(turn, growth) for turn in range(9) for growth in range(99)}
        numbers |= {kind_of_shared(uses) for uses in range(99)}
        assert min(numbers) == 0
        assert max(numbers) < NUM_KINDS
        assert kind_of_turn(4, 4096) == kind_of_turn(400, 10**6)
        assert kind_of_turn(1, 4) == kind_of_turn(1, 15) != kind_of_turn(1, 16)


def test_the_bench_tells_costs_and_hits() -> None:
    names = list(POLICIES)
    costs = list(bench.costs(names, [64], 20))
    assert [cost.policy for cost in costs] == names
    assert all(cost.us_per_block > 0 for cost in costs)
    found = list(bench.hits(["lru", "hold-turn"], [30, 60], scans_and_talks(5)))
    assert [(one.policy, one.capacity_blocks) for one in found] == [
        ("lru", 30), ("hold-turn", 30), ("lru", 60), ("hold-turn", 60),
    ]  # fmt: skip
    assert found[3].hit_rate > found[2].hit_rate


def test_memory_is_bounded_between_ticks() -> None:
    """However many blocks come and go before the model is due: after days on end ticks are hours apart."""
    policy = HoldTurn(100)
    policy.insert(block_key(1), None, 0.0)
    for number in range(2, 10_000):
        policy.decline([Newcomer(block_key(number), None, 1.0)])
    lives = policy._lives
    assert len(lives) == 1024, "as few as are remembered at least"
    assert len(lives._young) <= len(lives) + len(policy)

"""Loads that pay and loads that do not, with a storage made fast and slow beneath an engine that computes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from kvfleet import Fleet
from kvfleet.bench.throttled import set_speed, throttled_options
from kvfleet.core.totals import Totals
from kvfleet.node.messages import Miss, Source
from kvfleet.node.tallies import Request
from tests.conftest import wait_for
from tests.vllm.conftest import running_fleet
from tests.vllm.engines import BLOCK_BYTES, BLOCK_TOKENS, Answer, EngineProcess, connector, fleet_tokens, saved

BLOCKS = 12  # of a prompt
TOKENS = BLOCKS * BLOCK_TOKENS
FAST_S, SLOW_S = 0.0, 5.0  # until a block of the storage comes
SLOWER = Miss.SLOWER_THAN_COMPUTE


def prompt(seed: int) -> dict[str, list[int]]:
    dice = random.Random(seed)
    return {"prompt_token_ids": [dice.randrange(100, 10_000) for _ in range(TOKENS + 1)]}


@dataclass
class Site:
    """An engine on a fleet whose memory has room for one prompt, above a storage whose speed a test sets."""

    fleet: Fleet
    engine: EngineProcess
    speed_file: Path

    def storage(self, latency_s: float) -> None:
        set_speed(self.speed_file, latency_s, 1e12)

    def ask(self, seed: int) -> Answer:
        """An answer, of which vLLM remembers nothing; all that was computed is in the storage then."""
        self.engine.forget()
        answer: Answer = self.engine.ask([prompt(seed)], max_tokens=4)[0]
        saved(self.engine)
        nodes = lambda: self.fleet.status().nodes  # noqa: E731
        wait_for(lambda: not any(node.unsaved_blocks for node in nodes()), "the blocks are in the storage")
        return answer

    def totals(self) -> Totals:
        return self.fleet.status().totals

    def requests(self) -> list[Request]:
        """What is remembered of the prompt that was looked up last: of its lookup, then of its load, if there was one.

        The scheduler looks it up and plans, a worker loads.
        """
        found = [request for _, request in self.fleet.requests()]
        last = max(request.asked_ns for request in found)
        return sorted((request for request in found if request.asked_ns == last), key=lambda request: request.loaded)


@pytest.fixture(scope="module")
def site(
    ray_cluster: object, start_engine: Any, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("storage")
    speed_file = directory / "speed"
    set_speed(speed_file, FAST_S, 1e12)
    settings = {"shared_url": "dir:///tier", "shared_options": throttled_options(directory, speed_file)}
    with running_fleet(plan_loads=True, dram_bytes=(BLOCKS + 1) * BLOCK_BYTES, **settings) as fleet:
        engine = start_engine("here", model, kv_transfer_config=connector(fleet.config.name, block_tokens=BLOCK_TOKENS))
        yield Site(fleet, engine, speed_file)
        engine.stop()


def learned_s(engine: Any) -> float:
    """Seconds of a prompt's prefill, as the planner has learned it."""
    scheduler, _ = engine.connectors()
    speed = scheduler._scheduling.plans._planning.prefill()
    return 0.0 if speed is None else speed.seconds(0, TOKENS)


def prefills_s(engine: Any) -> float:
    """Of all prompts so far, as vLLM has measured them."""
    (times,) = (metric for metric in engine._llm.get_metrics() if metric.name == "vllm:request_prefill_time_seconds")
    return float(times.sum)


def test_what_is_faster_than_computing_is_loaded_and_what_is_not_is_computed(site):
    # Until the engine's speed is known, all that is found is loaded: so the storage's becomes known.
    cold = {seed: site.ask(seed) for seed in (0, 1)}
    assert site.engine.call(learned_s) == 0
    assert site.ask(0).cached_tokens == TOKENS
    before_s = site.engine.call(prefills_s)
    cold |= {seed: site.ask(seed) for seed in (2, 3)}
    measured_s = (site.engine.call(prefills_s) - before_s) / 2
    assert site.engine.call(learned_s) == pytest.approx(measured_s, rel=0.3)

    loaded = site.totals()
    assert site.ask(1).token_ids == cold[1].token_ids
    asked, load = site.requests()
    assert (asked.planned_blocks, asked.reason, load.from_shared, load.miss) == (BLOCKS, "", BLOCKS, None)
    assert 0 < asked.predicted_load_s < asked.predicted_ready_s < asked.recompute_s
    totals = site.totals()
    assert totals.bytes_by_source == {Source.SHARED.value: 2 * BLOCKS * BLOCK_BYTES}
    assert totals.stored_blocks == loaded.stored_blocks == 4 * BLOCKS
    assert fleet_tokens(site.engine) == 2 * TOKENS, "vLLM has not computed them"

    # The storage gets slow: the load ends when computing is ahead of it, and the next prompt is not even tried.
    site.storage(SLOW_S)
    answer = site.ask(2)
    assert (answer.token_ids, answer.cached_tokens) == (cold[2].token_ids, 0)
    asked, load = site.requests()
    assert (asked.planned_blocks, load.from_shared, load.miss) == (BLOCKS, 0, SLOWER)
    assert site.totals().outcomes[SLOWER.value] == BLOCKS
    site.storage(FAST_S)
    answer = site.ask(3)
    assert (answer.token_ids, answer.cached_tokens) == (cold[3].token_ids, 0)
    (asked,) = site.requests()
    assert (asked.hit_blocks, asked.planned_blocks, asked.miss) == (BLOCKS, 0, SLOWER)
    assert asked.reason == "shared brought nothing in its time when it was last asked"
    assert asked.predicted_ready_s == asked.recompute_s > 0
    assert site.totals().outcomes[SLOWER.value] == 2 * BLOCKS
    assert site.totals().loads == 3

    # Some seconds after it was used last, a prompt has it looked at beside its computing, and it is found fast.
    seeds = cycle((2, 3))  # only one of them is in memory
    wait_for(lambda: site.ask(next(seeds)).cached_tokens == TOKENS, "the storage has been looked at", 60)
    answer = site.ask(0)
    assert (answer.token_ids, answer.cached_tokens) == (cold[0].token_ids, TOKENS)
    assert [request.from_shared for request in site.requests()] == [0, BLOCKS]

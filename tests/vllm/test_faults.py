"""Faults of the fleet under a serving engine: requests finish with the same text, and the engine lives."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import ray

from kvfleet.node.messages import Miss, Source
from tests.cluster.engine_process import directory_process, elsewhere, manager_process
from tests.conftest import wait_for
from tests.seaweed import seaweed
from tests.vllm.conftest import running_fleet
from tests.vllm.engines import (
    ANSWER_TIMEOUT_S,
    BLOCK_BYTES,
    BLOCK_TOKENS,
    FROM_FLEET,
    HITS,
    OTHER,
    PROMPT,
    UNIQUE,
    Answer,
    EngineProcess,
    connector,
    fleet_tokens,
    saved,
    whole_blocks,
)

HELD = "Case two. " + PROMPT


@pytest.fixture(scope="module")
def expected(first: EngineProcess) -> Answer:
    """The answer to HELD as computed, and this node then holds its blocks."""
    answer: Answer = first.ask([HELD])[0]
    assert answer.cached_tokens == 0
    saved(first)
    return answer


@contextmanager
def stopped(process: int) -> Iterator[None]:
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


def counted(engine: EngineProcess, before: dict[str, float]) -> dict[str, float]:
    """vLLM's counters of the fleet that have grown, and by how much."""
    now = engine.metrics()
    grown = {name: value - before.get(name, 0) for name, value in now.items()}
    return {name: value for name, value in grown.items() if value and ("kvfleet" in name or "external" in name)}


def test_every_load_fails(fleet, first, other_node, expected):
    """The node's manager hangs: what the directory promises does not come. Each request tries once."""
    before = other_node.metrics()
    with stopped(manager_process(fleet.config.name, elsewhere())):
        for _ in range(2):
            (answer,) = other_node.ask([HELD])
            assert (answer.text, answer.token_ids) == (expected.text, expected.token_ids)
            other_node.forget()
    grown = counted(other_node, before)
    assert grown["vllm:kvfleet_loads"] == 2
    assert "vllm:kvfleet_loaded_bytes{source=peer}" not in grown
    asked = sum(value for name, value in grown.items() if name.startswith("vllm:kvfleet_blocks{"))
    assert asked == 2 * whole_blocks(answer)
    wait_for(other_node.is_saved, "what was dropped meanwhile is counted", timeout_s=120.0)


def slow_down(engine: Any, seconds: float) -> None:
    """Have each block of a load take its time."""
    _, worker = engine.connectors()
    pool = worker._transfers._pool
    write = type(pool).write

    def slow(*arguments: Any) -> None:
        time.sleep(seconds)
        write(pool, *arguments)

    pool.write = slow


def speed_up(engine: Any) -> None:
    _, worker = engine.connectors()
    del worker._transfers._pool.write


def loads_under_way(engine: Any) -> int:
    """Blocks that came so far of loads under way."""
    _, worker = engine.connectors()
    return len(worker._transfers._loading)


def test_the_manager_dies_in_the_middle_of_a_load(fleet, other_node, expected):
    before = other_node.metrics()
    other_node.forget()
    other_node.call(slow_down, 0.05)
    answer = other_node.begin("ask", [HELD])
    wait_for(lambda: other_node.call(loads_under_way) > 0, "the load is under way")
    os.kill(manager_process(fleet.config.name, elsewhere()), signal.SIGKILL)
    (after,) = ray.get(answer, timeout=ANSWER_TIMEOUT_S)
    assert after.text == expected.text
    other_node.call(speed_up)
    assert counted(other_node, before)["vllm:kvfleet_loads"] == 1

    # The node's manager comes back, and with it hits.
    def hit() -> bool:
        other_node.forget()
        (answer,) = other_node.ask([HELD])
        assert answer.text == expected.text
        return bool(answer.cached_tokens == whole_blocks(answer) * BLOCK_TOKENS)

    wait_for(hit, "the whole prompt is a hit again", timeout_s=60.0)


def test_the_directory_is_away(fleet, first, other_node, expected):
    with stopped(directory_process(fleet.config.name)):
        first.forget()
        before = fleet_tokens(first)
        (here_again,) = first.ask([HELD])
        assert here_again.text == expected.text
        assert fleet_tokens(first) - before == whole_blocks(expected) * BLOCK_TOKENS, "this node needs no directory"
        (cold,) = other_node.ask(["Case three. " + UNIQUE])
        assert cold.cached_tokens == 0
    other_node.forget()


def test_a_request_is_aborted_in_the_middle_of_its_load(other_node, expected):
    other_node.forget()
    before = other_node.metrics()
    other_node.call(slow_down, 0.2)
    other_node.call(abort_while_loading, HELD)
    other_node.call(speed_up)
    assert counted(other_node, before)["vllm:kvfleet_loads_cancelled"] == 1
    other_node.forget()  # which vLLM refuses while blocks are in use
    (answer,) = other_node.ask([HELD])
    assert answer.text == expected.text
    assert answer.cached_tokens == whole_blocks(answer) * BLOCK_TOKENS


def abort_while_loading(engine: Any, prompt: str) -> None:
    """Step the engine until the load is under way, abort its request, and step until all is at rest."""
    from vllm import SamplingParams

    core, (scheduler, worker) = engine._llm.llm_engine, engine.connectors()
    core.add_request("aborted", prompt, SamplingParams(max_tokens=4, temperature=0.0))
    while not worker._transfers._loading:
        core.step()
    core.abort_request(["aborted"])
    deadline = time.monotonic() + 30.0
    while scheduler._scheduling._loading:
        core.step()
        assert time.monotonic() < deadline, "the aborted load is reported"


def test_requests_are_preempted(fleet, first, start_engine, model):
    """Less room than all requests need: vLLM takes some out and starts them again; all texts are the same."""
    prompts = [f"Story number {n}: " + UNIQUE for n in range(3)]
    expected = first.ask(prompts, max_tokens=120)
    saved(first)
    settings = connector(fleet.config.name, block_tokens=BLOCK_TOKENS)
    # Three times 22 blocks do not fit.
    small = start_engine("here", model, max_model_len=1024, num_gpu_blocks_override=56, kv_transfer_config=settings)
    answers = small.ask(prompts, max_tokens=120)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    metrics = small.metrics()
    assert metrics["vllm:num_preemptions"] > 0
    assert not [name for name in metrics if "errors" in name]
    saved(small)
    small.forget()
    again = small.ask(prompts, max_tokens=120)
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in expected]
    assert small.stats().num_bytes[Source.DRAM] >= 3 * 7 * BLOCK_BYTES
    small.stop()


def test_shared_storage_serves_a_restarted_fleet_and_goes_away(start_engine, model, ray_cluster, plain):
    with seaweed() as server:
        settings: dict[str, Any] = {"shared_url": "s3://cache/kv", "shared_options": server.settings}
        settings |= {"load_timeout_s": 10.0, "shared_timeout_s": 2.0}
        with running_fleet(**settings) as fleet:
            joined = connector(fleet.config.name, block_tokens=BLOCK_TOKENS)
            engine = start_engine("here", model, kv_transfer_config=joined)
            assert [answer.cached_tokens for answer in engine.ask([PROMPT, UNIQUE])] == [0, 0]
            saved(engine)
            engine.stop()
        with running_fleet(**settings) as fleet:
            assert fleet.wait_for_shared(30.0)
            joined = connector(fleet.config.name, block_tokens=BLOCK_TOKENS)
            engine = start_engine("here", model, kv_transfer_config=joined)
            (answer,) = engine.ask([PROMPT])
            blocks = whole_blocks(answer)
            assert answer.text == plain[PROMPT].text
            assert answer.cached_tokens == fleet_tokens(engine) == blocks * BLOCK_TOKENS
            assert engine.stats().num_bytes == {Source.SHARED: blocks * BLOCK_BYTES}

            server.kill()
            before = engine.metrics()
            (answer,) = engine.ask([UNIQUE])
            assert answer.text == plain[UNIQUE].text
            assert engine.stats().blocks[Miss.STORAGE_FAILED] == 1
            assert engine.stats().num_bytes == {Source.SHARED: blocks * BLOCK_BYTES}
            metrics = engine.metrics()
            assert metrics[HITS] - before[HITS] == whole_blocks(answer) * BLOCK_TOKENS, "vLLM was promised them"
            assert metrics[FROM_FLEET] == before[FROM_FLEET], "and knows that they did not come"
            assert engine.ask([OTHER])[0].text == plain[OTHER].text
            engine.stop()


def test_after_a_reset_nothing_is_shared(first, other_node):
    """As when weights are changed in place: what is stored from then on is this engine's alone."""
    other_node.reset()
    before = other_node.metrics().get(FROM_FLEET, 0)
    (answer,) = other_node.ask([HELD])
    assert (answer.cached_tokens, other_node.metrics().get(FROM_FLEET, 0)) == (0, before)
    # The first save prepares a client for what comes from now on.
    other_node.forget()
    wait_for(lambda: other_node.call(_clients) == 2, "there is a second client")
    assert other_node.ask([HELD])[0].cached_tokens == 0
    saved(other_node)
    other_node.forget()
    assert other_node.ask([HELD])[0].cached_tokens == whole_blocks(answer) * BLOCK_TOKENS


def _clients(engine: object) -> int:
    _, worker = engine.connectors()  # type: ignore[attr-defined]
    return len(worker._transfers._clients.all())

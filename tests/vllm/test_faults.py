"""Faults of the fleet under a serving engine: requests finish with the same text, and the engine lives."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray

from kvfleet import Fleet
from kvfleet.node.messages import Miss, Source
from tests.cluster.engine_process import directory_process, elsewhere, manager_process
from tests.conftest import wait_for
from tests.seaweed import seaweed
from tests.vllm.conftest import running_fleet
from tests.vllm.engines import ANSWER_TIMEOUT_S, Answer, EngineProcess, connector
from tests.vllm.test_connector import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    FROM_FLEET,
    HITS,
    PROMPT,
    UNIQUE,
    fleet_tokens,
    saved,
    whole_blocks,
)

LOAD_TIMEOUT_S = 2.0


@pytest.fixture(scope="module")
def fleet(ray_cluster: object) -> Iterator[Fleet]:
    with running_fleet(load_timeout_s=LOAD_TIMEOUT_S, attach_timeout_s=15.0) as running:
        yield running


@pytest.fixture(scope="module")
def holder(fleet: Fleet, start_engine: Callable[..., EngineProcess], model: Path) -> EngineProcess:
    """An engine here whose blocks of PROMPT the fleet holds."""
    engine = start_engine("here", model, kv_transfer_config=connector(fleet.config.name, block_tokens=BLOCK_TOKENS))
    engine.ask([PROMPT])
    saved(engine)
    return engine


@pytest.fixture(scope="module")
def expected(holder: EngineProcess) -> Answer:
    holder.forget()
    answer: Answer = holder.ask([PROMPT])[0]
    return answer


@pytest.fixture(scope="module")
def reader(
    holder: EngineProcess, fleet: Fleet, start_engine: Callable[..., EngineProcess], model: Path
) -> EngineProcess:
    """An engine on the other node, which knows of the blocks and has none."""
    return start_engine("elsewhere", model, kv_transfer_config=connector(fleet.config.name, block_tokens=BLOCK_TOKENS))


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


def test_every_load_fails(fleet, reader, expected):
    """The node's manager hangs: what the directory promises does not come. Each request tries once."""
    before = reader.metrics()
    with stopped(manager_process(fleet.config.name, elsewhere())):
        for _ in range(2):
            (answer,) = reader.ask([PROMPT])
            assert (answer.text, answer.token_ids) == (expected.text, expected.token_ids)
            reader.forget()
    grown = counted(reader, before)
    assert grown["vllm:kvfleet_loads"] == 2
    assert "vllm:kvfleet_loaded_bytes{source=peer}" not in grown
    asked = sum(value for name, value in grown.items() if name.startswith("vllm:kvfleet_blocks{"))
    assert asked == 2 * whole_blocks(answer)
    wait_for(reader.is_saved, "what was dropped meanwhile is counted", timeout_s=120.0)


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


def test_the_manager_dies_in_the_middle_of_a_load(fleet, reader, expected):
    before = reader.metrics()
    reader.forget()
    reader.call(slow_down, 0.05)
    answer = reader.begin("ask", [PROMPT])
    wait_for(lambda: reader.call(loads_under_way) > 0, "the load is under way")
    os.kill(manager_process(fleet.config.name, elsewhere()), signal.SIGKILL)
    (after,) = ray.get(answer, timeout=ANSWER_TIMEOUT_S)
    assert after.text == expected.text
    reader.call(speed_up)
    assert counted(reader, before)["vllm:kvfleet_loads"] == 1

    # The node's manager comes back, and with it hits.
    def hit() -> bool:
        reader.forget()
        (answer,) = reader.ask([PROMPT])
        assert answer.text == expected.text
        return bool(answer.cached_tokens == whole_blocks(answer) * BLOCK_TOKENS)

    wait_for(hit, "the whole prompt is a hit again", timeout_s=60.0)


def test_the_directory_is_away(fleet, holder, reader, expected):
    with stopped(directory_process(fleet.config.name)):
        holder.forget()
        before = fleet_tokens(holder)
        (here_again,) = holder.ask([PROMPT])
        assert here_again.text == expected.text
        assert fleet_tokens(holder) - before == whole_blocks(expected) * BLOCK_TOKENS, "this node needs no directory"
        (cold,) = reader.ask([UNIQUE])
        assert cold.cached_tokens == 0
    reader.forget()


def test_a_request_is_aborted_in_the_middle_of_its_load(reader, expected):
    reader.forget()
    before = reader.metrics()
    reader.call(slow_down, 0.2)
    reader.call(abort_while_loading, PROMPT)
    reader.call(speed_up)
    assert counted(reader, before)["vllm:kvfleet_loads_cancelled"] == 1
    reader.forget()  # which vLLM refuses while blocks are in use
    (answer,) = reader.ask([PROMPT])
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


def test_requests_are_preempted(fleet, start_engine, model):
    """Less room than all requests need: vLLM takes some out and starts them again; all texts are the same."""
    prompts = [f"Story number {n}: " + UNIQUE for n in range(3)]
    plain = start_engine("here", model)
    expected = plain.ask(prompts, max_tokens=200)
    plain.stop()
    settings = connector(fleet.config.name, block_tokens=BLOCK_TOKENS)
    # Three times 22 blocks do not fit.
    small = start_engine("here", model, max_model_len=1024, num_gpu_blocks_override=56, kv_transfer_config=settings)
    answers = small.ask(prompts, max_tokens=200)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    metrics = small.metrics()
    assert metrics["vllm:num_preemptions"] > 0
    assert not [name for name in metrics if "errors" in name]
    saved(small)
    small.forget()
    again = small.ask(prompts, max_tokens=200)
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in expected]
    assert small.stats().num_bytes[Source.DRAM] >= 3 * 7 * BLOCK_BYTES
    small.stop()


def test_shared_storage_goes_away(start_engine, model, ray_cluster, expected):
    with seaweed() as server:
        settings: dict[str, Any] = {"shared_url": "s3://cache/kv", "shared_options": server.options}
        settings |= {"load_timeout_s": 10.0, "shared_timeout_s": 2.0}
        with running_fleet(**settings) as fleet:
            joined = connector(fleet.config.name, block_tokens=BLOCK_TOKENS)
            engine = start_engine("here", model, kv_transfer_config=joined)
            engine.ask([PROMPT])
            saved(engine)
            engine.stop()
        with running_fleet(**settings) as fleet:
            assert fleet.wait_for_shared(30.0)
            joined = connector(fleet.config.name, block_tokens=BLOCK_TOKENS)
            engine = start_engine("here", model, kv_transfer_config=joined)
            server.kill()
            (answer,) = engine.ask([PROMPT])
            assert answer.text == expected.text
            stats = engine.stats()
            assert Source.SHARED not in stats.num_bytes
            assert stats.blocks[Miss.UNREACHABLE] == 1
            metrics = engine.metrics()
            assert metrics[HITS] == whole_blocks(answer) * BLOCK_TOKENS, "vLLM was promised them"
            assert FROM_FLEET not in metrics, "and knows that they did not come"
            (cold,) = engine.ask([UNIQUE])
            assert cold.cached_tokens == 0
            engine.stop()

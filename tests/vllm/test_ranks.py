"""Tensor parallelism: every rank moves its own shard, and one decision holds for all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.conftest import wait_for
from tests.vllm.engines import Answer, EngineProcess, connector
from tests.vllm.models import tiny

BLOCK_TOKENS = 64
PROMPT = "one two three four five six seven eight nine ten " * 30
LAYERS, HEAD_DIM = 4, 32
SHARD_BYTES = BLOCK_TOKENS * LAYERS * 2 * 1 * HEAD_DIM * 4  # K and V of one of the two KV heads, float32


@pytest.fixture(scope="module")
def engine(fleet, start_engine: Callable[..., EngineProcess], model: Path, tmp_path_factory: Any) -> EngineProcess:
    """One engine with two ranks, which are children of its process and know nothing of Ray."""
    runtime = ray.get_runtime_context()
    settings = {"address": runtime.gcs_address, "node_id": runtime.get_node_id(), "block_tokens": BLOCK_TOKENS}
    engine = start_engine(
        "here",
        tiny(model, tmp_path_factory.mktemp("models") / "tiny"),
        environment={"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"},
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        kv_transfer_config=connector(fleet.config.name, **settings),
    )
    # A rank that does not get through to Ray at its start tries again.
    wait_for(lambda: all(on_ranks(engine, has_joined)), "both ranks have joined the fleet", timeout_s=120.0)
    return engine


def on_ranks(engine: EngineProcess, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run a function of the test in every rank."""
    results: list[Any] = engine.call(_on_ranks, function, arguments)
    return results


def _on_ranks(engine: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
    results: list[Any] = engine._llm.collective_rpc(function, args=arguments)
    return results


def transfers() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._transfers


def has_joined(_: Any) -> bool:
    from tests.vllm.test_ranks import transfers

    return transfers()._clients is not None


def moved(_: Any) -> tuple[int, int]:
    """Bytes that a rank has loaded and stored."""
    from tests.vllm.test_ranks import transfers

    (client,) = transfers()._clients.all()
    stats = client.stats()
    return sum(stats.num_bytes.values()), stats.stored_bytes


def is_idle(_: Any) -> bool:
    from tests.vllm.test_ranks import transfers

    return bool(transfers().idle())


def saved(engine: EngineProcess) -> None:
    wait_for(lambda: all(on_ranks(engine, is_idle)), "all ranks have stored their blocks")


def fleet_tokens(engine: EngineProcess) -> int:
    return int(engine.metrics().get("vllm:external_prefix_cache_hits", 0))


def close_to(one: Answer, other: Answer) -> bool:
    return one.token_ids == other.token_ids and one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_both_ranks_load_their_shards(engine):
    cold = engine.ask([PROMPT])[0]
    assert (cold.cached_tokens, fleet_tokens(engine)) == (0, 0)
    saved(engine)
    blocks = cold.prompt_tokens // BLOCK_TOKENS
    assert on_ranks(engine, moved) == [(0, blocks * SHARD_BYTES)] * 2

    engine.forget()
    warm = engine.ask([PROMPT])[0]
    assert warm.cached_tokens == fleet_tokens(engine) == blocks * BLOCK_TOKENS
    assert on_ranks(engine, moved) == [(blocks * SHARD_BYTES, blocks * SHARD_BYTES)] * 2
    assert close_to(warm, cold)


def drop_saves(_: Any, rank: int) -> None:
    """Have one rank store nothing."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    from tests.vllm.test_ranks import transfers

    if get_tensor_model_parallel_rank() == rank:
        transfers().save = lambda saves: None


def fail_loads(_: Any, rank: int) -> None:
    """Have one rank's memory refuse what is loaded."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    from tests.vllm.test_ranks import transfers

    if get_tensor_model_parallel_rank() == rank:

        def write(*_: Any) -> None:
            raise OSError("this rank's device is gone")

        transfers()._pool.write = write


def mend(_: Any) -> None:
    from tests.vllm.test_ranks import transfers

    vars(transfers()).pop("save", None)
    vars(transfers()._pool).pop("write", None)


@pytest.mark.parametrize("rank", [0, 1])
def test_without_one_ranks_shard_nothing_is_a_hit(engine, rank):
    prompt = f"rank {rank}: {PROMPT}"
    before = fleet_tokens(engine)
    on_ranks(engine, drop_saves, rank)
    cold = engine.ask([prompt])[0]
    saved(engine)
    on_ranks(engine, mend)
    engine.forget()
    again = engine.ask([prompt])[0]
    assert (again.cached_tokens, fleet_tokens(engine)) == (0, before)
    assert close_to(again, cold)
    # The second time, both ranks have stored what was missing.
    saved(engine)
    engine.forget()
    assert engine.ask([prompt])[0].cached_tokens == again.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize("rank", [0, 1])
def test_when_one_rank_fails_the_request_is_computed(engine, rank):
    engine.forget()
    expected = engine.ask([PROMPT])[0]
    engine.forget()
    before = engine.metrics()
    on_ranks(engine, fail_loads, rank)
    answer = engine.ask([PROMPT])[0]
    on_ranks(engine, mend)
    assert close_to(answer, expected)
    counted = engine.metrics()
    assert counted["vllm:kvfleet_errors{where=load}"] - before.get("vllm:kvfleet_errors{where=load}", 0) == 1
    engine.forget()
    assert engine.ask([PROMPT])[0].cached_tokens == answer.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS

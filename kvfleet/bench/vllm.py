"""Requests to vLLM with the connector, beside requests to a vLLM without it."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvfleet.bench.report import Row, measure, quantile
from kvfleet.bench.workload import Prompts
from kvfleet.errors import ConfigError
from kvfleet.fleet import Fleet

__all__ = ["MEASURES", "Engines", "engines", "hook_times", "rows"]

MEASURES = (
    "TTFT of one request at a time to a vLLM engine in a process of its own: from its token ids to its first token. "
    "Floor: without the connector. no hit: with it, and a prompt that nobody has seen; its blocks are stored "
    "meanwhile. hit: with it, and a prompt of which the node's arena has all whole blocks and vLLM's memory none. "
    "The cases take turns."
)

_START_TIMEOUT_S = 600.0
_REQUEST_TIMEOUT_S = 600.0
_HOOKS = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
)


class _Engine:
    """vLLM in this process."""

    def __init__(self, model: str, num_tokens: int, fleet: str | None) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; vLLM on CPU wants most of the memory otherwise
        from vllm import LLM
        from vllm.config import KVTransferConfig

        connector = KVTransferConfig(
            kv_connector="KVFleetConnector",
            kv_connector_module_path="kvfleet.connectors.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"fleet": fleet},
        )
        self._llm: Any = LLM(
            model=model,
            max_model_len=num_tokens + 16,
            enforce_eager=True,
            distributed_executor_backend="uni",
            kv_transfer_config=connector if fleet is not None else None,
        )
        self._steps: list[float] = []
        if fleet is not None:
            self._time_hooks()

    def _time_hooks(self) -> None:
        """Add up the processor time that the scheduler's hooks take in each step."""
        connector = self._connector()
        spent: dict[str, int] = defaultdict(int)

        def timed(hook: Callable[..., Any], *, ends_step: bool) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401  any hook
                started = time.thread_time_ns()
                try:
                    return hook(*arguments, **options)
                finally:
                    spent["ns"] += time.thread_time_ns() - started
                    if ends_step:
                        self._steps.append(spent.pop("ns") / 1e9)

            return call

        for name in _HOOKS:
            setattr(connector, name, timed(getattr(connector, name), ends_step=name == "build_connector_meta"))

    def _connector(self) -> Any:  # noqa: ANN401  vLLM's
        return self._llm.llm_engine.engine_core.engine_core.scheduler.connector

    def request(self, token_ids: list[int]) -> tuple[float, int]:
        """TTFT in seconds, and the tokens of the prompt that were not computed. vLLM's own memory is dropped before."""
        from vllm import SamplingParams

        assert self._llm.reset_prefix_cache()
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        started = time.perf_counter()
        (output,) = self._llm.generate([{"prompt_token_ids": token_ids}], sampling, use_tqdm=False)
        return time.perf_counter() - started, output.num_cached_tokens or 0

    def wait_until_saved(self) -> bool:
        """Wait until what was computed is stored."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        deadline = time.monotonic() + _REQUEST_TIMEOUT_S
        while not get_kv_transfer_group()._transfers.idle():
            assert time.monotonic() < deadline, "stores end"
            time.sleep(0.01)
        return True

    def steps(self) -> list[float]:
        """Processor seconds of the hooks in each step so far."""
        return self._steps


class Engines:
    """An engine without the connector and one with it."""

    def __init__(self, off: ActorHandle[Any], on: ActorHandle[Any], vocabulary: int) -> None:
        self.off, self.on, self.vocabulary = off, on, vocabulary


@contextmanager
def engines(fleet: Fleet, model: str, num_tokens: int) -> Iterator[Engines]:
    """Start both on this node.

    Raises:
        ConfigError: vLLM is not installed.
    """
    try:
        from vllm.transformers_utils.config import get_config
    except ImportError as error:
        raise ConfigError("vllm", f"has to be installed for this: {error}") from error
    vocabulary = int(get_config(model, trust_remote_code=False).vocab_size)
    strategy = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor: Any = ray.remote(_Engine).options(num_cpus=0, scheduling_strategy=strategy)
    off, on = (actor.remote(model, num_tokens, name) for name in (None, fleet.config.name))
    try:
        ray.get([off.steps.remote(), on.steps.remote()], timeout=_START_TIMEOUT_S)
        yield Engines(off, on, vocabulary)
    finally:
        ray.kill(off)
        ray.kill(on)


def rows(pair: Engines, num_tokens: int, repeats: int) -> list[Row]:
    """Measure prompts of one length."""
    prompts = Prompts("vllm", num_tokens)
    fresh: list[int] = []
    known = _ids(prompts, pair.vocabulary)
    _request(pair.on, known)
    assert ray.get(pair.on.wait_until_saved.remote(), timeout=_REQUEST_TIMEOUT_S)

    def off() -> float:
        fresh[:] = _ids(prompts, pair.vocabulary)
        seconds, cached = _request(pair.off, fresh)
        assert cached == 0
        return seconds

    def miss() -> float:
        seconds, cached = _request(pair.on, fresh)
        assert cached == 0
        assert ray.get(pair.on.wait_until_saved.remote(), timeout=_REQUEST_TIMEOUT_S)
        return seconds

    def hit() -> float:
        seconds, cached = _request(pair.on, known)
        assert cached > 0
        return seconds

    cases = {"without kvfleet": off, "no hit": miss, "hit": hit}
    return measure(cases, block_bytes=0, num_blocks=num_tokens, moves=False, repeats=repeats)


def hook_times(pair: Engines) -> str:
    """What the connector's hooks cost vLLM's scheduler."""
    steps: list[float] = ray.get(pair.on.steps.remote(), timeout=_REQUEST_TIMEOUT_S)
    p50, p99, most = (1e3 * quantile(steps, q) for q in (0.5, 0.99, 1.0))
    return (
        f"scheduler hooks, processor time a step: p50 {p50:.3f} ms, p99 {p99:.3f}, max {most:.3f}, {len(steps)} steps"
    )


def _ids(prompts: Prompts, vocabulary: int) -> list[int]:
    return [int(token) for token in prompts.next() % np.uint32(vocabulary)]


def _request(engine: ActorHandle[Any], token_ids: list[int]) -> tuple[float, int]:
    answer: tuple[float, int] = ray.get(engine.request.remote(token_ids), timeout=_REQUEST_TIMEOUT_S)
    return answer

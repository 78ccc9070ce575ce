"""vLLM engines in processes of their own, on chosen nodes, as the tests use them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import ray

from kvfleet.client import Client
from kvfleet.counts import ClientStats
from tests.cluster.engine_process import on
from tests.conftest import wait_for

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
ENGINE_BLOCK_TOKENS = 32
START_TIMEOUT_S = 240.0
BLOCK_TOKENS = 64
BLOCK_BYTES = BLOCK_TOKENS * 30 * 2 * 3 * 64 * 4  # SmolLM2: layers, K and V, heads, head size, float32
HITS = "vllm:external_prefix_cache_hits"
FROM_FLEET = "vllm:prompt_tokens_by_source{source=external_kv_transfer}"
ANSWER_TIMEOUT_S = 120.0

_RULES = "".join(
    f"You are a helpful assistant that answers geography questions briefly. Rule {i}: be precise about place {i}. "
    for i in range(40)
)
PROMPT = _RULES + "The capital of France is"
OTHER = _RULES + "The capital of Italy is"
UNIQUE = "Once upon a time, in a land of " + ", ".join(f"hill {i}" for i in range(100)) + ", there lived"


def connector(fleet: str, **settings: object) -> dict[str, Any]:
    """What a user writes in `kv_transfer_config`."""
    return {
        "kv_connector": "KVFleetConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"fleet": fleet, **settings},
    }


@dataclass(frozen=True)
class Answer:
    """A request's answer.

    Attributes:
        token_ids: generated.
        logprobs: of the generated tokens.
        cached_tokens: of the prompt that vLLM did not compute.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int
    transfer_params: dict[str, Any] | None


class Engine:
    """vLLM in this process."""

    def __init__(self, model: str, arguments: dict[str, Any], environment: dict[str, str]) -> None:
        os.environ.update(ENVIRONMENT | environment)
        from vllm import LLM

        defaults: dict[str, Any] = {
            "dtype": "float32",
            "max_model_len": 2048,
            "enforce_eager": True,
            "block_size": ENGINE_BLOCK_TOKENS,
            "distributed_executor_backend": "uni",
            "disable_log_stats": False,
            "num_gpu_blocks_override": 160,  # 225 MiB: several engines live beside each other
        }
        self._llm: Any = LLM(model=model, **(defaults | arguments))

    def pid(self) -> int:
        return os.getpid()

    def close(self) -> bool:
        """Shut vLLM down, which removes its shared memory."""
        self._llm.llm_engine.engine_core.shutdown()
        return True

    def ask(self, prompts: list[Any], max_tokens: int = 8, **request: Any) -> list[Answer]:
        """Greedy answers to prompts that are in the engine at the same time."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=1, ignore_eos=True)
        if (params := request.pop("transfer_params", None)) is not None:
            sampling.extra_args = {"kv_transfer_params": params}
        if (adapter := request.pop("adapter", None)) is not None:
            from vllm.lora.request import LoRARequest

            request["lora_request"] = LoRARequest(*adapter)
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False, **request)
        return [_answer(output) for output in outputs]

    def forget(self) -> None:
        """Drop vLLM's own prefix cache."""
        assert self._llm.reset_prefix_cache()

    def reset(self) -> None:
        """Drop it and tell the connector to forget too, as after weights were changed in place."""
        assert self._llm.reset_prefix_cache(reset_connector=True)

    def metrics(self) -> dict[str, float]:
        """vLLM's counters that are not zero, by name and labels."""
        counters = {}
        for metric in self._llm.get_metrics():
            labels = {k: v for k, v in metric.labels.items() if k not in ("model_name", "engine")}
            text = ",".join(f"{k}={v}" for k, v in sorted(labels.items()))
            if getattr(metric, "value", 0):
                counters[metric.name + (f"{{{text}}}" if text else "")] = metric.value
        return counters

    def connectors(self) -> tuple[Any, Any]:
        """The connector objects of the scheduler and of the worker."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        core = self._llm.llm_engine.engine_core.engine_core
        return core.scheduler.connector, get_kv_transfer_group()

    def _clients(self) -> list[Client]:
        _, worker = self.connectors()
        clients: list[Client] = worker._transfers._clients.all()
        return clients

    def stats(self) -> ClientStats:
        """Of the worker's client."""
        return self._clients()[0].stats()

    def is_saved(self) -> bool:
        """Whether all stores are done."""
        _, worker = self.connectors()
        return bool(worker._transfers.idle())

    def call(self, function: Any, *arguments: Any) -> Any:
        """Run a function of the test with this engine."""
        return function(self, *arguments)


def _answer(output: Any) -> Answer:
    completion = output.outputs[0]
    logprobs = tuple(step[token].logprob for step, token in zip(completion.logprobs, completion.token_ids, strict=True))
    return Answer(
        completion.text,
        tuple(completion.token_ids),
        logprobs,
        len(output.prompt_token_ids),
        output.num_cached_tokens or 0,
        output.kv_transfer_params,
    )


class EngineProcess:
    """An `Engine` on a node, called from the test."""

    def __init__(self, node: str, model: str, environment: dict[str, str] | None = None, **arguments: Any) -> None:
        options: dict[str, Any] = on(node) | {"max_concurrency": 2}
        self._actor: Any = ray.remote(Engine).options(**options).remote(str(model), arguments, environment or {})

    def wait_until_up(self) -> EngineProcess:
        self.process: int = ray.get(self._actor.pid.remote(), timeout=START_TIMEOUT_S)
        return self

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._actor, name)
        return lambda *arguments, **options: ray.get(method.remote(*arguments, **options), timeout=ANSWER_TIMEOUT_S)

    def begin(self, name: str, *arguments: Any, **options: Any) -> ray.ObjectRef[Any]:
        """Call without waiting."""
        reference: ray.ObjectRef[Any] = getattr(self._actor, name).remote(*arguments, **options)
        return reference

    def stop(self) -> None:
        """Shut vLLM down, as far as it still runs, and end the process."""
        try:
            closed = ray.get(self._actor.close.remote(), timeout=ANSWER_TIMEOUT_S)
        except ray.exceptions.ActorDiedError:
            return
        ray.kill(self._actor)
        assert closed, "something was left when vLLM had shut down"


def whole_blocks(answer: Answer) -> int:
    """Blocks of a prompt that can be found."""
    return answer.prompt_tokens // BLOCK_TOKENS


def fleet_tokens(engine: EngineProcess) -> int:
    """Prompt tokens that vLLM says came from the fleet."""
    metrics = engine.metrics()
    assert metrics.get(HITS, 0) == metrics.get(FROM_FLEET, 0)
    return int(metrics.get(HITS, 0))


def saved(engine: EngineProcess) -> None:
    """Wait until all that an engine has computed is in the fleet."""
    wait_for(engine.is_saved, "the engine's blocks are stored")

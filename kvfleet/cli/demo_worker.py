"""What the demo does on the nodes. Each function runs in a process of its own and yields what it is doing.

The last thing yielded is the result.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

import kvfleet
from kvfleet.cli import demo_model, demo_prompt
from kvfleet.cli.demo_messages import Answer, Event, Filled, Plan, Progress, Request
from kvfleet.core.layout import ModelSpec

if TYPE_CHECKING:
    import torch

__all__ = ["answer", "evict", "filler_of", "prepare"]

_NEW_TOKENS = 48
_PROMPT_TOKENS_MAX = 8192  # more would take a small machine more than the five minutes that the demo should take
_WARM_UP_TOKENS = 64
_STORE_TIMEOUT_S = 120.0
_FILL_BLOCKS = 4  # blocks stored at once to push others out
_FILL_FACTOR_MAX = 4  # how many times the arena's size is stored at most

Emit: TypeAlias = Callable[[Event], None]


def prepare(request: Request) -> Iterator[Event]:
    """Load the model once and make the plan."""
    from kvfleet.connectors.transformers import spec_for

    model = request.model
    if model is None:
        yield Progress("loading SmolLM2-135M-Instruct, unpacked the first time")
        model = demo_model.prepare_smollm2(request.model_root)
    yield Progress("reading the document")
    network = demo_model.load_model(model)
    context = getattr(network.config.get_text_config(), "max_position_embeddings", None) or _PROMPT_TOKENS_MAX
    tokens_max = min(context - _NEW_TOKENS, _PROMPT_TOKENS_MAX)
    tokenizer = demo_model.load_tokenizer(model)
    prompt, notes = demo_prompt.tokenize(tokenizer, request.document, request.question, tokens_max)
    yield Progress("taking the fingerprint of the weights")
    yield Plan(
        fleet=request.fleet,
        model=model,
        spec=spec_for(network, block_tokens=demo_prompt.block_tokens_for(len(prompt)), salt=request.salt),
        prompt=tuple(prompt),
        num_threads=request.num_threads,
        notes=tuple(notes),
    )


def answer(plan: Plan) -> Iterator[Event]:
    """Answer the question, with the fleet's cache behind the model."""
    yield Progress("loading the model")
    import torch

    torch.set_num_threads(plan.num_threads)
    model, tokenizer = demo_model.load_model(plan.model), demo_model.load_tokenizer(plan.model)
    with torch.no_grad():  # the first run of a process is slow
        model(torch.zeros((1, _WARM_UP_TOKENS), dtype=torch.long))
    yield from _on_a_thread(lambda emit: emit(_Run(plan, model, tokenizer, emit).run()))


def evict(plan: Plan, arena_bytes: int, seed: int) -> Iterator[Event]:
    """Store other KV on this node until none of the prompt is left in its arena."""
    fleet = kvfleet.connect(plan.fleet)
    client, filler = fleet.client(plan.spec), fleet.client(filler_of(plan))
    random = np.random.default_rng(seed)
    batch_bytes = _FILL_BLOCKS * plan.spec.layout.block_bytes
    prompt = np.array(plan.prompt, np.uint32)
    stored = 0
    while True:
        left = sum(run.stop - run.start for run in client.lookup(prompt).runs if run.local)
        if not left or stored > _FILL_FACTOR_MAX * arena_bytes:
            break
        tokens = random.integers(0, 2**31, _FILL_BLOCKS * plan.spec.block_tokens, np.uint32)
        filler.store(tokens, lambda index, view: view.fill(index)).wait(_STORE_TIMEOUT_S)
        stored += batch_bytes
        yield Progress("storing other KV", min(stored, arena_bytes), arena_bytes)
    fleet.close()
    yield Filled(stored, left)


def filler_of(plan: Plan) -> ModelSpec:
    """Whose KV pushes the prompt out."""
    return replace(plan.spec, tenant="filler")


class _Run:
    """One answer. Emits progress on the way."""

    def __init__(self, plan: Plan, model: Any, tokenizer: Any, emit: Emit) -> None:  # noqa: ANN401
        self._plan = plan
        self._model = model
        self._tokenizer = tokenizer
        self._emit = emit
        self._cache_argument = ""
        self._computed = 0
        self._new: list[int] = []
        self._started = self._first = 0.0

    def run(self) -> Answer:
        import torch

        from kvfleet.connectors.transformers import TransformersConnector
        from kvfleet.connectors.transformers_model import cache_argument

        fleet = kvfleet.connect(self._plan.fleet)
        client = fleet.client(self._plan.spec)
        client.attach()
        connector = TransformersConnector(self._model, client)
        self._cache_argument = cache_argument(self._model)
        self._model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        prompt = torch.tensor([self._plan.prompt])
        self._emit(Progress("reading the prompt", 0, len(self._plan.prompt)))
        self._started = time.perf_counter()
        output = connector.generate(
            prompt, max_new_tokens=_NEW_TOKENS, do_sample=False, streamer=self,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        prefill = connector.last
        assert prefill is not None
        stored = prefill.wait(_STORE_TIMEOUT_S)
        fleet.close()
        return Answer(
            text=self._text(),
            logits_digest=_digest(output.logits),
            reused_tokens=prefill.reused_tokens,
            computed_tokens=self._computed,
            bytes_by_source=prefill.loaded.bytes_by_source,
            ttft_s=self._first - self._started,
            stored_blocks=stored.stored + stored.already,
            shortfall=prefill.loaded.miss or stored.reason,
        )

    def put(self, tokens: torch.Tensor) -> None:
        """Take what has been generated: the prompt first, then each new token."""
        if tokens.ndim > 1:
            return
        self._first = self._first or time.perf_counter()
        self._new += tokens.tolist()
        self._emit(Progress("answering", len(self._plan.prompt), len(self._plan.prompt), self._text()))

    def end(self) -> None:
        """Nothing more will come."""

    def _before_forward(self, _module: object, _args: object, inputs: Mapping[str, Any]) -> None:
        if self._first:
            return
        cached, tokens = inputs[self._cache_argument].get_seq_length(), inputs["input_ids"].shape[1]
        self._computed += tokens
        self._emit(Progress("reading the prompt", cached + tokens, len(self._plan.prompt)))

    def _text(self) -> str:
        return str(self._tokenizer.decode(self._new, skip_special_tokens=True)).strip()


def _digest(logits: tuple[torch.Tensor, ...]) -> str:
    digest = hashlib.sha256()
    for step in logits:
        digest.update(step.numpy().tobytes())
    return digest.hexdigest()


def _on_a_thread(work: Callable[[Emit], None]) -> Iterator[Event]:
    """Yield what `work` emits while it runs.

    Raises:
        Exception: what `work` raises.
    """
    events: queue.SimpleQueue[Event | BaseException | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            work(events.put)
        except BaseException as error:  # noqa: BLE001  raised below, by the thread that waits
            events.put(error)
        events.put(None)

    threading.Thread(target=run, name="kvfleet-demo", daemon=True).start()
    while (event := events.get()) is not None:
        if isinstance(event, BaseException):
            raise event
        yield event

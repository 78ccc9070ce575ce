"""What the demo does on the nodes. Each function runs in a process of its own and yields what it is doing.

The last thing yielded is the result.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

import kvfleet
from kvfleet.cli import demo_model, demo_prompt
from kvfleet.core.layout import ModelSpec
from kvfleet.node.messages import Source

if TYPE_CHECKING:
    import torch

__all__ = ["Answer", "Event", "Filled", "Plan", "Progress", "answer", "evict", "filler_of", "prepare"]

NEW_TOKENS = 48
PROMPT_TOKENS_MAX = 8192  # more would take a small machine more than the five minutes that the demo should take
_WARM_UP_TOKENS = 64
_STORE_TIMEOUT_S = 120.0
_FILL_BLOCKS = 4  # blocks stored at once to push others out
_FILL_FACTOR_MAX = 4  # how many times the arena's size is stored at most


@dataclass(frozen=True, slots=True)
class Progress:
    """What is being done, and how far it has got.

    Attributes:
        doing: in a few words.
        done: of `total`, or None if there is nothing to count.
        text: of the answer so far.
    """

    doing: str
    done: int | None = None
    total: int | None = None
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What all steps share.

    Attributes:
        fleet: name of the fleet.
        model: directory of the model, as transformers saves it.
        spec: of the model.
        prompt: token ids.
        num_threads: that the model may use.
        notes: for the user, about the prompt.
    """

    fleet: str
    model: Path
    spec: ModelSpec
    prompt: tuple[int, ...]
    num_threads: int
    notes: tuple[str, ...]

    @property
    def num_blocks(self) -> int:
        """Whole blocks of the prompt."""
        return len(self.prompt) // self.spec.block_tokens

    @property
    def prompt_bytes(self) -> int:
        """Bytes of the prompt's whole blocks."""
        return self.num_blocks * self.spec.layout.block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one run of the model gave.

    Attributes:
        text: the answer.
        logits_digest: SHA-256 of the logits of every token of the answer.
        reused_tokens: of the prompt, not computed.
        computed_tokens: that the model was run over before its first new token.
        bytes_by_source: KV loaded.
        ttft_s: time to first token: from the prompt's token ids to the first new one.
        stored_blocks: of KV that was computed, now in the fleet.
        shortfall: why less came from the cache than was found there, or "".
    """

    text: str
    logits_digest: str
    reused_tokens: int
    computed_tokens: int
    bytes_by_source: Mapping[Source, int]
    ttft_s: float
    stored_blocks: int
    shortfall: str


@dataclass(frozen=True, slots=True)
class Filled:
    """What it took to push the prompt out of an arena.

    Attributes:
        num_bytes: of other KV that was stored.
        left_blocks: of the prompt that are there nevertheless.
    """

    num_bytes: int
    left_blocks: int


Event: TypeAlias = Progress | Plan | Answer | Filled
Emit: TypeAlias = Callable[[Event], None]


def prepare(
    fleet: str, document: str, question: str, *, model: Path | None, model_root: Path, num_threads: int, salt: str
) -> Iterator[Event]:
    """Load the model once and make the plan.

    Args:
        fleet: name of the fleet.
        document: the text.
        question: about it.
        model: None: SmolLM2.
        model_root: where the copy of SmolLM2 is, or will be.
        num_threads: that the model may use.
        salt: keeps this demo's KV apart from that of earlier ones.
    """
    from kvfleet.connectors.transformers import spec_for

    if model is None:
        yield Progress("unpacking SmolLM2-135M-Instruct: only the first time")
        model = demo_model.prepare_smollm2(model_root)
    yield Progress("reading the document")
    network = demo_model.load_model(model)
    context = getattr(network.config.get_text_config(), "max_position_embeddings", None) or PROMPT_TOKENS_MAX
    prompt, notes = demo_prompt.tokenize(
        demo_model.load_tokenizer(model), document, question, min(context - NEW_TOKENS, PROMPT_TOKENS_MAX)
    )
    yield Progress("taking the fingerprint of the weights")
    yield Plan(
        fleet=fleet,
        model=model,
        spec=spec_for(network, block_tokens=demo_prompt.block_tokens_for(len(prompt)), salt=salt),
        prompt=tuple(prompt),
        num_threads=num_threads,
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
            prompt, max_new_tokens=NEW_TOKENS, do_sample=False, streamer=self,
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
        """transformers gives the prompt first, and then each new token."""
        if tokens.ndim > 1:
            return
        self._first = self._first or time.perf_counter()
        self._new += tokens.tolist()
        self._emit(Progress("answering", len(self._plan.prompt), len(self._plan.prompt), self._text()))

    def end(self) -> None:
        """transformers has given all tokens."""

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
        digest.update(step.contiguous().numpy())
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

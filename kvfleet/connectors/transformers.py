"""Reuse of KV for Hugging Face transformers: `generate` with a fleet's cache behind it.

    model = AutoModelForCausalLM.from_pretrained(...).eval()
    kv = TransformersConnector(model, fleet.client(spec_for(model)))
    output = kv.generate(input_ids, max_new_tokens=64)

A prompt is computed block by block, whether parts of it were found or not. So the model runs the same shapes after
the same tokens with and without the cache, and the logits are equal bit for bit.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvfleet.connectors.transformers_model import cache_argument, layout_of, spec_for
from kvfleet.connectors.transformers_prompt import PrefixCache, Prompt
from kvfleet.core.hints import NO_HINTS, Hints
from kvfleet.errors import ConfigError, LayoutMismatchError
from kvfleet.hits import Loaded, PrefixHit, StoreResult
from kvfleet.node.messages import Source
from kvfleet.storing import StoreTask

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache, PreTrainedModel

__all__ = ["Prefill", "PrefixCache", "TransformersConnector", "spec_for"]

# What `generate` takes besides the settings of a GenerationConfig and leaves KV the prompt's alone.
_GENERATE_ARGUMENTS = frozenset(
    {
        "attention_mask",
        "generation_config",
        "logits_processor",
        "prefix_allowed_tokens_fn",
        "stopping_criteria",
        "streamer",
        "tokenizer",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """A prompt's KV, ready to generate from.

    Attributes:
        cache: KV of the prompt's whole blocks, a batch of one; never of its last token, so that there is one to run.
        prompt_tokens: of the whole prompt.
        reused_tokens: whose KV came from the fleet and is in `cache`.
        loaded: how those came, block by block.
        stores: under way, of the blocks that were computed.
        seconds: from the prompt to the filled cache.
    """

    cache: DynamicCache
    prompt_tokens: int
    reused_tokens: int
    loaded: Loaded
    stores: tuple[StoreTask, ...] = field(repr=False)
    seconds: float

    @property
    def blocks_by_source(self) -> Mapping[Source, int]:
        """Blocks that were loaded, by where they came from."""
        return Counter(outcome for outcome in self.loaded.outcomes if isinstance(outcome, Source))

    def wait(self, timeout_s: float) -> StoreResult:
        """Wait until the whole fleet can find what was computed; the sum of all stores.

        Raises:
            DeadlineExceededError: not within `timeout_s`. The stores go on.
        """
        deadline = time.monotonic() + timeout_s
        results = [task.wait(max(0.0, deadline - time.monotonic())) for task in self.stores]
        return StoreResult(
            stored=sum(result.stored for result in results),
            already=sum(result.already for result in results),
            dropped=sum(result.dropped for result in results),
            published=all(result.published for result in results),
            num_bytes=sum(result.num_bytes for result in results),
            reason=next((result.reason for result in results if result.reason), ""),
        )


class TransformersConnector:
    """Loads what the fleet holds of a prompt, has the model compute the rest, and stores that.

    Any fault of the cache costs a recompute and nothing else. Only prompts are stored, not what is generated.

    Threads: one request at a time.

    Args:
        model: a causal language model whose cache is a `DynamicCache` of full-attention layers, in eval mode. Its
            weights must not change as long as the client's spec is used.
        client: made with `spec_for(model)`, or a spec of the same layout.

    Raises:
        ConfigError: the model keeps other state than full-attention KV.
        LayoutMismatchError: the client's spec describes other KV than the model's.
    """

    def __init__(self, model: PreTrainedModel, client: PrefixCache) -> None:
        layout = client.spec.layout
        found = layout_of(model, block_tokens=layout.block_tokens)
        if found != layout:
            raise LayoutMismatchError(f"KV as in the client's spec, {layout}", f"a model with {found}")
        self.last: Prefill | None = None  # of the last `generate`
        self._model = model
        self._client = client
        self._layout = layout

    def generate(
        self,
        input_ids: torch.Tensor,
        *,
        hints: Hints = NO_HINTS,
        **settings: Any,  # noqa: ANN401 - the model's
    ) -> Any:  # noqa: ANN401 - what the model returns
        """Like `model.generate(input_ids, **settings)`. Afterwards `last` says what was reused.

        Args:
            input_ids: (1, num_tokens), integers.
            hints: of whose prompt it is; see `Client.store`.
            **settings: of `model.generate`.

        Raises:
            ConfigError: a batch, a mask with padding, several beams or sequences, or inputs besides tokens.
        """
        _check_settings(self._model, settings)
        self.last = self.prefill(input_ids, hints=hints)
        settings.setdefault("attention_mask", input_ids.new_ones(input_ids.shape))
        settings[cache_argument(self._model)] = self.last.cache
        return self._model.generate(input_ids, **settings)

    def prefill(self, input_ids: torch.Tensor, *, hints: Hints = NO_HINTS) -> Prefill:
        """Fill a cache with the KV of a prompt's whole blocks.

        Args:
            input_ids: (1, num_tokens), integers.
            hints: as in `generate`.

        Raises:
            ConfigError: a batch of several prompts, or an empty prompt.
        """
        if input_ids.ndim != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
            raise ConfigError("input_ids", f"one prompt at a time, shape (1, num_tokens), is {tuple(input_ids.shape)}")
        started = time.monotonic()
        hit = self._client.lookup(input_ids[0].cpu().numpy(), hints=hints)
        prompt, loaded = self._fill(input_ids, hit, hints)
        seconds = time.monotonic() - started
        self._client.started(loaded, seconds)
        cache, prompt_tokens = prompt.cache, input_ids.shape[1]
        if hit.asked_blocks * self._layout.block_tokens == prompt_tokens:
            cache.crop(-1)
        return Prefill(
            cache=cache,
            prompt_tokens=prompt_tokens,
            reused_tokens=min(int(loaded), prompt_tokens - 1),
            loaded=loaded,
            stores=tuple(prompt.stores),
            seconds=seconds,
        )

    def _fill(self, input_ids: torch.Tensor, hit: PrefixHit, hints: Hints) -> tuple[Prompt, Loaded]:
        """Load what is worth it, compute the rest."""
        client, whole_tokens = self._client, hit.asked_blocks * self._layout.block_tokens
        prompt = Prompt(self._model, client, input_ids, hit, hints)
        plan = client.planning.plan(hit, whole_tokens, can_split=True)
        stop = hit.start_block if plan.tail is None else plan.tail.start
        loaded = client.load(hit, prompt.buffer, plan=plan, meanwhile=lambda first: prompt.begin(first, stop))
        prompt.finish(loaded)
        if hints.lasting and hit.keys:
            prompt.stores.append(client.hint(hit.keys, hints))  # those that were loaded have no store to tell it
        return prompt, loaded


def _check_settings(model: PreTrainedModel, settings: Mapping[str, Any]) -> None:
    """Refuse settings of `generate` with which KV would not be that of the prompt's tokens alone.

    Raises:
        ConfigError: naming the setting.
    """
    from transformers import GenerationConfig

    unknown = settings.keys() - vars(GenerationConfig()).keys() - _GENERATE_ARGUMENTS
    if unknown:
        raise ConfigError(", ".join(sorted(unknown)), "not supported: the cache knows a prompt by its tokens only")
    mask = settings.get("attention_mask")
    if mask is not None and not bool(mask.bool().all()):
        raise ConfigError("attention_mask", "padded prompts are not supported: give one prompt without padding")
    defaults = settings.get("generation_config") or model.generation_config
    for name, supported in (("num_beams", 1), ("num_return_sequences", 1), ("use_cache", True)):
        value = settings.get(name, getattr(defaults, name, None))
        if value is not None and value != supported:
            raise ConfigError(name, f"must be {supported}, is {value}")
    if settings.get("cache_implementation", getattr(defaults, "cache_implementation", None)):
        raise ConfigError("cache_implementation", "must not be set: the prompt's KV comes in a DynamicCache")

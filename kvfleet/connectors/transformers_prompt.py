"""One prompt on its way into a transformers cache: blocks that were loaded, and blocks that the model computes."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from kvfleet.connectors.transformers_model import forward
from kvfleet.core.block import KEY_BYTES
from kvfleet.core.hints import Hints
from kvfleet.core.layout import ModelSpec
from kvfleet.core.planner import Plan
from kvfleet.hits import Loaded, PrefixHit
from kvfleet.loads import Meanwhile
from kvfleet.node.messages import Source
from kvfleet.planning import Planning
from kvfleet.storing import StoreTask

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache, PreTrainedModel

__all__ = ["PrefixCache", "Prompt"]


class PrefixCache(Protocol):
    """What is needed of a `kvfleet.Client`."""

    spec: ModelSpec

    def lookup(self, token_ids: Any, /, *, hints: Hints) -> PrefixHit:  # noqa: ANN401 - see Client
        """See `Client.lookup`."""
        ...

    planning: Planning

    def load(self, hit: PrefixHit, into: object, /, *, plan: Plan, meanwhile: Meanwhile) -> Loaded:
        """See `Client.load`."""
        ...

    def started(self, loaded: Loaded, seconds: float, /) -> None:
        """See `Client.started`."""
        ...

    def store_keys(self, keys: bytes, kv: object, /, *, start_block: int, hints: Hints) -> StoreTask:
        """See `Client.store_keys`."""
        ...

    def hint(self, keys: bytes, hints: Hints, /) -> StoreTask:
        """See `Client.hint`."""
        ...


class Prompt:
    """Fills a cache with a prompt's whole blocks, in order.

    Args:
        hints: of whose prompt it is, for each store; that it is the last one is for `Client.hint`, when all are stored.

    Attributes:
        buffer: where loaded blocks come to, CPU, of the layout's shape with the hit's tokens.
        cache: KV of the blocks so far.
        stores: under way.
    """

    def __init__(
        self, model: PreTrainedModel, client: PrefixCache, input_ids: torch.Tensor, hit: PrefixHit, hints: Hints
    ) -> None:
        import torch
        from transformers import DynamicCache

        layout = client.spec.layout
        num_layers, _, num_heads, _, head_dim = layout.shape
        dtype = getattr(torch, layout.dtype)
        self.buffer = torch.empty((num_layers, 2, num_heads, hit.num_tokens, head_dim), dtype=dtype)
        self.cache: DynamicCache = DynamicCache(config=model.config)
        self.stores: list[StoreTask] = []
        self._model = model
        self._layout = layout
        self._client = client
        self._input_ids = input_ids
        self._hit = hit
        self._hints = replace(hints, final=False)
        self._next = 0

    def finish(self, loaded: Loaded) -> None:
        """A load has ended: take what came, and compute the rest."""
        outcomes = loaded.outcomes
        while self._next < self._hit.asked_blocks:
            start = stop = self._next
            while stop < len(outcomes) and isinstance(outcomes[stop], Source):
                stop += 1
            self._take(stop)
            while stop < self._hit.asked_blocks and (stop >= len(outcomes) or not isinstance(outcomes[stop], Source)):
                stop += 1
            self._compute(stop)
            assert self._next > start

    def begin(self, loaded_stop: int, stop: int) -> None:
        """Blocks before `loaded_stop` came: compute those from there up to `stop`."""
        self._take(loaded_stop)
        self._compute(stop)

    def _take(self, stop: int) -> None:
        """Put loaded blocks, from the next one up to `stop`, into the cache."""
        if stop == self._next:
            return
        tokens = slice(self._next * self._layout.block_tokens, stop * self._layout.block_tokens)
        for index, layer in enumerate(self.buffer):
            keys, values = (kv[None, :, tokens].to(self._model.device) for kv in layer)
            self.cache.update(keys, values, index)
        self._next = stop

    def _compute(self, stop: int) -> None:
        """Run the model over the blocks from the next one up to `stop`, and store each as soon as it is there."""
        block_tokens = self._layout.block_tokens
        for index in range(self._next, stop):
            began, first = time.perf_counter(), index * block_tokens
            forward(self._model, self._input_ids[:, first : first + block_tokens], self.cache)
            keys = self._hit.keys[: (index + 1) * KEY_BYTES]
            self.stores.append(
                self._client.store_keys(keys, self._newest_block(), start_block=index, hints=self._hints)
            )
            self._client.planning.computed(first, block_tokens, time.perf_counter() - began)
            self._next = index + 1

    def _newest_block(self) -> torch.Tensor:
        """Copy of the cache's last block, of the layout's shape, on the CPU.

        A copy because the cache moves its tensors as it grows, while the store reads in the background.
        """
        import torch

        block = torch.empty(self._layout.shape, dtype=getattr(torch, self._layout.dtype))
        for target, layer in zip(block, self.cache.layers, strict=True):
            target[0].copy_(layer.keys[0, :, -self._layout.block_tokens :])
            target[1].copy_(layer.values[0, :, -self._layout.block_tokens :])
        return block

"""What kvfleet must know of a transformers model: what its KV looks like, and which other models have the same."""

from __future__ import annotations

import hashlib
import inspect
import json
from typing import TYPE_CHECKING

from typing_extensions import Unpack

from kvfleet.core.layout import DEFAULT_BLOCK_TOKENS, BlockLayout, ModelSpec, Scope
from kvfleet.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache, PreTrainedModel

__all__ = ["cache_argument", "forward", "layout_of", "spec_for", "weights_digest"]

# What a config says about where a model came from and not about what it computes.
_ORIGIN = ("_name_or_path", "transformers_version")

# Rotary embeddings that turn a key by an angle that depends on how long the prompt was: KV is not the prefix's alone.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def spec_for(
    model: PreTrainedModel,
    *,
    weight_revision: str | None = None,
    model_id: str | None = None,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    **scope: Unpack[Scope],
) -> ModelSpec:
    """Describe a loaded model so that its KV is shared with equal models, and with no others.

    Args:
        model: with all its weights loaded.
        weight_revision: hub commit of the weights. Without it a digest of config and weights is computed, which
            reads all of them once (1.7 GB/s).
        model_id: default: the model's name on the hub with a `weight_revision`, else its class.
        block_tokens: tokens in a block.
        **scope: tenant, salt and adapter. An adapter that is merged or active when this is called is in the digest.

    Raises:
        ConfigError: the model keeps other state than full-attention KV, or has no name.
    """
    layout = layout_of(model, block_tokens=block_tokens)
    if weight_revision is None:
        weight_revision = weights_digest(model)
        model_id = model_id or type(model).__name__
    return ModelSpec(
        model_id=model_id or str(model.config.name_or_path), weight_revision=weight_revision, layout=layout, **scope
    )


def weights_digest(model: PreTrainedModel) -> str:
    """SHA-256 over a model's config and weights, hex. Equal wherever equal files were loaded to the same dtype."""
    import torch

    config = {name: value for name, value in model.config.to_dict().items() if name not in _ORIGIN}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def layout_of(model: PreTrainedModel, *, block_tokens: int = DEFAULT_BLOCK_TOKENS) -> BlockLayout:
    """The blocks of a model, as its own cache shows them after one token.

    Raises:
        ConfigError: the model keeps other state than full-attention KV, or is in training mode.
    """
    _check_config(model)
    try:
        layers = _probe(model).layers
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ConfigError("model", f"{type(model).__name__} does not take a DynamicCache: {error}") from error
    shapes = {tuple(kv.shape) for layer in layers for kv in (layer.keys, layer.values) if kv is not None}
    if len(shapes) != 1 or any(layer.keys is None for layer in layers):
        raise ConfigError("model", f"only layers with keys and values of one shape can be cached, has {shapes}")
    batch, num_heads, num_tokens, head_dim = shapes.pop()
    assert batch == num_tokens == 1
    return BlockLayout.kv(
        num_layers=len(layers),
        num_kv_heads=num_heads,
        head_dim=head_dim,
        dtype=str(layers[0].keys.dtype).removeprefix("torch."),
        block_tokens=block_tokens,
    )


def _check_config(model: PreTrainedModel) -> None:
    """Refuse what would be silently wrong."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    name = type(model).__name__
    if model.training:
        raise ConfigError("model", f"{name} is in training mode: call model.eval()")
    text = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise ConfigError("model", f"{name} has an encoder: only decoder models can be cached")
    rope = json.dumps(getattr(text, "rope_parameters", None), default=str)
    for kind in _LENGTH_DEPENDENT_ROPE:
        if f'"{kind}"' in rope:
            raise ConfigError("model", f"{name} has {kind} rotary embeddings: its keys depend on the prompt's length")
    others = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers} - {DynamicLayer.__name__}
    if others or getattr(model, "_is_stateful", False):
        raise ConfigError(
            "model",
            f"{name} keeps other state than full-attention KV ({', '.join(sorted(others)) or 'recurrent'}): sliding "
            "windows and linear attention cannot be cached",
        )


def _probe(model: PreTrainedModel) -> DynamicCache:
    """A cache after one token."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    forward(model, torch.zeros((1, 1), dtype=torch.long, device=model.device), cache)
    return cache


def forward(model: PreTrainedModel, input_ids: torch.Tensor, cache: DynamicCache) -> None:
    """Run the model over tokens that follow those in the cache. Only the cache is of interest."""
    import torch

    settings = {cache_argument(model): cache}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        settings["logits_to_keep"] = 1
    with torch.no_grad():
        model(input_ids=input_ids, use_cache=True, **settings)


def cache_argument(model: PreTrainedModel) -> str:
    """The name of the argument, which transformers changed in the course of its version 5."""
    return "past_key_values" if "past_key_values" in inspect.signature(model.forward).parameters else "cache"

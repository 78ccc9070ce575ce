"""What a transformers config says about the KV of its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvfleet.errors import ConfigError

__all__ = ["Geometry", "read_geometry"]

# The same thing under another name in the config.json of older models.
ALIASES = {
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "hidden_size": ("n_embd",),
    "dtype": ("torch_dtype",),
}

# Settings that only models with some other state than full-attention KV have.
OTHER_STATE = (
    "attention_chunk_size",
    "attention_types",
    "attention_window_size",
    "attn_layer_period",
    "block_configs",
    "block_types",
    "blocksparse_block_size",
    "conv_L_cache",
    "conv_kernel",
    "cross_attention_layers",
    "full_attention_interval",
    "hybrid_layer_pattern",
    "index_topk",
    "index_topk_blocks",
    "layer_group_size",
    "layers_block_type",
    "linear_attn_config",
    "linear_conv_kernel_dim",
    "mamba_d_state",
    "num_kv_shared_layers",
    "share_q_dim",
    "ssm_state_size",
    "state_size",
)

# Lists with a kind for each layer, and how they name full attention.
FULL_ATTENTION = {"attn_type_list": "1", "layer_types": "full_attention"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes of a model's KV.

    Attributes:
        num_layers: layers that keep KV.
        num_kv_heads: of the whole model; 1 for latent KV.
        head_dim: numbers a head and token, K and V alike; for latent KV, numbers a token.
        latent: K and V are kept as one compressed vector (MLA).
        dtype: as named by torch, like "bfloat16", or None if the config does not say.
        name: what the config calls its model, or "".
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    latent: bool
    dtype: str | None
    name: str


def read_geometry(config: object) -> Geometry:
    """Read a transformers config.

    Args:
        config: a config object, or its config.json as a dict. Of a multimodal model, its text part counts.

    Raises:
        ConfigError: sizes are missing, or the model keeps something else than full-attention KV.
    """
    text = _get(config, "text_config") or config
    _refuse_other_state(text)
    dtype = _get(text, "dtype") or _get(config, "dtype")
    rank = _get(text, "kv_lora_rank")
    # Models with latent KV declare KV heads too, but do not keep them.
    if rank is not None:
        num_kv_heads, head_dim = 1, _int(text, "kv_lora_rank") + _int(text, "qk_rope_head_dim")
    else:
        num_kv_heads, head_dim = _num_kv_heads(text), _head_dim(text)
    return Geometry(
        num_layers=_int(text, "num_hidden_layers"),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        latent=rank is not None,
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        name=str(_get(config, "_name_or_path") or ""),
    )


def _num_kv_heads(config: object) -> int:
    if _get(config, "num_key_value_heads") is not None:
        return _int(config, "num_key_value_heads")
    if _get(config, "multi_query") and not _get(config, "new_decoder_architecture"):
        return 1
    if _get(config, "num_kv_heads") is not None:
        return _int(config, "num_kv_heads")
    return _int(config, "num_attention_heads")


def _head_dim(config: object) -> int:
    if _get(config, "head_dim") is not None:
        return _int(config, "head_dim")
    hidden, heads = _int(config, "hidden_size"), _int(config, "num_attention_heads")
    if hidden % heads:
        raise ConfigError("config", f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    return hidden // heads


def _refuse_other_state(config: object) -> None:
    problem = _other_state(config)
    if problem:
        raise ConfigError(
            "config", f"{_get(config, 'model_type')} model with {problem}: only full-attention KV can be cached"
        )


def _other_state(config: object) -> str | None:
    if _get(config, "is_encoder_decoder"):
        return "an encoder"
    for name in OTHER_STATE:
        if _get(config, name):
            return f"{name}={_get(config, name)!s:.40}"
    for name, full in FULL_ATTENTION.items():
        kinds = _get(config, name)
        if isinstance(kinds, (list, tuple)):
            others = sorted({str(kind) for kind in kinds} - {full})
            return f"layers of type {', '.join(others)}" if others else None
    window = _get(config, "sliding_window")
    if window and _get(config, "use_sliding_window") is not False:
        return f"sliding_window={window}"
    return None


def _get(config: object, name: str) -> object:
    """A setting, or None if the config has none of that name."""
    for known in (name, *ALIASES.get(name, ())):
        value = config.get(known) if isinstance(config, Mapping) else getattr(config, known, None)
        if value is not None:
            return value
    return None


def _int(config: object, name: str) -> int:
    value = _get(config, name)
    if type(value) is not int or value <= 0:
        raise ConfigError("config", f"{name} must be a positive integer, is {value!r}; or give a BlockLayout yourself")
    return value

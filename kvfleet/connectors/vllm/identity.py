"""Whose KV an engine's blocks are: what vLLM is set to, as a `ModelSpec`.

vLLM's block hashes chain tokens, cache salt, images and an adapter's name. They say nothing of the model, its weights,
its dtype, or the order of the bytes, so the root of the keys has to. What goes into it:

* the numbers: digest of the weights, config after overrides, quantisation, what else changes what is computed;
* the bytes: all of `EngineLayout`;
* the hashes: what vLLM makes of a sample, so that versions that hash differently never meet by accident;
* the scope: tenant, adapter, and a word for engines whose weights were changed in place.

What must not: paths, file times, names that a model is served under, ports, engine ids, ranks. vLLM's seed of the
chain is left out because every hash depends on it already.

vLLM itself puts paths into two kinds of hashes: of adapters (0.32) and of images. Blocks with these are shared
only between engines whose model and adapters lie in the same place.

This module does not import vLLM.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvfleet.connectors import weights
from kvfleet.connectors.vllm.layout import EngineLayout, layer_specs
from kvfleet.connectors.weights import canonical_json
from kvfleet.core.block import encode_fields
from kvfleet.core.layout import DEFAULT_BLOCK_TOKENS, ModelSpec
from kvfleet.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

__all__ = [
    "AdapterRef",
    "adapter_ref",
    "block_tokens",
    "check_supported",
    "model_spec",
    "scoped",
]

# Compared by name: a subclass keeps something else.
_FULL_ATTENTION = {"FullAttentionSpec", "MLAAttentionSpec"}
# Ways of guessing tokens that keep no KV of their own.
_DRAFTS_WITHOUT_KV = {"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"}
# Formats whose weights come from elsewhere than the model's directory.
_WEIGHTS_ELSEWHERE = {"ipc_cache", "modelexpress", "tensorizer"}
# Settings besides the config that change what is computed, with the part of vLLM's config they are in.
_MODEL_SETTINGS = (
    "disable_sliding_window",
    "model_class_overrides",
    "model_impl",
    "quantization",
    "quantization_config",
)
_CACHE_SETTINGS = ("kv_cache_dtype_skip_layers",)
_ATTENTION_SETTINGS = ("indexer_kv_dtype",)
_MULTIMODAL_SETTINGS = (
    "language_model_only", "mm_device_do_normalize", "mm_encoder_attn_dtype", "mm_processor_kwargs",
    "video_pruning_method", "video_pruning_rate",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """A LoRA adapter.

    Attributes:
        name: by which requests ask for it; part of vLLM's hashes.
        revision: digest of its weights.
    """

    name: str
    revision: str


def block_tokens(setting: int | None, engine_block_tokens: int) -> int:
    """Tokens in a block: whole engine blocks, by default as many as fit in 256 tokens, one at least.

    Raises:
        ConfigError: the setting is not a multiple of the engine's block size.
    """
    if setting is None:
        return max(1, DEFAULT_BLOCK_TOKENS // engine_block_tokens) * engine_block_tokens
    if setting < 1 or setting % engine_block_tokens:
        raise ConfigError(
            "block_tokens", f"must be a multiple of vLLM's block_size {engine_block_tokens}, is {setting}"
        )
    return setting


def check_supported(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    *,
    environment: Mapping[str, str] = os.environ,
    door: str = "connector",
) -> None:
    """Refuse what would be wrong, or would never be shared.

    Args:
        vllm_config: vLLM's settings.
        kv_cache_config: vLLM's KV cache groups. Workers see the spec of each layer, the scheduler one for all.
        environment: variables of the process that makes block hashes.
        door: see `EngineLayout`.

    Raises:
        ConfigError: which setting, and why.
    """
    if door == "connector" and vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
        raise ConfigError(
            "kv_load_failure_policy",
            'a block that cannot be loaded would fail its request: set "kv_load_failure_policy": "recompute"',
        )
    _check_hashes(vllm_config, environment)
    _check_model(vllm_config)
    _check_parallelism(vllm_config.parallel_config)
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ConfigError("model", f"has {len(groups)} KV cache groups, only one group of full attention can be cached")
    for name, spec in layer_specs(kv_cache_config):
        _check_layer(name, spec)


def _check_hashes(vllm_config: VllmConfig, environment: Mapping[str, str]) -> None:
    cache = vllm_config.cache_config
    if cache.prefix_caching_hash_algo.startswith("xxhash") and environment.get("PYTHONHASHSEED") is None:
        raise ConfigError(
            "prefix_caching_hash_algo",
            f"{cache.prefix_caching_hash_algo} names blocks differently in each process: set it to sha256 or "
            "sha256_cbor, or set PYTHONHASHSEED to the same value everywhere",
        )
    # vLLM hashes with a connector even without prefix caching, but then it may name images by request.
    images = getattr(vllm_config.model_config, "multimodal_config", None)
    if images is not None and not cache.enable_prefix_caching and images.mm_processor_cache_gb == 0:
        raise ConfigError(
            "enable_prefix_caching", "must be on for multimodal models: vLLM does not look at what an image shows"
        )


def _check_model(vllm_config: VllmConfig) -> None:
    model = vllm_config.model_config
    if model.is_encoder_decoder:
        raise ConfigError("model", "has an encoder: only decoder models can be cached")
    if vllm_config.load_config.load_format == "dummy":
        raise ConfigError("load_format", "dummy weights cannot be told apart")
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise ConfigError("weight_transfer_config", "weights that change while the engine runs cannot be told apart")
    draft = vllm_config.speculative_config
    if draft is not None and draft.method not in _DRAFTS_WITHOUT_KV:
        raise ConfigError(
            "speculative_config",
            f"{draft.method} keeps a draft model's KV among the model's: use one of "
            f"{', '.join(sorted(_DRAFTS_WITHOUT_KV))}, or none",
        )


def _check_parallelism(parallel: ParallelConfig) -> None:
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise ConfigError(name, f"must be 1, is {size}: only tensor and data parallelism are supported")


def _check_layer(name: str, spec: KVCacheSpec) -> None:
    kind = type(spec).__name__
    if kind not in _FULL_ATTENTION:
        raise ConfigError("model", f"{name} is {kind.removesuffix('Spec')}: only full attention can be cached")
    for window in ("sliding_window", "attention_chunk_size"):
        if getattr(spec, window, None) is not None:
            raise ConfigError("model", f"{name} has a {window} of {getattr(spec, window)}: only full attention can be")
    if getattr(spec, "non_causal", False):
        raise ConfigError("model", f"{name} looks at later tokens: a prompt's beginning cannot be cached")
    if getattr(spec, "tokens_per_state", 1) != 1:
        raise ConfigError("model", f"{name} keeps one state for {spec.tokens_per_state} tokens: cannot be cached")


def model_spec(
    vllm_config: VllmConfig, layout: EngineLayout, *, tenant: str = "", model_id: str = "", weight_revision: str = ""
) -> ModelSpec:
    """What tells an engine's blocks from all others.

    Args:
        vllm_config: vLLM's settings, as one process of the engine has them after the model was loaded.
        layout: of its blocks.
        tenant: whose cache this is.
        model_id: name of the model; its architecture if not given: the digest of the weights tells models apart,
            and the name under which a node knows one may be a path.
        weight_revision: of weights that cannot be read here; otherwise their digest is taken.

    Raises:
        ConfigError: the weights cannot be told apart, or a size is out of bounds.

    Blocking: while weights are read, see `weights.weight_revision`.
    """
    model = vllm_config.model_config
    return ModelSpec(
        model_id=model_id or _architecture(model.hf_config),
        weight_revision=_numbers(vllm_config, weight_revision or _weights(vllm_config)),
        layout=layout.block_layout(),
        tenant=tenant,
    )


def scoped(spec: ModelSpec, adapter: AdapterRef | None, reset: str) -> ModelSpec:
    """The same model with an adapter, or after its weights were changed in place.

    Args:
        spec: as `model_spec` gives it.
        adapter: the requests', or None.
        reset: a word that no other engine has, or "".
    """
    name, revision = (adapter.name, adapter.revision) if adapter is not None else ("", "")
    return replace(spec, salt=reset, adapter_id=name, adapter_revision=revision)


def adapter_ref(lora: LoRARequest) -> AdapterRef:
    """Which adapter a request asks for.

    Args:
        lora: vLLM's `LoRARequest`.

    Raises:
        ConfigError: its weights cannot be told apart.

    Blocking: while they are read, see `weights.weight_revision`.
    """
    if getattr(lora, "tensorizer_config_dict", None) is not None:
        raise ConfigError("adapter", f"{lora.lora_name} is loaded by tensorizer: its weights cannot be told apart")
    return AdapterRef(lora.lora_name, weights.adapter_revision(os.path.expanduser(lora.lora_path)))  # noqa: PTH111


def _architecture(hf_config: PretrainedConfig) -> str:
    names = getattr(hf_config, "architectures", None)
    return str(names[0]) if names else type(hf_config).__name__


def _weights(vllm_config: VllmConfig) -> str:
    model, load = vllm_config.model_config, vllm_config.load_config
    # Set if the model is in object storage: `model` is then a copy of its small files.
    if getattr(model, "model_weights", "") or load.load_format in _WEIGHTS_ELSEWHERE:
        raise ConfigError(
            "weight_revision", f"must be given: with load format {load.load_format} the weights are not read from here"
        )
    return weights.weight_revision(
        model.model,
        model.revision,
        download_directory=load.download_dir,
        load_format=load.load_format,
        remote_code=model.trust_remote_code,
    )


def _numbers(vllm_config: VllmConfig, revision: str) -> str:
    """Digest of all that decides the numbers in a block, besides the tokens."""
    model = vllm_config.model_config
    config = canonical_json(model.hf_config)
    settings = {
        "model": _picked(model, _MODEL_SETTINGS),
        "cache": _picked(vllm_config.cache_config, _CACHE_SETTINGS),
        "attention": _picked(getattr(vllm_config, "attention_config", None), _ATTENTION_SETTINGS),
        "multimodal": _picked(getattr(model, "multimodal_config", None), _MULTIMODAL_SETTINGS),
        "adapters": _adapter_settings(vllm_config),
        # These rotary embeddings are chosen by the longest prompt the engine takes.
        "longest": model.max_model_len if '"longrope"' in config or '"su"' in config else None,
    }
    named = (("weights", revision), ("config", config), ("settings", canonical_json(settings)))
    return f"sha256:{hashlib.sha256(encode_fields(named)).hexdigest()}"


def _picked(settings: object, names: tuple[str, ...]) -> dict[str, Any]:
    # Settings that a version does not have are as if unset.
    return {name: value for name in names if (value := getattr(settings, name, None)) is not None}


def _adapter_settings(vllm_config: VllmConfig) -> dict[str, Any]:
    """What changes what adapters compute; nothing if that is what the engine would do anyway."""
    lora = getattr(vllm_config, "lora_config", None)
    chosen = _picked(lora, ("lora_dtype", "target_modules"))
    if str(chosen.get("lora_dtype", "auto")) in ("auto", str(vllm_config.model_config.dtype)):
        chosen.pop("lora_dtype", None)
    return chosen

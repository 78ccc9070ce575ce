"""What differs between the versions of vLLM, 0.29 to 0.32, and where to ask it of each.

vLLM is imported inside the functions: this module can be imported without it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

from kvfleet.connectors.vllm.layout import EngineLayout, layer_geometry, layer_specs
from kvfleet.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

__all__ = [
    "cache_hit_sources",
    "cpu_isa",
    "engine_layout",
    "engine_version",
    "hash_block_tokens",
    "hash_scheme",
    "tensor_parallel_rank",
]


class Pool(Protocol):
    """The sizes of an engine's pool of blocks."""

    blocks_per: int
    block_bytes: int
    num_parts: int


def engine_version() -> str:
    """The version of vLLM without the patch level."""
    import vllm

    return ".".join(map(str, vllm.__version_tuple__[:2]))


def hash_scheme(vllm_config: VllmConfig) -> str:
    """What vLLM's block hashes are made of, as text: equal in all engines that give equal blocks equal hashes.

    A block with a salt, an image and an adapter is hashed as a sample. 0.32 says of each what it is and adds the
    adapter's path, 0.29 does not: their hashes of plain text are equal, all others are not, and without tags a
    salt could be taken for an adapter. What a later version does gives another sample's hash.

    Raises:
        ConfigError: this version of vLLM cannot be asked.
    """
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    name = vllm_config.cache_config.prefix_caching_hash_algo
    request = SimpleNamespace(
        lora_request=SimpleNamespace(lora_name="adapter", lora_path="place"),
        mm_features=[SimpleNamespace(identifier="image", mm_position=SimpleNamespace(offset=1, length=2))],
        cache_salt="salt",
        prompt_embeds=None,
    )
    try:
        extra, _ = kv_cache_utils.generate_block_hash_extra_keys(request, 0, 4, 0)
        sample = kv_cache_utils.hash_block_tokens(get_hash_fn_by_name(name), bytes(32), (1, 2, 3, 70_000), extra)
    except (AttributeError, TypeError) as error:
        raise ConfigError("vllm", f"version {engine_version()} hashes blocks in a way not known: {error}") from error
    # Pickle's bytes are its version's own business; CBOR's are a standard.
    writer = "" if name.endswith("_cbor") else f" python{sys.version_info[0]}.{sys.version_info[1]}"
    return f"{name} {sample.hex()[:16]}{writer}"


def hash_block_tokens(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Tokens that one of vLLM's block hashes stands for."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


def engine_layout(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, pool: Pool) -> EngineLayout:
    """What a worker's blocks are, seen through a connector.

    Args:
        vllm_config: the worker's, after the model was loaded.
        kv_cache_config: the worker's.
        pool: sizes of its blocks.

    Raises:
        ConfigError: this version of vLLM cannot be asked.
    """
    specs = dict(layer_specs(kv_cache_config))
    layers = {name: vllm_config.compilation_config.static_forward_context[name] for name in specs}
    backends = sorted({layer.get_attn_backend().get_name() for layer in layers.values()})
    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    # Every rank keeps the whole of a compressed KV; all else is dealt out.
    replicated = all(type(spec).__name__ == "MLAAttentionSpec" for spec in specs.values())
    return EngineLayout(
        door="connector",
        engine=engine_version(),
        hash_scheme=hash_scheme(vllm_config),
        kv_cache_layout=str(kv_cache_config.kv_cache_layout),
        backend=",".join(backends),
        cpu_isa=cpu_isa(vllm_config, backends, specs.values()),
        dtype=dtype,
        kv_cache_dtype=",".join(sorted({_kv_dtype(layer, dtype) for layer in layers.values()})),
        geometry=layer_geometry(kv_cache_config),
        engine_block_tokens=vllm_config.cache_config.block_size,
        blocks_per=pool.blocks_per,
        num_parts=pool.num_parts,
        block_bytes=pool.block_bytes,
        num_shards=1 if replicated else vllm_config.parallel_config.tensor_parallel_size,
    )


def _kv_dtype(layer: AttentionLayerBase, dtype: str) -> str:
    """What a layer's KV is kept as. The config says "auto" where the checkpoint or the platform decides."""
    from vllm.platforms import current_platform

    name = str(getattr(layer, "kv_cache_dtype", "auto"))
    if name == "auto":
        return dtype
    # Which of the 8-bit formats "fp8" means depends on the generation of the GPU.
    return f"{name}:{current_platform.fp8_dtype()}" if name.startswith("fp8") else name


def cpu_isa(vllm_config: VllmConfig, backends: list[str], specs: Iterable[KVCacheSpec]) -> str:
    """The instruction sets for which the CPU backend packs keys, as it will choose them when it first runs."""
    if "CPU_ATTN" not in backends:
        return ""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model, cache = vllm_config.model_config, vllm_config.cache_config
    isas = {_get_attn_isa(model.dtype, spec.block_size, spec.head_size, cache.cache_dtype) for spec in specs}
    return ",".join(sorted(isas))


def tensor_parallel_rank() -> int:
    """This worker's rank."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def cache_hit_sources(tokens: Mapping[str, int]) -> dict[Any, int]:
    """Say in vLLM's words where loaded tokens came from.

    Args:
        tokens: "host", "disk", "p2p" or "shared" → number of tokens.

    Returns:
        nothing for versions that do not ask.
    """
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return {}
    names = {
        "host": CacheHitSource.HOST,
        "disk": CacheHitSource.DISK,
        "p2p": CacheHitSource.P2P,
        "shared": CacheHitSource.EXTERNAL_UNSPECIFIED,
    }
    return {names[place]: count for place, count in tokens.items() if count}

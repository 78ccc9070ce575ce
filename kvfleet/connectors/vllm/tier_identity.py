"""Whose KV the chunks of vLLM's offloading are, and what their bytes are: seen from the process that schedules.

Only the workers know the layers. What follows from them is told by the KV cache's specs, which come from the workers,
or worked out once more as the workers do it.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

from kvfleet.connectors.vllm import versions
from kvfleet.connectors.vllm.identity import check_supported, model_spec
from kvfleet.connectors.vllm.layout import EngineLayout, layer_geometry, layer_specs
from kvfleet.core.layout import ModelSpec
from kvfleet.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import ParallelConfig
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.config import OffloadingConfig

__all__ = ["tier_spec"]


def tier_spec(offloading: OffloadingSpec, row_bytes: int, *, tenant: str) -> ModelSpec:
    """Describe an engine's chunks.

    Args:
        offloading: of the engine.
        row_bytes: bytes of a chunk, all ranks' together.
        tenant: whose cache it is.

    Raises:
        ConfigError: KV that the fleet cannot tell apart from other KV, or that does not come in one row.

    Blocking: while weights are read, see `model_spec`.
    """
    vllm_config, kv_cache_config = _engine_configs()
    check_supported(vllm_config, kv_cache_config, door="offload")
    _check_rows(vllm_config)
    return model_spec(vllm_config, _layout(offloading.config, vllm_config, kv_cache_config, row_bytes), tenant=tenant)


def _engine_configs() -> tuple[VllmConfig, KVCacheConfig]:
    """The engine's own configuration.

    vLLM hands a tier a summary that leaves out what KV depends on: quantisation, overrides of the model's
    configuration, how blocks are hashed. The scheduler's half of the connector, which is being made further up the
    stack, has all of it.

    Raises:
        ConfigError: it is not there.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("vllm_config"), frame.f_locals.get("kv_cache_config")
        if isinstance(found[0], VllmConfig) and isinstance(found[1], KVCacheConfig):
            return found[0], found[1]
        frame = frame.f_back
    raise ConfigError("secondary_tiers", "KVFleetTier works behind vLLM's OffloadingConnector only")


def _check_rows(vllm_config: VllmConfig) -> None:
    """Refuse engines whose chunks are not wholly in this process's sight.

    Raises:
        ConfigError: saying why.
    """
    if vllm_config.lora_config is not None:
        problem = "KVFleetTier does not support it: vLLM does not tell a tier which adapter's KV it is handed"
        raise ConfigError("enable_lora", problem)
    parallel: ParallelConfig = vllm_config.parallel_config
    if parallel.nnodes_within_dp > 1 or (parallel.world_size > 1 and parallel.distributed_executor_backend == "ray"):
        problem = "KVFleetTier sees this node's memory only, so all workers must be on it for sure: use mp"
        raise ConfigError("distributed_executor_backend", problem)


def _layout(
    config: OffloadingConfig, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, row_bytes: int
) -> EngineLayout:
    """What a row is: the bytes of each worker, in it those of each layer, in it those of each engine block."""
    specs = [spec for _, spec in layer_specs(kv_cache_config)]
    backends = sorted({_backend(vllm_config, spec) for spec in specs})
    group, parallel = config.groups[0], config.parallel
    row = (
        f"workers={parallel.world_size} tp={parallel.tp_size} worker_bytes={config.worker_kv_bytes_per_block} "
        f"one_copy={int(config.replicated_layout)} canonical={int(config.canonical_layout)}"
    )
    return EngineLayout(
        door="offload",
        engine=versions.engine_version(),
        hash_scheme=f"{versions.hash_scheme(vllm_config)} of {config.cache.tokens_per_hash}",
        kv_cache_layout=str(config.kv_cache_layout),
        backend=",".join(backends),
        cpu_isa=versions.cpu_isa(vllm_config, backends, specs),
        dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
        kv_cache_dtype=_kv_dtype(vllm_config, specs),
        geometry=f"{layer_geometry(kv_cache_config)} {row}",
        engine_block_tokens=group.tokens_per_block,
        blocks_per=config.cache.blocks_per_chunk,
        num_parts=1,
        block_bytes=row_bytes,
        num_shards=1,
    )


def _backend(vllm_config: VllmConfig, spec: KVCacheSpec) -> str:
    """Name of the attention backend that vLLM chooses on this machine for a layer of plain attention.

    A layer may end up with another one, for reasons that lie in the model. But where this is the same, and so are
    vLLM, its settings and the model, so is that one.
    """
    with set_current_vllm_config(vllm_config):
        backend = get_attn_backend(
            spec.head_size,
            vllm_config.model_config.dtype,
            vllm_config.cache_config.cache_dtype,
            use_mla=type(spec).__name__ == "MLAAttentionSpec",
        )
    return f"{backend.get_name()}"


def _kv_dtype(vllm_config: VllmConfig, specs: list[KVCacheSpec]) -> str:
    """What KV is kept as. Which of the 8-bit formats "fp8" means depends on the generation of the GPU."""
    kept = ",".join(sorted({str(spec.dtype).removeprefix("torch.") for spec in specs}))
    return f"{vllm_config.cache_config.cache_dtype} {kept} {current_platform.fp8_dtype()}"

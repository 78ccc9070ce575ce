"""What an engine's blocks are made of, so that others can be told whether theirs are the same.

This module does not import vLLM.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Literal

from kvfleet.connectors.weights import canonical_json
from kvfleet.core.layout import BlockLayout

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

__all__ = ["EngineLayout", "layer_geometry", "layer_specs"]

# Of a layer's spec: where a block lies in the pool, and which ranks have it too; not what it holds.
_NOT_GEOMETRY = {"block_stride_alignment", "max_tp_shards"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayout:
    """What a worker knows of the bytes and names of its blocks. Two engines share only if all of it is equal.

    Attributes:
        door: which of vLLM's interfaces hands out the bytes; each has its own order.
        engine: vLLM's version without the patch level: what lies inside a block is its own business.
        hash_scheme: what vLLM's hashes are made of.
        kv_cache_layout: vLLM's name of the pool's order of axes.
        backend: names of the attention backends, which order the bytes inside.
        cpu_isa: instruction set for which the CPU backend packs keys, "" on other devices.
        dtype: of the model.
        kv_cache_dtype: of the KV.
        geometry: see `layer_geometry`.
        engine_block_tokens: tokens in an engine block.
        blocks_per: engine blocks in a block.
        num_parts: runs of bytes in an engine block.
        block_bytes: of one rank's block.
        num_shards: ranks that hold different bytes of a block.
    """

    door: Literal["connector", "offload"]
    engine: str
    hash_scheme: str
    kv_cache_layout: str
    backend: str
    cpu_isa: str
    dtype: str
    kv_cache_dtype: str
    geometry: str
    engine_block_tokens: int
    blocks_per: int
    num_parts: int
    block_bytes: int
    num_shards: int

    @property
    def block_tokens(self) -> int:
        """Tokens in a block."""
        return self.engine_block_tokens * self.blocks_per

    def block_layout(self) -> BlockLayout:
        """The bytes as kvfleet sees them: opaque, in an order named by all fields.

        Raises:
            ConfigError: a size is out of bounds.
        """
        return BlockLayout.opaque(
            block_bytes=self.block_bytes,
            block_tokens=self.block_tokens,
            inner_order="vllm " + json.dumps(asdict(self), sort_keys=True, separators=(",", ":")),
            num_shards=self.num_shards,
        )


def layer_specs(kv_cache_config: KVCacheConfig) -> Iterator[tuple[str, KVCacheSpec]]:
    """Layers' names and vLLM's spec of each."""
    for group in kv_cache_config.kv_cache_groups:
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for name in group.layer_names:
            yield name, group.kv_cache_spec if specs is None else specs[name]


def layer_geometry(kv_cache_config: KVCacheConfig) -> str:
    """Short digest of what each layer keeps: heads, sizes, dtypes. The number of blocks plays no role."""
    described = [
        [layer, type(spec).__name__, {name: getattr(spec, name) for name in _geometry_fields(spec)}]
        for layer, spec in sorted(layer_specs(kv_cache_config), key=lambda named: named[0])
    ]
    return hashlib.sha256(canonical_json(described).encode()).hexdigest()[:32]


def _geometry_fields(spec: KVCacheSpec) -> list[str]:
    return [field.name for field in fields(spec) if field.name not in _NOT_GEOMETRY]

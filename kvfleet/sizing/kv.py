"""Bytes of KV: of a token, a block and a session, whole or quantised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvfleet.core.layout import DEFAULT_BLOCK_TOKENS, BlockLayout
from kvfleet.errors import ConfigError
from kvfleet.sizing.models import Model

__all__ = ["FORMATS", "KvFormat", "bytes_per_token", "find_format", "layout_of"]

_GROUP = 32  # numbers that share a scale


@dataclass(frozen=True, slots=True)
class KvFormat:
    """How a number of KV is kept.

    Attributes:
        name: as the user gives it.
        dtype: torch's name of it; "" for a quantised format, which only its engine can read.
        number_bits: of a number.
        group_bits: of what 32 numbers share: the scale, 16 bits, and the zero point, 16 bits, where there is one.
    """

    name: str
    dtype: str
    number_bits: int
    group_bits: int = 0

    @property
    def bits(self) -> float:
        """Bits a number, its part of the scale included."""
        return self.number_bits + self.group_bits / _GROUP


FORMATS: Mapping[str, KvFormat] = {
    found.name: found
    for found in (
        KvFormat("fp32", "float32", 32),
        KvFormat("bf16", "bfloat16", 16),
        KvFormat("fp16", "float16", 16),
        KvFormat("fp8", "float8_e4m3fn", 8),
        KvFormat("int8", "", 8, 16),
        KvFormat("int4", "", 4, 32),
    )
}
"""By name. fp8 has one scale a layer, which is not counted; int8 has a scale for 32 numbers: 8.5 bits a number; int4
has a scale and a zero point for 32 numbers: 5 bits a number."""


def find_format(name: str | None, model: Model) -> KvFormat:
    """A format by its name; without one, that of the model's config.

    Raises:
        ConfigError: there is none of this name, or the config does not say.
    """
    if name is None:
        dtype = model.geometry.dtype
        found = next((one for one in FORMATS.values() if one.dtype and one.dtype == dtype), None)
        if found is None:
            raise ConfigError("kv_dtype", f"{model.name} does not say in what type it keeps KV, give one")
        return found
    if name not in FORMATS:
        raise ConfigError("kv_dtype", f"must be one of {', '.join(FORMATS)}, is {name!r}")
    return FORMATS[name]


def bytes_per_token(model: Model, kv: KvFormat) -> int:
    """Bytes of a token's KV, of all layers and over all ranks; rounded up."""
    return layout_of(model, kv, 1).bytes_per_token


def layout_of(model: Model, kv: KvFormat, block_tokens: int = DEFAULT_BLOCK_TOKENS) -> BlockLayout:
    """The layout of a block, as one shard.

    Raises:
        ConfigError: the block is too big.
    """
    sizes = model.geometry
    if not kv.dtype:
        groups = -(-model.numbers_per_token * block_tokens // _GROUP)
        num_bytes = -(-groups * (_GROUP * kv.number_bits + kv.group_bits) // 8)
        return BlockLayout.opaque(block_bytes=num_bytes, block_tokens=block_tokens, inner_order=kv.name)
    if sizes.latent:
        return BlockLayout.latent(
            num_layers=sizes.num_layers, latent_dim=sizes.head_dim, dtype=kv.dtype, block_tokens=block_tokens
        )
    return BlockLayout.kv(
        num_layers=sizes.num_layers,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        dtype=kv.dtype,
        block_tokens=block_tokens,
    )

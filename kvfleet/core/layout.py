"""What a block's bytes are, and which model they belong to."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from typing_extensions import Self, TypedDict, Unpack

from kvfleet.core.block import Identity, TokenIds, chain_keys, encode_fields, namespace_id
from kvfleet.core.geometry import Geometry, read_geometry
from kvfleet.errors import ConfigError

__all__ = ["DEFAULT_BLOCK_TOKENS", "BlockLayout", "ModelSpec", "Scope"]

# Long blocks cost little a token to hash, look up and move; short ones lose little at a prompt's end.
DEFAULT_BLOCK_TOKENS = 256

ITEMSIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1}

# The record table keeps lengths in 32 bits and shards in 16.
BLOCK_BYTES_MAX = 2**32 - 1
NUM_SHARDS_MAX = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """Shape and meaning of the bytes of one block, as one shard holds them.

    Attributes:
        dtype: torch's name of the numbers' type.
        shape: of one shard's block, in C order.
        token_axis: which axis counts tokens; None for an opaque block.
        inner_order: "plain", or a name for an engine's private order of the bytes.
        num_shards: tensor-parallel parts of a block.
        block_tokens: tokens in a block.

    Raises:
        ConfigError: the fields do not fit together.
    """

    dtype: str
    shape: tuple[int, ...]
    token_axis: int | None
    inner_order: str = "plain"
    num_shards: int = 1
    block_tokens: int = DEFAULT_BLOCK_TOKENS

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZES:
            raise ConfigError("dtype", f"must be one of {', '.join(ITEMSIZES)}, is {self.dtype!r}")
        if not isinstance(self.inner_order, str):
            raise ConfigError("inner_order", f"must be text, is {self.inner_order!r}")
        sizes = (*self.shape, self.num_shards, self.block_tokens)
        if not self.shape or any(type(size) is not int or size < 1 for size in sizes):
            raise ConfigError("layout", f"shape, num_shards and block_tokens must be positive integers, are {sizes}")
        if self.num_shards > NUM_SHARDS_MAX:
            raise ConfigError("num_shards", f"must be at most {NUM_SHARDS_MAX}, is {self.num_shards}")
        if self.block_bytes > BLOCK_BYTES_MAX:
            raise ConfigError("block_tokens", f"a block of {self.block_bytes} bytes is too big, 4 GiB is the limit")
        if self.token_axis is not None and not self._counts_tokens(self.token_axis):
            raise ConfigError("token_axis", f"axis {self.token_axis} of {self.shape} is not {self.block_tokens} tokens")

    def _counts_tokens(self, axis: int) -> bool:
        return type(axis) is int and 0 <= axis < len(self.shape) and self.shape[axis] == self.block_tokens

    @classmethod
    def kv(
        cls,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: str,
        block_tokens: int = DEFAULT_BLOCK_TOKENS,
        num_shards: int = 1,
    ) -> Self:
        """Keys and values: `(num_layers, 2, num_kv_heads / num_shards, block_tokens, head_dim)`.

        `num_kv_heads` is the whole model's.

        Raises:
            ConfigError: the heads cannot be dealt out evenly, or a size is wrong.
        """
        if num_shards < 1 or num_kv_heads % num_shards:
            raise ConfigError("num_shards", f"must divide the {num_kv_heads} KV heads, is {num_shards}")
        return cls(
            dtype=dtype,
            shape=(num_layers, 2, num_kv_heads // num_shards, block_tokens, head_dim),
            token_axis=3,
            num_shards=num_shards,
            block_tokens=block_tokens,
        )

    @classmethod
    def latent(cls, *, num_layers: int, latent_dim: int, dtype: str, block_tokens: int = DEFAULT_BLOCK_TOKENS) -> Self:
        """Compressed KV (MLA): `(num_layers, block_tokens, latent_dim)`.

        Never sharded: each tensor-parallel rank keeps the whole latent, so all ranks can read the same block.
        """
        return cls(dtype=dtype, shape=(num_layers, block_tokens, latent_dim), token_axis=1, block_tokens=block_tokens)

    @classmethod
    def opaque(cls, *, block_bytes: int, block_tokens: int, inner_order: str, num_shards: int = 1) -> Self:
        """Bytes whose order is the engine's own business: the same bytes come back.

        `block_bytes` is one shard's; `inner_order` names the order, and is part of the identity.
        """
        return cls(
            dtype="uint8",
            shape=(block_bytes,),
            token_axis=None,
            inner_order=inner_order,
            num_shards=num_shards,
            block_tokens=block_tokens,
        )

    @property
    def itemsize(self) -> int:
        """Bytes a number."""
        return ITEMSIZES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one shard's block."""
        return self.itemsize * math.prod(self.shape)

    @property
    def bytes_per_token(self) -> int:
        """Bytes a token, over all shards; rounded up if an opaque block has padding."""
        return -(-self.block_bytes * self.num_shards // self.block_tokens)

    @property
    def fingerprint(self) -> bytes:
        """Digest of all fields, 32 bytes."""
        shape = encode_fields(("size", size) for size in self.shape)
        axis = "none" if self.token_axis is None else self.token_axis
        return hashlib.sha256(
            encode_fields(
                (
                    ("dtype", self.dtype),
                    ("shape", shape),
                    ("token_axis", axis),
                    ("inner_order", self.inner_order),
                    ("num_shards", self.num_shards),
                    ("block_tokens", self.block_tokens),
                )
            )
        ).digest()

    def to_json(self) -> str:
        """The fields as canonical JSON: equal layouts give equal text."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote.

        Raises:
            ConfigError: it is something else.
        """
        try:
            values = json.loads(text)
            layout = cls(**{**values, "shape": tuple(values["shape"])})
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError("layout", f"{text[:200]!r} is not a block layout: {error}") from error
        if layout.to_json() != text:
            raise ConfigError("layout", f"{text[:200]!r} is not canonical")
        return layout


class Scope(TypedDict, total=False):
    """The fields of `ModelSpec` that say for whom, and with what adapter, a model computes."""

    tenant: str
    salt: str
    adapter_id: str
    adapter_revision: str
    tenant_secret: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model, as far as its KV is concerned: two specs that are equal share a cache, others never do.

    Attributes:
        model_id: name of the model, as on the hub.
        weight_revision: hub commit, else a digest of the weight files.
        layout: of its blocks.
        tenant, salt, adapter_id, adapter_revision, tenant_secret: see `Identity`.
        root: start of the key chain, 32 bytes; a secret.
        namespace_id: public name of the root, 16 bytes.

    Raises:
        ConfigError: something that tells models apart is missing.
    """

    model_id: str
    weight_revision: str
    layout: BlockLayout
    tenant: str = ""
    salt: str = ""
    adapter_id: str = ""
    adapter_revision: str = ""
    tenant_secret: bytes | None = field(default=None, repr=False)
    root: bytes = field(init=False, repr=False, compare=False)
    namespace_id: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("model_id", "weight_revision"):
            if not getattr(self, name):
                raise ConfigError(name, "must be given: KV of different weights must never be mixed")
        if bool(self.adapter_id) != bool(self.adapter_revision):
            raise ConfigError("adapter_revision", "an adapter needs both an id and a revision")
        if self.tenant_secret == b"":
            raise ConfigError("tenant_secret", "must not be empty")
        root = Identity(
            tenant=self.tenant,
            salt=self.salt,
            model_id=self.model_id,
            weight_revision=self.weight_revision,
            adapter_id=self.adapter_id,
            adapter_revision=self.adapter_revision,
            layout_fingerprint=self.layout.fingerprint,
            block_tokens=self.block_tokens,
            tenant_secret=self.tenant_secret,
        ).root()
        object.__setattr__(self, "root", root)
        object.__setattr__(self, "namespace_id", namespace_id(root))

    @classmethod
    def from_hf(
        cls,
        config: object,
        *,
        weight_revision: str,
        model_id: str | None = None,
        dtype: str | None = None,
        block_tokens: int = DEFAULT_BLOCK_TOKENS,
        num_shards: int = 1,
        **scope: Unpack[Scope],
    ) -> Self:
        """Describe a transformers model.

        Args:
            config: its config object, or config.json as a dict. MHA, GQA, MQA and MLA; of a multimodal model the
                text part.
            weight_revision: hub commit, else a digest of the weight files.
            model_id: if the config does not name the model, or names a directory.
            dtype: of the KV cache, if it is not that of the config.
            block_tokens: tokens in a block.
            num_shards: tensor-parallel ranks; 1 for MLA, where all ranks keep the same.
            **scope: tenant, salt and adapter, see `Scope`.

        Raises:
            ConfigError: the model keeps something else than full-attention KV, or the config leaves something out.
        """
        sizes = read_geometry(config)
        dtype = dtype or sizes.dtype
        if dtype is None:
            raise ConfigError("dtype", "the config names none: say which type the KV cache has")
        model_id = model_id or sizes.name
        if model_id.startswith(("/", ".", "~")):
            raise ConfigError("model_id", f"{model_id!r} is a place, not a name that all nodes share: give model_id")
        layout = _layout(sizes, dtype, block_tokens, num_shards)
        return cls(model_id=model_id, weight_revision=weight_revision, layout=layout, **scope)

    @property
    def block_tokens(self) -> int:
        """Tokens in a block."""
        return self.layout.block_tokens

    @property
    def bytes_per_token(self) -> int:
        """Bytes a token, over all shards."""
        return self.layout.bytes_per_token

    def keys(self, token_ids: TokenIds, extra: Mapping[int, bytes] | None = None) -> bytes:
        """Packed keys of the whole blocks of a prompt, see `chain_keys`."""
        return chain_keys(self.root, token_ids, self.block_tokens, extra)


def _layout(sizes: Geometry, dtype: str, block_tokens: int, num_shards: int) -> BlockLayout:
    if not sizes.latent:
        return BlockLayout.kv(
            num_layers=sizes.num_layers,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            dtype=dtype,
            block_tokens=block_tokens,
            num_shards=num_shards,
        )
    if num_shards != 1:
        raise ConfigError("num_shards", "must be 1 for latent KV: every rank keeps, and can read, the same block")
    return BlockLayout.latent(
        num_layers=sizes.num_layers, latent_dim=sizes.head_dim, dtype=dtype, block_tokens=block_tokens
    )

"""Names of blocks: what KV is interchangeable with what.

A *root* stands for everything besides the tokens that decides the numbers in a KV block: tenant, model, weights,
adapter, layout. From it a chain of SHA-256 runs over the tokens, one link a block, so that a key names a block
together with all that came before it:

    chain[-1] = root
    chain[i]  = SHA-256(chain[i-1] || token ids of block i as little-endian uint32 || extra digests of block i)
    key[i]    = chain[i][:16]

Keys are equal on every machine and in every process. The root never leaves the process: whoever knows it can
compute the keys of any text. Files and metrics carry `namespace_id(root)` instead.
"""

from __future__ import annotations

import hashlib
import hmac
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NewType, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = [
    "KEY_BYTES",
    "BlockKey",
    "Identity",
    "TokenIds",
    "chain_keys",
    "encode_fields",
    "engine_keys",
    "namespace_id",
    "split",
    "token_buffer",
]

BlockKey = NewType("BlockKey", bytes)

KEY_BYTES = 16
ROOT_BYTES = 32

# Part of every root: raise it when the meaning of keys or of block bytes changes, and old blocks are never found.
FORMAT_VERSION = 1

Value: TypeAlias = bytes | str | int


class SupportsArray(Protocol):
    """Anything numpy can look into, a CPU torch tensor for one."""

    def __array__(self) -> npt.NDArray[Any]:
        """The numbers as a numpy array."""
        ...


TokenIds: TypeAlias = "Sequence[int] | array[int] | npt.NDArray[Any] | memoryview | bytearray | SupportsArray"


def encode_fields(fields: Iterable[tuple[str, Value]]) -> bytes:
    """Write tagged values so that different sequences always give different bytes.

    Each field is its tag, its type and its value, tag and value with their lengths before them. An encoding is
    never the beginning of another one's field, so encodings can be concatenated and nested as values.
    """
    out = bytearray()
    for tag, value in fields:
        kind, payload = _payload(value)
        name = tag.encode()
        out += len(name).to_bytes(2, "little") + name + kind + len(payload).to_bytes(8, "little") + payload
    return bytes(out)


def _payload(value: Value) -> tuple[bytes, bytes]:
    if isinstance(value, bytes):
        return b"b", value
    if isinstance(value, str):
        return b"s", value.encode()
    assert type(value) is int, f"not bytes, str or int: {value!r}"
    return b"i", b"%d" % value


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """All that two KV blocks must share, besides tokens, to be interchangeable.

    Attributes:
        tenant: who may see the blocks; tenants never find each other's.
        salt: separates further within a tenant (vLLM's cache salt).
        model_id: name of the model, as on the hub.
        weight_revision: hub commit, else a digest of the weight files.
        adapter_id: name of the adapter (LoRA), or "".
        adapter_revision: commit or digest of the adapter, or "".
        layout_fingerprint: 32 bytes, see `BlockLayout.fingerprint`.
        block_tokens: tokens in a block.
        tenant_secret: keys cannot be computed without it, if given.
    """

    tenant: str
    salt: str
    model_id: str
    weight_revision: str
    adapter_id: str
    adapter_revision: str
    layout_fingerprint: bytes
    block_tokens: int
    tenant_secret: bytes | None = field(default=None, repr=False)

    def root(self) -> bytes:
        """Start of the chain, 32 bytes. Secret: see the module's docstring."""
        fields = encode_fields(
            (
                ("kvfleet", FORMAT_VERSION),
                ("tenant", self.tenant),
                ("salt", self.salt),
                ("model_id", self.model_id),
                ("weight_revision", self.weight_revision),
                ("adapter_id", self.adapter_id),
                ("adapter_revision", self.adapter_revision),
                ("layout", self.layout_fingerprint),
                ("block_tokens", self.block_tokens),
            )
        )
        if self.tenant_secret is None:
            return hashlib.sha256(fields).digest()
        # HMAC pads short keys with zeros, which makes b"k" and b"k\0" the same key; their digests are not.
        return hmac.digest(hashlib.sha256(self.tenant_secret).digest(), fields, "sha256")


def namespace_id(root: bytes) -> bytes:
    """Public name of a root, 16 bytes; the root cannot be told from it."""
    assert len(root) == ROOT_BYTES
    return hashlib.sha256(b"id" + root).digest()[:16]


def token_buffer(token_ids: TokenIds) -> npt.NDArray[np.uint32]:
    """Token ids as a contiguous array of little-endian uint32, shape (num_tokens,).

    Costs nothing for uint32 buffers. `bytes`, `bytearray` and byte memoryviews are read as little-endian uint32.

    Args:
        token_ids: one prompt: a list, numpy array, CPU torch tensor or buffer, of any integer type.

    Raises:
        ValueError: not one-dimensional, not integers, or not all in [0, 2**32).
    """
    if isinstance(token_ids, memoryview) and token_ids.format in ("B", "b", "c"):
        token_ids = token_ids.tobytes()
    if isinstance(token_ids, (bytes, bytearray)):
        if len(token_ids) % 4:
            raise ValueError(f"token ids as bytes must be whole uint32, got {len(token_ids)} bytes")
        return np.frombuffer(token_ids, dtype="<u4")
    ids = _integers(token_ids)
    if ids.ndim != 1:
        raise ValueError(f"token ids must be one-dimensional (one prompt, no batch axis), have shape {ids.shape}")
    if ids.dtype.kind not in "iu":
        raise ValueError(f"token ids must be integers, are {ids.dtype}")
    words = np.ascontiguousarray(ids, dtype="<u4")
    if ids.dtype != words.dtype and not np.array_equal(words, ids):
        raise ValueError("token ids must be in [0, 2**32)")
    return words


def _integers(token_ids: TokenIds) -> npt.NDArray[Any]:
    try:
        if isinstance(token_ids, (array, memoryview)) or hasattr(token_ids, "__array__"):
            return np.asarray(token_ids)
        # Much faster than numpy's own reading of a list: 1 ms against 4 for 128k ids.
        return np.asarray(array("I", token_ids))
    except OverflowError as error:
        raise ValueError("token ids must be in [0, 2**32)") from error
    except TypeError as error:
        raise ValueError(f"token ids must be one prompt's integers in CPU memory: {error}") from error


def chain_keys(root: bytes, token_ids: TokenIds, block_tokens: int, extra: Mapping[int, bytes] | None = None) -> bytes:
    """Keys of the whole blocks of a prompt, packed; tokens of an incomplete last block have none.

    Args:
        root: of the namespace, 32 bytes.
        token_ids: see `token_buffer`.
        block_tokens: tokens in a block, as in the root.
        extra: block index → digest of what else went into that block (images, audio).

    Raises:
        ValueError: see `token_buffer`.
    """
    assert len(root) == ROOT_BYTES
    assert block_tokens > 0
    view = token_buffer(token_ids).data.cast("B")
    step = 4 * block_tokens
    extra = extra or {}
    chain = root
    packed = bytearray()
    for index in range(len(view) // step):
        link = hashlib.sha256(chain)
        link.update(view[index * step : (index + 1) * step])
        if index in extra:
            link.update(encode_fields((("extra", extra[index]),)))
        chain = link.digest()
        packed += chain[:KEY_BYTES]
    return bytes(packed)


def engine_keys(root: bytes, hashes: Sequence[bytes]) -> bytes:
    """Packed keys of blocks that an engine has named by chained hashes of its own.

    Args:
        root: of the namespace, 32 bytes: engine hashes say nothing about model, weights or layout.
        hashes: one a block; each must depend on all tokens up to the block's end.
    """
    assert len(root) == ROOT_BYTES
    return b"".join(hashlib.sha256(root + name).digest()[:KEY_BYTES] for name in hashes)


def split(packed: bytes) -> list[BlockKey]:
    """The single keys of a packed run of keys."""
    assert len(packed) % KEY_BYTES == 0
    return [BlockKey(packed[at : at + KEY_BYTES]) for at in range(0, len(packed), KEY_BYTES)]

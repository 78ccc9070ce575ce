"""Models, prompts and KV for tests: a block's bytes are derived from its key and shard, so that any mix-up shows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvfleet.client import Client
from kvfleet.config import KIB, MIB
from kvfleet.core.block import split
from kvfleet.core.layout import BlockLayout, ModelSpec
from kvfleet.hits import Loaded, StoreResult
from kvfleet.node.messages import FetchRequest, LoadRequest, Namespace, ReserveRequest

BLOCK_TOKENS = 16


def model(block_kib: int = 64, *, dtype: str = "bfloat16", num_shards: int = 1, name: str = "model") -> ModelSpec:
    """A model whose blocks of 16 tokens have a given size; each shard's if there are several."""
    itemsize = 2 if dtype == "bfloat16" else 4
    head_dim = block_kib * KIB // (2 * 2 * 2 * BLOCK_TOKENS * itemsize)
    layout = BlockLayout.kv(
        num_layers=2, num_kv_heads=2 * num_shards, head_dim=head_dim, dtype=dtype, block_tokens=BLOCK_TOKENS,
        num_shards=num_shards,
    )  # fmt: skip
    assert layout.block_bytes == block_kib * KIB
    return ModelSpec(model_id=name, weight_revision="1", layout=layout)


def prompt(num_blocks: int, number: int = 0) -> Any:
    """Token ids of whole blocks; prompts of one number are prefixes of each other, others share nothing."""
    return np.arange(num_blocks * BLOCK_TOKENS, dtype=np.uint32) + np.uint32(number << 20)


def content(key: bytes, num_bytes: int) -> npt.NDArray[np.uint8]:
    """The bytes of an opaque block, no two words of any blocks alike."""
    words = np.arange(num_bytes // 8, dtype=np.uint64) + np.frombuffer(key, np.uint64)[0]
    data: npt.NDArray[np.uint8] = words.view(np.uint8)
    return data


_PATTERN = np.arange(MIB // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def block(spec: ModelSpec, key: bytes, shard: int = 0) -> Any:
    """What a block holds, in the layout's shape, as unsigned integers."""
    words: Any = _PATTERN[: spec.layout.block_bytes // 8] ^ np.uint64(int.from_bytes(key[:8], "little") ^ shard)
    return words.view(f"u{spec.layout.itemsize}").reshape(spec.layout.shape)


def kv(spec: ModelSpec, tokens: Any, shard: int = 0) -> Any:
    """The KV of a prompt: the layout's shape with a longer token axis."""
    return np.concatenate([block(spec, key, shard) for key in split(spec.keys(tokens))], axis=3)


def empty(spec: ModelSpec, num_blocks: int) -> Any:
    """Where the KV of so many blocks can be loaded to."""
    shape = list(spec.layout.shape)
    shape[3] *= num_blocks
    return np.zeros(shape, f"u{spec.layout.itemsize}")


def store(client: Client, tokens: Any) -> StoreResult:
    """Store a prompt, all of it."""
    result = client.store(tokens, kv(client.spec, tokens, client.shard)).wait(60)
    assert result.dropped == 0, result
    assert result.published
    return result


def load(client: Client, tokens: Any, timeout_s: float | None = None) -> Loaded:
    """Look a prompt up and load what is said to be there; every byte that counts as loaded is right."""
    hit = client.lookup(tokens)
    target = empty(client.spec, hit.num_blocks)
    loaded = client.load(hit, target, timeout_s)
    assert len(loaded.outcomes) == hit.num_blocks
    expected = kv(client.spec, tokens, client.shard)
    assert np.array_equal(target[:, :, :, : int(loaded)], expected[:, :, :, : int(loaded)])
    return loaded


def namespace(spec: ModelSpec) -> Namespace:
    """A model's namespace as managers know it."""
    return Namespace(spec.namespace_id, spec.layout.to_json())


def reserve_request(spec: ModelSpec, tokens: Any, client_id: int, sequence: int) -> ReserveRequest:
    """What a client asks before it stores a prompt."""
    return ReserveRequest(
        client_id, sequence, namespace(spec), spec.keys(tokens), b"", 0, 0, spec.layout.block_bytes, timeout_s=5.0
    )


def load_request(client: Client, tokens: Any, timeout_s: float) -> LoadRequest:
    """What a client asks its manager after a lookup that found nothing of a prompt locally."""
    spec = client.spec
    keys = spec.keys(tokens)
    runs = client._directory.locate(keys, client.shard, spec.layout.num_shards, 1.0).runs
    return LoadRequest(namespace(spec), keys, b"", 0, client.shard, spec.layout.block_bytes, runs, timeout_s)


def fetch_request(spec: ModelSpec, tokens: Any, timeout_s: float) -> FetchRequest:
    """What one manager asks another for a prompt."""
    return FetchRequest(namespace(spec), spec.keys(tokens), b"", 0, 0, spec.layout.block_bytes, 256 * KIB, timeout_s)

"""Models: what their config.json says of their KV, their weights and the computing of a prompt.

The table holds what the public config.json of each model says, as far as it matters here. A model of one's own is read
from its config.json. Parameters are counted from the sizes: matrices only, no biases or norms, so a little too few.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvfleet.core.geometry import Geometry, read_geometry
from kvfleet.errors import ConfigError
from kvfleet.sizing.table import MODELS

__all__ = ["Model", "find_model", "read_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What sizing needs to know of a model.

    Attributes:
        name: as the user gave it.
        geometry: of its KV.
        num_params: all weights.
        active_params: weights that a token is multiplied with: fewer than all in a mixture of experts.
        attention_flops: floating-point operations for a token and each token before it, over all layers.
        weight_bytes: of all weights, as they are published.
    """

    name: str
    geometry: Geometry
    num_params: int
    active_params: int
    attention_flops: int
    weight_bytes: int

    @property
    def numbers_per_token(self) -> int:
        """Numbers of KV a token: keys and values of all layers, or the compressed vector of all layers."""
        sizes = self.geometry
        return sizes.num_layers * (1 if sizes.latent else 2) * sizes.num_kv_heads * sizes.head_dim


def find_model(name: str) -> Model:
    """A model of the table by its name, or of a config.json by its path.

    Args:
        name: like "llama-3-8b", in any case and with or without an owner before it; or the path of a config.json, or of
            the folder it is in.

    Raises:
        ConfigError: there is no such model; its KV cannot be cached; the file is no config.
    """
    key = name.rpartition("/")[2].lower()
    if key in MODELS:
        return read_model(key, MODELS[key])
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        near = [known for known in MODELS if key.split("-")[0] in known]
        known = ", ".join(near or MODELS)
        raise ConfigError("model", f"{name!r} is neither a known model nor a config.json; known are {known}")
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("model", f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError("model", f"{path} is no model's config.json")
    return read_model(name, config)


def read_model(name: str, config: Mapping[str, object]) -> Model:
    """Of a config.json.

    Raises:
        ConfigError: sizes are missing, or the model keeps something else than full-attention KV.
    """
    geometry = read_geometry(config)
    text = config.get("text_config")
    sizes = _Sizes(text if isinstance(text, Mapping) else config, geometry)
    total, active = sizes.params()
    quantised = config.get("quantization_config")
    return Model(
        name=name,
        geometry=geometry,
        num_params=total,
        active_params=active,
        attention_flops=sizes.attention_flops(),
        weight_bytes=total * _weight_bits(geometry, quantised if isinstance(quantised, Mapping) else {}) // 8,
    )


def _weight_bits(geometry: Geometry, quantised: Mapping[str, object]) -> int:
    """Bits of a weight. Of a way to quantise that does not say: 8."""
    bits = quantised.get("bits")
    if type(bits) is int and bits > 0:
        return bits
    if quantised:
        return 8
    return 32 if geometry.dtype == "float32" else 16


class _Sizes:
    """Sizes of the matrices of a decoder of the Llama family, with experts and latent KV where the config has them."""

    def __init__(self, config: Mapping[str, object], geometry: Geometry) -> None:
        self._config = config
        self._geometry = geometry
        self._hidden = self._int("hidden_size", "n_embd", least=1)
        self._heads = self._int("num_attention_heads", "n_head", least=1)
        self._head_dim = self._int("head_dim", default=self._hidden // self._heads)

    def _int(self, *names: str, default: int | None = None, least: int = 0) -> int:
        for name in names:
            value = self._config.get(name)
            if type(value) is int and value >= least:
                return value
        if default is None:
            raise ConfigError("model", f"the config has no {names[0]}")
        return default

    def params(self) -> tuple[int, int]:
        """All weights, and those that a token is multiplied with."""
        layers, hidden = self._geometry.num_layers, self._hidden
        dense = 3 * hidden * self._int("intermediate_size", "n_inner", default=8 * hidden // 3)
        experts = self._int("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", default=0)
        num_dense = self._int("first_k_dense_replace", "moe_layer_start_index", default=0) if experts else layers
        num_sparse = max(0, layers - num_dense)
        expert = 3 * hidden * self._int("moe_intermediate_size", "intermediate_size", default=0)
        shared = expert * self._int("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", default=0)
        shared += 3 * hidden * self._int("shared_expert_intermediate_size", default=0)
        each = self._attention() * layers + dense * (layers - num_sparse) + shared * num_sparse
        routed = num_sparse * expert
        words = hidden * self._int("vocab_size", default=0)
        tied = self._config.get("tie_word_embeddings") is True
        total = each + routed * experts + words * (1 if tied else 2)
        chosen = self._int("num_experts_per_tok", "moe_k", default=0)
        return total, each + routed * chosen + words

    def _attention(self) -> int:
        """Weights of a layer's attention."""
        hidden, heads = self._hidden, self._heads
        if not self._geometry.latent:
            return 2 * hidden * self._head_dim * (heads + self._geometry.num_kv_heads)
        rank, rope, nope, value = self._latent()
        query = self._int("q_lora_rank", default=0)
        width = heads * (nope + rope)
        queries = query * (hidden + width) if query else hidden * width
        return queries + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden

    def _latent(self) -> tuple[int, int, int, int]:
        rope = self._int("qk_rope_head_dim")
        value = self._int("v_head_dim")
        return self._int("kv_lora_rank"), rope, self._int("qk_nope_head_dim"), value

    def attention_flops(self) -> int:
        """A multiplication and an addition for each number of a key and of a value, each head and layer."""
        if self._geometry.latent:
            _, rope, nope, value = self._latent()
            width = rope + nope + value
        else:
            width = 2 * self._head_dim
        return 2 * self._geometry.num_layers * self._heads * width

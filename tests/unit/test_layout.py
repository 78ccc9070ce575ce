"""Layouts and model specs: sizes, identity, and what is refused."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvfleet.core.block import chain_keys, namespace_id
from kvfleet.core.layout import BlockLayout, ModelSpec
from kvfleet.errors import ConfigError

# The parts of the models' config.json that matter here.
LLAMA_8B = {
    "model_type": "llama",
    "_name_or_path": "meta-llama/Meta-Llama-3-8B",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
LLAMA_70B = {**LLAMA_8B, "hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 80}
SMOLLM2 = {
    **LLAMA_8B,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "_name_or_path": "deepseek-ai/DeepSeek-V3",
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "dtype": "float16"}
FALCON_7B = {
    "model_type": "falcon",
    "hidden_size": 4544,
    "multi_query": True,
    "new_decoder_architecture": False,
    "num_attention_heads": 71,
    "num_hidden_layers": 32,
    "torch_dtype": "bfloat16",
}
FALCON_40B = {
    **FALCON_7B,
    "hidden_size": 8192,
    "new_decoder_architecture": True,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_kv_heads": 8,
}
QWEN3_8B = {
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}
LLAVA = {"model_type": "llava", "text_config": LLAMA_8B, "torch_dtype": "float16"}


def spec(config, **settings):
    return ModelSpec.from_hf(config, **{"weight_revision": "r1", "model_id": "model", **settings})


@pytest.mark.parametrize(
    ("config", "shape", "bytes_per_token"),
    [
        (LLAMA_8B, (32, 2, 8, 256, 128), 131_072),
        (LLAMA_70B, (80, 2, 8, 256, 128), 327_680),
        (SMOLLM2, (30, 2, 3, 256, 64), 23_040),
        (DEEPSEEK_V3, (61, 256, 576), 70_272),
        (GPT2, (12, 2, 12, 256, 64), 36_864),
        (FALCON_7B, (32, 2, 1, 256, 64), 8_192),
        (FALCON_40B, (60, 2, 8, 256, 64), 122_880),
        (QWEN3_8B, (36, 2, 8, 256, 128), 147_456),
        (LLAVA, (32, 2, 8, 256, 128), 131_072),
    ],
    ids=["llama-3-8b", "llama-3-70b", "smollm2", "deepseek-v3", "gpt2", "falcon-7b", "falcon-40b", "qwen3-8b", "llava"],
)
def test_models(config, shape, bytes_per_token):
    for given in (config, SimpleNamespace(**config)):
        layout = spec(given).layout
        assert layout.shape == shape
        assert layout.shape[layout.token_axis] == layout.block_tokens == 256
        assert spec(given).bytes_per_token == layout.bytes_per_token == bytes_per_token
        assert layout.block_bytes == 256 * bytes_per_token


def test_the_config_names_model_and_dtype():
    assert ModelSpec.from_hf(LLAMA_8B, weight_revision="r1").model_id == "meta-llama/Meta-Llama-3-8B"
    assert spec(LLAVA).layout.dtype == "bfloat16"
    assert spec(LLAMA_8B, dtype="float32").layout.dtype == "float32"


def test_shards_share_the_heads():
    whole, half = spec(LLAMA_8B).layout, spec(LLAMA_8B, num_shards=2).layout
    assert half.shape == (32, 2, 4, 256, 128)
    assert half.block_bytes * 2 == whole.block_bytes
    assert half.bytes_per_token == whole.bytes_per_token
    assert half.fingerprint != whole.fingerprint


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"sliding_window": 4096}, "sliding_window=4096"),
        ({"sliding_window": 4096, "use_sliding_window": True}, "sliding_window=4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"full_attention_interval": 4}, "full_attention_interval"),
        ({"is_encoder_decoder": True}, "an encoder"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_key_value_heads": None, "num_attention_heads": None}, "num_attention_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"hidden_size": 4097}, "not a multiple"),
        ({"torch_dtype": None}, "dtype"),
        ({"torch_dtype": "float64"}, "dtype"),
    ],
)
def test_other_models_are_refused(change, problem):
    with pytest.raises(ConfigError, match=problem):
        spec({**LLAMA_8B, **change})
    with pytest.raises(ConfigError, match=problem):
        spec({"model_type": "multimodal", "text_config": {**LLAMA_8B, **change}})


def test_layer_types_decide_over_the_window():
    assert spec({**LLAMA_8B, "sliding_window": 4096, "layer_types": ["full_attention"] * 32}) == spec(LLAMA_8B)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"num_shards": 3}, "num_shards: must divide"),
        ({"num_shards": 16}, "num_shards: must divide"),
        ({"num_shards": 0}, "num_shards: must divide"),
        ({"block_tokens": 0}, "positive"),
        ({"block_tokens": 2**20}, "too big"),
        ({"weight_revision": ""}, "weight_revision"),
        ({"model_id": "/models/llama"}, "model_id"),
        ({"adapter_id": "lora"}, "adapter_revision"),
        ({"adapter_revision": "1"}, "adapter_revision"),
        ({"tenant_secret": b""}, "tenant_secret"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, problem):
    with pytest.raises(ConfigError, match=problem):
        spec(LLAMA_8B, **settings)


def test_a_model_needs_a_name():
    with pytest.raises(ConfigError, match="model_id"):
        ModelSpec.from_hf(GPT2, weight_revision="r1")


def test_latent_kv_is_not_sharded():
    with pytest.raises(ConfigError, match="num_shards: must be 1"):
        spec(DEEPSEEK_V3, num_shards=8)


def test_keys_hang_on_the_root():
    model = spec(SMOLLM2, block_tokens=4, tenant="acme")
    assert model.namespace_id == namespace_id(model.root)
    assert model.keys(range(10)) == chain_keys(model.root, list(range(10)), 4)
    assert model.keys(range(10), {0: b"image"}) == chain_keys(model.root, list(range(10)), 4, {0: b"image"})


def test_specs_travel():
    model = spec(SMOLLM2, tenant_secret=b"hidden")
    copy = pickle.loads(pickle.dumps(model))
    assert copy == model
    assert copy.root == model.root
    assert "hidden" not in repr(model)
    assert replace(model, salt="other").root != model.root


LAYOUT = BlockLayout.kv(num_layers=2, num_kv_heads=4, head_dim=8, dtype="bfloat16", block_tokens=16, num_shards=2)
LAYOUTS = [
    LAYOUT,
    BlockLayout.latent(num_layers=2, latent_dim=24, dtype="float8_e4m3fn", block_tokens=16),
    BlockLayout.opaque(block_bytes=1000, block_tokens=16, inner_order="vllm-cpu-amx", num_shards=2),
]


def test_opaque_layouts_round_up():
    assert LAYOUTS[2].token_axis is None
    assert LAYOUTS[2].block_bytes == 1000
    assert LAYOUTS[2].bytes_per_token == 125
    assert replace(LAYOUTS[2], num_shards=1).bytes_per_token == 63


@pytest.mark.parametrize("layout", LAYOUTS, ids=["kv", "latent", "opaque"])
def test_layouts_as_json(layout):
    text = layout.to_json()
    assert BlockLayout.from_json(text) == layout
    assert BlockLayout.from_json(text).fingerprint == layout.fingerprint
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "int3"},
        {"dtype": ["bfloat16"]},
        {"shape": []},
        {"shape": [2, 2, 2, 16, 0]},
        {"shape": [2, 2, 2, 16, 8.0]},
        {"shape": [2, 2, 2, 16, True]},
        {"shape": 5},
        {"shape": [2**16, 2**16]},
        {"token_axis": 2},
        {"token_axis": 5},
        {"token_axis": -2},
        {"token_axis": 3.0},
        {"inner_order": None},
        {"num_shards": 0},
        {"num_shards": 65537},
        {"block_tokens": "16"},
        {"extra": 1},
    ],
    ids=str,
)
def test_other_json_is_refused(change):
    values = {**json.loads(LAYOUT.to_json()), **change}
    with pytest.raises(ConfigError):
        BlockLayout.from_json(json.dumps(values, sort_keys=True, separators=(",", ":")))


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", "\0", "[" * 100_000, '{"shape":[1]}'])
def test_garbage_is_refused(text):
    with pytest.raises(ConfigError):
        BlockLayout.from_json(text)


def test_json_has_one_form():
    with pytest.raises(ConfigError, match="canonical"):
        BlockLayout.from_json(LAYOUT.to_json().replace(",", ", "))

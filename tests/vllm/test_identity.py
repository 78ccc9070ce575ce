"""Roots of engines, from the settings that a real vLLM makes of a user's arguments. No engine is started."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvfleet.connectors.vllm import identity, versions
from kvfleet.connectors.vllm.layout import EngineLayout
from kvfleet.errors import ConfigError
from tests.vllm.engines import ENVIRONMENT, connector

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
    "vocab_size": 512,
    "dtype": "float32",
}
BLOCK_BYTES = 4096

# What each known version makes of the sample block; engines with other values never share.
SCHEMES = {
    "0.29": "sha256 2fd56f502be7b3de",
    "0.32": "sha256 a8e7cbab5429cef9",
}


@pytest.fixture(scope="module", autouse=True)
def _environment(tmp_path_factory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("PYTHONHASHSEED", raising=False)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "llama")


def write_model(directory: Path, weight: float = 1.0, **config: object) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG | config))
    save_file({"model.norm.weight": np.full(128, weight, np.float32)}, directory / "model.safetensors")
    return directory


def settings(model: Path, **arguments: Any) -> Any:
    """vLLM's settings, as an engine has them."""
    from vllm.engine.arg_utils import EngineArgs

    defaults: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 512,
        "enforce_eager": True,
        "block_size": 32,
        "distributed_executor_backend": "mp",
        "skip_tokenizer_init": True,
        "kv_transfer_config": connector("tests") | {"kv_connector_module_path": "kvfleet.connectors.vllm"},
    }
    return EngineArgs(model=str(model), **(defaults | arguments)).create_engine_config()


def kv_cache(config: Any, num_blocks: int = 8) -> Any:
    """The KV cache of a worker that has loaded the model: its attention layers are real."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    hf_config = config.model_config.hf_config
    layers = config.compilation_config.static_forward_context
    if not layers:
        with set_current_vllm_config(config):
            for index in range(hf_config.num_hidden_layers):
                Attention(
                    4,
                    32,
                    0.125,
                    num_kv_heads=2,
                    cache_config=config.cache_config,
                    prefix=f"model.layers.{index}.self_attn.attn",
                )
    (spec,) = {layer.get_kv_cache_spec(config) for layer in layers.values()}
    group = KVCacheGroupSpec(list(layers), spec)
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[group], kv_cache_layout="LBHNC")


def layout(config: Any) -> EngineLayout:
    pool = SimpleNamespace(blocks_per=8, num_parts=4, block_bytes=BLOCK_BYTES)
    return versions.engine_layout(config, kv_cache(config), pool)


def root(model: Path, **arguments: Any) -> bytes:
    config = settings(model, **arguments)
    identity.check_supported(config, kv_cache(config))
    return identity.model_spec(config, layout(config)).root


def test_what_the_layout_says(model):
    config = settings(model)
    found = layout(config)
    assert found.hash_scheme.startswith(SCHEMES.get(found.engine, "sha256 "))
    assert found.cpu_isa != ""
    expected = EngineLayout(
        door="connector",
        engine=versions.engine_version(),
        hash_scheme=versions.hash_scheme(config),
        kv_cache_layout="LBHNC",
        backend="CPU_ATTN",
        cpu_isa=found.cpu_isa,
        dtype="float32",
        kv_cache_dtype="float32",
        geometry=found.geometry,
        engine_block_tokens=32,
        blocks_per=8,
        num_parts=4,
        block_bytes=BLOCK_BYTES,
        num_shards=1,
    )
    assert found == expected
    assert versions.hash_block_tokens(config, kv_cache(config)) == 32


def test_the_isa_is_the_one_that_the_backend_takes(model):
    import torch
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    config = settings(model)
    cache = kv_cache(config)
    group = cache.kv_cache_groups[0]
    builder = CPUAttentionMetadataBuilder(group.kv_cache_spec, group.layer_names, config, torch.device("cpu"))
    assert layout(config).cpu_isa == builder.isa


def test_these_share(model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "elsewhere")
    # As another transformers writes it.
    (copy / "config.json").write_text(json.dumps(CONFIG | {"transformers_version": "9", "_name_or_path": "/x"}))
    same: list[tuple[Path, dict[str, Any]]] = [
        (copy, {}),
        (model, {"served_model_name": "other"}),
        (model, {"max_model_len": 256}),
        (model, {"enforce_eager": False}),
        (model, {"seed": 7}),
        (model, {"max_num_seqs": 3}),
        (model, {"load_format": "safetensors"}),
        (model, {"enable_prefix_caching": False}),
        (model, {"enable_lora": True}),
        (model, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}}),
    ]
    base = root(model)
    # "safetensors" reads what "auto" does if there is nothing else.
    assert {root(path, **arguments) for path, arguments in same} == {base}


def test_these_do_not(model, tmp_path):
    others: list[tuple[Path, dict[str, Any]]] = [
        (model, {}),
        (write_model(tmp_path / "weights", weight=2.0), {}),
        (write_model(tmp_path / "rope", rope_theta=5e5), {}),
        (model, {"dtype": "bfloat16"}),
        (model, {"kv_cache_dtype": "fp8"}),
        (model, {"block_size": 64}),
        (model, {"tensor_parallel_size": 2}),
        (model, {"prefix_caching_hash_algo": "sha256_cbor"}),
        (model, {"hf_overrides": {"rms_norm_eps": 1e-3}}),
        (model, {"enable_lora": True, "lora_dtype": "bfloat16"}),
    ]
    assert len({root(path, **arguments) for path, arguments in others}) == len(others)


def test_the_number_of_blocks_does_not_count(model):
    config = settings(model)
    pool = SimpleNamespace(blocks_per=8, num_parts=4, block_bytes=BLOCK_BYTES)
    layouts = {versions.engine_layout(config, kv_cache(config, count), pool) for count in (8, 9)}
    assert len(layouts) == 1


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_versions_that_hash_differently_have_other_schemes(model, monkeypatch, algorithm):
    from vllm.v1.core import kv_cache_utils

    config = settings(model, prefix_caching_hash_algo=algorithm)
    before = versions.hash_scheme(config)
    assert versions.hash_scheme(settings(model, prefix_caching_hash_algo=algorithm)) == before
    real = kv_cache_utils.generate_block_hash_extra_keys

    def tagged(*arguments: object) -> tuple[object, object]:
        keys, index = real(*arguments)
        return tuple(("tag", key) for key in keys), index

    monkeypatch.setattr(kv_cache_utils, "generate_block_hash_extra_keys", tagged)
    assert versions.hash_scheme(config) != before
    monkeypatch.setattr(kv_cache_utils, "generate_block_hash_extra_keys", lambda request: None)
    with pytest.raises(ConfigError, match="hashes blocks in a way not known"):
        versions.hash_scheme(config)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "policy": (
        {"kv_transfer_config": connector("tests") | {"kv_load_failure_policy": "fail"}},
        "kv_load_failure_policy",
    ),
    "xxhash": ({"prefix_caching_hash_algo": "xxhash"}, "set it to sha256"),
    "dummy": ({"load_format": "dummy"}, "dummy weights"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(model, arguments, message):
    config = settings(model, **arguments)
    with pytest.raises(ConfigError, match=message):
        identity.check_supported(config, kv_cache(config))


def test_windows_are_refused_however_they_are_kept(model):
    from dataclasses import fields, replace

    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs

    config = settings(model)
    cache = kv_cache(config)
    (group,) = cache.kv_cache_groups
    full = group.kv_cache_spec
    common = {name: getattr(full, name) for name in ("block_size", "num_kv_heads", "head_size", "dtype")}
    window = SlidingWindowSpec(**common, sliding_window=64)
    assert "sliding_window" in {field.name for field in fields(full)}
    first, second = group.layer_names
    mixed = UniformTypeKVCacheSpecs(
        block_size=32, kv_cache_specs={first: full, second: replace(full, sliding_window=64)}
    )
    for spec in (window, replace(full, sliding_window=64), replace(full, attention_chunk_size=64), mixed):
        cache.kv_cache_groups = [KVCacheGroupSpec(group.layer_names, spec)]
        with pytest.raises(ConfigError, match="only full attention"):
            identity.check_supported(config, cache)
    same = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={first: full, second: replace(full, head_size=64)})
    cache.kv_cache_groups = [KVCacheGroupSpec(group.layer_names, same)]
    identity.check_supported(config, cache)


def test_hit_sources_are_given_to_versions_that_ask():
    sources = versions.cache_hit_sources({"host": 32, "disk": 16, "p2p": 0, "shared": 64})
    assert {str(source.value): count for source, count in sources.items()} in (
        {},
        {"host": 32, "disk": 16, "external_unspecified": 64},
    )

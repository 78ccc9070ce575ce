"""Which settings of vLLM keep blocks apart, and which do not. vLLM's objects are played by plain namespaces."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvfleet.connectors.vllm import identity
from kvfleet.connectors.vllm.identity import AdapterRef, adapter_ref, block_tokens, check_supported, scoped
from kvfleet.connectors.vllm.layout import EngineLayout, layer_geometry, layer_specs
from kvfleet.core.layout import NUM_SHARDS_MAX
from kvfleet.errors import ConfigError


class Quantisation(IntEnum):
    NONE = 0
    FP8 = 1


@dataclass(frozen=True)
class FullAttentionSpec:
    block_size: int = 16
    num_kv_heads: int = 8
    head_size: int = 128
    head_size_v: int = 128
    dtype: str = "torch.bfloat16"
    kv_quant_mode: Quantisation = Quantisation.NONE
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    non_causal: bool = False
    tokens_per_state: int = 1
    max_tp_shards: int | None = None


class MLAAttentionSpec(FullAttentionSpec):
    pass


class SlidingWindowSpec(FullAttentionSpec):
    pass


class RSWASpec(FullAttentionSpec):
    pass


class MambaSpec(FullAttentionSpec):
    pass


class HFConfig:
    """transformers' config, as far as it matters here."""

    def __init__(self, **values: object) -> None:
        self.values = values
        self.architectures = values["architectures"]

    def to_dict(self) -> dict[str, object]:
        return copy.deepcopy(self.values)


def hf_config(**changes: object) -> HFConfig:
    return HFConfig(
        **{
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "transformers_version": "5.19.0",
            "_name_or_path": "/models/llama",
            **changes,
        }
    )


LONGROPE = hf_config(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4})


def directory(path: Path, content: bytes = b"weights") -> str:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({"hidden_size": 64}))
    (path / "model.safetensors").write_bytes(content)
    return str(path)


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """vLLM's settings for a small model, and its KV cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=directory(tmp_path / "model"),
            model_weights="",
            revision=None,
            served_model_name="llama",
            dtype="torch.bfloat16",
            hf_config=hf_config(),
            is_encoder_decoder=False,
            max_model_len=4096,
            quantization=None,
            quantization_config=None,
            trust_remote_code=False,
            disable_sliding_window=False,
            model_impl="auto",
            model_class_overrides={},
            seed=0,
            enforce_eager=False,
            multimodal_config=None,
        ),
        cache_config=SimpleNamespace(
            block_size=16,
            enable_prefix_caching=True,
            prefix_caching_hash_algo="sha256",
            kv_cache_dtype_skip_layers=[],
            gpu_memory_utilization=0.9,
            num_gpu_blocks=1000,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            data_parallel_size=1,
            data_parallel_rank=0,
            rank=0,
            master_port=29500,
        ),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        kv_transfer_config=SimpleNamespace(
            kv_load_failure_policy="recompute", engine_id="a", kv_port=14579, kv_role="kv_both"
        ),
        attention_config=SimpleNamespace(indexer_kv_dtype="auto"),
        speculative_config=None,
        lora_config=None,
        weight_transfer_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=256),
    )


LAYOUT = EngineLayout(
    door="connector",
    engine="0.32",
    hash_scheme="sha256 0123456789abcdef python3.11",
    kv_cache_layout="LBHNC",
    backend="CPU_ATTN",
    cpu_isa="vec",
    dtype="bfloat16",
    kv_cache_dtype="bfloat16",
    geometry="g",
    engine_block_tokens=16,
    blocks_per=16,
    num_parts=2,
    block_bytes=4096,
    num_shards=2,
)


def kv_cache(*specs: object) -> SimpleNamespace:
    """A KV cache of one group with a layer a spec."""
    names = [f"layers.{index}" for index in range(len(specs))]
    spec = specs[0] if len(set(specs)) == 1 else SimpleNamespace(kv_cache_specs=dict(zip(names, specs, strict=True)))
    return SimpleNamespace(num_blocks=10, kv_cache_groups=[SimpleNamespace(layer_names=names, kv_cache_spec=spec)])


def assign(target: SimpleNamespace, path: str, value: object) -> SimpleNamespace:
    *parents, name = path.split(".")
    for parent in parents:
        target = getattr(target, parent)
    setattr(target, name, value)
    return target


def root(engine: SimpleNamespace, layout: EngineLayout = LAYOUT, **scope: str) -> bytes:
    return identity.model_spec(engine, layout, **scope).root


# --- changing one setting


DIFFERENT = {
    "config": ("model_config.hf_config", hf_config(hidden_size=128)),
    "rope": ("model_config.hf_config", hf_config(rope_parameters={"rope_type": "default", "rope_theta": 5e5})),
    "architecture": ("model_config.hf_config", hf_config(architectures=["OtherForCausalLM"])),
    "quantisation": ("model_config.quantization", "fp8"),
    "its settings": ("model_config.quantization_config", {"ignored_layers": ["lm_head"]}),
    "windows off": ("model_config.disable_sliding_window", True),
    "implementation": ("model_config.model_impl", "transformers"),
    "another class": ("model_config.model_class_overrides", {"LlamaForCausalLM": "mine:Llama"}),
    "layers unquantised": ("cache_config.kv_cache_dtype_skip_layers", ["0"]),
    "indexer": ("attention_config.indexer_kv_dtype", "fp8"),
    "images": ("model_config.multimodal_config", SimpleNamespace(mm_processor_kwargs={"max_pixels": 5})),
    "fewer frames": ("model_config.multimodal_config", SimpleNamespace(video_pruning_rate=0.5)),
    "adapters' dtype": ("lora_config", SimpleNamespace(lora_dtype="torch.float32", target_modules=None)),
    "adapters' layers": ("lora_config", SimpleNamespace(lora_dtype="auto", target_modules=["q_proj"])),
    "loader": ("load_config.load_format", "sharded_state"),
}

SAME = {
    "who wrote the config": ("model_config.hf_config", hf_config(transformers_version="6", _name_or_path="x/y")),
    "served name": ("model_config.served_model_name", "other"),
    "longest prompt": ("model_config.max_model_len", 8192),
    "seed": ("model_config.seed", 7),
    "eager": ("model_config.enforce_eager", True),
    "memory": ("cache_config.gpu_memory_utilization", 0.5),
    "blocks": ("cache_config.num_gpu_blocks", 7),
    "data parallel": ("parallel_config.data_parallel_size", 4),
    "data parallel rank": ("parallel_config.data_parallel_rank", 3),
    "rank": ("parallel_config.rank", 1),
    "port": ("parallel_config.master_port", 29501),
    "engine id": ("kv_transfer_config.engine_id", "b"),
    "kv port": ("kv_transfer_config.kv_port", 1),
    "role": ("kv_transfer_config.kv_role", "kv_producer"),
    "batch": ("scheduler_config.max_num_seqs", 4),
    "adapters": ("lora_config", SimpleNamespace(lora_dtype="torch.bfloat16", target_modules=None, max_lora_rank=64)),
    "n-grams": ("speculative_config", SimpleNamespace(method="ngram")),
    "preferred loader": ("load_config.load_format", "fastsafetensors"),
    "code not there": ("model_config.trust_remote_code", True),
}


@pytest.mark.parametrize(("path", "value"), DIFFERENT.values(), ids=DIFFERENT)
def test_changing_this_changes_the_root(engine, path, value):
    before = root(engine)
    assign(engine, path, value)
    assert root(engine) != before


@pytest.mark.parametrize(("path", "value"), SAME.values(), ids=SAME)
def test_changing_that_does_not(engine, path, value):
    before = root(engine)
    assign(engine, path, value)
    assert root(engine) == before


def test_no_two_of_these_share(engine):
    roots = {root(engine)}
    for path, value in DIFFERENT.values():
        changed = SimpleNamespace(**{name: copy.copy(part) for name, part in vars(engine).items()})
        assign(changed, path, value)
        roots.add(root(changed))
    assert len(roots) == len(DIFFERENT) + 1


def test_settings_that_a_version_does_not_have_are_as_if_unset(engine):
    before = root(engine)
    del engine.model_config.model_weights, engine.weight_transfer_config
    engine.model_config.multimodal_config = SimpleNamespace(mm_processor_kwargs=None)
    assert root(engine) == before


def test_the_longest_prompt_counts_where_it_chooses_the_rotary_embedding(engine):
    engine.model_config.hf_config = LONGROPE
    before = root(engine)
    engine.model_config.max_model_len = 131072
    assert root(engine) != before


# --- the model


def test_a_model_is_the_same_wherever_it_lies(engine, tmp_path):
    before = root(engine)
    engine.model_config.model = shutil.copytree(engine.model_config.model, tmp_path / "other" / "name")
    assert root(engine) == before
    (tmp_path / "link").symlink_to(engine.model_config.model)
    engine.model_config.model = str(tmp_path / "link")
    assert root(engine) == before


def test_other_weights_under_the_same_name_start_cold(engine):
    before = root(engine)
    path = Path(engine.model_config.model, "model.safetensors")
    found = path.stat()
    path.write_bytes(b"WEIGHTS")
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert root(engine) != before


def test_the_root_knows_no_place(engine, tmp_path):
    spec = identity.model_spec(engine, LAYOUT)
    assert spec.model_id == "LlamaForCausalLM"
    assert str(tmp_path) not in repr(spec)


def test_the_operator_may_name_the_model_and_its_weights(engine, tmp_path):
    base = root(engine)
    assert identity.model_spec(engine, LAYOUT, model_id="llama").model_id == "llama"
    engine.model_config.model = str(tmp_path / "nowhere")
    named = {root(engine, weight_revision=name, model_id=model) for name in "ab" for model in ("", "llama")}
    assert len(named | {base}) == 5


def test_no_config_without_architectures_is_nameless(engine):
    engine.model_config.hf_config.architectures = None
    assert identity.model_spec(engine, LAYOUT).model_id == "HFConfig"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model_config.model_weights", "s3://bucket/model"),
        ("load_config.load_format", "tensorizer"),
        ("load_config.load_format", "modelexpress"),
        ("load_config.load_format", "ipc_cache"),
    ],
)
def test_weights_from_elsewhere_must_be_named(engine, path, value):
    assign(engine, path, value)
    with pytest.raises(ConfigError, match="weight_revision: must be given"):
        root(engine)
    assert root(engine, weight_revision="v1") != root(engine, weight_revision="v2")


def test_a_config_that_cannot_be_compared_is_refused(engine):
    engine.model_config.hf_config = hf_config(hook=object())
    with pytest.raises(ConfigError, match="no two processes can compare"):
        root(engine)


# --- the layout


LAYOUT_CHANGES = {
    "door": "offload",
    "engine": "0.29",
    "hash_scheme": "sha256_cbor 0123456789abcdef",
    "kv_cache_layout": "BLHNC",
    "backend": "FLASH_ATTN",
    "cpu_isa": "amx",
    "dtype": "float32",
    "kv_cache_dtype": "fp8:torch.float8_e4m3fn",
    "geometry": "h",
    "engine_block_tokens": 32,
    "blocks_per": 8,
    "num_parts": 4,
    "block_bytes": 8192,
    "num_shards": 4,
}


def test_every_field_of_the_layout_counts(engine):
    assert LAYOUT_CHANGES.keys() == set(EngineLayout.__slots__)
    roots = {root(engine, replace(LAYOUT, **{name: value})) for name, value in LAYOUT_CHANGES.items()}
    assert len(roots | {root(engine)}) == len(LAYOUT_CHANGES) + 1


def test_equal_sizes_of_other_make_do_not_share(engine):
    first = replace(LAYOUT, engine_block_tokens=16, blocks_per=16)
    second = replace(LAYOUT, engine_block_tokens=32, blocks_per=8)
    assert first.block_tokens == second.block_tokens == 256
    assert root(engine, first) != root(engine, second)


def test_text_cannot_move_from_field_to_field(engine):
    first = replace(LAYOUT, backend='A","cpu_isa":"B', cpu_isa="")
    second = replace(LAYOUT, backend="A", cpu_isa="B")
    assert root(engine, first) != root(engine, second)


def test_the_layout_is_opaque_and_readable():
    layout = LAYOUT.block_layout()
    assert (layout.dtype, layout.shape, layout.token_axis) == ("uint8", (4096,), None)
    assert (layout.block_tokens, layout.num_shards) == (256, 2)
    assert layout.inner_order.startswith('vllm {"backend":"CPU_ATTN",')


def test_a_layout_out_of_bounds_is_refused():
    with pytest.raises(ConfigError, match="num_shards"):
        replace(LAYOUT, num_shards=NUM_SHARDS_MAX + 1).block_layout()


# --- geometry


def test_geometry_tells_layers_apart():
    base = FullAttentionSpec()
    caches = [
        kv_cache(base, base),
        kv_cache(base),
        kv_cache(base, base, base),
        kv_cache(replace(base, num_kv_heads=4), replace(base, num_kv_heads=4)),
        kv_cache(base, replace(base, num_kv_heads=4)),
        kv_cache(replace(base, num_kv_heads=4), base),
        kv_cache(*[replace(base, head_size=64, num_kv_heads=16)] * 2),
        kv_cache(*[replace(base, dtype="torch.float32")] * 2),
        kv_cache(*[replace(base, kv_quant_mode=Quantisation.FP8)] * 2),
        kv_cache(MLAAttentionSpec(), MLAAttentionSpec()),
    ]
    assert len({layer_geometry(cache) for cache in caches}) == len(caches)


def test_geometry_does_not_count_blocks_or_the_order_of_layers():
    base = kv_cache(FullAttentionSpec(), FullAttentionSpec())
    other = copy.deepcopy(base)
    other.num_blocks = 99
    other.kv_cache_groups[0].layer_names.reverse()
    other.kv_cache_groups[0].kv_cache_spec = FullAttentionSpec(max_tp_shards=1)
    assert layer_geometry(base) == layer_geometry(other)


def test_layers_of_one_spec_and_of_many():
    one, two = FullAttentionSpec(), FullAttentionSpec(head_size=64)
    assert list(layer_specs(kv_cache(one, one))) == [("layers.0", one), ("layers.1", one)]
    assert list(layer_specs(kv_cache(one, two))) == [("layers.0", one), ("layers.1", two)]


# --- tenants, adapters, resets


def test_scopes_never_share(engine):
    a, b = AdapterRef("lora", "sha256:a"), AdapterRef("lora", "sha256:b")
    specs = [identity.model_spec(engine, LAYOUT, tenant=tenant) for tenant in ("", "acme")]
    scopes = [(None, ""), (a, ""), (b, ""), (AdapterRef("other", "sha256:a"), ""), (None, "word"), (a, "word")]
    roots = {scoped(spec, *scope).root for spec in specs for scope in scopes}
    assert len(roots) == len(specs) * len(scopes)
    assert scoped(specs[0], None, "") == specs[0]
    assert scoped(specs[0], None, "").root == specs[0].root


def test_a_spec_travels_between_processes(engine):
    spec = identity.model_spec(engine, LAYOUT, tenant="acme")
    there = pickle.loads(pickle.dumps((spec, AdapterRef("n", "r"))))
    assert there == (spec, AdapterRef("n", "r"))
    assert there[0].root == spec.root
    assert len({spec, there[0]}) == 1


def lora(path: Path, name: str = "lora", **more: object) -> SimpleNamespace:
    return SimpleNamespace(lora_name=name, lora_path=str(path), lora_int_id=1, **more)


def test_adapters_are_told_apart_by_content(engine, tmp_path, monkeypatch):
    for name, content in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_bytes(content)
    first = adapter_ref(lora(tmp_path / "a"))
    assert first == adapter_ref(lora(tmp_path / "b"))
    assert first != adapter_ref(lora(tmp_path / "c"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert first == adapter_ref(lora(Path("~/a"), tensorizer_config_dict=None))
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"2")
    assert first != adapter_ref(lora(tmp_path / "a"))
    with pytest.raises(ConfigError, match="tensorizer"):
        adapter_ref(lora(tmp_path / "a", tensorizer_config_dict={}))


# --- block sizes


@pytest.mark.parametrize(
    ("setting", "engine_tokens", "tokens"),
    [
        (None, 16, 256),
        (None, 32, 256),
        (None, 48, 240),
        (None, 256, 256),
        (None, 1024, 1024),
        (64, 16, 64),
        (16, 16, 16),
    ],
)
def test_block_tokens(setting, engine_tokens, tokens):
    assert block_tokens(setting, engine_tokens) == tokens


@pytest.mark.parametrize("setting", [8, 40, 0, -16])
def test_blocks_are_whole_engine_blocks(setting):
    with pytest.raises(ConfigError, match="multiple of vLLM's block_size 16"):
        block_tokens(setting, 16)


# --- what is refused


GOOD = kv_cache(FullAttentionSpec(), FullAttentionSpec())


def test_what_is_supported(engine):
    for cache in (GOOD, kv_cache(MLAAttentionSpec()), kv_cache(FullAttentionSpec(), FullAttentionSpec(head_size=64))):
        check_supported(engine, cache, environment={})
    for method in ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"):
        engine.speculative_config = SimpleNamespace(method=method)
        check_supported(engine, GOOD, environment={})
    engine.cache_config.enable_prefix_caching = False
    engine.cache_config.prefix_caching_hash_algo = "sha256_cbor"
    check_supported(engine, GOOD, environment={})
    engine.cache_config.prefix_caching_hash_algo = "xxhash_cbor"
    check_supported(engine, GOOD, environment={"PYTHONHASHSEED": "0"})


REFUSED = {
    "failure policy": ("kv_transfer_config.kv_load_failure_policy", "fail", '"kv_load_failure_policy": "recompute"'),
    "xxhash": ("cache_config.prefix_caching_hash_algo", "xxhash", "set it to sha256 or sha256_cbor, or set PYTHON"),
    "xxhash_cbor": ("cache_config.prefix_caching_hash_algo", "xxhash_cbor", "PYTHONHASHSEED"),
    "encoder": ("model_config.is_encoder_decoder", True, "only decoder models"),
    "dummy": ("load_config.load_format", "dummy", "dummy weights"),
    "weights on the move": ("weight_transfer_config", SimpleNamespace(backend="nccl"), "while the engine runs"),
    "draft model": (
        "speculative_config",
        SimpleNamespace(method="draft_model"),
        "draft_model keeps a draft",
    ),
    "eagle": ("speculative_config", SimpleNamespace(method="eagle3"), "eagle3 keeps"),
    "unknown guesses": ("speculative_config", SimpleNamespace(method="custom_class"), "custom_class keeps"),
    "pipeline": ("parallel_config.pipeline_parallel_size", 2, "pipeline_parallel_size: must be 1, is 2"),
    "decode context": ("parallel_config.decode_context_parallel_size", 2, "decode_context_parallel_size"),
    "prefill context": ("parallel_config.prefill_context_parallel_size", 2, "prefill_context_parallel_size"),
}


@pytest.mark.parametrize(("path", "value", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(engine, path, value, message):
    assign(engine, path, value)
    with pytest.raises(ConfigError) as caught:
        check_supported(engine, GOOD, environment={})
    assert message in str(caught.value)


def test_the_failure_policy_is_not_the_offloading_doors_business(engine):
    engine.kv_transfer_config.kv_load_failure_policy = "fail"
    check_supported(engine, GOOD, environment={}, door="offload")


def test_images_named_by_request_are_refused(engine):
    engine.model_config.multimodal_config = SimpleNamespace(mm_processor_cache_gb=0)
    check_supported(engine, GOOD, environment={})
    engine.cache_config.enable_prefix_caching = False
    with pytest.raises(ConfigError, match="enable_prefix_caching: must be on for multimodal models"):
        check_supported(engine, GOOD, environment={})
    engine.model_config.multimodal_config.mm_processor_cache_gb = 4
    check_supported(engine, GOOD, environment={})


LAYERS = {
    "sliding": (SlidingWindowSpec(), "SlidingWindow"),
    "mamba": (MambaSpec(), "Mamba"),
    "subclass": (RSWASpec(), "RSWA"),
    "sliding kept in full": (FullAttentionSpec(sliding_window=128), "sliding_window of 128"),
    "chunks kept in full": (FullAttentionSpec(attention_chunk_size=64), "attention_chunk_size of 64"),
    "looking ahead": (FullAttentionSpec(non_causal=True), "later tokens"),
    "compressed in time": (MLAAttentionSpec(tokens_per_state=4), "one state for 4 tokens"),
}


@pytest.mark.parametrize(("spec", "message"), LAYERS.values(), ids=LAYERS)
def test_other_layers_are_refused(engine, spec, message):
    with pytest.raises(ConfigError) as caught:
        check_supported(engine, kv_cache(spec, spec), environment={})
    assert message in str(caught.value)
    # One among many as well.
    with pytest.raises(ConfigError, match=r"layers\.1"):
        check_supported(engine, kv_cache(FullAttentionSpec(), spec), environment={})


@pytest.mark.parametrize("count", [0, 2])
def test_other_numbers_of_groups_are_refused(engine, count):
    cache = SimpleNamespace(kv_cache_groups=GOOD.kv_cache_groups * count)
    with pytest.raises(ConfigError, match=f"has {count} KV cache groups"):
        check_supported(engine, cache, environment={})

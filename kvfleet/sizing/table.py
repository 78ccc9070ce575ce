"""Common models: what their public config.json says, as far as sizing needs it."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["MODELS"]

Config = Mapping[str, object]


def _dense(*sizes: int, tied: bool = False, head_dim: int = 0) -> dict[str, object]:
    """Of layers, hidden size, heads, KV heads, width of the MLP, and words."""
    layers, hidden, heads, kv_heads, mlp, words = sizes
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim or hidden // heads, "intermediate_size": mlp,
        "vocab_size": words, "tie_word_embeddings": tied, "torch_dtype": "bfloat16",
    }  # fmt: skip


def _latent(layers: int, heads: int, routed: int, first_dense: int, words: int) -> dict[str, object]:
    """DeepSeek-V3 and those built like it."""
    return {
        **_dense(layers, 7168, heads, heads, 18432, words),
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": routed, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
        "first_k_dense_replace": first_dense, "quantization_config": {"quant_method": "fp8"},
    }  # fmt: skip


def _experts(routed: int, chosen: int, width: int, *, shared: int = 0, first_dense: int = 0) -> dict[str, object]:
    return {
        "num_experts": routed, "num_experts_per_tok": chosen, "moe_intermediate_size": width,
        "n_shared_experts": shared, "first_k_dense_replace": first_dense,
    }  # fmt: skip


_LLAMA_8B = _dense(32, 4096, 32, 8, 14336, 128256)
_LLAMA_70B = _dense(80, 8192, 64, 8, 28672, 128256)
_DEEPSEEK_V3 = _latent(61, 128, 256, 3, 129280)
_QWEN3_235B = {**_dense(94, 4096, 64, 4, 12288, 151936, head_dim=128), **_experts(128, 8, 1536)}
_GLM_4_5 = {
    **_dense(92, 5120, 96, 8, 12288, 151552, head_dim=128),
    **_experts(160, 8, 1536, shared=1, first_dense=3),
}
_GLM_4_5_AIR = {
    **_dense(46, 4096, 96, 8, 10944, 151552, head_dim=128),
    **_experts(128, 8, 1408, shared=1, first_dense=1),
}

MODELS: Mapping[str, Config] = {
    "llama-2-7b": _dense(32, 4096, 32, 32, 11008, 32000),
    "llama-2-13b": _dense(40, 5120, 40, 40, 13824, 32000),
    "llama-2-70b": _dense(80, 8192, 64, 8, 28672, 32000),
    "llama-3-8b": _LLAMA_8B,
    "llama-3-70b": _LLAMA_70B,
    "llama-3.1-8b": _LLAMA_8B,
    "llama-3.1-70b": _LLAMA_70B,
    "llama-3.1-405b": _dense(126, 16384, 128, 8, 53248, 128256),
    "llama-3.2-1b": _dense(16, 2048, 32, 8, 8192, 128256, tied=True),
    "llama-3.2-3b": _dense(28, 3072, 24, 8, 8192, 128256, tied=True),
    "llama-3.3-70b": _LLAMA_70B,
    "qwen2.5-7b": _dense(28, 3584, 28, 4, 18944, 152064),
    "qwen2.5-14b": _dense(48, 5120, 40, 8, 13824, 152064),
    "qwen2.5-32b": _dense(64, 5120, 40, 8, 27648, 152064),
    "qwen2.5-72b": _dense(80, 8192, 64, 8, 29568, 152064),
    "qwen3-4b": _dense(36, 2560, 32, 8, 9728, 151936, tied=True, head_dim=128),
    "qwen3-8b": _dense(36, 4096, 32, 8, 12288, 151936, head_dim=128),
    "qwen3-14b": _dense(40, 5120, 40, 8, 17408, 151936, head_dim=128),
    "qwen3-32b": _dense(64, 5120, 64, 8, 25600, 151936, head_dim=128),
    "qwen3-30b-a3b": {**_dense(48, 2048, 32, 4, 6144, 151936, head_dim=128), **_experts(128, 8, 768)},
    "qwen3-235b-a22b": _QWEN3_235B,
    "mistral-7b-v0.3": _dense(32, 4096, 32, 8, 14336, 32768),
    "mistral-small-24b": _dense(40, 5120, 32, 8, 32768, 131072, head_dim=128),
    "mistral-large-123b": _dense(88, 12288, 96, 8, 28672, 32768),
    "mixtral-8x7b": {**_dense(32, 4096, 32, 8, 14336, 32000), **_experts(8, 2, 14336)},
    "mixtral-8x22b": {**_dense(56, 6144, 48, 8, 16384, 32768), **_experts(8, 2, 16384)},
    "phi-4": _dense(40, 5120, 40, 10, 17920, 100352),
    "glm-4.5": _GLM_4_5,
    "glm-4.5-air": _GLM_4_5_AIR,
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-r1": _DEEPSEEK_V3,
    "kimi-k2": _latent(61, 64, 384, 1, 163840),
    "smollm2-135m": _dense(30, 576, 9, 3, 1536, 49152, tied=True),
}
"""By a short name in lower case. Base, instruct and chat models of a size are alike."""

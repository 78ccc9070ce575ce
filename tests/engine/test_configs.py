"""The configs of the installed transformers are read, or refused, for what their models keep."""

from __future__ import annotations

import pytest
import transformers

from kvfleet.core.layout import ModelSpec
from kvfleet.errors import ConfigError


def spec(config):
    return ModelSpec.from_hf(config, weight_revision="r1", model_id="model", dtype="bfloat16")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("Llama", (32, 2, 32, 256, 128)),
        ("GPT2", (12, 2, 12, 256, 64)),
        ("GPTBigCode", (12, 2, 1, 256, 64)),
        ("Falcon", (32, 2, 1, 256, 64)),
        ("Qwen3", (32, 2, 32, 256, 128)),
        ("Qwen2VL", (80, 2, 8, 256, 128)),
        ("Llava", (32, 2, 32, 256, 128)),
        ("DeepseekV2", (32, 256, 576)),
        ("DeepseekV3", (61, 256, 576)),
    ],
)
def test_full_attention(name, shape):
    config = getattr(transformers, f"{name}Config")()
    assert spec(config).layout.shape == shape
    assert spec(config.to_dict()).layout.shape == shape


@pytest.mark.parametrize(
    "name",
    [
        "Bamba", "DeepseekV32", "FalconH1", "GPTNeo", "Gemma2", "Gemma3", "Gemma3n", "GptOss", "Jamba", "KimiLinear",
        "Llama4", "Mamba", "Mamba2", "MiniMax", "Mistral", "Mllama", "NemotronH", "Qwen3Next", "RecurrentGemma",
        "Rwkv", "T5", "Whisper", "Zamba2",
    ],
)  # fmt: skip
def test_anything_else(name):
    config = getattr(transformers, f"{name}Config")()
    with pytest.raises(ConfigError):
        spec(config)
    with pytest.raises(ConfigError):
        spec(config.to_dict())

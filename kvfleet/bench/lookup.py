"""Looking up a prompt, beside hashing its tokens."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from time import perf_counter

import numpy as np

from kvfleet.bench.report import Row, measure
from kvfleet.bench.workload import Prompts
from kvfleet.calls import DirectoryCalls, ManagerCalls
from kvfleet.client import Client
from kvfleet.core.block import TokenIds
from kvfleet.core.layout import BlockLayout, ModelSpec
from kvfleet.fleet import Fleet

__all__ = ["MEASURES", "rows"]

MEASURES = (
    "`client.lookup` of a prompt that is in this node's arena, its ids given as a uint32 buffer or as a list; of a "
    "prompt nobody has, which asks the directory; and in a fleet whose actors are all gone: what a request pays then, "
    "looking for them now and then included. Floor: chained SHA-256 of the ids, a digest a block. Blocks of 256 tokens "
    "whose KV is small: a lookup does not read it."
)

_BLOCK_TOKENS = 256
_BLOCK_BYTES = 4096


def rows(fleet: Fleet, num_blocks: int, repeats: int) -> list[Row]:
    """Measure one prompt length."""
    layout = BlockLayout.opaque(block_bytes=_BLOCK_BYTES, block_tokens=_BLOCK_TOKENS, inner_order="bench")
    client = fleet.client(ModelSpec(model_id="bench", weight_revision="bench", layout=layout))
    prompts = Prompts("lookup", num_blocks * _BLOCK_TOKENS)
    tokens, stranger = prompts.next(), prompts.next()
    listed = tokens.tolist()
    stored = client.store(tokens, np.zeros((num_blocks, _BLOCK_BYTES), np.uint8)).wait(60.0)
    assert stored.stored + stored.already == num_blocks, stored

    def lookup(ids: TokenIds, hit_tokens: int) -> float:
        started = perf_counter()
        hit = client.lookup(ids)
        seconds = perf_counter() - started
        assert (hit.num_tokens, hit.fault) == (hit_tokens, None), hit
        return seconds

    broken = _without_fleet(fleet, client.spec)

    def lookup_broken() -> float:
        started = perf_counter()
        hit = broken.lookup(tokens)
        seconds = perf_counter() - started
        assert (hit.num_tokens, hit.fault is not None) == (0, True), hit
        return seconds

    def sha256() -> float:
        started = perf_counter()
        digest = b""
        for start in range(0, len(tokens), _BLOCK_TOKENS):
            hasher = hashlib.sha256(digest)
            hasher.update(tokens[start : start + _BLOCK_TOKENS].data)
            digest = hasher.digest()
        return perf_counter() - started

    cases = {
        "SHA-256 alone": sha256,
        "lookup, buffer": lambda: lookup(tokens, len(tokens)),
        "lookup, list": lambda: lookup(listed, len(tokens)),
        "lookup, asks the directory": lambda: lookup(stranger, 0),
        "lookup, all actors gone": lookup_broken,
    }
    return measure(cases, block_bytes=_BLOCK_BYTES, num_blocks=num_blocks, moves=False, repeats=repeats)


def _without_fleet(fleet: Fleet, spec: ModelSpec) -> Client:
    """A client of a fleet that is not there any more."""
    config = replace(fleet.config, name="gone")
    return Client(spec, ManagerCalls(config, "gone"), DirectoryCalls(config.name), config)

"""Loading a prefix that is in the node's own arena, beside memcpy of as many bytes."""

from __future__ import annotations

from time import perf_counter

import numpy as np

from kvfleet.bench.report import Row, measure
from kvfleet.bench.workload import Prompts, kv_array, mapped_client, memcpy, spec_of, zero_kv
from kvfleet.fleet import Fleet

__all__ = ["MEASURES", "rows"]

MEASURES = (
    "load: `client.load` of a prefix in this node's arena into a bfloat16 tensor (layers, 2, heads, tokens, dim), "
    "aligned to 64 bytes as torch's are. "
    "Floor: memcpy of as many bytes, block by block, between two other arrays. Everything touched before."
)


def rows(fleet: Fleet, block_tokens: int, num_blocks: int, repeats: int) -> list[Row]:
    """Measure one size."""
    spec = spec_of(block_tokens)
    client = mapped_client(fleet, spec)
    tokens = Prompts("local", num_blocks * block_tokens).next()
    kv = kv_array(spec.layout, num_blocks)
    stored = client.store(tokens, kv).wait(60.0)
    assert stored.stored == num_blocks, stored
    hit = client.lookup(tokens)
    target = zero_kv(spec.layout, num_blocks)

    def load() -> float:
        started = perf_counter()
        loaded = client.load(hit, target)
        seconds = perf_counter() - started
        assert loaded == len(tokens), loaded.miss
        return seconds

    load()
    assert np.array_equal(target, kv)
    cases = {"memcpy": memcpy(kv, num_blocks), "load": load}
    return measure(cases, block_bytes=spec.layout.block_bytes, num_blocks=num_blocks, moves=True, repeats=repeats)

"""Storing the KV of a prompt, beside memcpy of as many bytes."""

from __future__ import annotations

from time import perf_counter

from kvfleet.bench.report import Row, measure
from kvfleet.bench.workload import Prompts, kv_array, mapped_client, memcpy, spec_of
from kvfleet.fleet import Fleet

__all__ = ["MEASURES", "rows"]

MEASURES = (
    "store: `client.store(...).wait()` of a new prompt's bfloat16 tensor (layers, 2, heads, tokens, dim), checksums, "
    "both calls to the manager, eviction and the directory's acknowledgement included. Floor: memcpy of as many "
    "bytes, block by block, between two other arrays. Everything touched before."
)


def rows(fleet: Fleet, block_tokens: int, num_blocks: int, repeats: int) -> list[Row]:
    """Measure one size."""
    spec = spec_of(block_tokens)
    client = mapped_client(fleet, spec)
    prompts = Prompts("store", num_blocks * block_tokens)
    kv = kv_array(spec.layout, num_blocks)

    def store() -> float:
        tokens = prompts.next()
        started = perf_counter()
        result = client.store(tokens, kv).wait(60.0)
        seconds = perf_counter() - started
        assert result.stored == num_blocks, result
        assert result.published, result
        return seconds

    cases = {"memcpy": memcpy(kv, num_blocks), "store": store}
    return measure(cases, block_bytes=spec.layout.block_bytes, num_blocks=num_blocks, moves=True, repeats=repeats)

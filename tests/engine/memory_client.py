"""A client whose fleet is a dict in this process."""

from __future__ import annotations

import numpy as np

from kvfleet import copying
from kvfleet.core.block import TokenIds, split
from kvfleet.core.layout import ModelSpec
from kvfleet.hits import HitRun, Loaded, PrefixHit, StoreResult
from kvfleet.node.messages import Miss, Outcome, Source
from kvfleet.storing import StoreTask


class MemoryClient:
    """Stands in for `kvfleet.Client` in tests of connectors: the same calls, the same copies, no node.

    Attributes:
        blocks: what the fleet holds, by key.
        fail_from: loads miss from this block on, although lookups promise it.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.blocks: dict[bytes, np.ndarray] = {}
        self.fail_from: int | None = None

    def lookup(self, token_ids: TokenIds) -> PrefixHit:
        keys = self.spec.keys(token_ids)
        asked = split(keys)
        held = next((i for i, key in enumerate(asked) if key not in self.blocks), len(asked))
        runs = (HitRun(0, held, local=True),) if held else ()
        return PrefixHit(held * self.spec.block_tokens, held, len(asked), keys, runs)

    def load(self, hit: PrefixHit, into: object) -> Loaded:
        layout = self.spec.layout
        target = copying.as_array(into)
        copying.check_fits(target, into, layout, hit.num_blocks)
        stop = hit.num_blocks if self.fail_from is None else min(self.fail_from, hit.num_blocks)
        for index, key in enumerate(split(hit.keys)[:stop]):
            copying.copy_out(copying.block_slice(target, layout, index), self.blocks[key])
        missed = [Miss.UNREACHABLE, *[Miss.BEHIND_MISS] * hit.num_blocks][: hit.num_blocks - stop]
        outcomes: list[Outcome] = [*[Source.DRAM] * stop, *missed]
        return Loaded.of(outcomes, layout)

    def store_keys(self, keys: bytes, kv: object, *, start_block: int = 0) -> StoreTask:
        layout = self.spec.layout
        new = split(keys)[start_block:]
        source = copying.as_array(kv)
        copying.check_fits(source, kv, layout, len(new))
        for index, key in enumerate(new):
            slot = np.empty(layout.block_bytes, np.uint8)
            copying.copy_in(slot, copying.block_slice(source, layout, index))
            self.blocks.setdefault(key, slot)
        task = StoreTask()
        task.finish(StoreResult(stored=len(new), num_bytes=len(new) * layout.block_bytes))
        return task

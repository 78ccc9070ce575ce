"""What a policy costs a manager: clients store through it, beside one with another policy."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvfleet.bench.workload import kv_array, running_fleet
from kvfleet.config import MIB
from kvfleet.core.layout import BlockLayout, ModelSpec
from kvfleet.fleet import Fleet

__all__ = ["BASE", "MEASURES", "ROUNDS", "Throughput", "compare", "throughputs"]

MEASURES = (
    "a node's manager, both calls of a store over Ray included: prompts of {blocks} small blocks, two in three of them "
    "continuing one of the last, in a full arena. In turns with a manager that has {base}; median of {rounds} rounds."
)
BASE = "lru"
BLOCKS = 32  # of a prompt
ROUNDS = 15
_BLOCK_TOKENS = 16
_ARENA_BYTES = 16 * MIB
_SEED = 20250101
_OPEN_MAX = 60  # conversations that may go on
_TURNS_MAX = 3
_WARM = 120  # prompts, before the first round: the arena is full then

_LAYOUT = BlockLayout.kv(num_layers=1, num_kv_heads=1, head_dim=64, dtype="bfloat16", block_tokens=_BLOCK_TOKENS)
_SPEC = ModelSpec(model_id="bench", weight_revision="bench", layout=_LAYOUT)

_Tokens = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Throughput:
    """What a manager does with one policy.

    Attributes:
        policy: by name.
        requests_per_s: prompts looked up and stored by one client, one after the other.
        share: of those with `BASE`, in the rounds beside.
    """

    policy: str
    requests_per_s: float
    share: float


def throughputs(policies: Sequence[str], address: str | None, num_requests: int) -> Iterator[Throughput]:
    """Measure a manager with each policy, in turns with one that has `BASE`.

    Args:
        policies: names.
        address: of a Ray cluster; None: one is started.
        num_requests: in a round.
    """
    for policy in policies:
        with (
            running_fleet(_ARENA_BYTES, address, policy=BASE, name="base") as base,
            running_fleet(_ARENA_BYTES, address, policy=policy) as other,
        ):
            yield compare(policy, base, other, num_requests)


def compare(policy: str, base: Fleet, other: Fleet, num_requests: int, num_warm: int = _WARM) -> Throughput:
    """Measure a fleet with a policy, beside another.

    Args:
        policy: its name.
        base: with `BASE`.
        other: the one to measure.
        num_requests: in a round.
        num_warm: before the first round.
    """
    pair = _Talks(base), _Talks(other)
    for talks in pair:
        talks.serve(num_warm)
    rounds = [tuple(talks.serve(num_requests) for talks in pair) for _ in range(ROUNDS)]
    share = statistics.median(first / second for first, second in rounds)
    return Throughput(policy, num_requests / statistics.median(second for _, second in rounds), share)


class _Talks:
    """One client's prompts: the same ones for each policy."""

    def __init__(self, fleet: Fleet) -> None:
        self._client = fleet.client(_SPEC)
        self._kv = kv_array(_LAYOUT, BLOCKS + _TURNS_MAX)
        self._tokens = np.random.default_rng(_SEED)
        self._chance = random.Random(_SEED)
        self._open: list[_Tokens] = []

    def serve(self, num_requests: int) -> float:
        """Look up and store prompts. Returns the seconds that took."""
        prompts = [self._next() for _ in range(num_requests)]
        begun = time.perf_counter()
        for tokens in prompts:
            self._client.lookup(tokens)
            self._client.store(tokens, self._kv[..., : len(tokens), :]).wait(60.0)
        return time.perf_counter() - begun

    def _next(self) -> _Tokens:
        """A prompt of whole blocks: a new one, or one that goes on."""
        before = np.zeros(0, np.uint32)
        if self._open and self._chance.random() < 1 - 1 / _TURNS_MAX:
            before = self._open.pop(self._chance.randrange(len(self._open)))
        more = max(_BLOCK_TOKENS, BLOCKS * _BLOCK_TOKENS - len(before))
        tokens = np.concatenate([before, self._tokens.integers(0, 128_256, more, np.uint32)])
        if len(tokens) < (BLOCKS + _TURNS_MAX) * _BLOCK_TOKENS:
            self._open.append(tokens)
            del self._open[:-_OPEN_MAX]
        return tokens

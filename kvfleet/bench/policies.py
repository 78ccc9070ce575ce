"""What policies cost and what they keep: microseconds a block, and hit rates on a trace."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvfleet.core.policies import POLICIES
from kvfleet.sim.replay import Replay, replay
from kvfleet.sim.trace import Request, Trace

__all__ = ["MEASURES", "Cost", "Hits", "costs", "hits"]

MEASURES = (
    "cost: of all that a policy is asked for, in CPU time for each block that a request has: a full cache serves "
    "prompts of {blocks} blocks, two in three of them continuing one of the last. Hits: blocks found, of a trace's."
)
BLOCKS = 32  # of a prompt
_SEED = 20250101
_TURNS = 3
_PAUSE_S = 0.01  # between requests


@dataclass(frozen=True, slots=True)
class Cost:
    """What one policy costs with so many resident blocks."""

    policy: str
    resident: int
    us_per_block: float


@dataclass(frozen=True, slots=True)
class Hits:
    """What share of a trace's blocks one policy finds, with room for so many."""

    policy: str
    capacity_blocks: int
    hit_rate: float


def costs(policies: Sequence[str], residents: Sequence[int], num_requests: int) -> Iterator[Cost]:
    """Measure each policy with each number of resident blocks.

    Args:
        policies: names.
        residents: blocks there is room for.
        num_requests: that are timed, after the cache is full.
    """
    for resident in residents:
        for name in policies:
            node = Replay(POLICIES[name](resident), resident)
            requests = _requests(resident)
            for _ in range(2 * resident // BLOCKS + 1):
                node.request(next(requests))
            timed = [next(requests) for _ in range(num_requests)]
            begun = time.process_time()
            for request in timed:
                node.request(request)
            passed = time.process_time() - begun
            yield Cost(name, resident, 1e6 * passed / sum(len(request.keys) for request in timed))


def hits(policies: Sequence[str], capacities: Sequence[int], trace: Trace) -> Iterator[Hits]:
    """Replay a trace for each policy and capacity, in blocks."""
    for capacity in capacities:
        for name in policies:
            found = replay(trace, POLICIES[name](capacity), capacity)
            yield Hits(name, capacity, found / max(1, trace.references))


def _requests(resident: int) -> Iterator[Request]:
    """Prompts of conversations, without end; each is continued within a quarter of what there is room for."""
    chance = random.Random(_SEED)
    waiting: list[tuple[int, ...]] = []
    number, now = 0, 0.0
    while True:
        now += _PAUSE_S
        keys: tuple[int, ...] = ()
        if waiting and chance.random() < 1 - 1 / _TURNS:
            keys = waiting.pop(chance.randrange(len(waiting)))
        keys += tuple(range(number, number + max(1, BLOCKS - len(keys))))
        number += BLOCKS
        if len(keys) < BLOCKS + _TURNS:
            waiting.append(keys)
            del waiting[: -max(1, resident // (4 * BLOCKS))]
        yield Request(now, keys, len(keys), 0)

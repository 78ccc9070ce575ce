"""The most that a cache could hit which knows the future."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from kvfleet.sim.trace import Request, Trace

__all__ = ["best_hits", "best_hits_of"]


def best_hits(trace: Trace, capacity_blocks: int) -> int:
    """The most whole blocks that one cache of `capacity_blocks` can hit on a trace. See `best_hits_of`."""
    return best_hits_of(trace.requests, capacity_blocks)


def best_hits_of(requests: Sequence[Request], capacity_blocks: int) -> int:
    """The most whole blocks that a cache can hit which may keep `capacity_blocks` from each request to the next.

    Belady's MIN with bypass (Belady 1966; Michaud 2016): a block that was used is worth keeping until its next use or
    not at all; of all that could be kept, those whose next use is farthest go. Of intervals between two uses of a
    block, where at most `capacity_blocks` may overlap, the most are kept like that (Carlisle and Lloyd 1995).

    It is exact for prefixes too: a block's next use is never later than that of a block behind it, so nothing is kept
    without what is before it, if of blocks that are used next at the same time the last of the prefix goes first.

    It is an upper bound for a cache on one node, of blocks of one size, that only holds what was asked of it. A request
    counts as one moment: what it needs is hit if it was kept from the request before. All of what the bound leaves
    out makes real caches hit less: room for a prompt while it is written, times until a block is ready. Several nodes
    with the same blocks in all hit no more.

    Args:
        requests: in the order of their times.
        capacity_blocks: of the cache, at least 0.
    """
    assert capacity_blocks >= 0
    next_uses = _next_uses(requests)
    ending = [0] * len(requests)  # blocks kept for each request: those used next there differ in nothing else
    farthest: list[int] = []  # negated, of all requests that something was kept for
    kept = hits = 0
    for number, uses in enumerate(next_uses):
        hits += ending[number]
        kept -= ending[number]
        for use in uses:
            if not ending[use]:
                heappush(farthest, -use)
            ending[use] += 1
        kept += len(uses)
        while kept > capacity_blocks:
            last = -farthest[0]
            dropped = min(ending[last], kept - capacity_blocks)
            ending[last] -= dropped
            kept -= dropped
            if not ending[last]:
                heappop(farthest)
        assert 0 <= kept <= capacity_blocks
    return hits


def _next_uses(requests: Sequence[Request]) -> list[list[int]]:
    """For each request the numbers of those that use its blocks next, one for each block that is used again."""
    upcoming: dict[int, int] = {}
    next_uses: list[list[int]] = [[] for _ in requests]
    for number in range(len(requests) - 1, -1, -1):
        keys = requests[number].keys
        next_uses[number] = [upcoming[key] for key in keys if key in upcoming]
        upcoming.update(dict.fromkeys(keys, number))
    return next_uses

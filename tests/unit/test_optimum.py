"""The offline optimum against all that could have been done."""

from __future__ import annotations

from functools import cache
from itertools import chain, combinations
from random import Random

import pytest

from kvfleet.sim.optimum import best_hits, best_hits_of
from kvfleet.sim.trace import Request, Trace


def requests_of(*prompts):
    return [Request(float(at), tuple(keys), len(keys), 0) for at, keys in enumerate(prompts)]


def tried(requests, capacity, *, prefixes):
    """The most hits of all choices of what to keep after each request."""

    @cache
    def best(at, kept):
        if at == len(requests):
            return 0
        keys = requests[at].keys
        found = [key in kept for key in keys]
        hits = (found.index(False) if False in found else len(found)) if prefixes else sum(found)
        here = kept | frozenset(keys)
        sizes = range(min(capacity, len(here)) + 1)
        choices = chain.from_iterable(combinations(sorted(here), size) for size in sizes)
        return hits + max(best(at + 1, frozenset(choice)) for choice in choices)

    return best(0, frozenset())


def test_by_hand():
    """With room for two blocks, 1 and 2 are kept over the two prompts that are never asked again."""
    requests = requests_of([1, 2], [3, 4], [5], [1, 2], [1, 6])
    assert [best_hits_of(requests, room) for room in (0, 1, 2, 3)] == [0, 2, 3, 3]
    assert best_hits(Trace(1, requests), 2) == 3
    assert best_hits_of([], 5) == 0


@pytest.mark.parametrize("number", range(12))
def test_nothing_does_better(number):
    """Prompts out of a small tree: the bound is what can be had, also where a hit needs all blocks before it."""
    draw = Random(number)
    prompts = []
    for _ in range(7):
        keys, node = [], 0
        for _ in range(draw.randint(1, 3)):
            node = 3 * node + draw.randint(1, 2)
            keys.append(node)
        prompts.append(keys)
    requests = requests_of(*prompts)
    for room in (1, 2, 3):
        assert (
            best_hits_of(requests, room)
            == tried(requests, room, prefixes=True)
            == tried(requests, room, prefixes=False)
        )


def test_more_room_never_hits_less():
    draw = Random(1)
    requests = requests_of(*([draw.randrange(50)] for _ in range(2000)))
    hits = [best_hits_of(requests, room) for room in range(60)]
    assert hits == sorted(hits)
    assert hits[0] == 0
    assert hits[50:] == [2000 - 50] * 10

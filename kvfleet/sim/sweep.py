"""Simulations of one trace under several fleets."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

from kvfleet.sim.config import SimConfig
from kvfleet.sim.fleet import SimFleet
from kvfleet.sim.report import Report, report_of
from kvfleet.sim.trace import Request

__all__ = ["grid", "simulate"]

_TELL_EVERY = 256  # requests


def simulate(
    requests: Iterable[Request],
    block_tokens: int,
    config: SimConfig,
    *,
    on_progress: Callable[[int], None] = lambda _: None,
) -> Report:
    """Have a fleet serve a trace.

    Args:
        requests: in the order of their times; taken one by one, so that a generator needs no memory.
        block_tokens: tokens in a block of the trace.
        config: of the fleet.
        on_progress: told how many requests were taken, now and then.
    """
    fleet = SimFleet(config, block_tokens)

    def told() -> Iterator[Request]:
        number = 0
        for number, request in enumerate(requests, 1):
            yield request
            if number % _TELL_EVERY == 0:
                on_progress(number)
        on_progress(number)

    with _uncollected():
        fleet.run(told())
    return report_of(fleet, block_tokens)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's search for circles of garbage: a fleet makes none, and it takes a tenth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def grid(
    config: SimConfig, num_nodes: Sequence[int], dram_bytes: Sequence[int], policies: Sequence[str]
) -> list[SimConfig]:
    """All combinations of some settings; the others are as in `config`."""
    return [
        replace(config, num_nodes=nodes, dram_bytes=dram, policy=policy)
        for policy, nodes, dram in product(policies, num_nodes, dram_bytes)
    ]

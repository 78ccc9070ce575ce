"""Traffic by the name of its class, or from a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from random import Random

from kvfleet.errors import ConfigError
from kvfleet.sim.generators import WORKLOADS, Workload, generate
from kvfleet.sim.prompts import Source
from kvfleet.sim.trace import load_trace
from kvfleet.sim.workloads import scaled
from kvfleet.sizing.traffic import Traffic

__all__ = ["LINGER_S", "REQUESTS", "traffic_of_trace", "traffic_of_workload"]

LINGER_S = 60.0
"""A session counts as there for so long after its last request."""

REQUESTS = 2_400
"""Of a simulation: it takes a few seconds."""

_GENERATIONS = 4  # of sessions, one after the other, in these requests
_SESSIONS_MIN = 16
_COUNTED_FROM = 0.4  # of the requests: those before fill the cache, and the fleet with sessions
_BLOCKS = 64  # of a prompt at its longest: coarser than a fleet's blocks, so that simulations are short
_BLOCK_MIN = 256
_SAMPLE = 400  # sessions that lengths and durations are taken from
_SHORTER = 0.9  # of all sessions never get as long as the context that was given
_ENDLESS = 1 << 40
# Things that sessions have in common. A share of the sessions has the same share of them.
_COMMON = ("assistants", "documents", "kinds", "repositories")


def traffic_of_trace(path: Path) -> Traffic:
    """All requests of a trace: they are all that the fleet gets.

    Raises:
        ConfigError: it cannot be read.
    """
    trace = load_trace(path)
    return Traffic(name=path.name, block_tokens=trace.block_tokens, requests=list(trace.requests))


def traffic_of_workload(
    name: str, context_tokens: int, sessions: int, *, seed: int = 0, requests: int = REQUESTS
) -> Traffic:
    """Requests of a class of workload, by a share of the sessions that is quickly simulated.

    Args:
        name: of the class.
        context_tokens: that nine in ten sessions stay below; all texts are made longer or shorter for that. The others
            end there.
        sessions: that are there at once.
        seed: of all draws.
        requests: to make up; fewer are simulated sooner, and say less.

    Raises:
        ConfigError: there is no such class.
    """
    if name not in WORKLOADS:
        raise ConfigError("workload", f"must be one of {', '.join(WORKLOADS)}, is {name!r}")
    workload = _fitted(WORKLOADS[name], context_tokens, seed)
    lives = _lives(workload, seed)
    a_session = sum(life.requests for life in lives) / len(lives)
    simulated = min(sessions, max(_SESSIONS_MIN, int(requests / _GENERATIONS / a_session)))
    share = simulated / sessions
    common = {
        one.name: max(1, round(getattr(workload, one.name) * share)) for one in fields(workload) if one.name in _COMMON
    }
    seconds = sum(life.seconds for life in lives) / len(lives)
    made = list(
        generate(
            replace(workload, **common),
            requests=requests,
            rate=simulated / seconds * workload.requests_mean,
            block_tokens=_block_tokens(context_tokens),
            seed=seed,
        )
    )
    return Traffic(
        name=name,
        block_tokens=_block_tokens(context_tokens),
        requests=made,
        share=share,
        counted_from_s=made[int(_COUNTED_FROM * len(made))].time_s,
    )


def _block_tokens(context_tokens: int) -> int:
    """A power of two."""
    wanted = max(_BLOCK_MIN, context_tokens // _BLOCKS)
    return 1 << (wanted - 1).bit_length()


@dataclass(frozen=True, slots=True)
class _Life:
    """A session: its requests, the tokens of its longest prompt, how long it is there."""

    requests: int
    tokens: int
    seconds: float


def _lives(workload: Workload, seed: int) -> Sequence[_Life]:
    source = Source(Random(seed), _ENDLESS)
    lives = []
    for _ in range(_SAMPLE):
        asks = list(workload.session(source))
        seconds = sum(ask.pause_s for ask in islice(asks, 1, None)) + LINGER_S
        lives.append(_Life(len(asks), max(ask.prompt_tokens for ask in asks), seconds))
    return lives


def _fitted(workload: Workload, context_tokens: int, seed: int) -> Workload:
    """With texts so long that nine in ten sessions stay below the context."""
    lengths = sorted(life.tokens for life in _lives(replace(workload, context_tokens=_ENDLESS), seed))
    factor = context_tokens / lengths[int(_SHORTER * len(lengths))]
    return replace(scaled(workload, factor), context_tokens=context_tokens)

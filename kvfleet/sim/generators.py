"""Traffic that is made up, by class of workload. The same seed gives the same requests.

Sessions begin at random (a Poisson process); each is a row of requests whose prompts mostly continue those before.
Lengths and pauses are lognormal, popularity follows Zipf's law. The defaults are of the order of what is published
(Mooncake and Alibaba Bailian for chat, SWE-bench runs for agents); they are no fit of any trace. Not made up: times
of day, bursts, sessions that take the same documents at one time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, islice
from random import Random

from kvfleet.sim.prompts import Ask, Source
from kvfleet.sim.trace import Request
from kvfleet.sim.workloads import WORKLOADS, Workload

__all__ = ["WORKLOADS", "Workload", "generate"]


@dataclass(slots=True)
class _Session:
    """A session under way."""

    name: str
    asks: Iterator[Ask]
    ask: Ask
    turn: int = 1


def generate(
    workload: Workload,
    *,
    requests: int,
    rate: float,
    block_tokens: int = 512,
    seed: int = 0,
    final_share: float = 0.0,
) -> Iterator[Request]:
    """Requests in the order of their times, one by one.

    At the beginning no session is under way: the rate is reached once the first sessions have ended.

    Args:
        workload: one of `WORKLOADS`, or with other lengths: `scaled`, `dataclasses.replace`.
        requests: how many.
        rate: requests a second of the whole fleet.
        block_tokens: tokens in a block.
        seed: of all draws.
        final_share: share of the sessions' last requests that say they are the last, in [0, 1].
    """
    assert rate > 0
    assert 0 <= final_share <= 1
    return islice(
        _all(workload, rate / workload.requests_mean, final_share, Source(Random(seed), block_tokens)), requests
    )


def _all(workload: Workload, sessions_per_s: float, final_share: float, source: Source) -> Iterator[Request]:
    """All requests of sessions that begin now and then."""
    draw, numbers = source.draw, count()
    waiting: list[tuple[float, int, _Session]] = []  # by the time of what they ask next
    begins = draw.expovariate(sessions_per_s)
    while True:
        while not waiting or begins <= waiting[0][0]:
            asks = workload.session(source)
            number = next(numbers)
            heappush(waiting, (begins, number, _Session(str(number), asks, next(asks))))
            begins += draw.expovariate(sessions_per_s)
        time_s, number, session = heappop(waiting)
        ask, turn = session.ask, session.turn
        following = next(session.asks, None)
        final = following is None and draw.random() < final_share
        yield Request(time_s, ask.keys, ask.prompt_tokens, ask.output_tokens, session.name, turn, final)
        if following is not None:
            session.ask, session.turn = following, turn + 1
            heappush(waiting, (time_s + following.pause_s, number, session))

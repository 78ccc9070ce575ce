"""What requests come: of a class of workload, or of a recorded trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvfleet.sim.trace import Request

__all__ = ["Reuse", "Traffic", "reuse_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests, and what part of the fleet's they are.

    Attributes:
        name: of the class of workload, or of the file.
        block_tokens: tokens in a block of theirs.
        requests: in the order of their times.
        share: of the fleet's sessions that these are, in (0, 1]. A cache for them has the same share of the fleet's.
        counted_from_s: requests before it only fill the cache.
    """

    name: str
    block_tokens: int
    requests: Sequence[Request]
    share: float = 1.0
    counted_from_s: float = 0.0

    def __post_init__(self) -> None:
        assert 0 < self.share <= 1
        assert self.block_tokens > 0

    @property
    def span_s(self) -> float:
        """From the first request to the last."""
        return self.requests[-1].time_s - self.requests[0].time_s if self.requests else 0.0

    def counted(self) -> list[Request]:
        """The requests that count."""
        return [request for request in self.requests if request.time_s >= self.counted_from_s]

    def per_s(self) -> float:
        """Requests a second of the whole fleet; 0 if they all come at once."""
        counted = self.counted()
        seconds = counted[-1].time_s - counted[0].time_s if counted else 0.0
        return (len(counted) - 1) / seconds / self.share if seconds else 0.0


@dataclass(frozen=True, slots=True)
class Reuse:
    """What a cache could hold at best.

    Attributes:
        repeated: share of the tokens of prompts that came before, as whole blocks of a known prefix.
        blocks: distinct ones, of the requests at hand.
    """

    repeated: float
    blocks: int


def reuse_of(traffic: Traffic) -> Reuse:
    """What an endless cache would hit, and how many blocks it would hold in the end."""
    seen: set[int] = set()
    known = tokens = 0
    for request in traffic.requests:
        hits = next((at for at, key in enumerate(request.keys) if key not in seen), len(request.keys))
        if request.time_s >= traffic.counted_from_s:
            known += hits * traffic.block_tokens
            tokens += request.prompt_tokens
        seen.update(request.keys)
    return Reuse(known / tokens if tokens else 0.0, len(seen))

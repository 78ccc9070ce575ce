"""What a node knows of the nodes it reads from: which of them to leave alone, and whom to ask first."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from kvfleet.core.inventory import NodeId

__all__ = ["Holders"]

_FIRST_PAUSE_S = 0.5
_PAUSE_MAX_S = 5.0
_RELAPSE_PAUSE_MAX_S = 15.0
_FORGET_S = 300.0
_SUSPECTS_MAX = 1024


@dataclass(slots=True)
class _Suspect:
    """A holder that has failed.

    Attributes:
        avoided: False while it is only doubted, or has answered.
        recovered: it has answered a probe. It stays remembered until it has sent blocks.
        relapses: how often it failed after that.
        named_s: when it was last named as a holder, or failed, to within 5 minutes.
        named: since then.
        pause_s: before the next probe, if this one fails.
        due: seconds, when the next probe is to be made; infinite while one is under way.
    """

    avoided: bool
    named_s: float
    pause_s: float
    due: float
    named: bool = False
    recovered: bool = False
    relapses: int = 0


class Holders:
    """Holders that are avoided until they answer a probe, and the bytes that are on their way from each.

    A holder that fails costs whoever waits for it; nobody is to wait for it again before it has answered something
    cheap. Probes come 0.5 s after the failure, then after pauses that double up to 5 s. One that answers and then fails
    again is left alone for longer each time, up to 15 s. A holder that nobody names for 5 minutes is forgotten: a
    node that is gone is not probed for ever.

    Bounded: at most 1024 of them are remembered; the one that failed first is forgotten for another.

    Threads: none of its own; calls must not overlap. Times are passed in, in seconds.

    Args:
        node: whose view this is. Of equally loaded holders different nodes prefer different ones.
    """

    def __init__(self, node: NodeId) -> None:
        self._node = node
        self._suspects: dict[NodeId, _Suspect] = {}
        self._inflight_bytes: Counter[NodeId] = Counter()

    @property
    def avoided(self) -> frozenset[NodeId]:
        """Those that are not to be asked."""
        return frozenset(node for node, suspect in self._suspects.items() if suspect.avoided)

    def failed(self, node: NodeId, now: float) -> None:
        """A holder failed or was slow: it is avoided from now on."""
        suspect = self._suspect(node, now, now + _FIRST_PAUSE_S)
        if suspect.recovered:
            suspect.recovered = False
            suspect.relapses += 1
            suspect.due = now + min(_RELAPSE_PAUSE_MAX_S, _FIRST_PAUSE_S * 4**suspect.relapses)
        suspect.avoided = True

    def doubted(self, node: NodeId, now: float) -> None:
        """A holder sent nothing to one who could not wait long: it is probed at once, and used meanwhile."""
        suspect = self._suspect(node, now, now)
        if suspect.recovered:
            suspect.recovered, suspect.due = False, now

    def _suspect(self, node: NodeId, now: float, due: float) -> _Suspect:
        if node not in self._suspects:
            if len(self._suspects) >= _SUSPECTS_MAX:
                del self._suspects[next(iter(self._suspects))]
            self._suspects[node] = _Suspect(avoided=False, named_s=now, pause_s=_FIRST_PAUSE_S, due=due)
        return self._suspects[node]

    def answered(self, node: NodeId) -> None:
        """A probe had an answer: the holder is used again."""
        suspect = self._suspects.get(node)
        if suspect is None or not (suspect.avoided or suspect.relapses):
            self._suspects.pop(node, None)
        else:
            suspect.avoided, suspect.recovered = False, True
            suspect.pause_s, suspect.due = _FIRST_PAUSE_S, float("inf")

    def worked(self, node: NodeId) -> None:
        """A holder has sent what was asked of it: if it failed before, that is forgotten."""
        suspect = self._suspects.get(node)
        if suspect is not None and suspect.recovered:
            del self._suspects[node]

    def due(self, now: float) -> list[NodeId]:
        """Holders to be probed now. Each is due again only after `unanswered`."""
        for node, suspect in list(self._suspects.items()):
            if now >= suspect.named_s + _FORGET_S:
                if not suspect.named:
                    del self._suspects[node]
                suspect.named_s, suspect.named = now, False
        due = [node for node, suspect in self._suspects.items() if now >= suspect.due]
        for node in due:
            self._suspects[node].due = float("inf")
        return due

    def unanswered(self, node: NodeId, now: float) -> None:
        """A probe had no answer: the holder is avoided, and probed again after a longer pause."""
        suspect = self._suspects.get(node)
        if suspect is not None and not suspect.recovered:
            suspect.avoided = True
            suspect.pause_s = min(_PAUSE_MAX_S, 2 * suspect.pause_s)
            suspect.due = now + suspect.pause_s

    def next_due(self) -> float:
        """When the next probe is due, seconds; infinite if none is."""
        times = (min(suspect.due, suspect.named_s + _FORGET_S) for suspect in self._suspects.values())
        return min(times, default=float("inf"))

    def began(self, node: NodeId, num_bytes: int) -> None:
        """So many bytes were asked of a holder."""
        assert num_bytes > 0
        self._inflight_bytes[node] += num_bytes

    def ended(self, node: NodeId, num_bytes: int) -> None:
        """They came, or will not."""
        assert 0 < num_bytes <= self._inflight_bytes[node]
        self._inflight_bytes[node] -= num_bytes
        if not self._inflight_bytes[node]:
            del self._inflight_bytes[node]

    def order(self, candidates: Iterable[NodeId]) -> list[NodeId]:
        """Those of some holders that may be asked, the one with the fewest bytes on their way to us first."""
        candidates = list(candidates)
        for node in self._suspects.keys() & candidates:
            self._suspects[node].named = True
        avoided = self.avoided
        usable = (node for node in candidates if node not in avoided and node != self._node)
        return sorted(usable, key=lambda node: (self._inflight_bytes[node], self._distance(node), node))

    def _distance(self, node: NodeId) -> bytes:
        return hashlib.sha256(f"{self._node}-{node}".encode()).digest()

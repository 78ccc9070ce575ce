"""Who gets a request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence

from typing_extensions import override

from kvfleet.core.block import BlockKey
from kvfleet.sim.config import RouterName

__all__ = ["Router", "router_of"]

_KEYS_MAX = 1_000_000
_IMBALANCE_S = 2.0
_MIX = 0x9E3779B97F4A7C15

Busy = Callable[[int], float]
"""Seconds of work that wait at a node, by its number."""


class Router(ABC):
    """Chooses nodes. The same requests get the same nodes."""

    @abstractmethod
    def choose(self, keys: Sequence[BlockKey], busy: Busy) -> int:
        """The number of the node for a request of which `keys` are the whole blocks."""


class RoundRobin(Router):
    """Each in turn."""

    def __init__(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes
        self._next = -1

    @override
    def choose(self, keys: Sequence[BlockKey], busy: Busy) -> int:
        self._next = (self._next + 1) % self._num_nodes
        return self._next


class PrefixAware(Router):
    """The node that had the longest part of the prefix last, unless it is much busier than others.

    Others are the less busy one of two that are drawn. After Ray Serve LLM's PrefixCacheAffinityRouter (2.60), which
    keeps the beginnings of prompts in a tree: it too knows what was sent where, not what a node still holds. At most a
    million blocks are remembered.
    """

    def __init__(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes
        self._drawn = 0
        self._nodes: OrderedDict[BlockKey, int] = OrderedDict()  # which had a block last

    @override
    def choose(self, keys: Sequence[BlockKey], busy: Busy) -> int:
        chosen = other = min(self._draw(), self._draw(), key=busy)
        nodes = self._nodes
        known = next((nodes[key] for key in reversed(keys) if key in nodes), None)
        if known is not None:
            chosen = known if busy(known) - busy(other) <= _IMBALANCE_S else other
        for key in keys:
            nodes[key] = chosen
            nodes.move_to_end(key)
        while len(nodes) > _KEYS_MAX:
            nodes.popitem(last=False)
        return chosen

    def _draw(self) -> int:
        """A node, as if by chance: multiplicative hashing of a counter (Knuth, TAOCP 3, 6.4)."""
        self._drawn += 1
        return ((self._drawn * _MIX & 0xFFFF_FFFF_FFFF_FFFF) >> 32) % self._num_nodes


def router_of(name: RouterName, num_nodes: int) -> Router:
    """A new router."""
    return RoundRobin(num_nodes) if name == "round-robin" else PrefixAware(num_nodes)

"""Eviction policies, one a file, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvfleet.core.policies.arc import Arc
from kvfleet.core.policies.base import Newcomer, Policy
from kvfleet.core.policies.holdturn import HoldTurn
from kvfleet.core.policies.lfu import AgingLFU
from kvfleet.core.policies.lru import LeafFirstLRU
from kvfleet.core.policies.s3fifo import S3Fifo
from kvfleet.core.policies.secondsight import SecondSight

__all__ = ["DEFAULT", "POLICIES", "Newcomer", "Policy", "PolicyFactory"]

PolicyFactory = Callable[[int], Policy]
"""`factory(capacity)` makes an empty policy for about so many blocks, at least 1: it bounds what a policy remembers."""

DEFAULT = "hold-turn"

POLICIES: Mapping[str, PolicyFactory] = MappingProxyType(
    {
        "lru": lambda _capacity: LeafFirstLRU(),
        "s3-fifo": S3Fifo,
        "arc": Arc,
        "lfu": lambda _capacity: AgingLFU(),
        "second-sight": SecondSight,
        "hold-turn": HoldTurn,
    }
)

"""One KV cache for a fleet of inference nodes, on Ray.

`start` or `connect` gives a `Fleet`; `Fleet.client(model)` what an engine process calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfleet.client import Client
from kvfleet.config import DriveConfig, FleetConfig
from kvfleet.core.hints import Hints
from kvfleet.core.layout import BlockLayout, ModelSpec
from kvfleet.errors import (
    ConfigError,
    CorruptBlockError,
    DeadlineExceededError,
    DirectoryAvoidedError,
    DirectoryUnavailableError,
    KvFleetError,
    LayoutMismatchError,
    ManagerAvoidedError,
    StaleEpochError,
    TierError,
    TierFullError,
    TierUnavailableError,
)
from kvfleet.hits import PrefixHit

if TYPE_CHECKING:
    from kvfleet.fleet import Fleet, connect, start

__all__ = [
    "BlockLayout",
    "Client",
    "ConfigError",
    "CorruptBlockError",
    "DeadlineExceededError",
    "DirectoryAvoidedError",
    "DirectoryUnavailableError",
    "DriveConfig",
    "Fleet",
    "FleetConfig",
    "Hints",
    "KvFleetError",
    "LayoutMismatchError",
    "ManagerAvoidedError",
    "ModelSpec",
    "PrefixHit",
    "StaleEpochError",
    "TierError",
    "TierFullError",
    "TierUnavailableError",
    "connect",
    "start",
]


def __getattr__(name: str) -> object:
    """Import `kvfleet.fleet`, and Ray with it, when something of it is first asked for."""
    if name in {"Fleet", "connect", "start"}:
        from kvfleet import fleet

        return getattr(fleet, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""vLLM and the fleet, by two doors.

`KVFleetConnector` goes between vLLM's own memory and the fleet, on CPUs and GPUs. `KVFleetTier` stands behind vLLM's
OffloadingConnector, between its CPU memory and the fleet. Their blocks have different bytes and are never shared.

vLLM is imported when one of the two is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvfleet.connectors.vllm.connector import KVFleetConnector
    from kvfleet.connectors.vllm.tier import KVFleetTier

__all__ = ["KVFleetConnector", "KVFleetTier", "register"]

_NAME = "KVFleetConnector"


def __getattr__(name: str) -> object:
    """Import a door when it is first asked for."""
    if name == "KVFleetConnector":
        from kvfleet.connectors.vllm.connector import KVFleetConnector

        return KVFleetConnector
    if name == "KVFleetTier":
        from kvfleet.connectors.vllm.tier import KVFleetTier

        return KVFleetTier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> None:
    """Make the name `KVFleetConnector` known to vLLM. vLLM's plug-in entry point calls it in each of its processes."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if _NAME not in KVConnectorFactory._registry:  # registering twice is an error there, calling twice is not
        KVConnectorFactory.register_connector(_NAME, __name__, _NAME)

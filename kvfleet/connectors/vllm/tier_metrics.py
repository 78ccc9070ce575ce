"""What the tier counts, in vLLM's own metrics. vLLM itself counts the tier's lookups, jobs and bytes besides."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingMetricMetadata

from kvfleet.counts import ClientStats

__all__ = ["TierMetrics"]

_LOADED = "vllm:kvfleet_tier_loaded_bytes"
_STORED = "vllm:kvfleet_tier_stored_bytes"
_DROPPED = "vllm:kvfleet_tier_dropped_blocks"
_FAULTS = "vllm:kvfleet_tier_faults"
_TIMEOUTS = "vllm:kvfleet_tier_lookup_timeouts"
_ERRORS = "vllm:kvfleet_tier_errors"

# name → (what it counts, its labels)
_METRICS: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        _LOADED: ("Bytes loaded from the fleet, by where they came from.", ("source",)),
        _STORED: ("Bytes stored in the fleet.", ()),
        _DROPPED: ("Blocks not stored, by reason.", ("reason",)),
        _FAULTS: ("Lookups that may have missed what is there, by reason.", ("reason",)),
        _TIMEOUTS: ("Chunks counted as misses because no answer came in time.", ()),
        _ERRORS: ("Faults of the tier, by where; each cost hits and nothing else.", ("where",)),
    }
)


class TierMetrics:
    """Turns totals into what vLLM wants: what has been added since the last report."""

    def __init__(self) -> None:
        self._reported: dict[tuple[str, str], int] = {}

    @staticmethod
    def definitions() -> dict[str, OffloadingMetricMetadata]:
        """For Prometheus."""
        return {name: OffloadingCounterMetadata(text, labels) for name, (text, labels) in _METRICS.items()}

    def restart(self) -> None:
        """The totals begin again at 0."""
        self._reported.clear()

    def report(self, client: ClientStats | None, timeouts: int, errors: Mapping[str, int]) -> OffloadingConnectorStats:
        """What is new.

        Args:
            client: totals of the fleet's client, if there is one.
            timeouts: total of lookups without answer.
            errors: "errors:" and where → how many since the last report.
        """
        totals = {(_TIMEOUTS, ""): timeouts}
        if client is not None:
            totals[_STORED, ""] = client.stored_bytes
            totals |= {(_LOADED, source.value): n for source, n in client.num_bytes.items()}
            totals |= {(_DROPPED, reason): n for reason, n in client.dropped_blocks.items()}
            totals |= {(_FAULTS, reason.value): n for reason, n in client.faults.items()}
        stats = OffloadingConnectorStats()
        for (name, label), total in totals.items():
            if new := total - self._reported.get((name, label), 0):
                self._reported[name, label] = total
                stats.increase_counter(name, new, (label,) if label else ())
        for where, count in errors.items():
            stats.increase_counter(_ERRORS, count, (where.removeprefix("errors:"),))
        return stats

"""What the connector has done, in vLLM's own log lines and Prometheus metrics.

Counts are named `noun` or `noun:label`; every one of them is a total since the last report.

| count | label | what |
|---|---|---|
| loads | | requests that a load was begun for, and ended |
| loads_cancelled | | requests that ended before their load |
| blocks | source or reason | blocks asked for in loads, by outcome |
| loaded_bytes | source | bytes that came |
| saved_blocks, saved_bytes | | stored in the fleet |
| dropped_blocks | reason | not stored: they cost a later recompute, nothing else |
| ignored_hints | | requests whose hints were wrong |
| errors | where | faults of ours that became misses |
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter as PrometheusCounter
from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["FleetMetrics", "FleetStats"]

# name of the count → (its label, what Prometheus tells about it)
_METRICS = {
    "loads": ("", "Loads from the kvfleet fleet that have ended."),
    "loads_cancelled": ("", "Loads whose request ended first."),
    "blocks": ("outcome", "Blocks asked for in loads, by where they came from or why they did not come."),
    "loaded_bytes": ("source", "Bytes loaded from the fleet."),
    "saved_blocks": ("", "Blocks stored in the fleet."),
    "saved_bytes": ("", "Bytes stored in the fleet."),
    "dropped_blocks": ("reason", "Blocks not stored in the fleet."),
    "ignored_hints": ("", "Requests whose kvfleet hints were wrong and are ignored."),
    "errors": ("where", "Faults of the connector; each became a miss."),
}


@dataclass
class FleetStats(KVConnectorStats):
    """Counts of one interval; see the module."""

    data: dict[str, Any] = field(default_factory=dict)

    @override
    def reset(self) -> None:
        self.data = {}

    @override
    def aggregate(self, other: KVConnectorStats) -> FleetStats:
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    @override
    def reduce(self) -> dict[str, int | float]:
        return dict(sorted(self.data.items()))

    @override
    def is_empty(self) -> bool:
        return not any(self.data.values())


class FleetMetrics(KVConnectorPromMetrics):
    """The counts as Prometheus counters `vllm:kvfleet_<count>`, one set an engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        assert PrometheusCounter in metric_types
        self._counters = {
            name: self._counter_cls(
                name=f"vllm:kvfleet_{name}", documentation=text, labelnames=[*labelnames, *([label] if label else [])]
            )
            for name, (label, text) in _METRICS.items()
        }

    @override
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for count, number in transfer_stats_data.items():
            name, _, label = count.partition(":")
            values = [*self.per_engine_labelvalues[engine_idx], *([label] if label else [])]
            self._counters[name].labels(*values).inc(number)

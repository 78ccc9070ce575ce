"""What a fleet tells of itself through `ray.util.metrics`: Ray's own agents export it to Prometheus.

Managers and the directory publish, each heartbeat; clients do not: their managers read their totals. All metrics have
the label `fleet`, those of managers `node` (Ray's id) as well. Counters count what has happened since the process that
publishes them was started, and begin again at 0 with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeAlias

from typing_extensions import override

if TYPE_CHECKING:
    from kvfleet.node.catalogstatus import CatalogStatus
    from kvfleet.node.directory import DirectoryStatus
    from kvfleet.node.drivestatus import DriveStatus
    from kvfleet.node.status import NodeStatus

__all__ = ["METRICS", "Meter", "Metric", "RaySink", "Sink", "directory_values", "node_values"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: a counter if its name ends in `_total`, else a gauge.

    Attributes:
        unit: what it counts.
        label: besides `fleet` and `node`; "" if none.
        text: for Prometheus.
    """

    unit: str
    label: str
    text: str


METRICS: Mapping[str, Metric] = {
    "kvfleet_lookups_total": Metric("lookups", "", "Prompts that engines looked up."),
    "kvfleet_asked_blocks_total": Metric("blocks", "", "Blocks that engines asked for."),
    "kvfleet_blocks_total": Metric("blocks", "outcome", "Blocks asked for, by where they came from or why not."),
    "kvfleet_loaded_bytes_total": Metric("bytes", "tier", "Bytes copied into engines' memory, by where they were."),
    "kvfleet_stored_blocks_total": Metric("blocks", "", "Blocks that engines stored."),
    "kvfleet_stored_bytes_total": Metric("bytes", "", "Bytes that engines stored."),
    "kvfleet_dropped_blocks_total": Metric("blocks", "reason", "Blocks that stores gave up."),
    "kvfleet_used_bytes": Metric("bytes", "tier", "Bytes in slots that hold or await a block, or of objects."),
    "kvfleet_capacity_bytes": Metric("bytes", "tier", "Size of a tier on the node; of the shared one, its limit."),
    "kvfleet_resident_blocks": Metric("blocks", "tier", "Blocks in a tier: the shared one is told of by its keeper."),
    "kvfleet_reserved_blocks": Metric("blocks", "tier", "Blocks that are being written."),
    "kvfleet_held_bytes": Metric("bytes", "tier", "Bytes in slots that clients hold."),
    "kvfleet_avoided_holders": Metric("holders", "", "Nodes, and the shared tier, not asked until they answer."),
    "kvfleet_unsaved_blocks": Metric("blocks", "", "Blocks that wait for a copy in the shared tier."),
    "kvfleet_evicted_blocks_total": Metric("blocks", "tier", "Blocks that had to make room."),
    "kvfleet_lost_blocks_total": Metric("blocks", "", "Of those, blocks without a copy in the shared tier."),
    "kvfleet_retired_blocks_total": Metric("blocks", "", "Blocks that will not be used again, as engines said."),
    "kvfleet_drive_failed": Metric("drives", "drive", "1 while a drive is out of use, else 0."),
    "kvfleet_drive_budget_ratio": Metric("ratio", "drive", "Share of the day's write budget that is spent."),
    "kvfleet_drive_life_days": Metric("days", "drive", "How long a drive lasts if it is written as until now."),
    "kvfleet_drive_written_bytes_total": Metric("bytes", "drive", "Bytes written to a drive, its index included."),
    "kvfleet_corrupt_blocks_total": Metric("blocks", "tier", "Blocks whose bytes were wrong when they were read."),
    "kvfleet_saved_blocks_total": Metric("blocks", "", "Blocks written to the shared tier."),
    "kvfleet_save_failures_total": Metric("writes", "", "Writes to the shared tier that failed."),
    "kvfleet_shared_requests_total": Metric("blocks", "outcome", "Blocks for or of the shared tier, by what they met."),
    "kvfleet_shared_outages_total": Metric("outages", "way", "Times that the shared tier was left alone."),
    "kvfleet_sent_bytes_total": Metric("bytes", "", "Bytes sent to other nodes."),
    "kvfleet_resyncs_total": Metric("inventories", "", "Whole inventories sent to the directory."),
    "kvfleet_directory_rows": Metric("rows", "", "Records that the directory knows."),
    "kvfleet_directory_rows_max": Metric("rows", "", "Records that the directory takes at most."),
    "kvfleet_directory_bytes": Metric("bytes", "", "Memory of the directory, estimated."),
    "kvfleet_directory_nodes": Metric("nodes", "", "Nodes that the directory knows."),
    "kvfleet_directory_refused_rows_total": Metric("rows", "", "Records that the directory had no room for."),
    "kvfleet_directory_lookups_total": Metric("lookups", "", "Lookups that the directory answered."),
}
"""Every metric: `kvfleet_<noun>_<unit>[_total]`."""

Values: TypeAlias = Mapping[tuple[str, str], float]
"""(metric, its own label's value or "") → gauge, or a counter's total."""


def node_values(status: NodeStatus) -> dict[tuple[str, str], float]:
    """What a manager publishes."""
    totals = status.totals
    values: dict[tuple[str, str], float] = {
        ("kvfleet_lookups_total", ""): totals.lookups,
        ("kvfleet_asked_blocks_total", ""): totals.asked_blocks,
        ("kvfleet_stored_blocks_total", ""): totals.stored_blocks,
        ("kvfleet_stored_bytes_total", ""): totals.stored_bytes,
        ("kvfleet_used_bytes", "dram"): status.used_bytes,
        ("kvfleet_capacity_bytes", "dram"): status.capacity_bytes,
        ("kvfleet_resident_blocks", "dram"): status.blocks,
        ("kvfleet_reserved_blocks", "dram"): status.reserved_blocks,
        ("kvfleet_held_bytes", "dram"): status.held_bytes,
        ("kvfleet_avoided_holders", ""): len(status.avoided),
        ("kvfleet_unsaved_blocks", ""): status.unsaved_blocks,
        ("kvfleet_evicted_blocks_total", "dram"): status.evicted_blocks,
        ("kvfleet_lost_blocks_total", ""): status.lost_blocks,
        ("kvfleet_retired_blocks_total", ""): status.retired_blocks,
        ("kvfleet_saved_blocks_total", ""): status.saved_blocks,
        ("kvfleet_save_failures_total", ""): status.save_failures,
        ("kvfleet_sent_bytes_total", ""): status.sent_bytes,
        ("kvfleet_resyncs_total", ""): status.resyncs,
    }
    values |= _drive_values(status.drives) if status.drives else {}
    values |= _shared_values(status.shared_counts) if status.shared_counts else {}
    values |= _catalog_values(status.catalog) if status.catalog is not None else {}
    values |= {("kvfleet_blocks_total", name): n for name, n in totals.outcomes.items() if name != "unclaimed"}
    values |= {("kvfleet_loaded_bytes_total", source): n for source, n in totals.bytes_by_source.items()}
    values |= {("kvfleet_dropped_blocks_total", reason): n for reason, n in totals.dropped_blocks.items()}
    return values


def _catalog_values(catalog: CatalogStatus) -> dict[tuple[str, str], float]:
    values: dict[tuple[str, str], float] = {
        ("kvfleet_used_bytes", "shared"): catalog.num_bytes,
        ("kvfleet_resident_blocks", "shared"): catalog.objects,
        ("kvfleet_evicted_blocks_total", "shared"): catalog.deleted,
    }
    if catalog.bytes_max is not None:
        values["kvfleet_capacity_bytes", "shared"] = catalog.bytes_max
    return values


def _drive_values(drives: Sequence[DriveStatus]) -> dict[tuple[str, str], float]:
    values: dict[tuple[str, str], float] = {
        ("kvfleet_used_bytes", "nvme"): sum(drive.used_bytes for drive in drives),
        ("kvfleet_capacity_bytes", "nvme"): sum(drive.capacity_bytes for drive in drives),
        ("kvfleet_resident_blocks", "nvme"): sum(drive.blocks for drive in drives),
        ("kvfleet_evicted_blocks_total", "nvme"): sum(drive.counts.evicted_blocks for drive in drives),
        ("kvfleet_corrupt_blocks_total", "nvme"): sum(drive.counts.corrupt_blocks for drive in drives),
    }
    for drive in drives:
        values["kvfleet_drive_failed", drive.directory] = not drive.works
        values["kvfleet_drive_written_bytes_total", drive.directory] = drive.total_bytes
        if isfinite(drive.life_days):
            values["kvfleet_drive_life_days", drive.directory] = drive.life_days
        if drive.day_bytes:  # known once it was open
            values["kvfleet_drive_budget_ratio", drive.directory] = drive.today_bytes / drive.day_bytes
    return values


def _shared_values(counts: Mapping[str, int]) -> dict[tuple[str, str], float]:
    values: dict[tuple[str, str], float] = {("kvfleet_corrupt_blocks_total", "shared"): counts.get("corrupt", 0)}
    for name, count in counts.items():
        way, _, what = name.partition("_")
        if what == "outages":
            values["kvfleet_shared_outages_total", way] = count
        else:
            values["kvfleet_shared_requests_total", name] = count
    return values


def directory_values(status: DirectoryStatus) -> dict[tuple[str, str], float]:
    """What the directory publishes."""
    stats = status.stats
    return {
        ("kvfleet_directory_rows", ""): stats.rows,
        ("kvfleet_directory_rows_max", ""): stats.capacity,
        ("kvfleet_directory_bytes", ""): stats.memory_bytes,
        ("kvfleet_directory_nodes", ""): len(stats.nodes),
        ("kvfleet_directory_refused_rows_total", ""): stats.refused,
        ("kvfleet_directory_lookups_total", ""): status.lookups,
    }


class Sink:
    """Where metrics go: nowhere. Neither call raises or waits."""

    def add(self, name: str, labels: Mapping[str, str], number: float) -> None:
        """Increase a counter by a positive number."""

    def set(self, name: str, labels: Mapping[str, str], number: float) -> None:
        """Give a gauge a new value."""


class Meter:
    """Tells a sink of totals what has been added since it was told last.

    Args:
        labels: of all metrics.
        before: totals of an earlier process, which has told of them.
    """

    def __init__(self, sink: Sink, labels: Mapping[str, str], before: Values | None = None) -> None:
        self._sink = sink
        self._labels = labels
        self._told = dict(before or {})

    def tell(self, values: Values) -> None:
        """Publish gauges and increments. A total that has become smaller counts from there."""
        for (name, value), number in values.items():
            label = METRICS[name].label
            labels = {**self._labels, label: value} if label else self._labels
            if not name.endswith("_total"):
                self._sink.set(name, labels, number)
                continue
            more = number - self._told.get((name, value), 0)
            self._told[name, value] = number
            if more > 0:
                self._sink.add(name, labels, more)


class RaySink(Sink):
    """Ray's metrics of this process, which must be one of Ray's workers."""

    def __init__(self) -> None:
        self._metrics: dict[str, Any] = {}

    def _metric(self, name: str, labels: Mapping[str, str]) -> Any:  # noqa: ANN401  a counter or a gauge
        from ray.util import metrics

        if name not in self._metrics:
            kind = metrics.Counter if name.endswith("_total") else metrics.Gauge
            self._metrics[name] = kind(name, METRICS[name].text, tuple(labels))
        return self._metrics[name]

    @override
    def add(self, name: str, labels: Mapping[str, str], number: float) -> None:
        self._metric(name, labels).inc(number, dict(labels))

    @override
    def set(self, name: str, labels: Mapping[str, str], number: float) -> None:
        self._metric(name, labels).set(number, dict(labels))

"""Metrics: what is told, as increments and gauges, with the names and labels of the table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import pytest
from typing_extensions import override

from kvfleet.core.directory import DirectoryStats, NodeId, NodeStats
from kvfleet.core.outcomes import Miss, Source
from kvfleet.core.totals import NAMES, Totals
from kvfleet.metrics import METRICS, Meter, RaySink, Sink, directory_values, node_values
from kvfleet.node.directory import DirectoryStatus
from kvfleet.node.drivestatus import DriveCounts, DriveStatus
from kvfleet.node.status import NodeStatus

LABELS = {"fleet": "f", "node": "n"}
TOTALS = Totals.of(range(1, len(NAMES) + 1))
DRIVE = DriveStatus(
    "/d", works=True, problem="", capacity_bytes=9, used_bytes=5, blocks=2, day_bytes=4, today_bytes=1, total_bytes=6,
    life_days=8.0, counts=DriveCounts(evicted_blocks=3, corrupt_blocks=1),
)  # fmt: skip
STATUS = NodeStatus(
    "n", 1, "", capacity_bytes=100, used_bytes=40, blocks=4, evicted_blocks=3, totals=TOTALS, drives=(DRIVE,),
    shared_counts={"read": 3, "corrupt": 1, "write_outages": 2},
)  # fmt: skip
DIRECTORY = DirectoryStatus(
    DirectoryStats((NodeStats(NodeId("n"), 1, 1, 1, True),), rows=7, shared=0, refused=2, capacity=10, departed=1),
    shared_listed=True,
    lookups=5,
)


class Recorder(Sink):
    """A sink that remembers."""

    def __init__(self) -> None:
        self.told: dict[tuple[str, str], float] = {}

    def note(self, name: str, labels: Mapping[str, str]) -> tuple[str, str]:
        own = METRICS[name].label
        assert set(labels) == {*LABELS, *([own] if own else [])}
        return name, labels.get(own, "")

    @override
    def add(self, name: str, labels: Mapping[str, str], number: float) -> None:
        assert name.endswith("_total")
        assert number > 0
        key = self.note(name, labels)
        self.told[key] = self.told.get(key, 0) + number

    @override
    def set(self, name: str, labels: Mapping[str, str], number: float) -> None:
        assert not name.endswith("_total")
        self.told[self.note(name, labels)] = number


def nonzero(values: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    return {key: number for key, number in values.items() if number or not key[0].endswith("_total")}


def test_a_node_tells_of_its_blocks():
    values = node_values(replace(STATUS, reserved_blocks=2, held_bytes=30, avoided=("m", "shared")))
    names = ("resident_blocks", "reserved_blocks", "held_bytes")
    assert [values[f"kvfleet_{name}", "dram"] for name in names] == [4, 2, 30]
    assert values["kvfleet_avoided_holders", ""] == 2


def test_a_node_tells_what_requests_to_the_shared_tier_met():
    values = node_values(STATUS)
    told = {name: value for name, value in values.items() if "_shared_" in name[0] or "corrupt" in name[0]}
    del told["kvfleet_corrupt_blocks_total", "nvme"]
    assert told == {
        ("kvfleet_corrupt_blocks_total", "shared"): 1,
        ("kvfleet_shared_requests_total", "read"): 3,
        ("kvfleet_shared_requests_total", "corrupt"): 1,
        ("kvfleet_shared_outages_total", "write"): 2,
    }


def test_a_node_tells_of_its_drives():
    gone = DriveStatus("/e", works=False, problem="EIO", life_days=float("inf"))
    values = node_values(replace(STATUS, drives=(DRIVE, replace(DRIVE, directory="/f"), gone)))
    names = ("used_bytes", "capacity_bytes", "resident_blocks", "evicted_blocks_total", "corrupt_blocks_total")
    assert [values[f"kvfleet_{name}", "nvme"] for name in names] == [10, 18, 4, 6, 2]
    assert {key: n for key, n in values.items() if key[1].startswith("/") and key[1] != "/f"} == {
        ("kvfleet_drive_failed", "/d"): 0,
        ("kvfleet_drive_budget_ratio", "/d"): 0.25,
        ("kvfleet_drive_life_days", "/d"): 8.0,
        ("kvfleet_drive_written_bytes_total", "/d"): 6,
        ("kvfleet_drive_failed", "/e"): 1,
        ("kvfleet_drive_written_bytes_total", "/e"): 0,
    }
    assert ("kvfleet_used_bytes", "nvme") not in node_values(replace(STATUS, drives=()))


def test_increments_add_up_to_totals():
    sink = Recorder()
    meter = Meter(sink, LABELS)
    for totals in (Totals(), TOTALS, Totals.sum([TOTALS, TOTALS])):
        status = replace(STATUS, totals=totals, used_bytes=totals.lookups)
        for _ in range(2):
            meter.tell(node_values(status))
            assert sink.told == nonzero(node_values(status))


def test_what_an_earlier_process_has_told_is_not_told_again():
    sink = Recorder()
    meter = Meter(sink, LABELS, node_values(STATUS))
    meter.tell(node_values(STATUS))
    assert not [name for name, _ in sink.told if name.endswith("_total")]
    meter.tell(node_values(replace(STATUS, sent_bytes=5)))
    assert sink.told["kvfleet_sent_bytes_total", ""] == 5


def test_a_total_that_shrinks_counts_from_there():
    sink = Recorder()
    meter = Meter(sink, LABELS)
    for lookups in (5, 3, 4):
        meter.tell({("kvfleet_lookups_total", ""): lookups})
    assert sink.told == {("kvfleet_lookups_total", ""): 6}


def test_every_outcome_and_source_is_told():
    values = node_values(STATUS)
    outcomes = {label for name, label in values if name == "kvfleet_blocks_total"}
    assert outcomes == {outcome.value for kind in (Source, Miss) for outcome in kind}
    assert {label for name, label in values if name == "kvfleet_loaded_bytes_total"} == {s.value for s in Source}


def test_names_are_formed_by_rule():
    told = {name for name, _ in [*node_values(STATUS), *directory_values(DIRECTORY)]}
    assert told == METRICS.keys()
    for name, metric in METRICS.items():
        assert re.fullmatch(r"kvfleet(_[a-z]+)*_[a-z]+(_max|_total)?", name)
        assert metric.unit in {
            "blocks",
            "bytes",
            "rows",
            "lookups",
            "nodes",
            "holders",
            "writes",
            "inventories",
            "outages",
            "drives",
            "ratio",
            "days",
        }
        assert metric.text.endswith(".")


@pytest.mark.parametrize("name", METRICS)
def test_ray_takes_what_we_tell(monkeypatch, name):
    recorded = []
    monkeypatch.setattr("ray.util.metrics.Metric._record", lambda self, value, tags: recorded.append((value, tags)))
    sink, labels = RaySink(), dict.fromkeys(filter(None, (*LABELS, METRICS[name].label)), "x")
    for _ in range(2):
        (sink.add if name.endswith("_total") else sink.set)(name, labels, 3)
    assert recorded == [(3, labels)] * 2
    assert sink._metrics[name].info["tag_keys"] == tuple(labels)

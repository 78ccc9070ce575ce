"""Timing cases side by side, and telling what came out, as a table and as JSON."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

from rich.table import Table

from kvfleet.config import KIB, MIB

__all__ = ["Report", "Row", "Run", "measure", "median_interval", "quantile", "table", "to_json"]

Run = Callable[[], float]
"""Does the work once and returns the seconds it took; what it only prepares, it leaves out."""


@dataclass(frozen=True, slots=True)
class Row:
    """One case as measured.

    Attributes:
        block_bytes: of each block.
        num_blocks: in one run.
        moved_bytes: by one run; 0 if it moves none.
        seconds: of each run.
        of_floor: speed as a fraction of the floor's: median over the rounds, of which each ran both.
        of_floor_95: interval that holds that median with a probability of 95 % or more.
        calls_per_s: of all callers together, where several call at once; else 0.
        keys_per_call: that each of those calls asks for.
    """

    name: str
    block_bytes: int
    num_blocks: int
    moved_bytes: int
    seconds: tuple[float, ...]
    of_floor: float
    of_floor_95: tuple[float, float]
    calls_per_s: float = 0.0
    keys_per_call: int = 0

    def ms(self, q: float) -> float:
        """A quantile of the runs, nearest rank, in milliseconds."""
        return 1e3 * quantile(self.seconds, q)

    @property
    def gb_per_s(self) -> float:
        """Throughput of the median run."""
        return self.moved_bytes / statistics.median(self.seconds) / 1e9


@dataclass(frozen=True, slots=True)
class Report:
    """Outcome of one benchmark.

    Attributes:
        measures: in words, what was timed and what the floor is.
        count: what a row's `num_blocks` counts.
    """

    bench: str
    measures: str
    rows: tuple[Row, ...]
    count: str = "blocks"


def quantile(values: Sequence[float], q: float) -> float:
    """The value of nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the median of what the values were drawn from lies, with a probability of 95 % or more.

    Between two of the values, whatever the distribution: the number of values below the median is binomial. With
    fewer than six values, the smallest and the largest, which promise less.
    """
    ordered, count = sorted(values), len(values)
    skip, tail = 0, 0.5**count
    while 2 * (tail := tail + math.comb(count, skip + 1) * 0.5**count) <= 0.05:
        skip += 1
    return ordered[skip], ordered[count - 1 - skip]


def measure(
    cases: Mapping[str, Run], *, block_bytes: int, num_blocks: int, moves: bool, repeats: int, warmups: int = 2
) -> list[Row]:
    """Run cases in turn, so that all see the same moods of the machine.

    Args:
        cases: by name; the first one is the floor.
        block_bytes: of each block.
        num_blocks: in one run.
        moves: whether a run moves the blocks' bytes.
        repeats: rounds that count.
        warmups: rounds before those.
    """
    assert repeats > 0
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(warmups + repeats):
        for name, run in cases.items():
            seconds[name].append(run())
    counted = {name: tuple(times[warmups:]) for name, times in seconds.items()}
    floor = next(iter(counted.values()))
    ratios = {name: [f / t for f, t in zip(floor, times, strict=True)] for name, times in counted.items()}
    return [
        Row(
            name=name,
            block_bytes=block_bytes,
            num_blocks=num_blocks,
            moved_bytes=block_bytes * num_blocks if moves else 0,
            seconds=times,
            of_floor=statistics.median(ratios[name]),
            of_floor_95=median_interval(ratios[name]),
        )
        for name, times in counted.items()
    ]


def table(report: Report) -> Table:
    """The rows for reading; a size's first row is its floor."""
    moves, calls = any(row.moved_bytes for row in report.rows), any(row.calls_per_s for row in report.rows)
    caption = f"{report.measures} Milliseconds are of all blocks of a row together." if moves else report.measures
    shown = Table(title=f"kvfleet bench {report.bench}", caption=caption, caption_justify="left")
    shown.add_column("block", justify="right")
    shown.add_column(report.count, justify="right")
    shown.add_column("what")
    rates = [*(["GB/s"] if moves else []), *(["calls/s", "keys/s"] if calls else [])]
    titles = [*rates, "p50 ms", "p99 ms" if calls else "p90 ms", "max ms", "of floor", "95 %"]
    for title in titles:
        shown.add_column(title, justify="right", no_wrap=True)
    before: Row | None = None
    for row in report.rows:
        new = before is None or (row.block_bytes, row.num_blocks) != (before.block_bytes, before.num_blocks)
        if new and before is not None:
            shown.add_section()
        shown.add_row(
            _size(row.block_bytes) if new and row.block_bytes else "",
            str(row.num_blocks) if new else "",
            row.name,
            *([f"{row.gb_per_s:.2f}"] if moves else []),
            *([f"{row.calls_per_s:,.0f}", f"{row.calls_per_s * row.keys_per_call:,.0f}"] if calls else []),
            f"{row.ms(0.5):.2f}",
            f"{row.ms(0.99 if calls else 0.9):.2f}",
            f"{row.ms(1.0):.2f}",
            f"{row.of_floor:.2f}",
            "-".join(f"{end:.2f}" for end in row.of_floor_95),
        )
        before = row
    return shown


def to_json(report: Report) -> str:
    """Everything, and where it was measured: machine, versions, command."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    packages = ("kvfleet-ray", "ray", "numpy", "xxhash")
    return json.dumps(
        {
            "time": now,
            "command": shlex.join(["kvfleet", *sys.argv[1:]]),
            "machine": _machine(),
            "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
            **asdict(report),
        },
        indent=2,
    )


def _machine() -> dict[str, object]:
    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = next((line.split(":", 1)[1].strip() for line in cpuinfo.splitlines() if line.startswith("model name")), "")
    return {
        "cpu": model or platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "load": os.getloadavg(),
    }


def _size(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.4g} MiB" if num_bytes >= MIB else f"{num_bytes / KIB:.4g} KiB"

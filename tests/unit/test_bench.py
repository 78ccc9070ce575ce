"""How benchmarks time and tell; that they run at all is shown in tests/cluster/test_bench.py."""

from __future__ import annotations

import io
import json
from dataclasses import replace

from rich.console import Console

from kvfleet.bench.report import Report, measure, median_interval, table, to_json

MIB = 1 << 20


def times(*seconds: float):
    remaining = iter(seconds)
    return lambda: next(remaining)


def rows(moves: bool = True):
    cases = {"floor": times(9, 1.0, 2.0, 4.0), "work": times(9, 2.0, 2.0, 5.0)}
    return measure(cases, block_bytes=2 * MIB, num_blocks=8, moves=moves, repeats=3, warmups=1)


def test_rounds_are_compared_pair_by_pair_and_warmups_dropped():
    floor, work = rows()
    assert (floor.seconds, work.seconds) == ((1.0, 2.0, 4.0), (2.0, 2.0, 5.0))
    assert (floor.of_floor, work.of_floor) == (1.0, 0.8)


def test_the_interval_of_a_median():
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    # From tables of the sign test: the 6th and 15th of 20, the 40th and 61st of 100.
    assert median_interval([float(n) for n in range(1, 21)]) == (6.0, 15.0)
    assert median_interval([float(n) for n in range(1, 101)]) == (40.0, 61.0)
    assert rows()[1].of_floor_95 == (0.5, 1.0)


def test_cases_take_turns():
    order: list[str] = []

    def note(name: str) -> float:
        order.append(name)
        return 1.0

    cases = {"a": lambda: note("a"), "b": lambda: note("b")}
    measure(cases, block_bytes=1, num_blocks=1, moves=False, repeats=2, warmups=1)
    assert order == ["a", "b"] * 3


def test_figures_of_a_row():
    work = rows()[1]
    assert (work.ms(0.5), work.ms(0.9), work.ms(1.0)) == (2000.0, 5000.0, 5000.0)
    assert work.gb_per_s == 16 * MIB / 2.0 / 1e9


def test_the_table_shows_each_size_once():
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table(Report("local", "what it measures", tuple(rows()))))
    text = console.export_text()
    assert text.count("2 MiB") == 1
    assert "what it measures" in text
    assert "GB/s" in text


def test_no_throughput_where_nothing_moves():
    assert "GB/s" not in [column.header for column in table(Report("lookup", "", tuple(rows(moves=False)))).columns]


def test_rates_where_several_call_at_once():
    calling = [replace(row, calls_per_s=2000.0, keys_per_call=512) for row in rows(moves=False)]
    shown = table(Report("directory", "", tuple(calling), "callers"))
    titles = [column.header for column in shown.columns]
    assert titles[1:] == ["callers", "what", "calls/s", "keys/s", "p50 ms", "p99 ms", "max ms", "of floor", "95 %"]
    assert [next(iter(column.cells)) for column in shown.columns[3:5]] == ["2,000", "1,024,000"]


def test_json_says_where_it_was_measured():
    told = json.loads(to_json(Report("local", "what it measures", tuple(rows()))))
    assert told["bench"] == "local"
    assert told["rows"][1]["seconds"] == [2.0, 2.0, 5.0]
    assert told["machine"]["cores"] >= 1
    assert {"python", "ray", "kvfleet-ray"} <= told["versions"].keys()
    assert told["command"].startswith("kvfleet")

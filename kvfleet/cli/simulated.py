"""Simulations as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import Group
from rich.table import Table

from kvfleet.core.outcomes import Source
from kvfleet.core.writebudget import DAY_S
from kvfleet.explain import show_bytes
from kvfleet.sim.report import QUANTILES, Report, by_tier

__all__ = ["report_tables"]

_BUSY = 0.9  # share of the time from which on waiting times say more of the queue than of the cache
_COLUMNS = 5

Line = tuple[str, Callable[[Report], str]]
"""What is told in a row of a table, and what it is for a simulation."""


def report_tables(reports: Sequence[Report]) -> Group:
    """All figures, a column a simulation, so many of them side by side; of a single one, why blocks missed too."""
    groups = [reports[first : first + _COLUMNS] for first in range(0, len(reports), _COLUMNS)]
    return Group(*map(_figures, groups), *([_reasons(reports[0])] if len(reports) == 1 else []))


def _figures(reports: Sequence[Report]) -> Table:
    first = reports[0]
    shown = Table(
        title=f"{first.requests:,} requests, {first.num_blocks:,} blocks of {first.block_tokens} tokens, "
        f"{show_bytes(first.config.block_bytes)} each",
        caption=_caption(reports),
        caption_justify="left",
    )
    shown.add_column("")
    for one in reports:
        nodes = "1 node" if one.config.num_nodes == 1 else f"{one.config.num_nodes} nodes"
        shown.add_column(f"{one.config.policy}\n{nodes}\n{show_bytes(one.config.dram_bytes)}", justify="right")
    for part in (_hits, _times, _traffic, _calls):
        for name, tell in part(reports):
            shown.add_row(name, *(tell(one) for one in reports))
        shown.add_section()
    return shown


def _hits(reports: Sequence[Report]) -> Iterator[Line]:
    yield "tokens in memory", lambda one: f"{one.capacity_tokens / 1e6:.3g} M"
    yield "blocks that hit", lambda one: f"{one.hit_rate:.1%}"
    for tier in Source:
        if any(tier.value in report.blocks for report in reports):
            yield f"  from {tier.value}", lambda one, tier=tier: f"{by_tier(one)[tier.value]:.1%}"  # type: ignore[misc]


def _times(reports: Sequence[Report]) -> Iterator[Line]:
    yield "compute saved", lambda one: f"{one.compute_saved:.1%}"
    yield "engines busy", lambda one: f"{one.engines_busy:.0%}"
    for place, q in enumerate(QUANTILES):
        yield f"TTFT p{100 * q:g}", lambda one, place=place: _seconds(one.ttft_s[place])  # type: ignore[misc]


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"


def _traffic(reports: Sequence[Report]) -> Iterator[Line]:
    if any(one.config.drives.max_bytes for one in reports):
        yield "to a node's drives, a day", lambda one: show_bytes(int(one.drive_bytes_a_day))
        yield "  drive writes a day", lambda one: f"{one.drive_writes_a_day:.2f}"
    yield "between nodes", lambda one: show_bytes(one.peer_bytes)
    if any(one.config.shared for one in reports):
        yield "from the shared tier", lambda one: show_bytes(one.shared_read_bytes)
        yield "  to learn how fast it is", lambda one: show_bytes(one.shared_look_bytes)
        yield "to the shared tier", lambda one: show_bytes(one.shared_written_bytes)


def _calls(reports: Sequence[Report]) -> Iterator[Line]:
    yield "calls a request", lambda one: f"{sum(one.calls.values()):.2f}"
    for name in sorted({name for report in reports for name in report.calls}):
        yield f"  {name}", lambda one, name=name: f"{one.calls.get(name, 0.0):.2f}"  # type: ignore[misc]
    yield "directory, a block", lambda one: f"{one.directory_bytes:.0f} B"


def _caption(reports: Sequence[Report]) -> str:
    texts = ["hits: share of whole blocks"]
    if any(report.engines_busy > _BUSY for report in reports):
        texts.append("engines are nearly always busy: requests queue, and wait the longer the longer the trace is")
    if any(report.config.drives.max_bytes and report.span_s < DAY_S for report in reports):
        texts.append("drives: what a day at this pace would come to, at most the write budget")
    return "\n".join(texts)


def _reasons(report: Report) -> Table:
    shown = Table(title="What became of each block")
    shown.add_column("outcome")
    shown.add_column("blocks", justify="right")
    shown.add_column("share", justify="right")
    sources = {source.value for source in Source}
    for name, count in report.blocks.items():
        text = f"hit: {name}" if name in sources else f"miss: {name}"
        shown.add_row(text, f"{count:,}", f"{count / report.num_blocks:.1%}")
    return shown

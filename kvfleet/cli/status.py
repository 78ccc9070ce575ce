"""`kvfleet status`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from math import isinf
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvfleet.cli.console import Address, Name, plain_errors, show_bytes, show_count
from kvfleet.core.outcomes import Source
from kvfleet.core.totals import Totals
from kvfleet.explain import words

if TYPE_CHECKING:
    from kvfleet.fleet import FleetStatus
    from kvfleet.node.status import NodeStatus

__all__ = [
    "as_dict",
    "directory_line",
    "drives_table",
    "misses_table",
    "nodes_table",
    "notes",
    "requests_table",
    "show_nodes",
    "status",
]

_SOURCES = tuple(source.value for source in Source)
_YEARS_MAX = 99  # no drive is known to last longer


def status(
    name: Name = "default",
    address: Address = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> None:
    """Show what the nodes of a fleet hold, what engines asked for, and what became of it."""
    with plain_errors():
        from kvfleet.operating import join

        found = join(name, address=address).status()
    if as_json:
        typer.echo(json.dumps(as_dict(found), indent=2))
        return
    console = Console()
    show_nodes(console, found)
    if found.totals.asked_blocks:
        console.print("", requests_table(found), sep="\n")
    if any(outcome not in _SOURCES for outcome in found.totals.outcomes):
        console.print("", misses_table(found.totals), sep="\n")
    console.print("\n" + directory_line(found), highlight=False)
    for line in catalog_lines(found):
        console.print(line, highlight=False)


def as_dict(found: FleetStatus) -> dict[str, object]:
    """All that is known, in JSON's types."""
    everything = asdict(found) | {"totals": asdict(found.totals)}
    for node in everything["nodes"]:
        for drive in node["drives"]:
            if isinf(drive["life_days"]):  # JSON has no word for it
                drive["life_days"] = None
    if found.directory is not None:
        everything["directory"]["stats"]["memory_bytes"] = found.directory.stats.memory_bytes
    return everything


def show_nodes(console: Console, found: FleetStatus) -> None:
    """The table of nodes, and what there is to say about each."""
    console.print(nodes_table(found))
    if any(node.drives for node in found.nodes):
        console.print("", drives_table(found), sep="\n")
    for line in notes(found):
        console.print(line, markup=False, emoji=False, highlight=False)


def _table(title: str, *columns: str, last: str = "") -> Table:
    """A table whose first column is of words, the others of figures, and one of words at the end if asked for."""
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    if last:
        table.add_column(last)
    return table


def nodes_table(found: FleetStatus) -> Table:
    """What each node holds."""
    table = _table(f"fleet {found.name}", "node", "dram", "fill", "blocks", "evicted", "saved", "unsaved", "sent")
    for node in found.nodes:
        table.add_row(node.node_id[:8], *_figures(node))
    for node_id in found.silent:
        table.add_row(node_id[:8], *["?"] * 7)
    return table


def _figures(node: NodeStatus) -> list[str]:
    return [
        show_bytes(node.capacity_bytes),
        _share(node.used_bytes, node.capacity_bytes),
        f"{node.blocks:,}",
        f"{node.evicted_blocks:,}",
        f"{node.saved_blocks:,}",
        f"{node.unsaved_blocks:,}",
        show_bytes(node.sent_bytes),
    ]


def drives_table(found: FleetStatus) -> Table:
    """The drives of each node: what is on them, and what writing wears out."""
    table = _table("drives", "node", "size", "fill", "blocks", "today", "of budget", "lasts")
    table.add_column("directory", overflow="fold")
    for node in found.nodes:
        for drive in node.drives:
            table.add_row(
                node.node_id[:8],
                show_bytes(drive.capacity_bytes),
                _share(drive.used_bytes, drive.capacity_bytes),
                f"{drive.blocks:,}",
                show_bytes(drive.today_bytes),
                _share(drive.today_bytes, drive.day_bytes),
                _show_days(drive.life_days),
                Text(drive.directory),
            )
    return table


def _show_days(days: float) -> str:
    """How long a drive lasts if it is written as until now."""
    years = days / 365
    return f"{days:.0f} days" if years < 1 else f"{years:.0f} years" if years <= _YEARS_MAX else "-"


def notes(found: FleetStatus) -> Iterator[str]:
    """What is not as usual, a line a node."""
    for node in found.nodes:
        said = [
            node.problem,
            "draining: it takes no stores" if node.draining else "",
            f"shared tier: {node.shared_problem}" if node.shared_problem else "",
            "" if node.shared_tried else "shared tier: no answer yet",
            *(f"{drive.directory}: {drive.problem}" for drive in node.drives if drive.problem),
            *(f"{drive.directory}: much slower than the others, not written" for drive in node.drives if drive.slow),
            *(f"{drive.directory}: no direct I/O there" for drive in node.drives if not drive.direct),
            f"does not ask {', '.join(name[:8] for name in node.avoided)}: no answer" if node.avoided else "",
            *node.audit,
        ]
        if any(said):
            yield f"{node.node_id[:8]}: " + "; ".join(filter(None, said))
    for node_id in found.silent:
        yield f"{node_id[:8]}: no answer from its manager; engines there read what its memory holds, and store nothing"


def requests_table(found: FleetStatus) -> Table:
    """What engines asked for, and the share of it that came, by where it was."""
    table = _table("blocks asked for", "node", "lookups", "asked", "hit", *_SOURCES, "unclaimed", "loaded")
    for node in found.nodes:
        table.add_row(node.node_id[:8], *_shares(node.totals))
    if len(found.nodes) > 1:
        table.add_section()
        table.add_row("all", *_shares(found.totals))
    return table


def _shares(totals: Totals) -> list[str]:
    asked = totals.asked_blocks
    came = [totals.outcomes.get(source, 0) for source in _SOURCES]
    return [
        f"{totals.lookups:,}",
        f"{asked:,}",
        *(_share(blocks, asked) for blocks in (sum(came), *came)),
        f"{totals.outcomes.get('unclaimed', 0):,}",
        show_bytes(sum(totals.bytes_by_source.values())),
    ]


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"


def misses_table(totals: Totals) -> Table:
    """Why blocks did not come, the most frequent reason first."""
    table = _table("blocks that did not come", "reason", "blocks", "of asked", last="why")
    missed = {reason: blocks for reason, blocks in totals.outcomes.items() if reason not in _SOURCES}
    for reason, blocks in sorted(missed.items(), key=lambda item: -item[1]):
        table.add_row(reason, f"{blocks:,}", _share(blocks, totals.asked_blocks), words(reason))
    return table


def directory_line(found: FleetStatus) -> str:
    """How the directory is doing."""
    if found.directory is None:
        return "directory: no answer; nodes find what they hold themselves"
    stats = found.directory.stats
    refused = f", {stats.refused:,} refused" if stats.refused else ""
    listed = "" if found.directory.shared_listed else "; the shared tier is being listed"
    return (
        f"directory: {stats.rows:,} of at most {stats.capacity:,} records of {show_count(len(stats.nodes), 'node')} in "
        f"{show_bytes(stats.memory_bytes)}{refused}; {stats.shared:,} in the shared tier{listed}"
    )


def catalog_lines(found: FleetStatus) -> Iterator[str]:
    """What the shared tier has, as the node says that keeps its catalog."""
    for node in found.nodes:
        catalog = node.catalog
        if catalog is not None:
            limit = f" of at most {show_bytes(catalog.bytes_max)}" if catalog.bytes_max is not None else ""
            refused = f", {catalog.refused:,} more are not known" if catalog.refused else ""
            problem = f"; {catalog.problem}" if catalog.problem else ""
            yield (
                f"shared tier: {show_count(catalog.objects, 'object')} in {show_bytes(catalog.num_bytes)}{limit}"
                f"{refused}; {node.node_id[:8]} keeps the catalog{problem}"
            )

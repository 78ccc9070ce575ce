"""`kvfleet status`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvfleet.cli.console import Address, Name, plain_errors, show_bytes
from kvfleet.core.outcomes import Source
from kvfleet.core.totals import Totals
from kvfleet.explain import words

if TYPE_CHECKING:
    from kvfleet.fleet import FleetStatus
    from kvfleet.node.status import NodeStatus

__all__ = [
    "as_dict",
    "directory_line",
    "misses_table",
    "nodes_table",
    "notes",
    "requests_table",
    "show_nodes",
    "status",
]

_SOURCES = tuple(source.value for source in Source)


def status(
    name: Name = "default",
    address: Address = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> None:
    """Show what the nodes of a fleet hold, what engines asked for, and what became of it."""
    with plain_errors():
        import kvfleet

        found = kvfleet.connect(name, address=address).status()
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


def as_dict(found: FleetStatus) -> dict[str, object]:
    """All that is known, in JSON's types."""
    everything = asdict(found) | {"totals": asdict(found.totals)}
    if found.directory is not None:
        everything["directory"]["stats"]["memory_bytes"] = found.directory.stats.memory_bytes
    return everything


def show_nodes(console: Console, found: FleetStatus) -> None:
    """The table of nodes, and what there is to say about each."""
    console.print(nodes_table(found))
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


def notes(found: FleetStatus) -> Iterator[str]:
    """What is not as usual, a line a node."""
    for node in found.nodes:
        said = [
            node.problem,
            "draining: it takes no stores" if node.draining else "",
            f"shared tier: {node.shared_problem}" if node.shared_problem else "",
            f"does not ask {', '.join(name[:8] for name in node.avoided)}: no answer" if node.avoided else "",
            *node.audit,
        ]
        if any(said):
            yield f"{node.node_id[:8]}: " + "; ".join(filter(None, said))
    for node_id in found.silent:
        yield f"{node_id[:8]}: its manager did not answer"


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
        return "directory: did not answer; nodes find what they hold themselves"
    stats = found.directory.stats
    refused = f", {stats.refused:,} refused" if stats.refused else ""
    listed = "" if found.directory.shared_listed else "; the shared tier is being listed"
    return (
        f"directory: {stats.rows:,} of at most {stats.capacity:,} records of {len(stats.nodes)} nodes in "
        f"{show_bytes(stats.memory_bytes)}{refused}; {stats.shared:,} in the shared tier{listed}"
    )

"""`kvfleet status`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvfleet.cli.console import Address, Name, plain_errors, show_bytes

if TYPE_CHECKING:
    from kvfleet.fleet import FleetStatus
    from kvfleet.node.manager import NodeStatus

__all__ = ["nodes_table", "status"]


def status(
    name: Name = "default",
    address: Address = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> None:
    """Show what the nodes of a fleet hold and have done."""
    with plain_errors():
        import kvfleet

        found = kvfleet.connect(name, address=address).status()
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
        return
    console = Console()
    console.print(nodes_table(found))
    console.print(directory_line(found), highlight=False)


def nodes_table(found: FleetStatus) -> Table:
    """One row a node; those that did not answer come last."""
    table = Table(title=f"fleet {found.name}", title_justify="left")
    table.add_column("node")
    for title in ("used", "of", "blocks", "unsaved", "evicted", "from peers", "from shared", "sent"):
        table.add_column(title, justify="right")
    table.add_column("problem")
    for node in found.nodes:
        table.add_row(
            node.node_id[:8], *_figures(node), "; ".join(filter(None, (node.problem, node.shared_problem, *node.audit)))
        )
    for node_id in found.silent:
        table.add_row(node_id[:8], *[""] * 8, "its manager did not answer")
    return table


def _figures(node: NodeStatus) -> list[str]:
    loaded = node.loaded_bytes or {}
    return [
        show_bytes(node.used_bytes),
        show_bytes(node.capacity_bytes),
        f"{node.blocks:,}",
        f"{node.unsaved_blocks:,}",
        f"{node.evicted_blocks:,}",
        show_bytes(loaded.get("peer", 0)),
        show_bytes(loaded.get("shared", 0)),
        show_bytes(node.sent_bytes),
    ]


def directory_line(found: FleetStatus) -> str:
    """How the directory is doing."""
    if found.directory is None:
        return "directory: did not answer; nodes find what they hold themselves"
    stats = found.directory.stats
    listed = "" if found.directory.shared_listed else "; the shared tier is being listed"
    return f"directory: {stats.rows:,} records of {len(stats.nodes)} nodes, {stats.shared:,} in the shared tier{listed}"

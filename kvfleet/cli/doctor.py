"""`kvfleet doctor`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvfleet.cli.console import Address, Name, plain_errors

if TYPE_CHECKING:
    from kvfleet.checkup import NodeCheckup

__all__ = ["checkup_table", "clock_problem", "doctor", "well"]

_CLOCK_MAX_S = 5.0
_STYLES = {"ok": "green", "note": "yellow", "bad": "bold red"}


def doctor(
    name: Name = "default",
    address: Address = "auto",
    repair: Annotated[
        bool, typer.Option("--repair", help="Drop damaged blocks, and bring the books in line with the media.")
    ] = False,
    seconds: Annotated[
        float,
        typer.Option(
            min=0,
            help="Longest time each node takes to read its memory, and as long for copies in the shared tier; what was "
            "not read by then is told. Drives are read whole.",
        ),
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> None:
    """Compare what the nodes of a running fleet say they hold with what is there, and look at their machines.

    The fleet goes on with its work. The exit status is 1 if anything is bad.
    """
    with plain_errors():
        from kvfleet.checkup import look_over
        from kvfleet.operating import join

        fleet = join(name, address=address)
        with Console(stderr=True).status("reading what the nodes hold"):  # on a terminal only
            found = look_over(name, seconds, repair=repair)
        directory = fleet.status().directory
    if as_json:
        typer.echo(json.dumps({"nodes": [asdict(one) for one in found], "directory": directory is not None}, indent=2))
    else:
        console = Console()
        for one in found:
            console.print(Text(f"node {one.node_id[:8]}", style="bold"))
            console.print(checkup_table(one))
        if not found:
            console.print("no node has a manager")
        if directory is None:
            console.print("the directory did not answer")
    if directory is None or not well(found):
        raise typer.Exit(1)


def well(found: Sequence[NodeCheckup]) -> bool:
    """Whether nothing is bad."""
    return not any(state == "bad" for one in found for state, _, _ in _lines(one))


def checkup_table(one: NodeCheckup) -> Table:
    """A line a check."""
    table = Table(box=None, show_header=False, pad_edge=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", max_width=24)
    table.add_column(overflow="fold")
    for state, name, text in _lines(one):
        table.add_row(Text(state, style=_STYLES[state]), Text(name), Text(text))
    return table


def _lines(one: NodeCheckup) -> list[tuple[str, str, str]]:
    if one.checkup is None:
        return [("bad", "manager", "did not answer")]
    lines = [(check.state, check.name, check.text) for check in one.checkup.checks]
    problem = clock_problem(one.ahead_s)
    return [*lines, ("bad" if problem else "ok", "clock", problem or "agrees with this machine's")]


def clock_problem(ahead_s: float) -> str:
    """What is wrong with a clock so far from ours; "" if nothing is."""
    if abs(ahead_s) <= _CLOCK_MAX_S:
        return ""
    way = "ahead of" if ahead_s > 0 else "behind"
    return f"{abs(ahead_s):.0f} s {way} this machine's; S3 refuses requests from 15 min on"

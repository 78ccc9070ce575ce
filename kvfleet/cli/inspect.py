"""`kvfleet inspect`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvfleet.cli.console import Address, Name, plain_errors
from kvfleet.errors import ConfigError
from kvfleet.explain import show_bytes

if TYPE_CHECKING:
    from kvfleet.node.copies import Copy
    from kvfleet.node.findings import Findings

__all__ = ["copies_table", "findings_table", "inspect"]

_KEY = re.compile(r"([0-9a-fA-F]{32})([0-9a-fA-F]{4}|\.[0-9]{1,5})?")  # of any shard, as `doctor` and `inspect` name it
_KEY_DIGITS = 32
_PART_OF_KEY = re.compile(r"[0-9a-fA-F]{6,}")


def inspect(
    what: Annotated[
        str,
        typer.Argument(
            metavar="PATH|URL|KEY",
            help="A file or directory of kvfleet's, an object's URL, or a block's key: 32 hex digits.",
        ),
    ],
    name: Name = "default",
    address: Address = "auto",
    endpoint: Annotated[
        str | None,
        typer.Option(
            envvar="AWS_ENDPOINT_URL", metavar="URL", help="Of the S3 server, for s3:// URLs, if it is not Amazon's."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> None:
    """Say what a block file, drive, arena, manifest or object is, and whether it is sound; changes nothing.

    For a key: where in the fleet the block is, and whether each copy is sound. The exit status is 1 if anything is not.
    """
    with plain_errors():
        if _KEY.fullmatch(what) and not Path(what).exists():
            sound = _key(what.lower()[:_KEY_DIGITS], name, address, as_json=as_json)
        else:
            sound = _thing(what, endpoint, as_json=as_json)
    if not sound:
        raise typer.Exit(1)


def _thing(what: str, endpoint: str | None, *, as_json: bool) -> bool:
    from kvfleet.node.inspecting import inspect_url
    from kvfleet.node.inspectpath import inspect_path

    if what.startswith("file://"):
        what = what.removeprefix("file://")
    if "://" not in what and not Path(what).exists():
        hint = "; a block's key has 32 hex digits" if _PART_OF_KEY.fullmatch(what) else ""
        raise ConfigError("", f"{what}: no such file or directory{hint}")
    options = {"endpoint_url": endpoint} if endpoint and what.startswith(("s3://", "s3a://")) else {}
    findings = inspect_url(what, options) if "://" in what else inspect_path(Path(what))
    if as_json:
        typer.echo(json.dumps(asdict(findings) | {"facts": dict(findings.facts), "sound": findings.sound}, indent=2))
        return findings.sound
    console = Console()
    console.print(Text(f"{what}: {findings.kind}"))
    console.print(findings_table(findings))
    if findings.sound:
        console.print(Text(f"sound: {findings.checked}" if findings.whole else findings.checked))
    else:
        console.print(Text("NOT SOUND", style="bold red"))
    return findings.sound


def findings_table(findings: Findings) -> Table:
    """What is known of a thing, a line a fact, and then what is wrong with it."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for fact, value in findings.facts:
        table.add_row(Text(fact), Text(value))
    for problem in findings.problems:
        table.add_row(Text("problem", style="red"), Text(problem))
    return table


def _key(key: str, name: str, address: str, *, as_json: bool) -> bool:
    from kvfleet.checkup import copies_of
    from kvfleet.operating import join

    join(name, address=address)
    copies, silent = copies_of(name, bytes.fromhex(key))
    sound = not any(copy.problem for copy in copies)
    if as_json:
        typer.echo(json.dumps({"key": key, "copies": [asdict(copy) for copy in copies], "silent": silent}, indent=2))
        return sound
    console = Console()
    if copies:
        console.print(copies_table(copies))
    else:
        console.print(Text(f"{key}: nowhere in fleet {name}"))
    for node in silent:
        console.print(Text(f"{node[:8]}: its manager did not answer"))
    return sound


def copies_table(copies: Sequence[Copy]) -> Table:
    """A line a copy."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("node", "tier"):
        table.add_column(column, no_wrap=True)
    for column in ("shard", "bytes"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("checksum", no_wrap=True)
    table.add_column("state", overflow="fold")
    for copy in copies:
        table.add_row(
            copy.node_id[:8], copy.tier, str(copy.shard), show_bytes(copy.num_bytes), copy.checksum,
            Text(copy.problem or "sound", style="red" if copy.problem else ""),
        )  # fmt: skip
    return table

"""`kvfleet explain`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvfleet.cli.console import Address, Name, plain_errors, show_bytes, show_count
from kvfleet.core.outcomes import Miss, Source
from kvfleet.explain import prompt_times, show_time, words

if TYPE_CHECKING:
    from kvfleet.core.directory import NodeId
    from kvfleet.node.tallies import Request

__all__ = ["as_dict", "explain", "merged", "request_table", "requests_table"]

_WIDE = 110


def explain(
    request: Annotated[
        str, typer.Argument(help="Beginning of its label (an engine's request id) or of its first or last key in hex.")
    ] = "",
    name: Name = "default",
    address: Address = "auto",
    limit: Annotated[int, typer.Option(min=1, help="At most so many requests, the newest.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> None:
    """Show what became of the last requests of a fleet's engines, or of one of them in full."""
    with plain_errors():
        from kvfleet.operating import join

        found = merged(join(name, address=address).requests(request, 2 * limit))[:limit]
    if as_json:
        typer.echo(json.dumps([as_dict(node, one) for node, one in found], indent=2))
        return
    console = Console()
    if not found:
        begins = f" whose label or key begins with {request!r}" if request else ""
        console.print(f"no request{begins} is remembered", markup=False, emoji=False, highlight=False)
    elif not request:
        console.print(requests_table(found, in_words=console.width >= _WIDE))
    for node, one in found if request else ():
        console.print(request_table(node, one), "", sep="\n")


def merged(found: Sequence[tuple[NodeId, Request]]) -> list[tuple[NodeId, Request]]:
    """Where one client has looked up and others have loaded, only what those say."""
    loaded = {request.asked_ns for _, request in found if request.loaded}
    return [pair for pair in found if pair[1].loaded or pair[1].asked_ns not in loaded]


def as_dict(node: NodeId, request: Request) -> dict[str, Any]:
    """All that is known of a request, in JSON's types."""
    keys = {"first_key": request.first_key.hex(), "last_key": request.last_key.hex()}
    return {"node": node} | asdict(request) | keys


def requests_table(found: Sequence[tuple[NodeId, Request]], *, in_words: bool = True) -> Table:
    """A line a request, with its reason in words where there is room."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("time", "node"):
        table.add_column(column, no_wrap=True)
    table.add_column("label", overflow="ellipsis", max_width=13, no_wrap=True)
    for column in ("tokens", "found"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("from", "missing"):
        table.add_column(column)
    for node, request in found:
        table.add_row(
            f"{_time(request):%H:%M:%S}",
            node[:8],
            Text(request.label or request.last_key.hex()[:8]),
            f"{(request.asked_blocks - request.start_block) * request.block_tokens:,}",
            f"{(request.hit_blocks - request.start_block) * request.block_tokens:,}",
            _came(request),
            _why(request.miss or request.missing, in_words=in_words),
        )
    return table


def request_table(node: NodeId, request: Request) -> Table:
    """One request in full."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for row in _rows(node, request):
        table.add_row(*map(Text, row))
    return table


def _rows(node: NodeId, request: Request) -> Iterator[tuple[str, str]]:
    asked, found = request.asked_blocks - request.start_block, request.hit_blocks - request.start_block
    yield "request", request.label or "(no label)"
    yield "time", f"{_time(request):%Y-%m-%d %H:%M:%S.%f}"
    yield "node", node
    behind = f", from block {request.start_block:,} on" if request.start_block else ""
    yield "asked for", f"{show_count(asked, 'block')} of {request.block_tokens} tokens{behind}"
    yield "found", f"{found:,}" + _listed(request, _PLACES)
    if request.missing is not None:
        yield "missing", f"{asked - found:,}: {_why(request.missing)}"
    if request.loaded:
        size = show_bytes(request.came * request.block_bytes)
        yield "loaded", f"{request.came:,}, {size}" + _listed(request, _CAME)
    else:
        yield "loaded", "not, or not yet"
    if request.miss is not None:
        yield "not loaded", f"{found - request.came:,}: {_why(request.miss)}"
    yield "lookup took", show_time(request.lookup_s)
    if request.loaded:
        expected_s = request.predicted_load_s
        yield "load took", show_time(request.load_s) + (f", {show_time(expected_s)} expected" if expected_s else "")
    if request.reason:
        yield "plan", f"{show_count(request.planned_blocks, 'block')} to load: {request.reason}"
    if prompt := prompt_times(request.ready_s, request.predicted_ready_s, request.recompute_s):
        yield "prompt", prompt
    yield "keys", f"{request.first_key.hex()} to {request.last_key.hex()}"


_PLACES = {
    "local": "in this node's memory",
    "nvme": "on this node's drives",
    "pending": "being written on this node",
    "remote": "on other nodes",
    "shared": "in the shared tier",
}
_CAME = {f"from_{source.value}": words(source).removeprefix("came ") for source in Source}


def _listed(request: Request, fields: dict[str, str]) -> str:
    parts = [f"{blocks:,} {text}" for name, text in fields.items() if (blocks := getattr(request, name))]
    return ": " + ", ".join(parts) if parts else ""


def _came(request: Request) -> str:
    counts = ((source.value, getattr(request, f"from_{source.value}")) for source in Source)
    came = ", ".join(f"{source} {blocks:,}" for source, blocks in counts if blocks)
    return came or "nothing" if request.loaded else "not loaded"


def _why(miss: Miss | None, *, in_words: bool = True) -> str:
    if miss is None:
        return ""
    return f"{miss.value}: {words(miss)}" if in_words else miss.value


def _time(request: Request) -> datetime:
    return datetime.fromtimestamp(request.asked_ns / 1e9, tz=timezone.utc).astimezone()

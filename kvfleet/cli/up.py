"""`kvfleet up` and `kvfleet down`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from kvfleet.cli.console import Address, Name, parse_bytes, plain_errors, show_bytes
from kvfleet.cli.status import show_nodes
from kvfleet.config import FleetConfig

__all__ = ["down", "up"]


def up(
    name: Name = "default",
    address: Address = "auto",
    dram_bytes: Annotated[
        int | None,
        typer.Option(
            parser=parse_bytes,
            metavar="SIZE",
            help="Of each node's arena, like 48GiB. Default: 4GiB, or half of what is free if that is less.",
        ),
    ] = None,
    arena_root: Annotated[str, typer.Option(help="Where arenas live.")] = FleetConfig().arena_root,
    shared: Annotated[
        str | None, typer.Option(metavar="URL", help="Of the shared tier, like s3://bucket/prefix.")
    ] = None,
) -> None:
    """Start a fleet on every node of a running Ray cluster. Nodes that have their manager keep it."""
    with plain_errors():
        import kvfleet

        config = FleetConfig(name=name, dram_bytes=dram_bytes, arena_root=arena_root, shared_url=shared)
        fleet = kvfleet.start(config, address=address)
        show_nodes(Console(), fleet.up())


def down(
    name: Name = "default",
    address: Address = "auto",
    drain_timeout: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Longest time for saving blocks to the shared tier.")
    ] = 60.0,
) -> None:
    """Stop a fleet: save what the shared tier lacks, end its actors, free its memory. Ray goes on."""
    with plain_errors():
        import kvfleet

        fleet = kvfleet.connect(name, address=address)
        found = fleet.status()
        unsaved = fleet.stop(drain_timeout_s=drain_timeout)
    freed = show_bytes(sum(node.capacity_bytes for node in found.nodes))
    stopped = f"fleet {name} is stopped: {len(found.nodes) + len(found.silent)} managers and its directory"
    Console().print(f"{stopped}; {freed} of memory are free again", highlight=False, soft_wrap=True)
    if unsaved:
        Console(stderr=True).print(f"{unsaved} blocks could not be saved in time")

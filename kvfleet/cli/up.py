"""`kvfleet up`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from kvfleet.cli.console import Address, Name, parse_bytes, plain_errors
from kvfleet.cli.status import show_nodes
from kvfleet.config import DriveConfig, FleetConfig

__all__ = ["up"]

_FLEET, _DRIVE = FleetConfig(), DriveConfig(directory="/")
_CODECS = "How blocks are kept {}: raw, or zstd, which is smaller and slower."


def up(  # noqa: PLR0913  an option each
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
    arena_root: Annotated[str, typer.Option(help="Where arenas live.")] = _FLEET.arena_root,
    shared: Annotated[
        str | None, typer.Option(metavar="URL", help="Of the shared tier, like s3://bucket/prefix.")
    ] = None,
    nvme: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIR",
            help="A directory on a drive that each node has there, for a tier below its memory; once a drive. It must "
            "exist. `$NAME` is what the environment of Ray's workers on the node says.",
        ),
    ] = None,
    nvme_bytes: Annotated[
        int | None,
        typer.Option(
            parser=parse_bytes, metavar="SIZE", help="To use of each drive. Default: nine tenths of what is free there."
        ),
    ] = None,
    nvme_dwpd: Annotated[
        float, typer.Option(metavar="NUMBER", help="Writes of its whole capacity a day that each drive is rated for.")
    ] = _DRIVE.dwpd,
    nvme_codec: Annotated[str, typer.Option(help=_CODECS.format("on drives"))] = _FLEET.nvme_codec,
    shared_codec: Annotated[str, typer.Option(help=_CODECS.format("in the shared tier"))] = _FLEET.shared_codec,
    shared_bytes: Annotated[
        int | None,
        typer.Option(
            parser=parse_bytes, metavar="SIZE", help="Of the shared tier, at most. Default: no limit of ours."
        ),
    ] = None,
) -> None:
    """Start a fleet on every node of a running Ray cluster. Nodes that have their manager keep it."""
    with plain_errors():
        import kvfleet

        config = FleetConfig(
            name=name,
            dram_bytes=dram_bytes,
            arena_root=arena_root,
            nvme=tuple(DriveConfig(directory=path, max_bytes=nvme_bytes, dwpd=nvme_dwpd) for path in nvme or ()),
            nvme_codec=nvme_codec,
            shared_url=shared,
            shared_codec=shared_codec,
            shared_bytes_max=shared_bytes,
        )
        fleet = kvfleet.start(config, address=address)
        show_nodes(Console(), fleet.up())

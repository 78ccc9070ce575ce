"""`kvfleet drain`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from kvfleet.cli.console import Address, Name, parse_bytes, plain_errors, show_bytes, show_count

__all__ = ["drain"]


def drain(
    node: Annotated[str, typer.Argument(help="Ray node id, or a beginning of it that no other node has.")],
    name: Name = "default",
    address: Address = "auto",
    seconds: Annotated[float, typer.Option(min=0, help="No block is written after so long.")] = 60.0,
    num_bytes: Annotated[
        int | None,
        typer.Option("--bytes", parser=parse_bytes, metavar="SIZE", help="At most so much is written, like 20GiB."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Let a drained node take stores again instead.")] = False,
) -> None:
    """Prepare a node to leave: no more stores, and its most valuable unsaved blocks go to the shared tier.

    First those in its memory, then those on its drives. Loads from it go on, and it stays drained until `--resume`, or
    until the node is gone.
    """
    with plain_errors():
        from kvfleet.operating import join

        fleet = join(name, address=address)
        if resume:
            fleet.resume(node)
            typer.echo(f"node {node}: takes stores again")
            return
        drained = fleet.drain(node, timeout_s=seconds, bytes_max=num_bytes)
    saved = f"{show_count(drained.saved_blocks, 'block')} ({show_bytes(drained.saved_bytes)}) saved"
    left = f"{drained.left_blocks:,} ({show_bytes(drained.left_bytes)}) left without a copy in the shared tier"
    Console().print(f"node {node}: draining; {saved}, {left}", highlight=False, soft_wrap=True)

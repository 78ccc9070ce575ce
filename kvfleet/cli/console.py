"""What the subcommands share: options, sizes as text, errors as one line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from kvfleet.errors import KvFleetError
from kvfleet.explain import show_bytes, show_count

__all__ = ["Address", "Name", "parse_bytes", "plain_errors", "show_bytes", "show_count"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

Name = Annotated[str, typer.Option(help="The fleet's name.")]
Address = Annotated[
    str, typer.Option(envvar="RAY_ADDRESS", help="Of the Ray cluster; `auto`: the one running on this machine.")
]


def parse_bytes(text: str) -> int:
    """A size like `48GiB` or `1073741824`, in bytes."""
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?) ?([KMGT]i)?B?", text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is no size; write one like 48GiB or 512MiB")
    number, unit = found.groups()
    return int(float(number) * 1024 ** (_UNITS.index(f"{unit}B") if unit else 0))


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turn what users can put right into one line and exit status 1."""
    try:
        yield
    except (KvFleetError, ConnectionError) as error:
        problem = str(error)
    else:
        return
    Console(stderr=True).print(f"[red]kvfleet:[/red] {escape(problem)}", highlight=False, soft_wrap=True)
    raise typer.Exit(1)

"""`kvfleet record`."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kvfleet.cli.console import Address, Name, parse_bytes, plain_errors, show_bytes, show_count
from kvfleet.errors import ConfigError

if TYPE_CHECKING:
    from kvfleet.cli.recorded import FleetRecording, Told

__all__ = ["record"]

_EVERY_S = 1.0
_POLL_S = 0.1


def record(
    trace: Annotated[Path, typer.Argument(dir_okay=False, help="File to write, like requests.jsonl. A new one.")],
    name: Name = "default",
    address: Address = "auto",
    seconds: Annotated[float | None, typer.Option(min=0.0, help="End after so long; without it, at Ctrl-C.")] = None,
    size: Annotated[str, typer.Option("--bytes", metavar="SIZE", help="End when the file is so large.")] = "1GiB",
) -> None:
    """Record what is asked of a running fleet, as hashed ids of blocks, for `kvfleet simulate` and `kvfleet size`.

    Ids are salted anew for each recording: they tell which prefixes were equal, nothing else; tokens are not in it.
    Sessions, turns and ends are in it where engines tell them. What engines produce is not recorded.
    """
    console, bytes_max = Console(stderr=True), parse_bytes(size)
    with plain_errors():
        from kvfleet.cli.recorded import FleetRecording
        from kvfleet.operating import join

        join(name, address=address)
        try:
            with trace.open("x", encoding="utf-8") as file:
                recording = FleetRecording(name, file)
                try:
                    _go_on(console, recording, seconds, bytes_max)
                finally:
                    if not recording.told.requests:
                        trace.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError("", f"{trace}: {error.strerror or error}") from error
    _summary(console, trace, recording.told)


def _go_on(console: Console, recording: FleetRecording, seconds: float | None, bytes_max: int) -> None:
    """Until the time is up, the file large enough, or Ctrl-C."""
    begun, due, told = time.monotonic(), 0.0, recording.told
    with _interrupts() as interrupted, console.status("recording") as status:
        while not interrupted and told.num_bytes < bytes_max:
            passed = time.monotonic() - begun
            if seconds is not None and passed >= seconds:
                break
            if passed >= due:
                recording.turn()
                due = passed + _EVERY_S
                status.update(f"{show_count(told.requests, 'request')} in {passed:.0f} s; Ctrl-C ends")
            time.sleep(_POLL_S)
        recording.turn(ends=True)


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Signals that asked us to end, as they come: what was asked up to then is still to be written."""
    came: list[int] = []
    old = {number: signal.signal(number, lambda number, _: came.append(number)) for number in _SIGNALS}
    try:
        yield came
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def _summary(console: Console, trace: Path, told: Told) -> None:
    size = f"{show_count(told.blocks, 'block')}, {show_bytes(told.num_bytes)}"
    written = f"{trace}: {size}" if told.requests else "nothing was asked: no file is written"
    lines = [f"{show_count(told.requests, 'request')}; {written}"]
    if told.lost:
        lines.append(f"lost: {show_count(told.lost, 'request')} that came faster than they could be written")
    if told.other:
        lines.append(f"left out: {show_count(told.other, 'request')} of a model with blocks of another size")
    for node, times in told.silent.items():
        lines.append(f"node {node[:8]} did not answer {show_count(times, 'time')}: some of its requests may be missing")
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)

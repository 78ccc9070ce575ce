"""`kvfleet down`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from typing_extensions import Self

from kvfleet.cli.console import Address, Name, plain_errors, show_bytes, show_count
from kvfleet.errors import ConfigError

if TYPE_CHECKING:
    from kvfleet.operating import FleetStatus

__all__ = ["Saving", "down", "summary"]

_QUIET_S = 6.0  # without progress, after which it is told why, and again at times


def down(
    name: Name = "default",
    address: Address = "auto",
    drain_timeout: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Longest time for saving blocks to the tiers below memory.")
    ] = 60.0,
) -> None:
    """Stop a fleet: save what the tiers below memory lack, end its actors, free its memory. Ray goes on.

    Takes as long as saving does, at most `--drain-timeout`, and some seconds.
    """
    console = Console()
    with plain_errors():
        from kvfleet.operating import join

        try:
            fleet = join(name, address=address)
        except ConfigError:
            console.print(f"fleet {name} does not run here: nothing to stop", highlight=False)
            return
        found = fleet.status()
        with Saving(Console(stderr=True), lambda: _obstacles(fleet.status())) as saving:
            unsaved = fleet.stop(drain_timeout_s=drain_timeout, on_progress=saving.show)
    for line in summary(found, saving.first, unsaved):
        console.print(line, highlight=False, soft_wrap=True)
    if unsaved:
        why = "; ".join(saving.obstacles or _obstacles(found))
        lost = f"{show_count(unsaved, 'block')} could not be saved{f': {why}' if why else ' in time'}"
        Console(stderr=True).print(lost, markup=False, highlight=False, soft_wrap=True)


def summary(found: FleetStatus, unsaved_before: int, unsaved: int) -> Iterator[str]:
    """What was done, a line each.

    Args:
        found: the fleet before.
        unsaved_before: blocks without a copy below memory, then.
        unsaved: those that are gone.
    """
    if unsaved_before > unsaved:
        yield f"{show_count(unsaved_before - unsaved, 'block')} saved"
    managers = show_count(len(found.nodes) + len(found.silent), "manager")
    freed = show_bytes(sum(node.capacity_bytes for node in found.nodes))
    freed = f"; {freed} of memory are free again" if found.nodes else ""
    yield f"fleet {found.name} is stopped: {managers} and its directory{freed}"
    for node in found.silent:
        yield f"{node[:8]}: its manager did not answer; the next fleet that starts there frees its memory"


def _obstacles(found: FleetStatus) -> list[str]:
    """What keeps blocks from being saved, as far as nodes know."""
    problems = [node.shared_problem for node in found.nodes if node.shared_problem]
    problems += [drive.problem for node in found.nodes for drive in node.drives if drive.problem and not drive.works]
    return list(dict.fromkeys(problems))


class Saving:
    """How far saving is: a bar on a terminal, else a line when there is something to save.

    Where it does not get on, it says why.

    Attributes:
        first: how many blocks were to be saved.
        obstacles: what kept blocks from being saved when it was told last.
    """

    def __init__(self, console: Console, obstacles: Callable[[], list[str]]) -> None:
        """Nothing is shown yet.

        Args:
            console: to show it on.
            obstacles: what keeps blocks from being saved, asked when no block is for some seconds.
        """
        columns = (TextColumn("saving"), BarColumn(), MofNCompleteColumn(), TextColumn("blocks"), TimeElapsedColumn())
        self._console = console
        self._ask_obstacles = obstacles
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("saving", total=None, visible=False)
        self._left = 0
        self._moved_at = time.monotonic()
        self.first = 0
        self.obstacles: list[str] = []

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, left: int) -> None:
        """So many blocks are left."""
        if left and not self.first and not self._console.is_terminal:
            self._say(f"saving {show_count(left, 'block')}")
        self.first = max(self.first, left)
        self._progress.update(self._task, total=self.first, completed=self.first - left, visible=self.first > 0)
        if left != self._left:
            self._left, self._moved_at = left, time.monotonic()
        elif left and time.monotonic() - self._moved_at >= _QUIET_S:
            self.obstacles = self._ask_obstacles()
            why = "; ".join(self.obstacles)
            self._say(f"{show_count(left, 'block')} left to save" + (f": {why}" if why else ""))
            self._moved_at = time.monotonic()

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

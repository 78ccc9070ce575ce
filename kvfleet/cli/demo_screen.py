"""What the demo shows: one line a step, with progress while it runs, and a table at the end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Live
from rich.table import Table

from kvfleet.cli.console import show_bytes
from kvfleet.cli.demo_worker import Answer, Progress
from kvfleet.node.messages import Source

__all__ = ["Row", "Screen", "Step", "same_everywhere", "sources"]

_BAR_WIDTH = 20
_DETAIL_WIDTH = 44
_FROM = {
    Source.DRAM: "its own memory",
    Source.PEER: "another node",
    Source.SHARED: "shared storage",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One run of the model.

    Attributes:
        where: the document's KV was.
        node: that it ran on.
        answer: what it gave.
    """

    where: str
    node: str
    answer: Answer


class Step:
    """A step under way."""

    def __init__(self, live: Live, title: str) -> None:
        self.result = ""  # shown when the step has ended
        self._live = live
        self._task = live.add_task(title, total=None, detail="")

    def show(self, progress: Progress) -> None:
        """Show how far the step has got."""
        detail = progress.text or progress.doing
        if len(detail) > _DETAIL_WIDTH:
            detail = f"…{detail[1 - _DETAIL_WIDTH :]}"
        self._live.update(
            self._task, completed=progress.done or 0, total=progress.total, detail=" ".join(detail.split())
        )


class Screen:
    """The terminal, or a file: progress moves only on a terminal, the finished lines go to both."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        """A line for the user; rich markup."""
        self._console.print(text, highlight=False)

    def note(self, text: str) -> None:
        """Something the user may want to know, as plain text."""
        self._console.print(f"  [yellow]note:[/yellow] {escape(text)}", highlight=False)

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[Step]:
        """Show a step while it runs, and a line about it when it has ended well."""
        started = time.monotonic()
        live = Live(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(_BAR_WIDTH),
            TextColumn("[dim]{task.fields[detail]}", markup=True), TimeElapsedColumn(),
            console=self._console, transient=True,
        )  # fmt: skip
        with live:
            step = Step(live, title)
            yield step
        seconds = f"[dim]{time.monotonic() - started:.1f} s[/dim]"
        result = f": {escape(step.result)}" if step.result else ""
        self._console.print(f"[green]✓[/green] {title}{result}  {seconds}", highlight=False)

    def conclude(self, question: str, rows: Sequence[Row]) -> None:
        """The table, the answer and the time it all took."""
        reference = rows[0].answer
        self._console.print()
        self._console.print(_table(rows))
        self._console.print(Panel(escape(reference.text or "(nothing)"), title=escape(question), title_align="left"))
        if same_everywhere(rows):
            self.say("Every run gave the same answer, and the same logits for each of its tokens, bit for bit.")
        else:
            self.say("[red]The runs did not all give the same answer.[/red]")
        for row in rows:
            if row.answer.shortfall:
                self.note(f"{row.where}: {row.answer.shortfall}")
        self.say("TTFT: time to first token, from the prompt's token ids to the first new one; loading is included.")
        self.say(f"Total time: {time.monotonic() - self._started:.0f} s")


def same_everywhere(rows: Sequence[Row]) -> bool:
    """Whether all runs gave the same text from the same logits."""
    return len({(row.answer.text, row.answer.logits_digest) for row in rows}) == 1


def sources(answer: Answer) -> str:
    """Where the KV of a run came from, as text."""
    return ", ".join(_FROM[source] for source in answer.bytes_by_source)


def _table(rows: Sequence[Row]) -> Table:
    table = Table()
    table.add_column("KV of the document")
    table.add_column("Node")
    for name in ("Tokens reused", "Bytes moved"):
        table.add_column(name, justify="right")
    table.add_column("From")
    for name in ("TTFT", "Speed-up"):
        table.add_column(name, justify="right")
    table.add_column("Same answer")
    reference = rows[0].answer
    for row in rows:
        answer = row.answer
        prompt = answer.reused_tokens + answer.computed_tokens
        table.add_row(
            escape(row.where),
            row.node,
            f"{answer.reused_tokens:,} of {prompt:,}",
            show_bytes(sum(answer.bytes_by_source.values())) if answer.bytes_by_source else "-",
            sources(answer) or "-",
            f"{answer.ttft_s:.2f} s",
            f"{reference.ttft_s / answer.ttft_s:.1f}×",
            _compare(answer, reference),
        )
    return table


def _compare(answer: Answer, reference: Answer) -> str:
    if answer is reference:
        return "-"
    if answer.text != reference.text:
        return "[red]no[/red]"
    return "[green]yes, bit for bit[/green]" if answer.logits_digest == reference.logits_digest else "yes"

"""What the demo shows: one line a step, with progress while it runs, and a table at the end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Live
from rich.table import Column, Table

from kvfleet.cli.console import show_bytes
from kvfleet.cli.demo_messages import Answer, Progress
from kvfleet.node.messages import Source

__all__ = ["Row", "Screen", "Step", "same_everywhere", "sources"]

_BAR_WIDTH = 16
_SOURCES = {
    Source.DRAM: "own memory",
    Source.NVME: "own drives",
    Source.PEER: "other node",
    Source.SHARED: "shared storage",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One run of the model.

    Attributes:
        title: what was special about it.
        node: that it ran on.
        answer: what it gave.
    """

    title: str
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
        detail = escape(" ".join((progress.text or progress.doing).split()))
        self._live.update(self._task, completed=progress.done or 0, total=progress.total, detail=detail)


class Screen:
    """The terminal, or a file: only the terminal shows what is under way, both get what is done."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        """A line for the user; rich markup."""
        self._console.print(text, highlight=False, soft_wrap=not self._console.is_terminal)

    def note(self, text: str) -> None:
        """Something the user may want to know, as plain text."""
        self.say(f"  [yellow]note:[/yellow] {escape(text)}")

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[Step]:
        """Show a step while it runs, and a line about it when it has ended well."""
        started = time.monotonic()
        live = Live(
            SpinnerColumn(),
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            BarColumn(_BAR_WIDTH),
            TextColumn("[dim]{task.fields[detail]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            expand=True,
            disable=not self._console.is_terminal,
        )
        with live:
            step = Step(live, title)
            yield step
        result = f": {escape(step.result)}" if step.result else ""
        self.say(f"[green]✓[/green] {title}{result} [dim]({time.monotonic() - started:.1f} s)[/dim]")

    def conclude(self, question: str, prompt_tokens: int, rows: Sequence[Row]) -> None:
        """The table, the answer and the time it all took."""
        reference = rows[0].answer
        self._console.print(_table(prompt_tokens, rows))
        self._console.print(Panel(escape(reference.text or "(nothing)"), title=escape(question), title_align="left"))
        if same_everywhere(rows):
            self.say("All runs gave the same answer, and the same logits for each of its tokens, bit for bit.")
        else:
            self.say("[red]The runs did not all give the same answer from the same logits.[/red]")
        for row in rows:
            if row.answer.shortfall:
                self.note(f"{row.title}: {row.answer.shortfall}")
        self.say("TTFT, time to first token: from the prompt's token ids to the first new one, loading of KV included.")
        self.say(f"Total time: {time.monotonic() - self._started:.0f} s")


def same_everywhere(rows: Sequence[Row]) -> bool:
    """Whether all runs gave the same text from the same logits."""
    return len({(row.answer.text, row.answer.logits_digest) for row in rows}) == 1


def sources(answer: Answer) -> str:
    """Where the KV of a run came from, as text."""
    return ", ".join(_SOURCES[source] for source in answer.bytes_by_source)


def _table(prompt_tokens: int, rows: Sequence[Row]) -> Table:
    reference = rows[0].answer
    table = Table(
        "", "Node", Column("Tokens\nreused", justify="right"), Column("Bytes\nmoved", justify="right"), "From",
        Column("TTFT", justify="right"), Column("Speed-\nup", justify="right"), "Same\nanswer",
        box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True,
        caption=f"prompt: {prompt_tokens:,} tokens", caption_justify="left",
    )  # fmt: skip
    for row in rows:
        answer = row.answer
        table.add_row(
            row.title,
            row.node,
            f"{answer.reused_tokens:,}",
            show_bytes(answer.num_bytes) if answer.num_bytes else "-",
            sources(answer) or "-",
            f"{answer.ttft_s:.2f} s",
            f"{reference.ttft_s / answer.ttft_s:.1f}x",
            _compare(answer, reference),
        )
    return table


def _compare(answer: Answer, reference: Answer) -> str:
    if answer is reference:
        return "-"
    return "[green]yes[/green]" if answer.text == reference.text else "[red]no[/red]"

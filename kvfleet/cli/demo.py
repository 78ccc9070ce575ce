"""`kvfleet demo`: one prompt is computed once, and its KV found again wherever it has gone since."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

from kvfleet.cli.console import plain_errors
from kvfleet.cli.demo_prompt import DEFAULT_QUESTION, read_document
from kvfleet.errors import ConfigError

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["run"]

_QUESTION_ABOUT_ANY_TEXT = "What is this text about?"
_NEEDED = ("torch", "transformers", "gguf")
_INTERRUPTED = 130  # exit status, as a shell has it after Ctrl-C
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(
    document: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A text. Default: the handbook of a lighthouse.")
    ] = None,
    question: Annotated[str | None, typer.Option(metavar="TEXT", help="About the document.")] = None,
    nodes: Annotated[int, typer.Option(min=1, max=4, help="Ray nodes to start on this machine.")] = 2,
    shared: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Shared storage, like s3://bucket/prefix. Default: a directory."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Full-attention model as transformers saves it. Default: SmolLM2-135M-Instruct."
        ),
    ] = None,
) -> None:
    """Ask a language model about a document again and again, the document's KV coming from elsewhere each time.

    Starts Ray nodes of its own, and leaves nothing behind but a copy of the model in ~/.cache/kvfleet.
    """
    with _interruptible(), plain_errors():
        _check_packages()
        text, notes = read_document(document)
        question = question or (DEFAULT_QUESTION if document is None else _QUESTION_ABOUT_ANY_TEXT)
        from kvfleet.cli.demo_flow import Demo, scratch
        from kvfleet.cli.demo_screen import same_everywhere

        with scratch(shared) as places:
            rows = Demo(places, text, question, nodes, model).show(notes)
    if not same_everywhere(rows):
        raise typer.Exit(1)


def _check_packages() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError("demo", f"needs {', '.join(missing)}: run `pip install 'kvfleet-ray[demo]'`")


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C, and signals that mean the same, end the demo once it has cleaned up behind itself."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        for each in _ENDING_SIGNALS:
            signal.signal(each, signal.SIG_IGN)  # cleaning up is not interrupted
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in _ENDING_SIGNALS}
    try:
        yield
    except KeyboardInterrupt:
        Console(stderr=True).print("[red]kvfleet:[/red] interrupted; everything that was started is gone")
        raise typer.Exit(_INTERRUPTED) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

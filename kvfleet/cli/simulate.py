"""`kvfleet simulate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from kvfleet.cli.console import parse_bytes, plain_errors
from kvfleet.errors import ConfigError

if TYPE_CHECKING:
    from kvfleet.sim.config import SimConfig
    from kvfleet.sim.report import Report
    from kvfleet.sim.trace import Request

__all__ = ["simulate"]

_REQUESTS = 10_000  # of a workload, unless told otherwise
_BLOCK_TOKENS = 512  # of a workload; traces bring their own
_RATE = 2.0  # of a workload
_TOKEN_BYTES = 128 << 10


class Workload(str, Enum):
    """Kinds of traffic that are made up here."""

    CHAT = "chat"
    RAG = "rag"
    AGENTS = "agents"
    CODE = "code"
    UNIQUE = "unique"


class RouterKind(str, Enum):
    """Who gets a request."""

    PREFIX = "prefix"
    ROUND_ROBIN = "round-robin"


_TraceFile = Annotated[
    Path | None,
    typer.Argument(exists=True, dir_okay=False, help="Requests: Mooncake, Alibaba Bailian, or of `kvfleet record`."),
]
_Rate = Annotated[
    float | None,
    typer.Option(min=1e-6, max=1e6, help=f"Of a workload: requests a second, to the whole fleet. Default: {_RATE:g}."),
]
_Hints = Annotated[bool, typer.Option("--hints", help="Engines tell session, turn and end, where a trace has them.")]
_TokenBytes = Annotated[
    str | None,
    typer.Option("--token-bytes", help="KV of a token. Default: what a recording says, else 128KiB, of Llama-3-8B."),
]
_Prefill = Annotated[float, typer.Option(min=1e-6, max=1e9, help="Tokens a second an engine computes, first ones.")]


def simulate(  # noqa: PLR0913  each is an option
    trace: _TraceFile = None,
    workload: Annotated[Workload | None, typer.Option(help="Made-up traffic instead of a trace.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Of a workload; of a trace, the first so many.")] = None,
    rate: _Rate = None,
    nodes: Annotated[list[int], typer.Option(min=1, help="Repeat for several.")] = [1],  # noqa: B006
    dram: Annotated[list[str], typer.Option(help="Memory of a node's arena. Repeat for several.")] = ["64GiB"],  # noqa: B006
    nvme: Annotated[str, typer.Option(help="Of a node's drives; 0 for none.")] = "0",
    nvme_dwpd: Annotated[float, typer.Option(min=1e-6, max=1e6, help="Drive writes a day they are rated for.")] = 1.0,
    shared: Annotated[bool, typer.Option("--shared", help="With a shared tier: 50 ms, 1 GB/s a node.")] = False,
    shared_bytes: Annotated[str | None, typer.Option(help="Most that is kept there.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="What to keep. Repeat for several.")] = None,
    hints: _Hints = False,
    router: Annotated[RouterKind, typer.Option(help="Which node gets a request.")] = RouterKind.PREFIX,
    kv: _TokenBytes = None,
    prefill: _Prefill = 12e3,
    network: Annotated[float, typer.Option(min=1e-3, max=1e6, help="Between nodes, GB/s.")] = 2.5,
    json_file: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write all figures here.")] = None,
    plots: Annotated[Path | None, typer.Option(file_okay=False, help="Write plots to this folder.")] = None,
) -> None:
    """Show what a fleet would do with your traffic, by the code that serves: hits, waiting times, wear, traffic.

    Time to first token follows from the planner's model and the queue at each engine; decoding is not modelled. With
    several values of --nodes, --dram or --policy, all combinations are simulated.
    """
    from kvfleet.cli.simulated import report_tables
    from kvfleet.core.policies import DEFAULT
    from kvfleet.core.speeds import PrefillSpeed, Speed
    from kvfleet.sim.config import EngineConfig, SimConfig, SimDrives
    from kvfleet.sim.plots import need_matplotlib, save_plots
    from kvfleet.sim.report import to_json
    from kvfleet.sim.sweep import grid

    if (trace is None) == (workload is None):
        raise typer.BadParameter("give a trace or a --workload")
    if trace is not None and rate is not None:
        raise typer.BadParameter("--rate is of a --workload: a trace has its own times")
    with plain_errors():
        if plots is not None:
            need_matplotlib()  # before a simulation that may take minutes
        block_tokens, token_bytes, number, source = _source(trace, workload, requests, rate or _RATE)
        token_bytes = parse_bytes(kv) if kv else token_bytes or _TOKEN_BYTES
        config = SimConfig(
            block_bytes=token_bytes * block_tokens,
            dram_bytes=parse_bytes(dram[0]),
            drives=SimDrives(max_bytes=parse_bytes(nvme), dwpd=nvme_dwpd),
            shared=Speed(0.05, 1e9) if shared or shared_bytes else None,
            shared_bytes_max=parse_bytes(shared_bytes) if shared_bytes else None,
            router=router.value,
            hints=hints,
            engine=EngineConfig(prefill=PrefillSpeed(1 / prefill, 1 / prefill / 40_000)),
            network=Speed(0.002, network * 1e9),
        )
        configs = grid(config, nodes, [parse_bytes(size) for size in dram], policy or [DEFAULT])
        reports = _run(configs, block_tokens, number, source)
        Console().print(report_tables(reports))
        with _writing():
            if json_file is not None:
                json_file.write_text(to_json(reports) + "\n")
            if plots is not None:
                for path in save_plots(reports, plots, _optimum(reports, source)):
                    typer.echo(path)


@contextmanager
def _writing() -> Iterator[None]:
    """A file that cannot be written is an error of one line."""
    try:
        yield
    except OSError as error:
        raise ConfigError("", f"{error.filename}: {error.strerror or error}") from error


Source = Callable[[], Iterable["Request"]]
"""Gives the requests, anew each time."""


def _source(
    trace: Path | None, workload: Workload | None, number: int | None, rate: float
) -> tuple[int, int | None, int, Source]:
    """Tokens in a block, bytes of a token if they are known, how many requests there are, and the requests."""
    if trace is not None:
        from kvfleet.sim.trace import load_trace

        found = load_trace(trace)
        requests = found.requests[:number]
        return found.block_tokens, found.token_bytes, len(requests), lambda: requests
    from kvfleet.sim.generators import WORKLOADS, generate

    assert workload is not None
    kind, number = WORKLOADS[workload.value], number or _REQUESTS
    return _BLOCK_TOKENS, None, number, lambda: generate(kind, requests=number, rate=rate, block_tokens=_BLOCK_TOKENS)


def _run(configs: Sequence[SimConfig], block_tokens: int, number: int, source: Source) -> list[Report]:
    """Simulate all, with a bar for what is left."""
    from kvfleet.sim.sweep import simulate as run

    reports = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for config in configs:
            task = progress.add_task(f"{config.policy}, {config.num_nodes} nodes", total=number)
            told = partial(_advance, progress, task)
            begun = time.perf_counter()
            reports.append(run(source(), block_tokens, config, on_progress=told))
            seconds = time.perf_counter() - begun
            progress.console.print(f"{reports[-1].requests:,} requests simulated in {seconds:.1f} s", style="dim")
    return reports


def _advance(progress: Progress, task: TaskID, number: int) -> None:
    progress.update(task, completed=number)


def _optimum(reports: Sequence[Report], source: Source) -> dict[int, float]:
    """The best that memory alone could do: that of one node with the memory of all. Nothing with tiers below."""
    from kvfleet.sim.optimum import best_hits_of

    if any(one.config.shared or one.config.drives.max_bytes for one in reports):
        return {}
    requests = list(source())
    blocks = max(1, sum(len(request.keys) for request in requests))
    capacities = {one.capacity_tokens: one.config.num_nodes * one.dram_blocks for one in reports}
    return {tokens: best_hits_of(requests, capacity) / blocks for tokens, capacity in capacities.items()}

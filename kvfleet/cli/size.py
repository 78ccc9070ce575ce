"""`kvfleet size`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from kvfleet.cli.console import plain_errors
from kvfleet.cli.simulate import Workload
from kvfleet.cli.sized import show
from kvfleet.core.policies import DEFAULT, POLICIES
from kvfleet.core.speeds import Speed
from kvfleet.errors import ConfigError
from kvfleet.sizing.hardware import GPUS, PRICED, Drives, Fleet, Prices, engine_for, find_gpu
from kvfleet.sizing.kv import FORMATS, find_format
from kvfleet.sizing.models import find_model

if TYPE_CHECKING:
    from kvfleet.sizing.answer import Answer
    from kvfleet.sizing.traffic import Traffic

__all__ = ["parse_size", "parse_speed", "parse_tokens", "size"]

_FLEET, _PRICES = Fleet(), Prices()
_POWERS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_NUMBER = r"(\d{1,15}(?:\.\d{1,15})?)"
_TOKENS_MAX = 10**7


# Typer has parsers read defaults too, which are numbers.


def parse_size(text: str | int) -> int:
    """A size like `256GB`, `1.5TB` or `48GiB`, in bytes; GB are 10^9."""
    found = re.fullmatch(rf"{_NUMBER} ?([KMGTP]?)(i?)B?(?:/s)?", str(text))
    if found is None or (found[3] and not found[2]):
        raise typer.BadParameter(f"{text!r} is no size; write one like 256GB, 1.5TB or 48GiB")
    power = 1024 ** list(_POWERS).index(found[2]) if found[3] else _POWERS[found[2]]
    return round(float(found[1]) * power)


def parse_speed(text: str | int) -> int:
    """Bytes a second, like `2.5GB`; not 0."""
    speed = parse_size(text)
    if not speed:
        raise typer.BadParameter("must be more than 0")
    return speed


def parse_tokens(text: str | int) -> int:
    """A number of tokens like `128k`, which is 128,000, `128Ki`, which is 131,072, or 4096."""
    found = re.fullmatch(rf"{_NUMBER}(k|K|Ki|M)?", str(text))
    if found is None:
        raise typer.BadParameter(f"{text!r} is no number of tokens; write one like 32000 or 128k")
    number = round(float(found[1]) * {None: 1, "k": 1000, "K": 1000, "Ki": 1024, "M": 10**6}[found[2]])
    if not 1 <= number <= _TOKENS_MAX:
        raise typer.BadParameter(f"must be from 1 to {_TOKENS_MAX:,}, is {number:,}")
    return number


_Size = partial(typer.Option, parser=parse_size, metavar="SIZE", show_default=False)
_SpeedOf = partial(typer.Option, parser=parse_speed, metavar="SIZE", show_default=False)
_Price = partial(typer.Option, min=0, max=1e6, metavar="DOLLARS")
_KvDtype = Annotated[
    str | None, typer.Option(help=f"How KV is kept: {', '.join(FORMATS)}. Default: as the config says.")
]
_Context = Annotated[
    int, typer.Option(parser=parse_tokens, metavar="TOKENS", help="Of a session at its longest, like 128k.")
]
_Workload = Annotated[Workload, typer.Option(help="What they do. `unique`: prompts that never repeat.")]
_Trace = Annotated[
    Path | None,
    typer.Option(help="Requests of your own, as `kvfleet record` writes them, instead of a class of workload."),
]
_Gpus = Annotated[int | None, typer.Option(min=1, max=4096, help="Of one engine. Default: as few as hold the model.")]
_PrefillSpeed = Annotated[
    float | None, typer.Option(help="Tokens a second that an engine computes of a short prompt, as you measured.")
]
_GpuPrice = Annotated[float | None, _Price(help=f"Of a GPU for an hour. Default: about the price of {PRICED}.")]


def size(  # noqa: PLR0913  an option each
    model: Annotated[str, typer.Argument(help="A known model, like llama-3-70b, or the path of a config.json.")],
    kv_dtype: _KvDtype = None,
    context: _Context = 32_000,
    sessions: Annotated[int, typer.Option(min=1, help="At once, in the whole fleet.")] = 100,
    workload: _Workload = Workload.CHAT,
    trace: _Trace = None,
    nodes: Annotated[int, typer.Option(min=1, max=10_000, help="Of the fleet.")] = _FLEET.num_nodes,
    dram: Annotated[int, _Size(help="Memory for the cache, of each node. Default: 256GB.")] = _FLEET.dram_bytes,
    nvme: Annotated[int, _Size(help="Drives for the cache, of each node.")] = 0,
    shared: Annotated[int, _Size(help="Shared tier, of the whole fleet.")] = 0,
    gpu: Annotated[str, typer.Option(help=f"That computes: {', '.join(GPUS)}.")] = "h100",
    gpus: _Gpus = None,
    prefill_speed: _PrefillSpeed = None,
    dwpd: Annotated[float, typer.Option(min=1e-6, max=1e3, help="Drive writes a day that drives are rated for.")] = 1.0,
    nvme_speed: Annotated[int, _SpeedOf(help="A second, from a node's drives. Default: 6GB.")] = 6 * 10**9,
    network_speed: Annotated[int, _SpeedOf(help="A second, from node to node. Default: 2.5GB.")] = 25 * 10**8,
    shared_speed: Annotated[int, _SpeedOf(help="A second, to a node from the shared tier. Default: 1GB.")] = 10**9,
    shared_latency: Annotated[float, typer.Option(min=0, max=60, help="Seconds until the shared tier answers.")] = 0.03,
    target: Annotated[float, typer.Option(help="Wanted: this share of what an endless cache would find.")] = 0.9,
    ttft: Annotated[float | None, typer.Option(help="Wanted instead: TTFT of nine requests in ten, seconds.")] = None,
    policy: Annotated[str, typer.Option(help=f"What is kept: {', '.join(POLICIES)}.")] = DEFAULT,
    gpu_price: _GpuPrice = None,
    dram_price: Annotated[float, _Price(help="Of a GB for a month.")] = _PRICES.dram_gb_month,
    nvme_price: Annotated[float, _Price(help="Of a GB for a month.")] = _PRICES.nvme_gb_month,
    shared_price: Annotated[float, _Price(help="Of a GB for a month.")] = _PRICES.shared_gb_month,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> None:
    """Say what to buy for a fleet's cache, and what to expect of it: bytes, hits, time to first token, GPUs, money.

    GB are 10^9 bytes, k are 1000 tokens. The requests are simulated by the code that serves; prices and, unless you
    give it, the speed of the GPUs are assumptions. The exit status is 0 whether it is worth it or not.
    """
    from kvfleet.sizing.advice import Question, advise

    drives = Drives(num_bytes=nvme, speed=Speed(_FLEET.drives.speed.latency_s, nvme_speed), dwpd=dwpd)
    network, storage = Speed(_FLEET.network.latency_s, network_speed), Speed(shared_latency, shared_speed)
    fleet = Fleet(num_nodes=nodes, dram_bytes=dram, drives=drives, shared_bytes=shared, network=network, shared=storage)
    prices = {"dram_gb_month": dram_price, "nvme_gb_month": nvme_price, "shared_gb_month": shared_price}
    with plain_errors(), _bar() as told:
        if policy not in POLICIES:
            raise ConfigError("policy", f"must be one of {', '.join(POLICIES)}, is {policy!r}")
        known = find_model(model)
        found = advise(
            Question(
                model=known,
                kv=find_format(kv_dtype, known),
                context_tokens=context,
                sessions=sessions,
                traffic=_traffic(trace, workload.value, context, sessions),
                fleet=fleet,
                engine=engine_for(known, find_gpu(gpu), num_gpus=gpus, tokens_per_s=prefill_speed),
                prices=Prices(gpu_hour=gpu_price, **prices),
                policy=policy,
                target=target,
                ttft_s=ttft,
                on_progress=told,
            )
        )
    _tell(found, as_json=as_json)


def _tell(found: Answer, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
    else:
        show(found, Console(highlight=False))


def _traffic(trace: Path | None, workload: str, context_tokens: int, sessions: int) -> Traffic:
    from kvfleet.sizing.workloads import traffic_of_trace, traffic_of_workload

    return traffic_of_workload(workload, context_tokens, sessions) if trace is None else traffic_of_trace(trace)


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """A bar for how far it is; gives what moves it."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("simulating", total=None)
        yield lambda done, most: progress.update(task, completed=done, total=most)

"""`kvfleet bench`: what kvfleet costs here, beside what the machine can do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kvfleet.cli.console import plain_errors

if TYPE_CHECKING:
    from kvfleet.bench.report import Row

__all__ = ["app"]

app = typer.Typer(help="Measure throughput and latency, each beside its floor.", no_args_is_help=True)

BlockTokens = Annotated[
    list[int], typer.Option(min=1, help="Tokens in a block; 128 KiB of KV each. Repeat for several sizes.")
]
Blocks = Annotated[list[int], typer.Option(min=1, help="Blocks in a prompt. Repeat for several.")]
Repeats = Annotated[int, typer.Option(min=1, help="Rounds that count, after two that do not.")]
JsonFile = Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write all figures to this file.")]
RayAddress = Annotated[
    str | None, typer.Option("--address", envvar="RAY_ADDRESS", help="Of a Ray cluster. Default: one is started.")
]


@app.command()
def local(
    block_tokens: BlockTokens = [16, 64, 256],  # noqa: B006  typer copies it
    blocks: Blocks = [1, 16],  # noqa: B006
    repeats: Repeats = 20,
    json_file: JsonFile = None,
    address: RayAddress = None,
) -> None:
    """Load a prefix from this node's arena; floor: memcpy."""
    from kvfleet.bench import local as bench
    from kvfleet.bench.workload import arena_bytes, running_fleet, spec_of

    with plain_errors(), running_fleet(arena_bytes(spec_of(max(block_tokens)), max(blocks)), address) as fleet:
        rows = [row for size, count in _sizes(block_tokens, blocks) for row in bench.rows(fleet, size, count, repeats)]
        _tell("local", bench.MEASURES, rows, json_file)


@app.command()
def store(
    block_tokens: BlockTokens = [16, 64, 256],  # noqa: B006
    blocks: Blocks = [1, 16],  # noqa: B006
    repeats: Repeats = 20,
    json_file: JsonFile = None,
    address: RayAddress = None,
) -> None:
    """Store new prompts; floor: memcpy."""
    from kvfleet.bench import store as bench
    from kvfleet.bench.workload import arena_bytes, running_fleet, spec_of

    with plain_errors(), running_fleet(arena_bytes(spec_of(max(block_tokens)), max(blocks)), address) as fleet:
        rows = [row for size, count in _sizes(block_tokens, blocks) for row in bench.rows(fleet, size, count, repeats)]
        _tell("store", bench.MEASURES, rows, json_file)


@app.command()
def lookup(
    blocks: Blocks = [32, 128, 512],  # noqa: B006
    repeats: Repeats = 200,
    json_file: JsonFile = None,
    address: RayAddress = None,
) -> None:
    """Look up prompts of 256-token blocks; floor: SHA-256 of their ids."""
    from kvfleet.bench import lookup as bench
    from kvfleet.bench.workload import running_fleet
    from kvfleet.config import MIB

    with plain_errors(), running_fleet(256 * MIB, address) as fleet:
        rows = [row for count in blocks for row in bench.rows(fleet, count, repeats)]
        _tell("lookup", bench.MEASURES, rows, json_file)


@app.command()
def peer(
    block_tokens: BlockTokens = [16, 64, 256],  # noqa: B006
    blocks: Blocks = [8],  # noqa: B006
    repeats: Repeats = 10,
    json_file: JsonFile = None,
    address: RayAddress = None,
) -> None:
    """Load a prefix from another node (by default between two raylets on this machine); floor: the object store."""
    from kvfleet.bench import peer as bench
    from kvfleet.bench.workload import arena_bytes, running_fleet, spec_of

    dram_bytes = arena_bytes(spec_of(max(block_tokens)), max(blocks))
    with plain_errors(), bench.two_nodes(address) as pair, running_fleet(dram_bytes, None) as fleet:
        rows = [
            row for size, count in _sizes(block_tokens, blocks) for row in bench.rows(fleet, pair, size, count, repeats)
        ]
        _tell("peer", bench.MEASURES, rows, json_file)


@app.command()
def directory(
    callers: Annotated[list[int], typer.Option(min=1, help="Callers at once. Repeat for several.")] = [1, 4, 16],  # noqa: B006
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of a prefix.")] = 512,
    records: Annotated[int, typer.Option(min=1, help="That the directory knows.")] = 1_000_000,
    repeats: Repeats = 7,
    json_file: JsonFile = None,
    address: RayAddress = None,
) -> None:
    """Ask the directory for prefixes, also while inventories come in; floor: an actor that does nothing."""
    from kvfleet.bench import directory as bench

    with plain_errors(), bench.running_directory(address, max(records, blocks), blocks) as site:
        found = [bench.rows(site, count, max(1, bench.CALLS // count), repeats) for count in callers]
    costs = ", ".join(f"{1e3 * cpu_s:.2f} ({count})" for count, (_, cpu_s) in zip(callers, found, strict=True))
    measures = f"{bench.MEASURES.format(blocks=blocks, records=records)} CPU ms a call at the callers: {costs}."
    _tell("directory", measures, [row for rows, _ in found for row in rows], json_file, count="callers")


@app.command()
def shared(  # noqa: PLR0913  each is an option
    url: Annotated[str, typer.Argument(help="Of the storage: s3://bucket/prefix, file:///mnt/cluster.")],
    block_tokens: BlockTokens = [16, 64],  # noqa: B006
    blocks: Blocks = [32],  # noqa: B006
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 4,
    codec: Annotated[str, typer.Option(help="raw, or zstd.")] = "raw",
    repeats: Repeats = 7,
    json_file: JsonFile = None,
) -> None:
    """Write blocks to a storage and read them; floor: its client library used bare.

    Credentials and an endpoint other than Amazon's come from the environment: AWS_ENDPOINT_URL and the like.
    """
    from kvfleet.bench import shared as bench
    from kvfleet.node.codecs import codec_of

    with plain_errors(), bench.open_site(url, concurrency, codec_of(codec, "codec")) as site:
        rows = [row for size, count in _sizes(block_tokens, blocks) for row in bench.rows(site, size, count, repeats)]
        _tell("shared", bench.MEASURES.format(concurrency=concurrency, cpu=site.cpu.text()), rows, json_file)


@app.command()
def nvme(  # noqa: PLR0913  each is an option
    directory: Annotated[Path, typer.Argument(file_okay=False, exists=True, help="On the drive to measure.")],
    block_tokens: BlockTokens = [32],  # noqa: B006
    blocks: Blocks = [256],  # noqa: B006
    inflight: Annotated[int, typer.Option(min=1, help="Transfers at once.")] = 8,
    codec: Annotated[str, typer.Option(help="raw, or zstd.")] = "raw",
    repeats: Repeats = 10,
    json_file: JsonFile = None,
) -> None:
    """Write blocks to a drive and read them; floor: a plain O_DIRECT loop."""
    from kvfleet.bench import nvme as bench

    with plain_errors(), bench.open_site(directory, inflight, codec) as site:
        rows = [row for size, count in _sizes(block_tokens, blocks) for row in bench.rows(site, size, count, repeats)]
        _tell("nvme", bench.MEASURES.format(inflight=inflight, cpu=site.cpu.text()), rows, json_file)


@app.command()
def vllm(
    model: Annotated[
        str | None, typer.Option(help="Name at Hugging Face or directory. Default: SmolLM2 as in the demo.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=256, help="Of a prompt.")] = 1024,
    repeats: Repeats = 20,
    json_file: JsonFile = None,
    address: RayAddress = None,
) -> None:
    """Requests to vLLM with and without the connector; floor: without."""
    from kvfleet.bench import vllm as bench
    from kvfleet.bench.workload import running_fleet
    from kvfleet.cli.demo_model import prepare_smollm2
    from kvfleet.config import GIB
    from kvfleet.connectors.filedigests import cache_directory

    with plain_errors(), running_fleet(2 * GIB, address) as fleet:
        name = model or str(prepare_smollm2(cache_directory()))
        with bench.engines(fleet, name, tokens) as pair:
            rows = bench.rows(pair, tokens, repeats)
            hooks = bench.hook_times(pair)
        _tell("vllm", f"{bench.MEASURES} {hooks}.", rows, json_file, count="tokens")


@app.command()
def planner(
    tokens: Annotated[int, typer.Option(min=256, help="Of a prompt.")] = 1024,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens in a block.")] = 64,
    factor: Annotated[
        list[float], typer.Option(min=0.01, help="Speed of the shared tier, times the model's. Repeat for several.")
    ] = [0.25, 0.8, 1.5, 4.0],  # noqa: B006
    repeats: Repeats = 8,
    json_file: JsonFile = None,
) -> None:
    """Prompts of SmolLM2 with a shared tier slower and faster than computing; floor: the model alone."""
    from kvfleet.bench import planner as bench
    from kvfleet.cli.demo_model import load_model, prepare_smollm2
    from kvfleet.connectors.filedigests import cache_directory

    with plain_errors():
        model = load_model(prepare_smollm2(cache_directory()))
        with bench.open_site(model, tokens, repeats, block_tokens) as site:
            cases = site.cases(factor)
        measures = f"{bench.measures(site)} {bench.expectations(cases)}."
        _tell("planner", measures, bench.rows(cases, tokens), json_file, count="tokens")


@app.command()
def policies(
    policy: Annotated[list[str] | None, typer.Option(help="By name. Repeat for several. Default: all.")] = None,
    resident: Annotated[list[int], typer.Option(min=1, help="Blocks there. Repeat for several.")] = [10_000, 100_000],  # noqa: B006
    requests: Annotated[int, typer.Option(min=1, help="That are timed.")] = 2_000,
    trace: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="To replay for hit rates.")] = None,
    capacity: Annotated[
        list[int] | None, typer.Option(min=1, help="Blocks, for the trace. Repeat for several.")
    ] = None,
    final: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the trace's requests that are the last of theirs and say so.")
    ] = 0.0,
) -> None:
    """What policies cost a block, and what they keep of a trace."""
    from rich.table import Table

    from kvfleet.bench import policies as bench
    from kvfleet.core.policies import POLICIES
    from kvfleet.errors import ConfigError
    from kvfleet.sim.trace import load_trace, with_final

    with plain_errors():
        names = policy or list(POLICIES)
        unknown = [name for name in names if name not in POLICIES]
        if unknown:
            raise ConfigError("--policy", f"must be of {', '.join(POLICIES)}, is {unknown[0]!r}")
        costs = Table("policy", "resident blocks", "µs a block", title=bench.MEASURES.format(blocks=bench.BLOCKS))
        for cost in bench.costs(names, resident, requests):
            costs.add_row(cost.policy, f"{cost.resident:,}", f"{cost.us_per_block:.1f}")
        Console().print(costs)
        if trace is not None:
            loaded = load_trace(trace)
            rooms = capacity or [max(1, loaded.distinct * percent // 100) for percent in (1, 2, 5, 10, 20)]
            if final:
                loaded = with_final(loaded, final)
            found = Table("policy", "room, blocks", "hits", title=f"{trace.name}: {len(loaded.requests):,} requests")
            for hit in bench.hits(names, rooms, loaded):
                found.add_row(hit.policy, f"{hit.capacity_blocks:,}", f"{hit.hit_rate:.1%}")
            Console().print(found)


@app.command("managers")
def bench_managers(
    policy: Annotated[list[str], typer.Option(help="By name. Repeat for several.")] = ["hold-turn"],  # noqa: B006
    requests: Annotated[int, typer.Option(min=1, help="Of a round.")] = 40,
    address: RayAddress = None,
) -> None:
    """What policies cost a manager that stores and looks up, beside leaf-first LRU."""
    from rich.table import Table

    from kvfleet.bench import managers as bench

    with plain_errors():
        title = bench.MEASURES.format(blocks=bench.BLOCKS, base=bench.BASE, rounds=bench.ROUNDS)
        shares = Table("policy", "requests a second", f"of those with {bench.BASE}", title=title)
        for one in bench.throughputs(policy, address, requests):
            shares.add_row(one.policy, f"{one.requests_per_s:.0f}", f"{one.share:.0%}")
        Console().print(shares)


def _sizes(block_tokens: list[int], blocks: list[int]) -> list[tuple[int, int]]:
    return [(size, count) for size in block_tokens for count in blocks]


def _tell(bench: str, measures: str, rows: list[Row], json_file: Path | None, count: str = "blocks") -> None:
    from kvfleet.bench.report import Report, table, to_json

    report = Report(bench, measures, tuple(rows), count)
    Console().print(table(report))
    if json_file is not None:
        json_file.write_text(to_json(report) + "\n")

"""A sizing on one screen."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvfleet.sizing.answer import Answer, Source, Tier

__all__ = ["show", "show_size"]

_NAMES = {"dram": "memory", "peer": "other node", "nvme": "drives", "shared": "shared tier"}
_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


def show_size(num_bytes: float) -> str:
    """In units of 1000, as drives, links and prices are sold, to three digits."""
    size, unit = float(num_bytes), 0
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.{max(0, 3 - len(str(int(size)))) if unit else 0}f} {_UNITS[unit]}"


def show(found: Answer, console: Console) -> None:
    """Print it: at 80 columns as a rule no more than 30 lines."""
    title = f"{found.model}, KV in {found.kv_dtype}, {found.requests.workload}, {found.policy}"
    console.print(Text(title, style="bold"))
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(no_wrap=True, style="cyan")
    facts.add_column(overflow="fold")
    for name, text in _facts(found):
        facts.add_row(name, text)
    console.print(facts)
    console.print(Padding(_tiers(found), (1, 0)))
    for number, line in enumerate(found.advice):
        style = ("bold green" if found.worth_it else "bold yellow") if number == 0 else ""
        console.print(Text(line, style=style))


def _facts(found: Answer) -> Iterator[tuple[str, str]]:
    kv, prefill, requests, gpus = found.kv, found.prefill, found.requests, found.gpus
    yield (
        "KV",
        (
            f"{kv.token_bytes:,} bytes a token, {show_size(kv.session_bytes)} a session of {kv.session_tokens:,}, "
            f"{show_size(kv.all_bytes)} for {kv.sessions:,}"
        ),
    )
    yield (
        "prefill",
        f"{prefill.tokens_per_s:,.0f} tokens/s on {prefill.gpus} {prefill.gpu}, {_time(prefill.session_s)} a session",
    )
    yield (
        "requests",
        (
            f"{requests.per_s:.3g} a second of {requests.prompt_tokens:,.0f} tokens, {requests.repeated:.0%} came "
            f"before; all fill {show_size(requests.working_bytes)}"
        ),
    )
    yield (
        "hits",
        (
            f"{found.hit_rate:.1%} of tokens found, {found.loaded_rate:.1%} loaded: {found.compute_saved:.1%} of "
            "prefill saved"
        ),
    )
    yield (
        "TTFT",
        f"{_times(found.ttft_s)}, without {_times(found.plain_ttft_s)} (p50, p90, p99, no queue)",
    )
    yield "wanted", _wanted(found)
    yield (
        "GPUs",
        (
            f"{gpus.needed:.1f} for prefill, not {gpus.without:.1f}: {gpus.saved:.1f} saved, "
            f"${gpus.saved_month_price:,.0f} a month; cache ${found.cache_month_price:,.0f}"
        ),
    )
    if found.wear is not None:
        wear = found.wear
        yield (
            "wear",
            (
                f"{wear.dwpd:.3g} DWPD ({show_size(wear.day_bytes)} a day), TBW {show_size(wear.life_bytes)} in "
                f"{wear.rated_years:g} years; rated {wear.rated_dwpd:g} and {show_size(wear.rated_life_bytes)}"
            ),
        )


def _wanted(found: Answer) -> str:
    wanted, repeated = found.wanted, found.requests.repeated
    if wanted.ttft_s is not None:
        aim = f"p90 TTFT of {_time(wanted.ttft_s)}"
    else:
        hit_rate = wanted.hit_rate or 0.0
        share = hit_rate / repeated if repeated else 1.0
        aim = f"{share:.0%} of what came before, {hit_rate:.1%} of tokens"
    if wanted.num_bytes is None:
        return f"{aim}: no cache reaches it, what is new takes longer"
    if not wanted.num_bytes:
        return f"{aim}: nothing to buy for that"
    return f"{aim}: {show_size(wanted.num_bytes)} of cache"


def _tiers(found: Answer) -> Table:
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    shown.add_column("load from", no_wrap=True)
    for title in ("capacity", "sessions", "hits", "read", "$/month", "speed"):
        shown.add_column(title, justify="right", no_wrap=True)
    shown.add_column("beats computing\nfrom")
    tiers = {tier.name: tier for tier in found.tiers}
    for source in found.sources:
        speed = f"{show_size(source.bytes_per_s)}/s"
        shown.add_row(_NAMES[source.name], *_tier(tiers.get(source.name)), speed, _crossover(source))
    return shown


def _tier(tier: Tier | None) -> tuple[str, ...]:
    if tier is None:
        return ("", "", "", "", "")
    return (
        show_size(tier.num_bytes),
        f"{tier.sessions:,.0f}" if tier.sessions >= 100 else f"{tier.sessions:.3g}",
        f"{tier.hit_rate:.1%}",
        f"{show_size(tier.read_bytes_per_s)}/s",
        f"{tier.month_price:,.0f}",
    )


def _crossover(source: Source) -> str:
    """The shortest prefix that is loaded, or the speed at which a session would be."""
    if source.crossover_tokens is not None:
        return f"{source.crossover_tokens:,} tokens"
    return f"{show_size(source.even_bytes_per_s)}/s" if source.even_bytes_per_s else "never"


def _times(values: tuple[float, ...]) -> str:
    return " / ".join(_time(value) for value in values)


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"

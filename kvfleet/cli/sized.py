"""A sizing on one screen."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvfleet.sizing.answer import Answer, Source, Tier

__all__ = ["show", "show_size"]

_NAMES = {"dram": "memory", "peer": "another node", "nvme": "drives", "shared": "shared tier"}
_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


def show_size(num_bytes: float) -> str:
    """In units of 1000, as drives, links and prices are sold, to three digits."""
    size, unit = float(num_bytes), 0
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.{max(0, 3 - len(str(int(size)))) if unit else 0}f} {_UNITS[unit]}"


def show(found: Answer, console: Console) -> None:
    """Print it."""
    console.print(Text(f"{found.model}, KV in {found.kv_dtype}, {found.requests.workload}", style="bold"))
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
    kv, prefill, requests = found.kv, found.prefill, found.requests
    yield (
        "KV",
        (
            f"{kv.token_bytes:,} bytes a token; {show_size(kv.session_bytes)} for a session of {kv.session_tokens:,} "
            f"tokens; {show_size(kv.all_bytes)} for {kv.sessions:,}"
        ),
    )
    yield (
        "prefill",
        (
            f"{prefill.tokens_per_s:,.0f} tokens/s on {prefill.gpus} {prefill.gpu}; such a session takes "
            f"{_time(prefill.session_s)} from nothing"
        ),
    )
    yield (
        "requests",
        (
            f"{requests.per_s:.3g} a second of {requests.prompt_tokens:,.0f} tokens; {requests.repeated:.0%} of these "
            f"came before; all that came fills {show_size(requests.working_bytes)}"
        ),
    )
    yield "hits", f"{found.hit_rate:.1%} of tokens found, {found.loaded_rate:.1%} loaded: {_saved(found)}"
    yield (
        "TTFT",
        (
            f"{_times(found.ttft_s)} with the cache, {_times(found.plain_ttft_s)} without "
            "(p50, p90, p99; alone, no queue)"
        ),
    )
    yield "wanted", _wanted(found)
    gpus = found.gpus
    yield (
        "GPUs",
        (
            f"{gpus.needed:.1f} for prefill instead of {gpus.without:.1f}: {gpus.saved:.1f} saved, "
            f"${gpus.saved_month_price:,.0f} a month; the cache costs ${found.cache_month_price:,.0f}"
        ),
    )
    if found.wear is not None:
        wear = found.wear
        yield (
            "wear",
            (
                f"{show_size(wear.day_bytes)} written to drives a day: {wear.dwpd:.2f} DWPD needed, rated for "
                f"{wear.rated_dwpd:g}; {show_size(wear.life_bytes)} in {wear.rated_years:g} years, rated for "
                f"{show_size(wear.rated_life_bytes)} (TBW)"
            ),
        )


def _saved(found: Answer) -> str:
    return f"{found.compute_saved:.1%} of prefill saved ({found.policy})"


def _wanted(found: Answer) -> str:
    wanted = found.wanted
    aim = (
        f"p90 TTFT of {_time(wanted.ttft_s)}" if wanted.ttft_s is not None else f"{wanted.hit_rate or 0:.1%} of tokens"
    )
    if wanted.num_bytes is None:
        return f"{aim}: no memory reaches it"
    if not wanted.num_bytes:
        return f"{aim}: nothing to buy for that"
    return f"{aim}: {show_size(wanted.num_bytes)} of cache for the fleet"


def _tiers(found: Answer) -> Table:
    shown = Table(box=None, pad_edge=False)
    shown.add_column("load from")
    for title in ("capacity", "sessions", "hits", "read", "$ a month", "faster than computing"):
        shown.add_column(title, justify="right" if title != "faster than computing" else "left")
    tiers = {tier.name: tier for tier in found.tiers}
    for source in found.sources:
        shown.add_row(_NAMES[source.name], *_tier(tiers.get(source.name)), _crossover(source))
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
    speed = f"at {show_size(source.bytes_per_s)}/s"
    if source.crossover_tokens is None:
        needed = f"; {show_size(source.even_bytes_per_s)}/s would be even" if source.even_bytes_per_s else ""
        return f"never {speed}{needed}"
    return f"from {source.crossover_tokens:,} tokens on, {speed}"


def _times(values: tuple[float, ...]) -> str:
    return " / ".join(_time(value) for value in values)


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"

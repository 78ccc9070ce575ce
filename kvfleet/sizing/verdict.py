"""Whether a cache is worth it, and what to look at, in words."""

from __future__ import annotations

from collections.abc import Iterator

from kvfleet.sim.workloads import WORKLOADS
from kvfleet.sizing.answer import Answer
from kvfleet.sizing.hardware import Fleet, Prices

__all__ = ["REPEATED_MIN", "verdict"]

REPEATED_MIN = 0.05
"""Of the tokens of prompts. Where fewer repeat, there is nothing to gain."""

_SAVED_MIN = 0.02  # of the time of prefill
_HITS_MIN = 0.01  # of the tokens of prompts, that a tier brings
_NAMES = {"dram": "the memory", "nvme": "the drives", "shared": "the shared tier"}


def verdict(found: Answer, prices: Prices, fleet: Fleet) -> tuple[bool, tuple[str, ...]]:
    """Whether to buy it, and why; then what else to know. `found` has all but these two."""
    worth_it, why = _why(found)
    notes = _notes(found, fleet) if found.requests.repeated >= REPEATED_MIN else ()
    return worth_it, (why, *notes, *_assumed(found, prices, fleet))


def _why(found: Answer) -> tuple[bool, str]:
    repeated = found.requests.repeated
    if repeated < REPEATED_MIN:
        return False, (
            f"Not worth it: prompts hardly repeat. Even a cache without end would find {repeated:.1%} of their tokens."
        )
    if found.compute_saved < _SAVED_MIN:
        return False, _saves_nothing(found)
    gain = found.gpus.saved_month_price - found.cache_month_price
    faster = _faster(found)
    if gain < 0:
        return False, (
            f"Not worth the money: it costs ${-gain:,.0f} a month more than the GPU time that it saves. {faster}: buy "
            "it only if that is worth as much to you, or buy less."
        )
    return True, (
        f"Worth it: it saves {found.compute_saved:.0%} of the time of prefill, ${gain:,.0f} a month after its own "
        f"cost; {faster}."
    )


def _faster(found: Answer) -> str:
    """The first of p50, p90 and p99 that can be seen to fall."""
    for name, plain_s, with_s in zip(("p50", "p90", "p99"), found.plain_ttft_s, found.ttft_s, strict=True):
        if _time(plain_s) != _time(with_s):
            return f"TTFT {name} {'falls' if with_s < plain_s else 'rises'} from {_time(plain_s)} to {_time(with_s)}"
    return "TTFT stays as it is"


def _saves_nothing(found: Answer) -> str:
    if found.hit_rate - found.loaded_rate > _SAVED_MIN:
        return (
            f"Not worth it: of what is found, {found.hit_rate:.0%} of the tokens of prompts, nearly all is computed "
            "faster than it is loaded from the tiers that have it."
        )
    return (
        f"Not worth it at this size: {found.requests.repeated:.0%} of the tokens of prompts repeat, but these tiers "
        f"are too small to keep them: they find {found.hit_rate:.1%}."
    )


def _notes(found: Answer, fleet: Fleet) -> Iterator[str]:
    """What to look at besides."""
    for tier in found.tiers:
        if _useless(found, tier.name):
            yield (f"Loading a session of this length from {_NAMES[tier.name]} is slower than computing it.")
        elif tier.hit_rate < _HITS_MIN <= found.hit_rate:
            yield f"Hardly anything is found in {_NAMES[tier.name]} alone: {tier.hit_rate:.1%} of all tokens."
    if found.wear is not None and found.wear.dwpd > found.wear.rated_dwpd:
        yield (
            f"The drives would be written {found.wear.dwpd:.1f} times a day and are rated for "
            f"{found.wear.rated_dwpd:g}: the write budget holds writes back, so they hit less than is shown."
        )
    yield from _small(found, fleet)


def _small(found: Answer, fleet: Fleet) -> Iterator[str]:
    """Where a node's memory has less room than one session takes."""
    sessions = next(tier.sessions for tier in found.tiers if tier.name == "dram") / fleet.num_nodes
    if sessions < 1:
        rest = "goes to the tiers below" if len(found.tiers) > 1 else "is not kept"
        yield f"A node's memory has room for {sessions:.2g} of a session: the rest {rest}."


def _assumed(found: Answer, prices: Prices, fleet: Fleet) -> Iterator[str]:
    """What was not told, and what was left out."""
    assumed = []
    if found.requests.workload in WORKLOADS:
        assumed.append("requests (--trace)")
    if found.prefill.assumed:
        assumed.append("prefill (--prefill-speed)")
    speeds = _assumed_speeds(fleet)
    if speeds:
        assumed.append(f"loads ({', '.join(speeds)})")
    if prices == Prices():
        assumed.append("prices (--gpu-price and others)")
    if assumed:
        yield f"Assumed; give your own: {', '.join(assumed)}."
    if fleet.num_nodes > 1:
        yield (
            f"The {fleet.num_nodes} nodes are simulated as one, each request where its prefix is: `kvfleet simulate` "
            "has nodes and links."
        )


def _assumed_speeds(fleet: Fleet) -> list[str]:
    """Options for the speeds that matter and that nobody gave."""
    usual = Fleet()
    options = {
        "--network-speed": fleet.num_nodes > 1 and fleet.network == usual.network,
        "--nvme-speed": fleet.drives.num_bytes > 0 and fleet.drives.speed == usual.drives.speed,
        "--shared-speed": fleet.shared_bytes > 0 and fleet.shared == usual.shared,
    }
    return [option for option, assumed in options.items() if assumed]


def _useless(found: Answer, name: str) -> bool:
    source = next(source for source in found.sources if source.name == name)
    return source.crossover_tokens is None or source.crossover_tokens > found.kv.session_tokens


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"

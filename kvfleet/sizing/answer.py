"""What `kvfleet size` answers. Names carry the units; bytes are bytes, money is US dollars, a month has 730 hours."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Answer", "Gpus", "Kv", "Prefill", "Requests", "Source", "Tier", "Wanted", "Wear"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kv:
    """Bytes of KV.

    Attributes:
        numbers_per_token: keys and values of all layers, or the compressed vectors.
        bits_per_number: its part of a scale included.
        token_bytes: of a token.
        block_tokens: tokens in a block of the fleet.
        block_bytes: of a block.
        session_tokens: of a session at its longest.
        session_bytes: of such a session.
        sessions: at once.
        all_bytes: of all of them.
    """

    numbers_per_token: int
    bits_per_number: float
    token_bytes: int
    block_tokens: int
    block_bytes: int
    session_tokens: int
    session_bytes: int
    sessions: int
    all_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """How fast prompts are computed.

    Attributes:
        gpu: kind.
        gpus: of one engine.
        tokens_per_s: of an engine, on a short prompt.
        session_s: for a session at its longest, from nothing.
        assumed: worked out from the GPU's peak, not given.
    """

    gpu: str
    gpus: int
    tokens_per_s: float
    session_s: float
    assumed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where KV could be loaded from.

    Attributes:
        name: "dram", "peer", "nvme", "shared".
        latency_s: of a read.
        bytes_per_s: of it.
        crossover_tokens: the shortest prefix that is loaded faster than computed; None: there is none.
        even_bytes_per_s: the speed at which a session at its longest is loaded as fast as computed; None: at no speed.
    """

    name: str
    latency_s: float
    bytes_per_s: float
    crossover_tokens: int | None
    even_bytes_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """What comes.

    Attributes:
        workload: class, or file.
        per_s: requests a second, of the fleet.
        prompt_tokens: of a prompt, on average.
        repeated: share of these that a cache without end would have.
        working_bytes: what such a cache would hold after the requests at hand, for the whole fleet.
        requests: that were counted.
        share: of the fleet's sessions that were simulated.
    """

    workload: str
    per_s: float
    prompt_tokens: float
    repeated: float
    working_bytes: int
    requests: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A tier of the whole fleet.

    Attributes:
        name: "dram", "nvme", "shared".
        num_bytes: capacity.
        sessions: at their longest, that it has room for.
        hit_rate: share of the tokens of prompts that come from it.
        read_bytes_per_s: for that, on average.
        month_price: of it; requests to S3 included.
    """

    name: str
    num_bytes: int
    sessions: float
    hit_rate: float
    read_bytes_per_s: float
    month_price: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Wear:
    """What drives have to bear, if all is written to them that the cache would.

    Attributes:
        day_bytes: written a day, to all drives.
        dwpd: the same in their capacity: what they have to be rated for.
        life_bytes: the same over the years that they are rated for: TBW.
        rated_dwpd: what they are rated for.
        rated_life_bytes: the same over those years.
        rated_years: these.
    """

    day_bytes: float
    dwpd: float
    life_bytes: float
    rated_dwpd: float
    rated_life_bytes: float
    rated_years: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What has to be bought for the target.

    Attributes:
        hit_rate: wanted share of the tokens of prompts; None if a TTFT is wanted.
        ttft_s: wanted TTFT of nine requests in ten; None if a hit rate is wanted.
        num_bytes: the memory, of the fleet, that reaches it; 0: none is needed, or there is nothing to find; None: no
            memory does.
    """

    hit_rate: float | None
    ttft_s: float | None
    num_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """GPUs for prefill alone; decoding needs the same with and without a cache.

    Attributes:
        without: a cache.
        needed: with it.
        saved: the difference.
        saved_month_price: of these.
    """

    without: float
    needed: float
    saved: float
    saved_month_price: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All of it.

    Attributes:
        model: its name.
        kv_dtype: how a number is kept.
        policy: that decides what is kept.
        hit_rate: share of the tokens of prompts that the tiers have.
        loaded_rate: share of the tokens of prompts that are loaded: not what is computed faster.
        compute_saved: share of the time of prefill that the cache saves.
        ttft_s: with the cache, p50, p90, p99, of a request alone.
        plain_ttft_s: without.
        cache_month_price: of all tiers.
        worth_it: whether to buy it.
        advice: why, and what to look at, in words.
    """

    model: str
    kv_dtype: str
    policy: str
    kv: Kv
    prefill: Prefill
    sources: tuple[Source, ...]
    requests: Requests
    tiers: tuple[Tier, ...]
    wear: Wear | None
    wanted: Wanted
    hit_rate: float
    loaded_rate: float
    compute_saved: float
    ttft_s: tuple[float, float, float]
    plain_ttft_s: tuple[float, float, float]
    gpus: Gpus
    cache_month_price: float
    worth_it: bool
    advice: tuple[str, ...]

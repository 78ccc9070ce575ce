"""From a model, a traffic, machines and prices to what to buy and what to expect of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvfleet.core.layout import DEFAULT_BLOCK_TOKENS
from kvfleet.core.policies import DEFAULT
from kvfleet.core.writebudget import DAY_S
from kvfleet.errors import ConfigError
from kvfleet.sizing import answer
from kvfleet.sizing.crossover import crossover_tokens, even_bytes_per_s
from kvfleet.sizing.hardware import GB, Engine, Fleet, Prices
from kvfleet.sizing.kv import KvFormat, bytes_per_token, layout_of
from kvfleet.sizing.models import Model
from kvfleet.sizing.search import STEPS, least, quantiles
from kvfleet.sizing.serving import Served, Sizes, serve, serve_memory
from kvfleet.sizing.traffic import Reuse, Traffic, reuse_of
from kvfleet.sizing.verdict import REPEATED_MIN, verdict

__all__ = ["GPU_LOAD", "MONTH_H", "Question", "advise"]

MONTH_H = 730
GPU_LOAD = 0.7
"""Share of its time that a GPU computes prompts at most: above it, requests wait for each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked.

    Attributes:
        model: that is served.
        kv: how it keeps KV.
        context_tokens: of a session at its longest.
        sessions: at once, in the whole fleet.
        traffic: what they ask.
        fleet: its machines.
        engine: that computes.
        prices: of all of it.
        policy: what the cache keeps, by name.
        target: share of what an endless cache would hit that is wanted, in (0, 1].
        ttft_s: TTFT that nine requests in ten should have; None: the target is the hit rate.
        on_progress: told before each simulation, with how many are done and how many there will be at most.
    """

    model: Model
    kv: KvFormat
    context_tokens: int
    sessions: int
    traffic: Traffic
    fleet: Fleet
    engine: Engine
    prices: Prices = field(default_factory=Prices)
    policy: str = DEFAULT
    target: float = 0.9
    ttft_s: float | None = None
    on_progress: Callable[[int, int], None] = lambda _done, _most: None

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            ConfigError: naming the setting.
        """
        if self.context_tokens < 1:
            raise ConfigError("context", f"a session has tokens, is {self.context_tokens}")
        if self.sessions < 1:
            raise ConfigError("sessions", f"there must be one, is {self.sessions}")
        if not 0 < self.target <= 1:
            raise ConfigError("target", f"must be above 0 and at most 1, is {self.target}")
        if self.ttft_s is not None and not 0 < self.ttft_s < math.inf:
            raise ConfigError("ttft", f"must be more than 0, is {self.ttft_s}")
        if not self.traffic.counted():
            raise ConfigError("trace", "it has no requests")
        if not any(request.prompt_tokens for request in self.traffic.counted()):
            raise ConfigError("trace", "its prompts are empty")
        if not self.traffic.per_s():
            raise ConfigError("trace", "its requests come all at once: how many come a second cannot be told")

    @property
    def token_bytes(self) -> int:
        """Of a token's KV."""
        return bytes_per_token(self.model, self.kv)

    def sources(self) -> tuple[answer.Source, ...]:
        """From what prefix on each source is worth a load."""
        fleet, prefill = self.fleet, self.engine.prefill
        speeds = {"dram": fleet.dram, "peer": fleet.network, "nvme": fleet.drives.speed, "shared": fleet.shared}
        return tuple(
            answer.Source(
                name=name,
                latency_s=speed.latency_s,
                bytes_per_s=speed.bytes_per_s,
                crossover_tokens=crossover_tokens(prefill, speed, self.token_bytes, DEFAULT_BLOCK_TOKENS),
                even_bytes_per_s=even_bytes_per_s(prefill, speed.latency_s, self.token_bytes, self.context_tokens),
            )
            for name, speed in speeds.items()
        )

    def serve(self, sizes: Sizes) -> Served:
        """What a cache of these sizes does."""
        return serve(self.traffic, sizes, self.token_bytes, self.fleet, self.engine, policy=self.policy)

    def serve_memory(self, num_bytes: float) -> Served:
        """What so much memory for the fleet does."""
        return serve_memory(self.traffic, num_bytes, self.token_bytes, self.fleet, self.engine, policy=self.policy)


def advise(question: Question) -> answer.Answer:
    """Work it out. Takes a few simulations of the traffic."""
    fleet, prices = question.fleet, question.prices
    nodes = fleet.num_nodes
    sizes = Sizes(fleet.dram_bytes * nodes, fleet.drives.num_bytes * nodes, fleet.shared_bytes)
    reuse = reuse_of(question.traffic)
    question.on_progress(0, STEPS + 2)
    served = question.serve(sizes)
    requests = _requests(question, reuse)
    tiers = tuple(_tiers(question, sizes, served, requests.per_s))
    gpus = _gpus(question, served, requests.per_s)
    found = answer.Answer(
        model=question.model.name,
        kv_dtype=question.kv.name,
        policy=question.policy,
        kv=_kv(question),
        prefill=_prefill(question),
        sources=question.sources(),
        requests=requests,
        tiers=tiers,
        wear=_wear(question, served, nodes) if sizes.nvme else None,
        wanted=_wanted(question, reuse, served),
        hit_rate=served.hit_rate,
        loaded_rate=served.loaded_rate,
        compute_saved=served.saved,
        ttft_s=quantiles(served.ttft_s),
        plain_ttft_s=quantiles(served.plain_ttft_s),
        gpus=gpus,
        cache_month_price=sum(tier.month_price for tier in tiers),
        worth_it=False,
        advice=(),
    )
    worth_it, advice = verdict(found, prices, fleet)
    return replace(found, worth_it=worth_it, advice=advice)


def _kv(question: Question) -> answer.Kv:
    layout = layout_of(question.model, question.kv)
    session = question.token_bytes * question.context_tokens
    return answer.Kv(
        numbers_per_token=question.model.numbers_per_token,
        bits_per_number=question.kv.bits,
        token_bytes=question.token_bytes,
        block_tokens=layout.block_tokens,
        block_bytes=layout.block_bytes,
        session_tokens=question.context_tokens,
        session_bytes=session,
        sessions=question.sessions,
        all_bytes=session * question.sessions,
    )


def _prefill(question: Question) -> answer.Prefill:
    engine = question.engine
    return answer.Prefill(
        gpu=engine.gpu.name,
        gpus=engine.num_gpus,
        tokens_per_s=1 / engine.prefill.token_s,
        session_s=engine.prefill.seconds(0, question.context_tokens),
        assumed=not engine.measured,
    )


def _requests(question: Question, reuse: Reuse) -> answer.Requests:
    traffic = question.traffic
    counted = traffic.counted()
    return answer.Requests(
        workload=traffic.name,
        per_s=traffic.per_s(),
        prompt_tokens=sum(request.prompt_tokens for request in counted) / len(counted),
        repeated=reuse.repeated,
        working_bytes=_working_bytes(question, reuse),
        requests=len(counted),
        share=traffic.share,
    )


def _working_bytes(question: Question, reuse: Reuse) -> int:
    traffic = question.traffic
    return int(reuse.blocks * traffic.block_tokens * question.token_bytes / traffic.share)


def _tiers(question: Question, sizes: Sizes, served: Served, per_s: float) -> list[answer.Tier]:
    prices = question.prices
    session = question.token_bytes * question.context_tokens
    mean_tokens = served.prompt_tokens / served.requests
    tiers = []
    for name, num_bytes, gb_month in (
        ("dram", sizes.dram, prices.dram_gb_month),
        ("nvme", sizes.nvme, prices.nvme_gb_month),
        ("shared", sizes.shared, prices.shared_gb_month),
    ):
        if not num_bytes:
            continue
        hit_rate = served.tokens[name] / served.prompt_tokens
        loaded = served.loaded_tokens[name] / served.prompt_tokens
        read = per_s * mean_tokens * loaded * question.token_bytes
        price = num_bytes / GB * gb_month
        if name == "shared":
            price += _object_price(question, served, read)
        tiers.append(
            answer.Tier(
                name=name,
                num_bytes=num_bytes,
                sessions=num_bytes / session,
                hit_rate=hit_rate,
                read_bytes_per_s=read,
                month_price=price,
            )
        )
    return tiers


def _object_price(question: Question, served: Served, read_bytes_per_s: float) -> float:
    """What a month of requests to S3 costs: one for each block of the fleet that is written or read."""
    seconds = MONTH_H * 3600
    # Blocks of the fleet, which may be smaller than the trace's.
    smaller = question.traffic.block_tokens / DEFAULT_BLOCK_TOKENS
    puts = served.shared_objects * smaller / question.traffic.share / served.span_s * seconds if served.span_s else 0.0
    gets = read_bytes_per_s / (question.token_bytes * DEFAULT_BLOCK_TOKENS) * seconds
    return puts * question.prices.put + gets * question.prices.get


def _wear(question: Question, served: Served, nodes: int) -> answer.Wear:
    drives = question.fleet.drives
    day = served.drive_bytes / question.traffic.share / served.span_s * DAY_S if served.span_s else 0.0
    return answer.Wear(
        day_bytes=day,
        dwpd=day / (drives.num_bytes * nodes),
        life_bytes=day * 365 * drives.rated_years,
        rated_dwpd=drives.dwpd,
        rated_life_bytes=drives.life_bytes * nodes,
        rated_years=drives.rated_years,
    )


def _gpus(question: Question, served: Served, per_s: float) -> answer.Gpus:
    engine = question.engine
    without = engine.gpus(per_s * served.compute_s / served.requests, GPU_LOAD)
    needed = engine.gpus(per_s * served.computed_s / served.requests, GPU_LOAD)
    hour = question.prices.gpu_hour if question.prices.gpu_hour is not None else engine.gpu.hour_price
    return answer.Gpus(
        without=without, needed=needed, saved=without - needed, saved_month_price=(without - needed) * hour * MONTH_H
    )


def _wanted(question: Question, reuse: Reuse, served: Served) -> answer.Wanted:
    """The least memory that reaches the target, to about a tenth: by bisection of its logarithm."""
    if question.ttft_s is None and reuse.repeated < REPEATED_MIN:
        return answer.Wanted(hit_rate=question.target * reuse.repeated, ttft_s=None, num_bytes=0)
    if question.ttft_s is not None and quantiles(served.plain_ttft_s)[1] <= question.ttft_s:
        return answer.Wanted(hit_rate=None, ttft_s=question.ttft_s, num_bytes=0)
    wanted_rate = None if question.ttft_s is not None else question.target * reuse.repeated
    block_bytes = question.traffic.block_tokens * question.token_bytes / question.traffic.share
    high = math.log2(_working_bytes(question, reuse) + block_bytes)

    def reaches(size: float) -> bool:
        served = question.serve_memory(2**size)
        if question.ttft_s is not None:
            return quantiles(served.ttft_s)[1] <= question.ttft_s
        assert wanted_rate is not None
        return served.hit_rate >= wanted_rate

    question.on_progress(1, STEPS + 2)
    if not reaches(high):
        return answer.Wanted(hit_rate=wanted_rate, ttft_s=question.ttft_s, num_bytes=None)
    size = least(reaches, math.log2(block_bytes), high, lambda done, most: question.on_progress(done + 2, most + 2))
    return answer.Wanted(hit_rate=wanted_rate, ttft_s=question.ttft_s, num_bytes=int(2**size))

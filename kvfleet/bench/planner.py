"""Prompts of a real model with a shared tier slower and faster than computing, beside the model alone."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from kvfleet.bench.report import Row, median_interval
from kvfleet.bench.throttled import set_speed, throttled_options
from kvfleet.config import FleetConfig
from kvfleet.errors import DeadlineExceededError
from kvfleet.fleet import Fleet, start
from kvfleet.node.messages import Source

if TYPE_CHECKING:
    import torch

    from kvfleet.connectors.transformers import Prefill
    from kvfleet.core.layout import ModelSpec

__all__ = ["Case", "Site", "expectations", "measures", "open_site", "rows"]

_MEASURES = (
    "time until the KV of a prompt is there: `TransformersConnector.prefill` of prompts that only the shared tier has,"
    " read at so many times the speed at which the model computes KV, {speed:.1f} MB/s, and {latency:.0f} ms latency;"
    " floor: the model alone, block by block. Loads are planned: as long as nothing is known of the tier (`first`), and"
    " with its speed known."
)

_LATENCY_S = 0.01
_TIMEOUT_S = 120.0
_SEED = 20250101
_TEACHING = 1  # prompts whose times do not count: by them the tier's speed becomes known


@dataclass(slots=True)
class Case:
    """What was found at one speed of the shared tier. In seconds.

    Attributes:
        factor: times the speed of computing.
        num_first: prompts, the first of all, for each of which nothing was known of the tier.
        alone, cached: until each prompt was there; without the cache, and with it.
        predicted: the latter as its plan expected; None where it did not know.
        loaded: blocks that were loaded of each.
    """

    factor: float
    num_first: int
    alone: list[float] = field(default_factory=list)
    cached: list[float] = field(default_factory=list)
    predicted: list[float | None] = field(default_factory=list)
    loaded: list[int] = field(default_factory=list)

    @property
    def first(self) -> slice:
        """The prompts for which nothing was known."""
        return slice(self.num_first)

    @property
    def known(self) -> slice:
        """Those for which the tier's speed was known."""
        return slice(self.num_first + _TEACHING, None)


@dataclass(frozen=True, slots=True)
class Site:
    """A model, and prompts whose KV is in a directory that stands for the shared tier."""

    model: Any
    spec: ModelSpec
    prompts: Sequence[torch.Tensor]
    directory: Path
    bytes_per_s: float
    """At which the model computes KV."""
    fresh: Iterator[int]
    """Seeds of prompts that nobody has computed."""

    def cases(self, factors: Sequence[float]) -> list[Case]:
        """Load and compute the prompts, at one speed of the shared tier after the other."""
        return [self._case(factor) for factor in factors]

    def _case(self, factor: float) -> Case:
        from kvfleet.connectors.transformers import TransformersConnector

        set_speed(_speed_file(self.directory), _LATENCY_S, factor * self.bytes_per_s)
        case = Case(factor, num_first=(len(self.prompts) - _TEACHING) // 2)
        with _fleet(self.directory, "reader", self.spec, self.prompts) as fleet:
            client = fleet.client(self.spec)
            client.attach()
            connector = TransformersConnector(self.model, client)
            _wait(connector.prefill(_random_prompt(self.prompts[0].shape[1], seed=next(self.fresh))))
            for number, prompt in enumerate(self.prompts):
                if number < case.num_first:
                    client.planning.forget()
                case.alone.append(_alone(self.model, prompt, self.spec.block_tokens))
                prefill = connector.prefill(prompt)
                plan = prefill.loaded.plan
                case.cached.append(prefill.seconds)
                case.predicted.append(plan.predicted_ttft_s if plan is not None else None)
                case.loaded.append(prefill.blocks_by_source.get(Source.SHARED, 0))
                _wait(prefill)
            client.close()
        return case


def measures(site: Site) -> str:
    """What was timed, in words."""
    return _MEASURES.format(speed=site.bytes_per_s / 1e6, latency=1e3 * _LATENCY_S)


def rows(cases: Sequence[Case], num_tokens: int) -> list[Row]:
    """Times with the cache beside those without, but for the prompts that taught the planner."""
    found = []
    for case in cases:
        for which, name in ((case.first, f"first at {case.factor:g}x"), (case.known, f"known, {case.factor:g}x")):
            alone, cached = case.alone[which], case.cached[which]
            ratios = [a / c for a, c in zip(alone, cached, strict=True)]
            for label, seconds, speeds in (("model alone", alone, [1.0] * len(alone)), (name, cached, ratios)):
                low, high = median_interval(speeds)
                found.append(Row(label, 0, num_tokens, 0, tuple(seconds), statistics.median(speeds), (low, high)))
    return found


def expectations(cases: Sequence[Case]) -> str:
    """What was predicted beside what was measured, and what was loaded; in words."""
    words = []
    for case in cases:
        pairs = zip(case.predicted[case.known], case.cached[case.known], strict=True)
        known = [(predicted, measured) for predicted, measured in pairs if predicted]
        errors = [abs(predicted / measured - 1) for predicted, measured in known]
        if errors:
            predicted_ms = 1e3 * statistics.median(predicted for predicted, _ in known)
            words.append(
                f"{case.factor:g}x: {predicted_ms:.0f} ms predicted, off by {100 * statistics.median(errors):.0f} %"
                f" in the median, blocks loaded {case.loaded}"
            )
    return "; ".join(words)


@contextmanager
def open_site(model: Any, num_tokens: int, repeats: int, block_tokens: int) -> Iterator[Site]:  # noqa: ANN401
    """Compute prompts and have a fleet save them. All is gone afterwards.

    Args:
        model: of transformers.
        num_tokens: of a prompt.
        repeats: prompts that are timed at each speed with nothing known of it, and as many with it known.
        block_tokens: tokens in a block.

    Raises:
        KvFleetError: there is no room for it.
    """
    from kvfleet.connectors.transformers import TransformersConnector, spec_for

    spec = spec_for(model, block_tokens=block_tokens)
    prompts = [_random_prompt(num_tokens, seed) for seed in range(2 * repeats + _TEACHING)]
    with tempfile.TemporaryDirectory(prefix="kvfleet-planner-") as name, _ray():
        directory = Path(name)
        set_speed(_speed_file(directory), 0.0, 1e12)
        _alone(model, prompts[0], block_tokens)
        seconds = statistics.median(_alone(model, prompts[0], block_tokens) for _ in range(3))
        with _fleet(directory, "writer", spec, prompts) as fleet:
            client = fleet.client(spec)
            connector = TransformersConnector(model, client)
            for prompt in prompts:
                _wait(connector.prefill(prompt))
            _wait_until(lambda: not any(node.unsaved_blocks for node in fleet.status().nodes), "saving the prompts")
            client.close()
        whole_tokens = num_tokens // block_tokens * block_tokens
        yield Site(model, spec, prompts, directory, whole_tokens * spec.bytes_per_token / seconds, count(len(prompts)))


@contextmanager
def _ray() -> Iterator[None]:
    """Ray, for fleets that come and go."""
    if ray.is_initialized():
        yield
        return
    ray.init(include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _fleet(directory: Path, name: str, spec: ModelSpec, prompts: Sequence[torch.Tensor]) -> Iterator[Fleet]:
    """A fleet of its own over the same shared tier, with room for all prompts twice."""
    config = FleetConfig(
        name=f"bench-{os.getpid()}-{name}",
        dram_bytes=max(64 << 20, 2 * (len(prompts) + 1) * prompts[0].shape[1] * spec.bytes_per_token),
        shared_url="dir:///tier",
        shared_options=throttled_options(directory, _speed_file(directory)),
    )
    fleet = start(config)
    try:
        fleet.up()
        fleet.wait_for_shared(_TIMEOUT_S)
        _wait_until(lambda: all(node.populated_bytes >= node.capacity_bytes for node in fleet.status().nodes), "memory")
        yield fleet
    finally:
        fleet.stop()


def _speed_file(directory: Path) -> Path:
    return directory / "speed"


def _random_prompt(num_tokens: int, seed: int) -> torch.Tensor:
    import torch

    generator = torch.Generator().manual_seed(_SEED + seed)
    return torch.randint(100, 10_000, (1, num_tokens), generator=generator)


def _alone(model: Any, prompt: torch.Tensor, block_tokens: int) -> float:  # noqa: ANN401
    """Seconds for the KV of a prompt's whole blocks by the model alone."""
    from transformers import DynamicCache

    from kvfleet.connectors.transformers_model import forward

    started, cache = time.perf_counter(), DynamicCache(config=model.config)
    for first in range(0, prompt.shape[1] // block_tokens * block_tokens, block_tokens):
        forward(model, prompt[:, first : first + block_tokens], cache)
    return time.perf_counter() - started


def _wait(prefill: Prefill) -> None:
    prefill.wait(_TIMEOUT_S)


def _wait_until(done: Callable[[], bool], what: str) -> None:
    """Wait for a fleet.

    Raises:
        DeadlineExceededError: that takes too long.
    """
    deadline = time.monotonic() + _TIMEOUT_S
    while not done():
        if time.monotonic() > deadline:
            raise DeadlineExceededError(what, _TIMEOUT_S)
        time.sleep(0.1)

"""Prompts of a real model with a shared tier slower and faster than computing, beside the model alone."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
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

__all__ = ["UNCOUNTED", "Case", "Site", "expectations", "measures", "open_site", "rows"]

_MEASURES = (
    "time until the KV of a prompt is there: `TransformersConnector.prefill` of prompts that only the shared tier has,"
    " read at so many times the speed at which the model computes KV, {speed:.1f} MB/s, and {latency:.0f} ms latency;"
    " floor: the model alone, block by block. Loads are planned; the first prompts at each speed teach it."
)

_LATENCY_S = 0.01
_TIMEOUT_S = 120.0
_SEED = 20250101
UNCOUNTED = 2
"""Prompts at each speed whose times do not count: the source is not known before."""


@dataclass(slots=True)
class Case:
    """What was found at one speed of the shared tier. In seconds.

    Attributes:
        factor: times the speed of computing.
        alone, cached: until each prompt was there; without the cache, and with it.
        predicted: the latter as its plan expected; None where it did not know.
        loaded: blocks that were loaded of each.
    """

    factor: float
    alone: list[float] = field(default_factory=list)
    cached: list[float] = field(default_factory=list)
    predicted: list[float | None] = field(default_factory=list)
    loaded: list[int] = field(default_factory=list)


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
        case = Case(factor)
        with _fleet(self.directory, "reader", self.spec, len(self.prompts)) as fleet:
            client = fleet.client(self.spec)
            client.attach()
            connector = TransformersConnector(self.model, client)
            _wait(connector.prefill(_random_prompt(self.prompts[0].shape[1], seed=next(self.fresh))))
            for prompt in self.prompts:
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
    """Times with the cache beside those without, without the prompts that taught the planner."""
    found = []
    for case in cases:
        alone, cached = case.alone[UNCOUNTED:], case.cached[UNCOUNTED:]
        ratios = [a / c for a, c in zip(alone, cached, strict=True)]
        for name, seconds, speeds in (("model alone", alone, [1.0] * len(alone)), ("planned", cached, ratios)):
            label = name if name == "model alone" else f"shared tier at {case.factor:g}x"
            low, high = median_interval(speeds)
            found.append(Row(label, 0, num_tokens, 0, tuple(seconds), statistics.median(speeds), (low, high)))
    return found


def expectations(cases: Sequence[Case]) -> str:
    """What was predicted beside what was measured, and what was loaded; in words."""
    words = []
    for case in cases:
        pairs = zip(case.predicted[UNCOUNTED:], case.cached[UNCOUNTED:], strict=True)
        known = [(predicted, measured) for predicted, measured in pairs if predicted]
        errors = [abs(predicted / measured - 1) for predicted, measured in known]
        if errors:
            predicted_ms = 1e3 * statistics.median(predicted for predicted, _ in known)
            words.append(
                f"{case.factor:g}x: {predicted_ms:.0f} ms predicted, off by {100 * statistics.median(errors):.0f} %"
                f" in the median, blocks loaded {case.loaded}; the first {1e3 * case.cached[0]:.0f} ms,"
                f" {1e3 * case.alone[0]:.0f} ms alone"
            )
    return "; ".join(words)


@contextmanager
def open_site(model: Any, num_tokens: int, num_prompts: int, block_tokens: int) -> Iterator[Site]:  # noqa: ANN401
    """Compute prompts and have a fleet save them. All is gone afterwards.

    Raises:
        KvFleetError: there is no room for it.
    """
    from kvfleet.connectors.transformers import TransformersConnector, spec_for

    spec = spec_for(model, block_tokens=block_tokens)
    prompts = [_random_prompt(num_tokens, seed) for seed in range(num_prompts)]
    with tempfile.TemporaryDirectory(prefix="kvfleet-planner-") as name, _ray():
        directory = Path(name)
        set_speed(_speed_file(directory), 0.0, 1e12)
        _alone(model, prompts[0], block_tokens)
        seconds = statistics.median(_alone(model, prompts[0], block_tokens) for _ in range(3))
        with _fleet(directory, "writer", spec, num_prompts) as fleet:
            client = fleet.client(spec)
            connector = TransformersConnector(model, client)
            for prompt in prompts:
                _wait(connector.prefill(prompt))
            _wait_until_saved(fleet)
            client.close()
        whole_tokens = num_tokens // block_tokens * block_tokens
        yield Site(model, spec, prompts, directory, whole_tokens * spec.bytes_per_token / seconds, count(num_prompts))


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
def _fleet(directory: Path, name: str, spec: ModelSpec, num_prompts: int) -> Iterator[Fleet]:
    """A fleet of its own over the same shared tier."""
    config = FleetConfig(
        name=f"bench-{os.getpid()}-{name}",
        dram_bytes=max(256 << 20, 2 * (num_prompts + 1) * spec.layout.block_bytes * 32),
        shared_url="dir:///tier",
        shared_options=throttled_options(directory, _speed_file(directory)),
    )
    fleet = start(config)
    try:
        fleet.wait_for_shared(_TIMEOUT_S)
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


def _wait_until_saved(fleet: Fleet) -> None:
    """Wait until all that is in the arenas is in the shared tier.

    Raises:
        DeadlineExceededError: that takes too long.
    """
    deadline = time.monotonic() + _TIMEOUT_S
    while any(node.unsaved_blocks for node in fleet.status().nodes):
        if time.monotonic() > deadline:
            raise DeadlineExceededError("saving the prompts", _TIMEOUT_S)
        time.sleep(0.1)

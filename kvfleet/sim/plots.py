"""Plots of simulations, for files and notebooks. They need matplotlib: `pip install 'kvfleet-ray[plots]'`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from kvfleet.core.outcomes import Source
from kvfleet.errors import ConfigError
from kvfleet.sim.report import QUANTILES, Report, by_tier

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["hits_over_capacity", "need_matplotlib", "policies_side_by_side", "save_plots", "ttft_over_capacity"]

_MILLION = 1e6
_SIZE = (7.0, 4.2)


def need_matplotlib() -> None:
    """Nothing, if plots can be made.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("plots", "they need matplotlib: pip install 'kvfleet-ray[plots]'")


def hits_over_capacity(reports: Sequence[Report], optimum: Mapping[int, float] | None = None) -> Figure:
    """Hit rate of whole blocks over the tokens that the fleet's arenas hold, a line a policy.

    Args:
        reports: of one trace, of several capacities and policies.
        optimum: the best that could be, by tokens of capacity, as a share; see `kvfleet.sim.optimum`.
    """
    figure, axes = _new("Hit rate over memory", "share of blocks that hit")
    for policy, ones in _by_policy(reports):
        axes.plot([one.capacity_tokens / _MILLION for one in ones], [one.hit_rate for one in ones], "o-", label=policy)
    if optimum:
        points = sorted(optimum.items())
        axes.plot([at / _MILLION for at, _ in points], [best for _, best in points], "k--", label="offline optimum")
    axes.set_ylim(bottom=0.0)
    return _done(figure, axes)


def ttft_over_capacity(reports: Sequence[Report]) -> Figure:
    """Time to first token over the tokens that the fleet's arenas hold: median and tail, a colour a policy."""
    figure, axes = _new("Time to first token over memory", "seconds")
    for number, (policy, ones) in enumerate(_by_policy(reports)):
        for place, (q, style) in enumerate(zip(QUANTILES, ("-", "--", ":"), strict=True)):
            axes.plot(
                [one.capacity_tokens / _MILLION for one in ones], [one.ttft_s[place] for one in ones],
                style, marker="o", color=f"C{number}", label=f"{policy} p{100 * q:g}",
            )  # fmt: skip
    axes.set_yscale("log")
    return _done(figure, axes)


def policies_side_by_side(reports: Sequence[Report]) -> Figure:
    """Where hits came from, a bar a policy, at the smallest capacity that all have."""
    figure, axes = _new("Policies", "share of blocks that hit")
    axes.set_xlabel("")
    smallest = min(one.capacity_tokens for one in reports)
    ones = [one for one in reports if one.capacity_tokens == smallest]
    below = [0.0] * len(ones)
    for source in Source:
        shares = [by_tier(one)[source.value] for one in ones]
        if any(shares):
            axes.bar([one.config.policy for one in ones], shares, bottom=below, label=source.value)
            below = [low + share for low, share in zip(below, shares, strict=True)]
    axes.set_title(f"Policies, {smallest / _MILLION:.3g} M tokens of memory")
    return _done(figure, axes)


def save_plots(reports: Sequence[Report], directory: Path, optimum: Mapping[int, float] | None = None) -> list[Path]:
    """Write all plots as PNG files. Returns their paths.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figures = {
        "hits_over_capacity": hits_over_capacity(reports, optimum),
        "ttft_over_capacity": ttft_over_capacity(reports),
        "policies": policies_side_by_side(reports),
    }
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in figures.items():
        paths.append(directory / f"{name}.png")
        figure.savefig(paths[-1], dpi=120)
    return paths


def _by_policy(reports: Sequence[Report]) -> list[tuple[str, list[Report]]]:
    """Reports of each policy, by capacity."""
    ordered = sorted(reports, key=lambda one: (one.config.policy, one.capacity_tokens))
    return [(policy, list(ones)) for policy, ones in groupby(ordered, lambda one: one.config.policy)]


def _new(title: str, label: str) -> tuple[Figure, Axes]:
    need_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    axes.set_xlabel("memory of the fleet, million tokens")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    return figure, axes


def _done(figure: Figure, axes: Axes) -> Figure:
    if axes.get_legend_handles_labels()[0]:  # where nothing hit, there is no bar
        figure.legend(loc="outside right center")  # inside, it would lie on bars
    return figure

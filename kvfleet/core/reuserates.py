"""The rates at which blocks are used again, and what they are worth by these: from what was counted of their lives."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvfleet.core.reuseclasses import AGES, EDGES, TURNS, WIDTHS

__all__ = ["Floats", "best_worths", "reuse_rates"]

Floats = npt.NDArray[np.float64]

_PRIOR = 10.0  # used prefixes of a class that weigh as much as what is known of its turn and growth
_OVER = 0.1  # how likely, compared to others, what is said to be over is used again, until that is known
_PRIOR_BY_AGE = 10.0  # at one age
_EXPOSED_MIN = 6.0  # prefixes seen all through an age: what less was seen of is taken from younger ages

_NUMBERS = np.arange(AGES)
_SEEN_MIN = _EXPOSED_MIN * WIDTHS
_SPREAD = np.array([0.5, 1.0, 0.5])
_BEFORE = np.array([_OVER] + [1.0] * TURNS)[:, None]  # of turns, 0 being one that is over


def reuse_rates(ended: Floats, exposed: Floats, clump: float) -> Floats:
    """Uses a second, by class and age.

    Args:
        ended: `(classes, AGES)`, lives that ended with a use; classes of one of `GROUPS`.
        exposed: `(classes, AGES)`, seconds of lives that went on.
        clump: how many lives say as much as one that depends on no other.
    """
    factors, base, passed = np.ones((len(ended), 1)), np.zeros(AGES), np.zeros(AGES)
    by_age, by_class = ended.sum(axis=0), ended.sum(axis=1)
    spread = np.convolve(by_age, _SPREAD, "same")
    for _ in range(4):
        relative = factors * _fade(factors, passed)
        base = _base(spread, (relative * exposed).sum(axis=0), clump) if by_age.any() else np.full(AGES, 1e-9)
        hazard = base * WIDTHS
        passed = np.cumsum(hazard) - hazard / 2
        factors = _factors(by_class, (exposed * _fade(factors, passed)) @ base, _PRIOR * clump)[:, None]
    expected = np.maximum(factors * _fade(factors, passed) * base, 1e-12)
    prior = _PRIOR_BY_AGE * clump
    return np.asarray((ended + prior) / (exposed + prior / expected))


def _fade(factors: Floats, passed: Floats) -> Floats:
    """How much of its factor is left to a class at each age.

    Lives of a class differ, and those that end soon are gone first, more so in a class of many such: the old of all
    classes are alike. (Rates that differ within a class by a gamma distribution of variance 1.)
    """
    return np.asarray((1 + passed) / (1 + factors * passed))


def _base(ended: Floats, exposed: Floats, clump: float) -> Floats:
    """The rate by age of all classes together, smoothed; it falls once it is past its top. `ended` is smooth."""
    seen = np.convolve(exposed, _SPREAD, "same")
    known = np.flatnonzero(seen > _SEEN_MIN * clump)
    if not len(known):
        return np.full(AGES, 1e-9)
    rates = np.interp(_NUMBERS, known, ended[known] / seen[known])
    last = known[-1]
    rates[last:] = rates[last] * EDGES[last + 1] / EDGES[last + 1 :]
    top = int(rates.argmax())
    rates[top:] = _falling(rates[top:], np.where(last >= _NUMBERS, exposed, 0.0)[top:] + 1e-6)
    return rates


def _factors(ended: Floats, expected: Floats, prior: float) -> Floats:
    """How much likelier a class is used again than all, from how often it was and how often that was to be expected."""
    by_turn = before = _BEFORE
    ended, expected = ended.reshape(TURNS + 1, -1), expected.reshape(TURNS + 1, -1)
    by_growth = np.ones((1, ended.shape[1]))
    of_turns = ended.sum(axis=1, keepdims=True) + prior * before
    of_growths = _smooth(ended.sum(axis=0)) + prior
    for _ in range(3):
        by_turn = of_turns / ((expected * by_growth).sum(axis=1, keepdims=True) + prior)
        by_growth = (of_growths / (_smooth((expected * by_turn).sum(axis=0)) + prior))[None, :]
    return np.asarray((ended + prior) / (expected + prior / (by_turn * by_growth))).ravel()


def _smooth(counts: Floats) -> Floats:
    """Neighbours are alike."""
    return np.convolve(counts, _SPREAD, "same") if len(counts) > 1 else counts


def _falling(rates: Floats, weights: Floats) -> list[float]:
    """The weighted least-squares fit that never rises (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []
    for rate, weight in zip(rates.tolist(), weights.tolist(), strict=True):
        pool = (rate, weight, 1)
        while pools and pools[-1][0] < pool[0]:
            rate_before, weight_before, length = pools.pop()
            total = weight_before + pool[1]
            mean = (rate_before * weight_before + pool[0] * pool[1]) / total
            pool = (mean, total, length + pool[2])
        pools.append(pool)
    return [rate for rate, _, length in pools for _ in range(length)]


def best_worths(likely: Floats, room: Floats) -> Floats:
    """The largest quotient of uses and room from each age on, by age and class.

    Args:
        likely: `(ages, classes)`, that a life which goes on ends within an age.
        room: `(ages, classes)`, seconds that it takes up room in it.
    """
    alive, used, taken, best = (np.zeros_like(likely) for _ in range(4))
    for end in range(AGES):  # kept from each age up to it on, to the end of this one
        alive[end] = 1.0
        from_each = slice(end + 1)
        used[from_each] += alive[from_each] * likely[end]
        taken[from_each] += alive[from_each] * room[end]
        np.maximum(best[from_each], used[from_each] / taken[from_each], out=best[from_each])
        alive[from_each] *= 1.0 - likely[end]
    return best

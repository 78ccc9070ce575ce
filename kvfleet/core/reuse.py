"""When blocks are used again: learned from traffic, for each class of blocks.

A *life* of a block begins with a use and ends with the next one. Lives are of a class, as the policy sees it. What is
counted is how many lives of a class ended at which age, and how long how many went on at that age: the two give the
rate of reuse by age, also where most lives have not ended yet. Rates of a class with little data are drawn towards what
its turn and its growth (see `kind_of_turn`) have elsewhere, and those towards the rate of all blocks.

The *worth* of a block is the most uses per second of room that keeping it can bring: over all times that it may be kept
from now on, the largest quotient of how likely it is used in that time and how long it takes up room (the index of
Gittins, 1979; with classes like those of LHD, Beckmann et al., NSDI 2018, which takes a fixed end instead). So a block
that is likely to come back in a minute is kept for that minute, and given up when the minute is over.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

__all__ = ["NUM_KINDS", "ReuseModel", "kind_of_shared", "kind_of_turn"]

_Floats = npt.NDArray[np.float64]

_TURNS = 4  # later ones count as this
_GROWTHS = 5
_AGES = 30
_AGE_MIN_S = 3.0
_STEP = 2**0.5  # between ages
_LOG_STEP = math.log(_STEP)
_COHORTS_MAX = 512
_TICK_S = 10.0
_STEPS_MAX = 32  # after a pause: the event loop waits for it, 1 ms a step
_REFRESH_S = 10.0  # between computations of the worths: with 30 s, traffic that changes quickly is learned too late
_HALF_S = 1800.0  # in which what was seen loses half its weight; longer if blocks live longer than that
_ENOUGH = 200  # uses that have been seen again before anything is said
_PRIOR = 200.0  # uses of a class that weigh as much as what is known of its turn and growth
_OVER = 0.1  # how likely, compared to others, what is said to be over is used again, until that is known
_PRIOR_BY_AGE = 50.0  # at one age
_EXPOSED_MIN_S = 60.0  # for each second of an age: what less was seen of is taken from younger ages

NUM_KINDS = 2 * (_TURNS + 1) * _GROWTHS
_HALF_KINDS = NUM_KINDS // 2


def kind_of_shared(uses: int) -> int:
    """The class of a block that prefixes of different ends share, and that was used so often."""
    return _HALF_KINDS + min(uses, _TURNS) * _GROWTHS


def kind_of_turn(turn: int, growth: int) -> int:
    """The class of a block of one conversation.

    Args:
        turn: of the conversation, from 1; 0 if it is said to be over.
        growth: new blocks of that turn.
    """
    return min(turn, _TURNS) * _GROWTHS + min(_GROWTHS - 1, max(1, growth).bit_length() - 1)


class ReuseModel:
    """Counts lives, and says what blocks are worth. Times are seconds.

    A class is a number below `NUM_KINDS`. Cost: O(1) for each life; some milliseconds every 10 s of the times
    passed in. Threads: calls must not overlap.

    Attributes:
        due: when `tick` has something to do.
    """

    def __init__(self) -> None:
        self._edges = np.concatenate(([0.0], _AGE_MIN_S * _STEP ** np.arange(_AGES)))
        self._ended = np.zeros((NUM_KINDS, _AGES))
        self._exposed = np.zeros((NUM_KINDS, _AGES))  # seconds
        self._cohorts: dict[int, _Floats] = {}  # lives that go on, by when they began
        self._width_s = _TICK_S  # of cohorts
        self.due = self._next_refresh = -math.inf
        self._num_ended = 0
        self._worths: list[list[float]] = []  # of each class at the middle of each age; empty: too early to say
        self._chances: list[list[float]] = []  # of another use

    @property
    def ready(self) -> bool:
        """Whether there is enough data to say anything."""
        return bool(self._worths)

    def began(self, number: int, start: float) -> None:
        """A life of a class began."""
        cohort = int(start // self._width_s)
        counts = self._cohorts.get(cohort)
        if counts is None:
            counts = self._cohorts[cohort] = np.zeros(NUM_KINDS)
        counts[number] += 1.0

    def forgotten(self, number: int, start: float) -> None:
        """Nobody will know how a life that began then ends."""
        counts = self._cohorts.get(int(start // self._width_s))
        if counts is not None:
            counts[number] -= 1.0

    def ended(self, number: int, age: float) -> None:
        """A life ended with a use, at an age."""
        self._ended[number, self._age(age)] += 1.0
        self._num_ended += 1

    def tick(self, now: float) -> None:
        """Let lives that go on grow older, at `due` or later. First all lives should be told that `began`."""
        if self.due == -math.inf:
            self.due = self._next_refresh = (now // self._width_s) * self._width_s
        left = 1 + min(int((now - self.due) // self._width_s), _COHORTS_MAX)
        step = -(-left // _STEPS_MAX)
        while left:
            step = min(step, left)
            left -= step
            self._expose(self.due + (step - 1) * self._width_s, step * self._width_s)
            self.due += step * self._width_s
        self.due = max(self.due, (now // self._width_s + 1) * self._width_s)
        while len(self._cohorts) > _COHORTS_MAX:
            self._widen()
        if now >= self._next_refresh and self._num_ended >= _ENOUGH:
            self._refresh()
            self._next_refresh = now + max(_REFRESH_S, self._width_s)

    def worth(self, number: int, age: float) -> float:
        """Uses per second of room, at best, of a block of a class so long after its last use. Needs `ready`."""
        worths = self._worths[number]
        place = self._place(age)
        if place <= 0.0:
            return worths[0]
        below = int(place)
        if below >= _AGES - 1:
            return worths[-1]
        return worths[below] + (worths[below + 1] - worths[below]) * (place - below)

    def chance(self, number: int, age: float) -> float:
        """How likely a block of a class is used again at all, so long after its last use. Needs `ready`."""
        return self._chances[number][self._age(age)]

    def _age(self, age: float) -> int:
        return min(_AGES - 1, max(0, int(self._place(age) + 0.5)))

    def _place(self, age: float) -> float:
        """Where an age is among the middles of the ages, which are numbered from 0."""
        if age < _AGE_MIN_S:
            return age / _AGE_MIN_S - 0.5
        return math.log(age / _AGE_MIN_S) / _LOG_STEP + 0.5

    def _expose(self, now: float, passed_s: float) -> None:
        """All lives that go on have become older by some ticks."""
        self._cohorts = {cohort: counts for cohort, counts in self._cohorts.items() if counts.any()}
        decay = 0.5 ** (passed_s / max(_HALF_S, 20 * self._width_s))
        self._ended *= decay
        self._exposed *= decay
        cohorts = [cohort for cohort in self._cohorts if (cohort + 1) * self._width_s <= now]
        if cohorts:
            old = (now - (np.array(cohorts) + 0.5) * self._width_s)[:, None]
            young = np.maximum(old - passed_s, 0.0)
            within = np.minimum(old, self._edges[1:]) - np.maximum(young, self._edges[:-1])
            counts = np.stack([self._cohorts[cohort] for cohort in cohorts])
            self._exposed += counts.T @ np.maximum(within, 0.0)

    def _widen(self) -> None:
        """Lives go on for so long that coarser cohorts will do."""
        self._width_s *= 2
        cohorts: dict[int, _Floats] = {}
        for cohort, counts in self._cohorts.items():
            cohorts[cohort // 2] = cohorts.get(cohort // 2, 0.0) + counts
        self._cohorts = cohorts

    def _refresh(self) -> None:
        rates = np.vstack([self._rates(slice(0, _HALF_KINDS)), self._rates(slice(_HALF_KINDS, NUM_KINDS))])
        widths = np.diff(self._edges)
        hazard = rates * widths
        passed = np.hstack([np.zeros((NUM_KINDS, 1)), np.cumsum(hazard, axis=1)])
        likely = -np.expm1(-hazard)
        room = np.where(hazard > 1e-9, likely / np.maximum(rates, 1e-300), widths)  # while the age lasts
        best = np.zeros((NUM_KINDS, _AGES))
        for age in range(_AGES):
            alive = np.exp(passed[:, age : age + 1] - passed[:, age:-1])
            used = np.cumsum(alive * likely[:, age:], axis=1)
            taken = np.cumsum(alive * room[:, age:], axis=1)
            best[:, age] = (used / taken).max(axis=1)
        self._worths = best.tolist()
        self._chances = (-np.expm1(passed[:, :-1] - passed[:, -1:])).tolist()

    def _rates(self, kinds: slice) -> _Floats:
        """Of reuse a second, by class and age."""
        ended, exposed = self._ended[kinds], self._exposed[kinds]
        factors = np.ones(len(ended))
        base = np.zeros(_AGES)
        for _ in range(4):
            base = self._base(ended.sum(axis=0), factors @ exposed)
            factors = _factors(ended.sum(axis=1), exposed @ base)
        expected = np.maximum(factors[:, None] * base, 1e-12)
        return np.asarray((ended + _PRIOR_BY_AGE) / (exposed + _PRIOR_BY_AGE / expected))

    def _base(self, ended: _Floats, exposed: _Floats) -> _Floats:
        """The rate by age of all classes together, smoothed; it falls once it is past its top."""
        spread = np.array([0.5, 1.0, 0.5])
        ended, seen = np.convolve(ended, spread, "same"), np.convolve(exposed, spread, "same")
        known = np.flatnonzero(seen > _EXPOSED_MIN_S * np.diff(self._edges))
        if not len(known) or not ended.sum():
            return np.full(_AGES, 1e-9)
        rates = np.interp(np.arange(_AGES), known, ended[known] / seen[known])
        last = known[-1]
        rates[last:] = rates[last] * self._edges[last + 1] / self._edges[last + 1 :]
        top = int(rates.argmax())
        rates[top:] = _falling(rates[top:], np.where(np.arange(_AGES) <= last, exposed, 0.0)[top:] + 1e-6)
        return rates


def _factors(ended: _Floats, expected: _Floats) -> _Floats:
    """How much likelier a class is used again than all, from how often it was and how often that was to be expected."""
    before = np.array([_OVER] + [1.0] * _TURNS)[:, None]
    by_turn = before
    by_growth = np.ones((1, _GROWTHS))
    ended, expected = ended.reshape(_TURNS + 1, _GROWTHS), expected.reshape(_TURNS + 1, _GROWTHS)
    for _ in range(3):
        by_turn = (ended.sum(axis=1, keepdims=True) + _PRIOR * before) / (
            (expected * by_growth).sum(axis=1, keepdims=True) + _PRIOR
        )
        by_growth = (ended.sum(axis=0, keepdims=True) + _PRIOR) / (
            (expected * by_turn).sum(axis=0, keepdims=True) + _PRIOR
        )
    return np.asarray((ended + _PRIOR) / (expected + _PRIOR / (by_turn * by_growth))).ravel()


def _falling(rates: _Floats, weights: _Floats) -> _Floats:
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
    return np.concatenate([np.full(length, rate) for rate, _, length in pools])

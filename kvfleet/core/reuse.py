"""When blocks are used again: learned from traffic, for each class of blocks.

A *life* of a block begins with a use and ends with the next one. Lives are of a class, as the policy sees it. What is
counted is how many lives of a class ended at which age, and how long how many went on at that age: the two give the
rate of reuse by age, also where most lives have not ended yet. Rates of a class with little data are drawn towards what
its turn and its growth (see `kind_of_turn`) have elsewhere, and those towards the rate of all blocks. Blocks that are
used as one prefix say as much as one block: how much data there is, is counted in prefixes, whatever a block's size.

The *worth* of a block is the most uses per second of room that keeping it can bring: over all times that it may be kept
from now on, the largest quotient of how likely it is used in that time and how long it takes up room (the index of
Gittins, 1979; with classes like those of LHD, Beckmann et al., NSDI 2018, which takes a fixed end instead). So a block
that is likely to come back in a minute is kept for that minute, and given up when the minute is over.
"""

from __future__ import annotations

import math

import numpy as np

from kvfleet.core.reuseclasses import AGES, EDGES, GROUPS, NUM_KINDS, WIDTHS, age_of, place_of
from kvfleet.core.reuserates import Floats, best_worths, reuse_rates
from kvfleet.core.surprise import Surprise

__all__ = ["ReuseModel"]

_COHORTS_MAX = 128
_TICK_S = 10.0
_STEPS_MAX = 32  # after a pause: the event loop waits for it, 1 ms a step
_REFRESH_S = 10.0  # between computations of the worths: with 30 s, traffic that changes quickly is learned too late
_NEWS = 0.03  # of what is known: so much more has to be known before they are computed again
_STALE_S = 60.0  # or so much time has to pass
_GAIN, _GAIN_LESS = 0.05, 0.03  # more hits that worth has to promise before it rules, and to go on
_HALF_S = 1800.0  # in which what was seen loses half its weight; longer if blocks live longer than that
_LATELY_S = 300.0  # in which uses are compared with what was expected: so long half of them count
_KEPT_S = 1200.0  # of what was seen, when it is halved as traffic has become another
_ENOUGH = 20  # prefixes that have been used again before anything is said


class ReuseModel:
    """Counts lives, and says what blocks are worth. Times are seconds.

    A class is a number below `NUM_KINDS`. Cost: O(1) for each life; some milliseconds every 10 s of the times
    passed in. Threads: calls must not overlap.

    Attributes:
        capacity: blocks there is room for.
        due: when `tick` has something to do.
        rules: whether keeping what is worth most promises more hits, in so much room, than keeping what was used last.
            Where the two promise about the same, what is not known well yet does harm: last use is the better guide.

    Args:
        capacity: blocks there is room for.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity > 0, "there is room for a block"
        self.rules = False
        self.capacity = capacity
        self._seen_s = 0.0  # how long it was looked at
        self._ended = np.zeros((NUM_KINDS, AGES))
        self._exposed = np.zeros((NUM_KINDS, AGES))  # seconds
        self._cohorts: dict[int, Floats] = {}  # lives that go on, by when they began
        self._width_s = _TICK_S  # of cohorts
        self.due = self._next_refresh = -math.inf
        self._num_ended = 0.0
        self._num_pairs = 0.0  # of lives that ended in one run, ordered and with themselves
        self._num_new = 0  # ended since worths were computed
        self._num_came = 0  # ended since lives were made older
        self._surprise = Surprise()
        self._rates = np.zeros((NUM_KINDS, AGES))  # as of when worths were computed
        self._run = 0  # lives that ended in the last one
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

    def ended(self, number: int, age: float, *, follows: bool) -> None:
        """A life ended with a use, at an age.

        Args:
            number: its class.
            age: seconds.
            follows: its block comes after the one whose life ended before: the two are used as one prefix.
        """
        self._ended[number, age_of(age)] += 1.0
        self._run = self._run + 1 if follows else 1
        self._num_ended += 1.0
        self._num_new += 1
        self._num_came += 1
        self._num_pairs += 2 * self._run - 1

    def tick(self, now: float) -> None:
        """Let lives that go on grow older, at `due` or later. First all lives should be told that `began`."""
        if self.due == -math.inf:
            self.due = self._next_refresh = (now // self._width_s) * self._width_s
        left = 1 + min(int((now - self.due) // self._width_s), _COHORTS_MAX)
        step = -(-left // _STEPS_MAX)
        going = self._going_on()
        while left:
            step = min(step, left)
            left -= step
            self._expose(self.due + (step - 1) * self._width_s, step * self._width_s, going)
            self.due += step * self._width_s
        self.due = max(self.due, (now // self._width_s + 1) * self._width_s)
        while len(self._cohorts) > _COHORTS_MAX:
            self._widen()
        if now >= self._next_refresh and self._num_ended >= _ENOUGH * self._clump():
            old = now >= self._next_refresh + _STALE_S
            if old or self._num_new >= _NEWS * self._num_ended:
                self._refresh()
                self._num_new = 0
                self._next_refresh = now + max(_REFRESH_S, self._width_s)

    def worth(self, number: int, age: float) -> float:
        """Uses per second of room, at best, of a block of a class so long after its last use. Needs `ready`."""
        worths = self._worths[number]
        place = place_of(age)
        if place <= 0.0:
            return worths[0]
        below = int(place)
        if below >= AGES - 1:
            return worths[-1]
        least = worths[below]
        return least + (worths[below + 1] - least) * (place - below)

    def chance(self, number: int, age: float) -> float:
        """How likely a block of a class is used again at all, so long after its last use. Needs `ready`."""
        return self._chances[number][age_of(age)]

    def _going_on(self) -> tuple[Floats, Floats]:
        """Cohorts of lives that go on: the numbers, and the lives of each class. Others are forgotten."""
        counts = np.array([*self._cohorts.values()]).reshape(-1, NUM_KINDS)
        alive = counts.any(axis=1)
        if not alive.all():
            numbers = np.array([*self._cohorts])[alive]
            self._cohorts = {number: self._cohorts[number] for number in numbers.tolist()}
        return np.array([*self._cohorts], float), counts[alive]

    def _expose(self, now: float, passed_s: float, going: tuple[Floats, Floats]) -> None:
        """All lives that go on have become older by some ticks."""
        numbers, counts = going
        self._weigh(0.5 ** (passed_s / max(_HALF_S, 20 * self._width_s)))
        self._seen_s += passed_s
        begun = (numbers + 1) * self._width_s <= now
        if begun.any():
            old = (now - (numbers[begun] + 0.5) * self._width_s)[:, None]
            young = np.maximum(old - passed_s, 0.0)
            within = np.minimum(old, EDGES[1:]) - np.maximum(young, EDGES[:-1])
            lived = counts[begun].T @ np.maximum(within, 0.0)
            self._exposed += lived
            if self.ready:
                self._compare(float((lived * self._rates).sum()), passed_s)
        self._num_came = 0

    def _compare(self, expected: float, passed_s: float) -> None:
        """Uses came. Where they are not what was to be expected, what was seen before says less of what is to come."""
        self._surprise.note(expected, self._num_came, 0.5 ** (passed_s / max(_LATELY_S, 3 * self._width_s)))
        if self._seen_s > max(_KEPT_S, 6 * self._width_s) and self._surprise.sure(self._clump()):
            self._weigh(0.5)
            self._surprise.forget()

    def _weigh(self, share: float) -> None:
        """What was seen so far counts by so much less."""
        self._ended *= share
        self._exposed *= share
        self._seen_s *= share
        self._num_ended *= share
        self._num_pairs *= share

    def _widen(self) -> None:
        """Lives go on for so long that coarser cohorts will do."""
        self._width_s *= 2
        cohorts: dict[int, Floats] = {}
        for cohort, counts in self._cohorts.items():
            cohorts[cohort // 2] = cohorts.get(cohort // 2, 0.0) + counts
        self._cohorts = cohorts

    def _clump(self) -> float:
        """How many lives end together: so many uses say as much as one that depends on no other."""
        return self._num_pairs / self._num_ended if self._num_ended else 1.0

    def _refresh(self) -> None:
        clump = self._clump()
        rates = np.vstack([reuse_rates(self._ended[kinds], self._exposed[kinds], clump) for kinds in GROUPS])
        self._rates = rates
        hazard = rates * WIDTHS
        passed = np.hstack([np.zeros((NUM_KINDS, 1)), np.cumsum(hazard, axis=1)])
        likely = -np.expm1(-hazard)
        room = np.where(hazard > 1e-9, likely / np.maximum(rates, 1e-300), WIDTHS)  # while the age lasts
        worths = best_worths(likely.T.copy(), room.T.copy()).T
        self._worths = worths.tolist()
        self.rules = self._promises(worths, _GAIN_LESS if self.rules else _GAIN)
        self._chances = (-np.expm1(passed[:, :-1] - passed[:, -1:])).tolist()

    def _promises(self, worths: Floats, gain: float) -> bool:
        """Whether worth promises by a share `gain` more hits than last use, by what was seen of classes and ages."""
        taken, used = self._exposed / self._seen_s, self._ended / self._seen_s  # blocks, and their uses a second
        by_last_use = _within(self.capacity, taken.sum(axis=0), used.sum(axis=0))
        kept_for = np.minimum.accumulate(worths, axis=1)  # what is gone does not come back when it is older
        order = np.argsort(-kept_for, axis=None, kind="stable")
        by_worth = _within(self.capacity, taken.ravel()[order], used.ravel()[order])
        return by_worth > (1.0 + gain) * by_last_use


def _within(capacity: float, taken: Floats, used: Floats) -> float:
    """Uses of as many blocks as there is room for, the first ones first."""
    return float(np.interp(capacity, np.cumsum(taken), np.cumsum(used)))

"""The least size that will do, and what of a row of values is in the middle or near its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["STEPS", "least", "quantiles"]

STEPS = 5
_OCTAVES = 7  # that are searched at once: to about a tenth
_QUANTILES = (0.5, 0.9, 0.99)


def least(
    reaches: Callable[[float], bool], floor: float, high: float, on_step: Callable[[int, int], None]
) -> float:  # fmt: skip
    """The least size that will do, as a logarithm to base 2; some octaves after the others, from above.

    Args:
        reaches: whether a size will do; a larger one does too.
        floor: no less is asked about.
        high: this one does.
        on_step: told before each question, with how many were asked and how many there will be as far as is known.
    """
    assert floor <= high
    done = 0
    while True:
        low = bottom = max(floor, high - _OCTAVES)
        for left in range(STEPS, 0, -1):
            on_step(done, done + left)
            done += 1
            middle = (low + high) / 2
            low, high = (low, middle) if reaches(middle) else (middle, high)
        if low > bottom or bottom == floor:  # else even the least that was tried will do
            return high


def quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Of some values: that which half of them are below, nine in ten, 99 in a hundred."""
    assert values
    ordered = sorted(values)
    p50, p90, p99 = (ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in _QUANTILES)
    return p50, p90, p99

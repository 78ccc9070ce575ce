"""Prompts that are made up: what is drawn for them, and the ids of their blocks."""

from __future__ import annotations

import math
from itertools import count
from random import Random
from typing import NamedTuple

__all__ = ["Ask", "Prompt", "Source"]

_FRESH = 2**32
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _mix(state: int, value: int) -> int:
    """A 64-bit id of a sequence, from that of what is before its last value (SplitMix64; Steele et al. 2014)."""
    mixed = (state * _GOLDEN + value + _GOLDEN) & _MASK
    mixed = ((mixed ^ mixed >> 30) * _MIX_1) & _MASK
    mixed = ((mixed ^ mixed >> 27) * _MIX_2) & _MASK
    return mixed ^ mixed >> 31


class Prompt:
    """The prefix of a prompt, made of pieces of text; a piece is known by its number.

    Equal pieces in equal order give equal ids, without a table of them: an id is a hash of its block's and all earlier
    pieces. So the memory that traffic needs does not grow with its length.

    Args:
        block_tokens: tokens in a block.

    Attributes:
        tokens: so far.
        keys: ids of its whole blocks.
    """

    def __init__(self, block_tokens: int) -> None:
        assert block_tokens > 0
        self._block_tokens = block_tokens
        self._state = 0
        self.tokens = 0
        self.keys: list[int] = []

    def add(self, piece: int, tokens: int) -> None:
        """Append a piece of text."""
        assert tokens >= 0
        self.tokens += tokens
        self._state = _mix(self._state, piece)
        state, number = self._state, len(self.keys)
        for _ in range(self.tokens // self._block_tokens - number):
            # Of its number too: blocks within one piece differ.
            self.keys.append(_mix(state, len(self.keys)))

    def cut(self, tokens: int) -> Prompt:
        """A prompt with the whole blocks of the first `tokens`, to be continued in another way."""
        other = Prompt(self._block_tokens)
        other.keys = self.keys[: tokens // self._block_tokens]
        other.tokens = len(other.keys) * self._block_tokens
        other._state = other.keys[-1] if other.keys else 0
        return other


class Ask(NamedTuple):
    """A request of a session.

    Attributes:
        pause_s: since the request before.
        keys: of its whole blocks.
        prompt_tokens: of its prompt.
        output_tokens: that will be produced.
    """

    pause_s: float
    keys: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int


class Source:
    """What sessions are drawn from.

    Attributes:
        draw: of all lengths, times and choices.
    """

    def __init__(self, draw: Random, block_tokens: int) -> None:
        self.draw = draw
        self._fresh = count(_FRESH)
        self._block_tokens = block_tokens

    def fresh(self) -> int:
        """The number of a piece of text that nobody has seen yet; those of text in common are below all of these."""
        return next(self._fresh)

    def prompt(self) -> Prompt:
        """An empty one."""
        return Prompt(self._block_tokens)

    def tokens(self, median: float, spread: float = 1.0) -> int:
        """A length: lognormal, at least 1. `spread` is the standard deviation of its logarithm."""
        return max(1, round(self.lognormal(median, spread)))

    def lognormal(self, median: float, spread: float = 1.0) -> float:
        """A length or a time."""
        return self.draw.lognormvariate(math.log(median), spread)

    def popular(self, number: int) -> int:
        """One of `number` things, the k-th about 1 / k as often as the first: Zipf's law, by its continuous inverse."""
        return min(number - 1, int((number + 1) ** self.draw.random()) - 1)

    def rounds(self, mean: float) -> int:
        """How often something is done, at least once: geometric."""
        return 1 + int(math.log(1.0 - self.draw.random()) / math.log(1.0 - 1.0 / mean)) if mean > 1 else 1

    def ask(self, prompt: Prompt, pause_s: float, output_tokens: int) -> Ask:
        """A request for a prompt as it is now."""
        return Ask(pause_s, tuple(prompt.keys), prompt.tokens, output_tokens)

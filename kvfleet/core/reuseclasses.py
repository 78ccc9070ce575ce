"""The classes of blocks, and the ages of their lives, by which reuse is counted."""

from __future__ import annotations

import math

import numpy as np

__all__ = [
    "AGES",
    "EDGES",
    "GROUPS",
    "NUM_KINDS",
    "TURNS",
    "WIDTHS",
    "age_of",
    "is_over",
    "kind_of_shared",
    "kind_of_turn",
    "place_of",
]

TURNS = 4  # later ones count as this
_GROWTHS = 7  # a class for each power of 4
AGES = 60
_AGE_MIN_S = 3.0
_STEP = 2**0.25  # between ages
_LOG_STEP = math.log(_STEP)

_SHARED = (TURNS + 1) * _GROWTHS  # the first class of shared blocks
NUM_KINDS = _SHARED + TURNS + 1
GROUPS = slice(0, _SHARED), slice(_SHARED, NUM_KINDS)
"""Classes of turns, a row of growths for each turn, and of shared blocks. Of either, there is one more than turns."""
EDGES = np.concatenate(([0.0], _AGE_MIN_S * _STEP ** np.arange(AGES)))
"""Of ages, seconds: `(AGES + 1,)`."""
WIDTHS = np.diff(EDGES)
_GROWTH_OF = [(max(1, blocks).bit_length() - 1) // 2 for blocks in range(1 + 4 ** (_GROWTHS - 1))]


def kind_of_shared(uses: int) -> int:
    """The class of a block that prefixes of different ends share, and that was used so often."""
    return _SHARED + min(uses, TURNS)


def kind_of_turn(turn: int, growth: int) -> int:
    """The class of a block of one conversation.

    Args:
        turn: of the conversation, from 1; 0 if it is said to be over.
        growth: new blocks of that turn.
    """
    row = min(TURNS, turn)
    return row * _GROWTHS + (_GROWTH_OF[growth] if growth < len(_GROWTH_OF) else _GROWTHS - 1)


def is_over(number: int) -> bool:
    """Whether a class is of conversations that are said to be over."""
    return number < _GROWTHS


def age_of(age: float) -> int:
    """The number of an age in seconds."""
    if age < _AGE_MIN_S:
        return 0
    number = int(math.log(age / _AGE_MIN_S) / _LOG_STEP + 1.0)
    return number if number < AGES else AGES - 1


def place_of(age: float) -> float:
    """Where an age is among the middles of the ages, which are numbered from 0."""
    if age < _AGE_MIN_S:
        return age / _AGE_MIN_S - 0.5
    return math.log(age / _AGE_MIN_S) / _LOG_STEP + 0.5

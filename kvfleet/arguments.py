"""Checks of what users give: a mistake is a TypeError or ValueError of one sentence, before anything is done."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real

from kvfleet.core.block import KEY_BYTES

__all__ = ["check_extra", "check_index", "check_keys", "check_kind", "check_seconds", "check_timeout"]


def check_seconds(seconds: float, name: str, most: float = math.inf) -> None:
    """A length of time above 0.

    Raises:
        TypeError: no number.
        ValueError: not above 0, or above `most`.
    """
    if not 0 < _check_number(seconds, name) <= most:
        limit = "" if most == math.inf else f" and at most {most:g}"
        raise ValueError(f"{name} must be above 0{limit}, is {seconds}")


def check_timeout(timeout_s: float | None, *, optional: bool = True) -> None:
    """A longest wait of 0 s or more, or None if it is optional.

    Raises:
        TypeError: no number.
        ValueError: below 0, or NaN.
    """
    if timeout_s is None and optional:
        return
    if not _check_number(timeout_s, "timeout_s") >= 0:
        raise ValueError(f"timeout_s must not be negative, is {timeout_s}")


def _check_number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number of seconds, is {_shown(value)}")
    return float(value)


def check_keys(keys: bytes, start_block: int = 0, label: str = "") -> None:
    """Packed keys of a prefix, the first block of it that matters, and the engine's name for the request.

    Raises:
        TypeError: no bytes, no integer, or no text.
        ValueError: no whole keys, or fewer than `start_block`.
    """
    if not isinstance(keys, bytes):
        raise TypeError(f"keys must be bytes, {KEY_BYTES} for each block, is {_shown(keys)}")
    if len(keys) % KEY_BYTES:
        raise ValueError(f"keys must be {KEY_BYTES} bytes for each block, has {len(keys)}")
    check_index(start_block, "start_block", len(keys) // KEY_BYTES)
    check_kind(label, "label", str)


def check_index(index: int, name: str, most: int | None = None) -> None:
    """A number from 0 to `most`.

    Raises:
        TypeError: no integer.
        ValueError: out of this range.
    """
    if isinstance(index, bool) or not isinstance(index, Integral):
        raise TypeError(f"{name} must be an integer, is {_shown(index)}")
    if index < 0 or (most is not None and index > most):
        limit = "must not be negative" if most is None else f"must be from 0 to {most}"
        raise ValueError(f"{name} {limit}, is {index}")


def check_extra(extra: Mapping[int, bytes] | None) -> None:
    """Block index → digest. TypeError: something else."""
    if extra is None:
        return
    if not isinstance(extra, Mapping):
        raise TypeError(f"extra must map block indexes to digests, is {_shown(extra)}")
    for index, digest in extra.items():
        if not isinstance(index, Integral) or not isinstance(digest, bytes):
            raise TypeError(f"extra must map block indexes to digests in bytes, has {index!r}: {_shown(digest)}")


def check_kind(value: object, name: str, *kinds: type) -> None:
    """Something of one of these kinds. TypeError: it is not."""
    if not isinstance(value, kinds):
        raise TypeError(f"{name} must be a {' or '.join(kind.__name__ for kind in kinds)}, is {_shown(value)}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"a {type(value).__name__}"

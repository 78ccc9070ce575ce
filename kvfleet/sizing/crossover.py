"""From what context on a load beats computing: the planner's arithmetic, solved for the length."""

from __future__ import annotations

import math

from kvfleet.core.speeds import PrefillSpeed, Speed

__all__ = ["CONTEXT_MAX", "crossover_tokens", "even_bytes_per_s"]

CONTEXT_MAX = 1 << 20
"""A crossover at more tokens than these counts as none."""


def crossover_tokens(prefill: PrefillSpeed, source: Speed, token_bytes: int, block_tokens: int) -> int | None:
    """The shortest prefix, in whole blocks, that is loaded faster than it is computed; from there on all are.

    Loading `n` tokens takes `latency + n * token_bytes / bytes_per_s`, computing them `n * token_s + n * n / 2 *
    context_s`. The second is convex, so the two lines cross once.

    Args:
        prefill: of the engine.
        source: that has the prefix.
        token_bytes: of a token's KV.
        block_tokens: tokens in a block.

    Returns:
        Tokens, or None if there is no such prefix up to `CONTEXT_MAX`.
    """
    assert min(token_bytes, block_tokens) > 0
    gain_s = prefill.token_s - token_bytes / source.bytes_per_s  # of a token, without attention
    square = prefill.context_s / 2
    if square:
        tokens = (-gain_s + math.sqrt(gain_s * gain_s + 4 * square * source.latency_s)) / (2 * square)
    elif gain_s > 0:
        tokens = source.latency_s / gain_s
    else:
        return None
    blocks = math.floor(tokens / block_tokens) + 1
    return blocks * block_tokens if blocks * block_tokens <= CONTEXT_MAX else None


def even_bytes_per_s(prefill: PrefillSpeed, latency_s: float, token_bytes: int, num_tokens: int) -> float | None:
    """The bandwidth at which loading so many tokens takes as long as computing them; None if its latency alone does."""
    left_s = prefill.seconds(0, num_tokens) - latency_s
    return num_tokens * token_bytes / left_s if left_s > 0 else None

"""What the engines of a simulated fleet talk about: a model, and conversations with shared prompts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvfleet.core.layout import BlockLayout, ModelSpec

__all__ = ["LARGE", "SPEC", "Talk"]


def _spec(head_dim: int) -> ModelSpec:
    layout = BlockLayout.kv(num_layers=2, num_kv_heads=2, head_dim=head_dim, dtype="bfloat16", block_tokens=16)
    return ModelSpec(model_id="simulated", weight_revision="1", layout=layout)


SPEC = _spec(128)
"""Blocks of 32 KiB: a node holds 32 of them."""

LARGE = _spec(256)
_TOKENS = 16  # in a block


class Talk:
    """A conversation: a prompt that many share, and turns of its own."""

    def __init__(self, number: int, system: int) -> None:
        self.number = number
        self.system = system
        self.num_blocks = 2 + system

    def tokens(self) -> npt.NDArray[np.uint32]:
        """Its token ids so far."""
        head = np.arange((2 + self.system) * _TOKENS, dtype=np.uint32) + np.uint32((1 + self.system) << 20)
        own = (self.num_blocks - 2 - self.system) * _TOKENS
        return np.concatenate([head, np.arange(own, dtype=np.uint32) + np.uint32((100 + self.number) << 20)])

"""What the demo's processes on the nodes are told, and what they tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from kvfleet.core.layout import ModelSpec
from kvfleet.node.messages import Source

__all__ = ["Answer", "Event", "Filled", "Plan", "Progress", "Request"]


@dataclass(frozen=True, slots=True)
class Progress:
    """What is being done, and how far it has got.

    Attributes:
        doing: in a few words.
        done: of `total`, or None if there is nothing to count.
        text: of the answer so far.
    """

    doing: str
    done: int | None = None
    total: int | None = None
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user wants.

    Attributes:
        fleet: name of the fleet.
        document: the text.
        question: about it.
        model: directory of the model, as transformers saves it; None: SmolLM2.
        model_root: where the copy of SmolLM2 is, or will be.
        num_threads: that the model may use.
        salt: keeps this demo's KV apart from that of earlier ones.
    """

    fleet: str
    document: str
    question: str
    model: Path | None
    model_root: Path
    num_threads: int
    salt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What all steps share.

    Attributes:
        fleet: name of the fleet.
        model: directory of the model, as transformers saves it.
        spec: of the model.
        prompt: token ids.
        num_threads: that the model may use.
        notes: for the user, about the prompt.
    """

    fleet: str
    model: Path
    spec: ModelSpec
    prompt: tuple[int, ...]
    num_threads: int
    notes: tuple[str, ...]

    @property
    def num_blocks(self) -> int:
        """Whole blocks of the prompt."""
        return len(self.prompt) // self.spec.block_tokens

    @property
    def prompt_bytes(self) -> int:
        """Bytes of the prompt's whole blocks."""
        return self.num_blocks * self.spec.layout.block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one run of the model gave.

    Attributes:
        text: the answer.
        logits_digest: SHA-256 of the logits of every token of the answer.
        reused_tokens: of the prompt, not computed.
        computed_tokens: that the model was run over before its first new token.
        bytes_by_source: KV loaded.
        ttft_s: time to first token: from the prompt's token ids to the first new one.
        stored_blocks: of KV that was computed, now in the fleet.
        shortfall: why less came from the cache than was found there, or "".
    """

    text: str
    logits_digest: str
    reused_tokens: int
    computed_tokens: int
    bytes_by_source: Mapping[Source, int]
    ttft_s: float
    stored_blocks: int
    shortfall: str

    @property
    def num_bytes(self) -> int:
        """KV loaded, from wherever."""
        return sum(self.bytes_by_source.values())


@dataclass(frozen=True, slots=True)
class Filled:
    """What it took to push the prompt out of an arena.

    Attributes:
        num_bytes: of other KV that was stored.
        left_blocks: of the prompt that are there nevertheless.
    """

    num_bytes: int
    left_blocks: int


Event: TypeAlias = Progress | Plan | Answer | Filled

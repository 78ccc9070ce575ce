"""Requests in an engine, as far as the fleet is concerned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvfleet.connectors.vllm.background import Job
from kvfleet.connectors.vllm.scopes import Scope
from kvfleet.hits import PrefixHit

__all__ = ["EngineRequest", "Prompt"]


class EngineRequest(Protocol):
    """What is used of a vLLM request."""

    request_id: str
    block_hashes: Sequence[bytes]
    kv_transfer_params: dict[str, Any] | None
    lora_request: Any
    skip_reading_prefix_cache: bool | None

    @property
    def num_tokens(self) -> int:
        """Of the prompt, and of what was generated already."""
        ...


@dataclass(slots=True)
class Prompt:
    """A request's tokens, as far as the fleet is concerned. Threads: the scheduling one.

    Attributes:
        scope: whose blocks they are; None while the adapter is not read yet.
        expected_blocks: how many another engine says that it has stored.
        keys: of the blocks so far, packed.
        computed_tokens: that the engine has; as `Lookups.find` was told last.
        asked_blocks: blocks that were looked up last; -1: none.
        start_block: the first of them.
        asked_at: when; monotonic seconds.
        ask_again_at: when there may be more.
        reading: the adapter's scope, being read.
        pending: the fleet's answer under way.
        hit: the answer; None if there is none, or nothing can be found.
        counted: an answer was used, and counted.
    """

    request: EngineRequest
    scope: Scope | None
    expected_blocks: int = 0
    keys: bytes = b""
    computed_tokens: int = 0
    asked_blocks: int = -1
    start_block: int = 0
    asked_at: float = 0.0
    ask_again_at: float | None = None
    reading: Job[Scope] | None = None
    pending: Job[PrefixHit] | None = None
    hit: PrefixHit | None = None
    counted: bool = False

"""What the fleet has of the prompts in an engine, found without making vLLM's scheduler wait.

What is in this node's arena is looked up at once; the directory is asked in the background, and the request waits its
turn meanwhile, at most `lookup_timeout_s`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvfleet.client import Client
from kvfleet.connectors.vllm.identity import AdapterRef
from kvfleet.connectors.vllm.scopes import Scope, ScopedClients
from kvfleet.core.block import KEY_BYTES, engine_keys
from kvfleet.errors import KvFleetError
from kvfleet.hits import PrefixHit

__all__ = ["EngineRequest", "Lookups", "Prompt"]

# While the directory fails, only one request in so many seconds waits for it.
_QUIET_S = 2.0
# A request that was long in the queue is looked up again: what was there then may be gone, or more may be there.
_STALE_S = 5.0
# Decode waits so long for what prefill has computed and is still storing, asking so often.
_HANDED_OVER_S = 2.0
_HANDED_OVER_POLL_S = 0.01


class EngineRequest(Protocol):
    """What is used of a vLLM request."""

    request_id: str
    block_hashes: Sequence[bytes]
    kv_transfer_params: dict[str, Any] | None
    lora_request: Any


@dataclass(slots=True)
class Prompt:
    """A request's tokens, as far as the fleet is concerned.

    Attributes:
        scope: whose blocks they are; None while the adapter is not read yet.
        expected_blocks: how many another engine says that it has stored.
        keys: of the blocks so far, packed.
        asked: what was looked up last: tokens that the engine has, blocks of the prompt; None: nothing.
        asked_at: when; monotonic seconds.
        local: what this node had then.
        pending: the fleet's answer under way.
        hit: the answer; None if there is none, or nothing can be found.
    """

    request: EngineRequest
    scope: Scope | None
    expected_blocks: int = 0
    keys: bytearray = field(default_factory=bytearray)
    asked: tuple[int, int] | None = None
    asked_at: float = 0.0
    local: PrefixHit | None = None
    pending: Future[PrefixHit | None] | None = None
    hit: PrefixHit | None = None


class Lookups:
    """Looks prompts up. Threads: vLLM's scheduler calls.

    Args:
        block_tokens: tokens in a block.
        hash_tokens: tokens that one of vLLM's block hashes stands for; `block_tokens` is a multiple of it.
        read_adapter: the identity of an adapter's weights; may take long.
        failed: told what failed, with the error.
        now: monotonic seconds.
    """

    def __init__(
        self,
        block_tokens: int,
        hash_tokens: int,
        read_adapter: Callable[[Any], AdapterRef],
        failed: Callable[[str, Exception], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        assert block_tokens % hash_tokens == 0
        self._block_tokens = block_tokens
        self._hashes_per_block = block_tokens // hash_tokens
        self._read_adapter = read_adapter
        self._failed = failed
        self._now = now
        self._clients: ScopedClients | None = None
        self._root: Callable[[Scope], bytes] = lambda _: b""
        self._timeout_s = 0.0
        self._asking = ThreadPoolExecutor(2, "kvfleet-lookup")
        self._quiet_until = 0.0
        self._reset = ""
        self._adapters: dict[tuple[int, str], AdapterRef] = {}

    def start(self, clients: ScopedClients, root: Callable[[Scope], bytes], timeout_s: float) -> None:
        """The fleet is there. Until this is called, nothing is found.

        Args:
            clients: of this process; the one of `Scope()` is ready.
            root: of a scope's keys.
            timeout_s: longest time that a prompt waits for the directory.
        """
        self._root, self._timeout_s, self._clients = root, timeout_s, clients

    @property
    def started(self) -> bool:
        """Whether the fleet is there."""
        return self._clients is not None

    def close(self) -> None:
        """Stop asking."""
        self._asking.shutdown(wait=False, cancel_futures=True)

    def prompt(self, request: EngineRequest, expected_blocks: int) -> Prompt:
        """A new request's prompt."""
        scope = Scope(reset=self._reset) if request.lora_request is None else None
        return Prompt(request, scope, expected_blocks)

    def num_blocks(self, request: EngineRequest) -> int:
        """Blocks of a request whose hashes are known by now."""
        return len(request.block_hashes) // self._hashes_per_block

    def reset(self, word: str) -> None:
        """Prompts from now on have nothing in common with those before."""
        self._reset = word
        self._adapters.clear()

    def find(self, prompt: Prompt, computed_tokens: int) -> bool:
        """Whether it is known what the fleet has of a prompt behind the tokens that the engine has: `prompt.hit`."""
        asked = (computed_tokens, self.num_blocks(prompt.request))
        stale = prompt.hit is not None and self._now() > prompt.asked_at + _STALE_S
        if prompt.asked != asked or stale:
            self._ask(prompt, asked)
        return prompt.pending is None or self._answered(prompt)

    def _ask(self, prompt: Prompt, asked: tuple[int, int]) -> None:
        """Look a prompt up in this node's arena, and in the fleet if there may be more."""
        prompt.asked, prompt.asked_at = asked, self._now()
        prompt.hit = prompt.local = prompt.pending = None
        start, blocks = asked[0] // self._block_tokens, asked[1]
        client = self._ready(prompt)
        if client is not None:
            prompt.local = client.lookup_local(self.keys(prompt, blocks), start_block=start)
            if prompt.local.num_blocks == blocks or self._now() < self._quiet_until:
                prompt.hit = prompt.local
                return
        prompt.pending = self._asking.submit(self._look_up, prompt, start, blocks, prompt.asked_at)

    def _ready(self, prompt: Prompt) -> Client | None:
        if prompt.scope is None or self._clients is None:
            return None
        return self._clients.ready(prompt.scope)

    def keys(self, prompt: Prompt, blocks: int) -> bytes:
        """Packed keys of the first blocks of a prompt. Its scope is known."""
        assert prompt.scope is not None
        have, step = len(prompt.keys) // KEY_BYTES, self._hashes_per_block
        if have < blocks:
            hashes = prompt.request.block_hashes
            names = [bytes(hashes[index]) for index in range((have + 1) * step - 1, blocks * step, step)]
            prompt.keys += engine_keys(self._root(prompt.scope), names)
        return bytes(prompt.keys[: blocks * KEY_BYTES])

    # in the background

    def _look_up(self, prompt: Prompt, start: int, blocks: int, asked_at: float) -> PrefixHit | None:
        """Ask the directory. None: nobody waits for it any more, or it failed."""
        if self._now() > asked_at + self._timeout_s:
            return None
        assert self._clients is not None
        try:
            if prompt.scope is None:
                prompt.scope = Scope(self._adapter(prompt.request.lora_request), self._reset)
            client = self._clients.get(prompt.scope)
            return client.lookup_keys(self.keys(prompt, blocks), start_block=start)
        except (KvFleetError, OSError) as error:  # an adapter that cannot be read, above all
            self._failed("lookup", error)
            return None

    def _adapter(self, lora: Any) -> AdapterRef:  # noqa: ANN401  vLLM's LoRARequest
        """An adapter's identity: read when the engine meets it, and again when it is told to load it again."""
        known = (lora.lora_int_id, lora.lora_path)
        if known not in self._adapters or getattr(lora, "load_inplace", False):
            self._adapters[known] = self._read_adapter(lora)
        return self._adapters[known]

    def _look_up_later(self, prompt: Prompt, start: int, blocks: int) -> PrefixHit | None:
        time.sleep(_HANDED_OVER_POLL_S)
        return self._look_up(prompt, start, blocks, self._now())

    # its answer

    def _answered(self, prompt: Prompt) -> bool:
        """Whether the fleet's answer is there, or has been waited for long enough."""
        assert prompt.pending is not None
        now = self._now()
        if not prompt.pending.done():
            if now < prompt.asked_at + self._timeout_s:
                return False
            self._quiet_until = now + _QUIET_S
            prompt.hit = prompt.local
        else:
            hit = prompt.pending.result()
            if hit is not None and hit.fault is not None:
                self._quiet_until = now + _QUIET_S
            if self._more_to_come(prompt, hit, now):
                return False
            prompt.hit = hit or prompt.local
        prompt.pending = None
        return True

    def _more_to_come(self, prompt: Prompt, hit: PrefixHit | None, now: float) -> bool:
        """Whether another engine has said that it is storing more; then the directory is asked again."""
        assert prompt.asked is not None
        start, blocks = prompt.asked[0] // self._block_tokens, prompt.asked[1]
        if hit is None or hit.fault is not None or hit.num_blocks >= min(prompt.expected_blocks, blocks):
            return False
        if now > prompt.asked_at + _HANDED_OVER_S:
            prompt.expected_blocks = 0
            return False
        prompt.pending = self._asking.submit(self._look_up_later, prompt, start, blocks)
        return True

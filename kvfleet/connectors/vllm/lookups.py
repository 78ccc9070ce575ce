"""What the fleet has of the prompts in an engine, found without making vLLM's scheduler wait.

All of it is done in the background, first in this node's arena, then by the directory, while the request waits its
turn, at most `lookup_timeout_s`. A prompt's state is the scheduling thread's: what runs in the background is given what
it needs and answers by its result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import takewhile
from typing import Any

from kvfleet.client import Client
from kvfleet.connectors.vllm.adapters import Adapters
from kvfleet.connectors.vllm.background import Background, Job
from kvfleet.connectors.vllm.prompts import EngineRequest, Prompt
from kvfleet.connectors.vllm.scopes import Scope, ScopedClients
from kvfleet.core.block import KEY_BYTES, engine_keys
from kvfleet.core.planner import Plan
from kvfleet.errors import KvFleetError
from kvfleet.hits import PrefixHit
from kvfleet.planning import Planning

__all__ = ["Lookups"]

# While the directory fails, only one request in so many seconds waits for it.
_QUIET_S = 2.0
# A request that was long in the queue is looked up again: what was there then may be gone, or more may be there.
_STALE_S = 5.0
# Decode waits so long for what prefill has computed and is still storing, asking so often.
_HANDED_OVER_S = 2.0
_HANDED_OVER_POLL_S = 0.01
_READY_POLL_S = 0.005


class Lookups:
    """Looks prompts up. Threads: vLLM's scheduling thread calls.

    Args:
        block_tokens: tokens in a block.
        hash_tokens: tokens that one of vLLM's block hashes stands for; `block_tokens` is a multiple of it.
        adapters: of the engine.
        failed: told what failed, with the error.
        now: monotonic seconds.
    """

    def __init__(
        self,
        block_tokens: int,
        hash_tokens: int,
        adapters: Adapters,
        failed: Callable[[str, Exception], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        assert block_tokens % hash_tokens == 0
        self._block_tokens = block_tokens
        self._hashes_per_block = block_tokens // hash_tokens
        self._adapters = adapters
        self._failed = failed
        self._now = now
        self._clients: ScopedClients | None = None
        self._root: Callable[[Scope], bytes] = lambda _: b""
        self._timeout_s = 0.0
        self._asking = Background(2, "kvfleet-lookup", failed)
        self._quiet_until = 0.0
        self._reset = ""

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
        self._asking.close()

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

    def find(self, prompt: Prompt, computed_tokens: int) -> bool:
        """Whether it is known what the fleet has of a prompt behind the tokens that the engine has: `prompt.hit`.

        An answer holds as long as the engine has no fewer tokens than when it was asked for.
        """
        prompt.computed_tokens = computed_tokens
        start, blocks, now = computed_tokens // self._block_tokens, self.num_blocks(prompt.request), self._now()
        stale = prompt.hit is not None and now > prompt.asked_at + _STALE_S
        if prompt.asked_blocks != blocks or start < prompt.start_block or stale:
            prompt.asked_blocks, prompt.start_block, prompt.asked_at = blocks, start, now
            self._ask(prompt)
        if prompt.reading is not None:
            return self._scope_read(prompt)
        if prompt.ask_again_at is not None and now >= prompt.ask_again_at:
            self._look_up(prompt)
        return prompt.ask_again_at is None and (prompt.pending is None or self._answered(prompt))

    def scope(self, prompt: Prompt) -> Scope | None:
        """The scope of a prompt, if it is known by now."""
        if prompt.reading is not None and prompt.reading.done:
            scope, prompt.reading = prompt.reading.result, None
            if scope is not None and scope.reset.startswith(self._reset):
                prompt.scope = scope
        return prompt.scope

    def forget(self, prompt: Prompt) -> None:
        """Have the next `find` ask anew."""
        prompt.asked_blocks, prompt.hit, prompt.pending, prompt.ask_again_at = -1, None, None, None

    def count(self, prompt: Prompt, plan: Plan | None = None) -> None:
        """The engine uses the answer: count it, of all that the prompt had in the queue. The first use counts.

        Args:
            prompt: whose answer.
            plan: what is loaded of it; None: all.
        """
        if prompt.counted or prompt.hit is None:
            return
        assert self._clients is not None
        assert prompt.scope is not None
        client = self._clients.ready(prompt.scope)
        if client is not None:
            client.count(prompt.hit, plan, num_tokens=prompt.request.num_tokens)
            prompt.counted = True

    def here(self, prompt: Prompt, start: int, stop: int) -> int:
        """How many of blocks [start, stop) are in this node's arena, up to the first that is not. Blocking: never."""
        scope = self.scope(prompt)
        client = self._clients.ready(scope) if self._clients is not None and scope is not None else None
        if client is None:
            return 0
        hit = client.lookup_local(self.keys(prompt, stop), start_block=start, label=prompt.request.request_id)
        return sum(run.stop - run.start for run in takewhile(lambda run: run.local, hit.runs))

    def planning(self, prompt: Prompt) -> Planning | None:
        """Of the client that has looked a prompt up; None if it is there no more."""
        client = self._clients.ready(prompt.scope) if self._clients is not None and prompt.scope is not None else None
        return None if client is None else client.planning

    def _ask(self, prompt: Prompt) -> None:
        """Look a prompt up, or first find out whose it is."""
        prompt.hit = prompt.pending = prompt.ask_again_at = None
        if prompt.scope is None:
            lora, word = prompt.request.lora_request, self._reset
            prompt.reading = prompt.reading or self._asking.submit(lambda _: self._read_scope(lora, word))
            return
        self._look_up(prompt)

    def _look_up(self, prompt: Prompt) -> None:
        prompt.ask_again_at = None
        scope, start, now = prompt.scope, prompt.start_block, self._now()
        assert scope is not None
        keys, deadline, quiet = self.keys(prompt, prompt.asked_blocks), now + self._timeout_s, now < self._quiet_until
        label = prompt.request.request_id
        prompt.pending = self._asking.submit(
            lambda job: self._found(job, scope, keys, start, None if quiet else deadline, label)
        )

    def keys(self, prompt: Prompt, blocks: int) -> bytes:
        """Packed keys of the first blocks of a prompt. Its scope is known."""
        assert prompt.scope is not None
        have, step = len(prompt.keys) // KEY_BYTES, self._hashes_per_block
        if have < blocks:
            hashes = prompt.request.block_hashes
            names = [bytes(hashes[index]) for index in range((have + 1) * step - 1, blocks * step, step)]
            prompt.keys += engine_keys(self._root(prompt.scope), names)
        return prompt.keys[: blocks * KEY_BYTES]

    # in the background

    def _read_scope(self, lora: Any, word: str) -> Scope | None:  # noqa: ANN401  vLLM's LoRARequest
        """The scope of a request with an adapter; None if the adapter cannot be read."""
        try:
            adapter, own = self._adapters.read(lora)
        except (KvFleetError, OSError) as error:
            self._failed("adapter", error)
            return None
        return Scope(adapter, word + own)

    def _found(
        self, job: Job[PrefixHit], scope: Scope, keys: bytes, start: int, deadline: float | None, label: str
    ) -> PrefixHit | None:
        """What this node has, and before a deadline the fleet. `job` is told of the first before that is asked."""
        client = self._client(scope, deadline)
        if client is None:
            return None
        try:
            job.result = local = client.lookup_local(keys, start_block=start, label=label)
            if local.num_blocks == local.asked_blocks or deadline is None or self._now() > deadline:
                return local
            return client.lookup_keys(keys, start_block=start, label=label, counted=False)
        except KvFleetError as error:
            self._failed("lookup", error)
            return job.result

    def _client(self, scope: Scope, deadline: float | None) -> Client | None:
        """The client of a scope, made on another thread: that may take far longer than a request waits."""
        assert self._clients is not None
        if self._clients.ready(scope) is None:
            self._clients.prepare(scope)
        while (client := self._clients.ready(scope)) is None and deadline is not None and self._now() < deadline:
            time.sleep(_READY_POLL_S)
        return client

    # its answer

    def _scope_read(self, prompt: Prompt) -> bool:
        """Go on when the adapter is read, or has been waited for long enough."""
        assert prompt.reading is not None
        if not prompt.reading.done:
            return self._now() >= prompt.asked_at + self._timeout_s
        if self.scope(prompt) is None:
            return True
        self._ask(prompt)
        return prompt.pending is None or self._answered(prompt)

    def _answered(self, prompt: Prompt) -> bool:
        """Whether the fleet's answer is there, or has been waited for long enough."""
        assert prompt.pending is not None
        now, done, hit = self._now(), prompt.pending.done, prompt.pending.result
        if not done:
            if now < prompt.asked_at + self._timeout_s:
                return False
            self._quiet_until = now + _QUIET_S
        elif hit is not None and hit.fault is not None:
            self._quiet_until = now + _QUIET_S
        elif self._more_to_come(prompt, hit, now):
            prompt.pending, prompt.ask_again_at = None, now + _HANDED_OVER_POLL_S
            return False
        prompt.pending, prompt.hit = None, hit
        return True

    def _more_to_come(self, prompt: Prompt, hit: PrefixHit | None, now: float) -> bool:
        """Whether another engine has said that it is storing more than was found."""
        if hit is None:
            return False
        return hit.num_blocks < min(prompt.expected_blocks, prompt.asked_blocks) and now < (
            prompt.asked_at + _HANDED_OVER_S
        )

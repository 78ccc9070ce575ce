"""What an engine process calls: look up a prefix, load it, store it.

No fault of the cache reaches the caller: each becomes a shorter answer and a counted reason. Only mistakes of the
caller raise, before anything is done: a TypeError or ValueError (token ids that are none, a time below 0), which a
LayoutMismatchError (a tensor of the wrong shape or dtype) is too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvfleet import arguments
from kvfleet.attachment import AttachedNode, DirectoryPort, ManagerPort
from kvfleet.config import FleetConfig
from kvfleet.core.block import KEY_BYTES, TokenIds
from kvfleet.core.layout import ModelSpec
from kvfleet.counts import ClientStats
from kvfleet.errors import KvFleetError, LayoutMismatchError, ManagerAvoidedError
from kvfleet.explain import Explanation, explain
from kvfleet.hits import Loaded, PrefixHit
from kvfleet.holding import Hold
from kvfleet.looking import Asked, Looking
from kvfleet.node.arena import Arena
from kvfleet.node.holds import HOLD_MAX_S
from kvfleet.node.messages import Bytes, Miss, Namespace, Outcome
from kvfleet.reading import Reading
from kvfleet.storing import StoreTask, StoreWorker
from kvfleet.tensors import PutBlock, TakeBlock, filler, taker
from kvfleet.writing import StoreJob, Writing

__all__ = ["Client", "PutBlock", "TakeBlock"]

_log = logging.getLogger(__name__)
_LOG_INTERVAL_S = 30.0


class Client:
    """One engine's door to the fleet, for one model and one tensor-parallel shard.

    Threads: any. Forking: make clients after the fork.
    Blocking: `lookup` at most `lookup_timeout_s`, twice that until the node is attached; `load` at most its deadline
    plus one block's copy and 0.25 s for an answer to arrive; `store` never.
    """

    def __init__(
        self, spec: ModelSpec, manager: ManagerPort, directory: DirectoryPort, config: FleetConfig, *, shard: int = 0
    ) -> None:
        arguments.check_kind(spec, "model", ModelSpec)
        arguments.check_index(shard, "shard")
        if not shard < spec.layout.num_shards:
            raise LayoutMismatchError(f"a shard below {spec.layout.num_shards}", f"shard {shard}")
        self.spec = spec
        self.shard = shard
        self._config = config
        self._manager = manager
        self._directory = directory
        self._looking = Looking(spec, shard, directory, config.lookup_timeout_s)
        self._node = AttachedNode(manager)
        self._namespace = Namespace(spec.namespace_id, spec.layout.to_json())
        writing = Writing(self._node, manager, config, spec.layout, self._namespace, shard)
        self._worker = StoreWorker(self._node, writing, spec.layout, config.store_queue_bytes_max)
        self._stats = writing.stats
        self._warn_at = 0.0
        self.closed = False

    def attach(self, timeout_s: float | None = None) -> None:
        """Map the node's arena now instead of at the first use.

        Raises:
            ConfigError: the node cannot have an arena, and why.
            KvFleetError: the manager did not answer in time.
        """
        arguments.check_timeout(timeout_s)
        self._stats.called("attach")
        self._node.attach(self._config.attach_timeout_s if timeout_s is None else timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Finish queued stores within `timeout_s`, then let go of the node."""
        arguments.check_timeout(timeout_s, optional=False)
        self.closed = True
        deadline = time.monotonic() + timeout_s
        if self._worker.close(timeout_s):
            self._node.close(max(0.0, deadline - time.monotonic()))

    @property
    def memory(self) -> Bytes | None:
        """Where blocks lie in this node's arena, for a device to be told of; None before the node is attached."""
        arena = self._node.arena
        return None if arena is None else arena.slot_view(arena.slots_offset, arena.capacity_bytes)

    def stats(self) -> ClientStats:
        """Totals since this client was made."""
        return self._stats.snapshot()

    def explain(self, request: PrefixHit | Loaded) -> Explanation:
        """What became of a request, block by block, and why; what a load did not bring shows only in its answer.

        Args:
            request: from a `lookup` or `load` of this client, or of another one of its model.
        """
        arguments.check_kind(request, "request", PrefixHit, Loaded)
        return explain(request, self.spec.layout)

    # lookup

    def lookup(self, token_ids: TokenIds, *, extra: Mapping[int, bytes] | None = None, label: str = "") -> PrefixHit:
        """The longest prefix of `token_ids`, in whole blocks, that the fleet says it holds.

        No remote call if all of it is in this node's arena or on its drives, else one to the directory. Blocks that
        are being written to this node's arena count: a load waits for them.

        Args:
            token_ids: 1-D; a uint32 buffer is fastest (numpy, torch, array); lists work.
            extra: block index → digest of what else that block depends on (images, ...).
            label: the engine's name for the request, by which `kvfleet explain` finds it.

        Raises:
            ValueError: the ids are no token ids.
        """
        arguments.check_extra(extra)
        return self.lookup_keys(self.spec.keys(token_ids, extra), label=label)

    def lookup_keys(self, keys: bytes, *, start_block: int = 0, label: str = "", counted: bool = True) -> PrefixHit:
        """Like `lookup`, for an engine that has the packed keys of its blocks already.

        Args:
            keys: of the prefix from its first block on.
            start_block: the first block to look for; the engine has those before it.
            label: as in `lookup`.
            counted: False for an engine that may ask again before it uses an answer: it gives the one it uses to
                `count`.
        """
        arguments.check_keys(keys, start_block, label)
        asked = Asked(keys, start_block, label)
        arena, asked.fault = self._arena(self._config.lookup_timeout_s, asked.calls)
        hit = self._looking.everywhere(asked, arena)
        self._stats.called(*hit.calls)
        if counted:
            self._stats.looked_up(hit)
        return hit

    def count(self, hit: PrefixHit) -> None:
        """Count a hit that its lookup did not. Blocking: never."""
        arguments.check_kind(hit, "hit", PrefixHit)
        self._stats.looked_up(hit)

    def lookup_local(self, keys: bytes, *, start_block: int = 0, label: str = "") -> PrefixHit:
        """Like `lookup_keys`, but only what is in this node's arena or on its drives, and not counted.

        Blocking: never; makes no remote call, and finds nothing before the node is attached.
        """
        arguments.check_keys(keys, start_block, label)
        arena = None if self._node.stale else self._node.arena
        return self._looking.here(Asked(keys, start_block, label), arena)

    def absent(self, keys: bytes) -> npt.NDArray[np.bool_]:
        """Which blocks of this client's shard are not in this node's arena; the others count as used now.

        For an engine that has these blocks itself: so that what it keeps using is kept here too.

        Blocking: never; makes no remote call. Before the node is attached, all are absent.
        """
        arguments.check_keys(keys)
        arena = None if self._node.stale else self._node.arena
        if arena is None:
            return np.full(len(keys) // KEY_BYTES, fill_value=True)
        slots = arena.records.find(keys, self.shard).slots
        arena.records.touch(slots, time.monotonic_ns())
        missing: npt.NDArray[np.bool_] = slots < 0
        return missing

    def _arena(self, timeout_s: float, calls: list[str]) -> tuple[Arena | None, Miss | None]:
        """The node's arena, attached if it can be within `timeout_s`; a call for that is noted."""
        if self._node.stale:
            calls.append("attach")
            try:
                self._node.attach(timeout_s)
            except KvFleetError as error:
                if isinstance(error, ManagerAvoidedError):
                    calls.remove("attach")
                self._warn("this node's arena cannot be used: %s", error)
                return None, Miss.MANAGER_UNAVAILABLE
        return self._node.arena, None

    def _warn(self, text: str, error: KvFleetError) -> None:
        """Log what is wrong with this node, once in a while: an engine asks hundreds of times a second."""
        now = time.monotonic()
        if now >= self._warn_at:
            self._warn_at = now + _LOG_INTERVAL_S
            _log.warning(text, error)

    # load

    def load(self, hit: PrefixHit, into: object, timeout_s: float | None = None) -> Loaded:
        """Copy the blocks of a hit into the engine's memory, first blocks first.

        Blocks in the local arena cost no remote call; if others are among them, one call to the local manager
        brings those. Stops at the first block that does not come.

        Args:
            hit: from `lookup`.
            into: a CPU tensor or array of the layout's shape, with a token axis of at least `hit.num_tokens`, any
                strides; or a `TakeBlock` function.
            timeout_s: deadline; default `load_timeout_s`.

        Returns:
            The number of tokens loaded, from the hit's start block on. Memory behind them may have been written to.

        Raises:
            LayoutMismatchError: `into` has another shape or dtype. Nothing was written.
        """
        arguments.check_kind(hit, "hit", PrefixHit)
        arguments.check_timeout(timeout_s)
        start_s, calls = time.perf_counter(), list[str]()
        take = taker(into, self.spec.layout, hit.num_blocks)
        timeout_s = self._config.load_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        outcomes: list[Outcome] = []
        if hit.num_blocks > hit.start_block:
            arena, fault = self._arena(min(timeout_s, self._config.lookup_timeout_s), calls)
            outcomes = [fault] if fault is not None else []
            if arena is not None:
                reading = Reading(arena, hit, self.shard, take, deadline)
                reading.local()
                if not reading.complete:
                    reading.rest(self._manager, self._namespace, self.spec.layout.block_bytes)
                    calls += [] if isinstance(reading.error, ManagerAvoidedError) else ["load"]
                if reading.error is not None:
                    self._warn("load stopped short: %s", reading.error)
                outcomes = reading.outcomes
                if Miss.EVICTED in outcomes[-1:]:
                    self._node.doubt()
        outcomes += [Miss.BEHIND_MISS] * (hit.num_blocks - hit.start_block - len(outcomes))
        self._stats.called(*calls)
        loaded = Loaded.of(outcomes, self.spec.layout)
        loaded.hit, loaded.load_s, loaded.calls = hit, time.perf_counter() - start_s, tuple(calls)
        self._stats.loaded(loaded, self.shard)
        return loaded

    def hold(self, hit: PrefixHit, seconds: float) -> Hold:
        """Keep those first blocks of a hit that are in this node's arena. One call to the manager.

        Args:
            hit: from `lookup`.
            seconds: above 0, at most 30.
        """
        arguments.check_kind(hit, "hit", PrefixHit)
        arguments.check_seconds(seconds, "seconds", HOLD_MAX_S)
        self._stats.called("hold")
        keys = hit.keys_of(hit.start_block, hit.num_blocks)
        hold = Hold(self._node, self._manager, keys, self.shard, timeout_s=self._config.lookup_timeout_s)
        hold.renew(seconds)
        return hold

    # store

    def store(
        self, token_ids: TokenIds, kv: object, *, start_block: int = 0, extra: Mapping[int, bytes] | None = None
    ) -> StoreTask:
        """Put the whole blocks of a prefix into the cache, in the background.

        Args:
            token_ids: of the prefix from its first token on.
            kv: a CPU tensor or array of the layout's shape whose token axis covers the whole blocks from
                `start_block` on; or a `PutBlock` function. Must stay unchanged until the task is done.
            start_block: the first block to store; earlier ones only name the prefix.
            extra: as in `lookup`.

        Returns:
            A task; `task.wait(timeout_s)` returns when the blocks it wrote can be found by the whole fleet, or when it
            is known that they will not: `dropped` and `reason` of its result tell. It raises DeadlineExceededError,
            a TimeoutError, only if that takes longer.

        Raises:
            LayoutMismatchError: `kv` has another shape or dtype than the client's model.
        """
        arguments.check_extra(extra)
        return self.store_keys(self.spec.keys(token_ids, extra), kv, start_block=start_block)

    def store_keys(self, keys: bytes, kv: object, *, start_block: int = 0) -> StoreTask:
        """Like `store`, for an engine that has the packed keys of its blocks already."""
        arguments.check_keys(keys)
        arguments.check_index(start_block, "start_block")
        num_blocks = max(0, len(keys) // KEY_BYTES - start_block)
        fill = filler(kv, self.spec.layout, num_blocks, start_block)
        return self._worker.submit(StoreJob(keys, start_block, num_blocks, fill))

"""What an engine process calls: look up a prefix, load it, store it.

No fault of the cache reaches the caller: each becomes a shorter answer and a counted reason. Only mistakes of the
caller raise, before anything is done: a TypeError or ValueError, as LayoutMismatchError is one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sized

import numpy as np
import numpy.typing as npt

from kvfleet import arguments
from kvfleet.attachment import AttachedNode, DirectoryPort, ManagerPort
from kvfleet.config import FleetConfig
from kvfleet.core.block import KEY_BYTES, TokenIds
from kvfleet.core.hints import NO_HINTS, Hints
from kvfleet.core.layout import ModelSpec
from kvfleet.core.planner import Plan
from kvfleet.counts import ClientStats
from kvfleet.errors import LayoutMismatchError
from kvfleet.explain import Explanation, explain
from kvfleet.hits import Loaded, PrefixHit
from kvfleet.holding import Hold
from kvfleet.loads import Loads, Meanwhile
from kvfleet.looking import Asked, Looking
from kvfleet.nearby import Nearby
from kvfleet.node.holds import HOLD_MAX_S
from kvfleet.node.messages import Bytes, HintRequest, Namespace
from kvfleet.node.recording import Recorder
from kvfleet.planning import Planning
from kvfleet.storing import StoreTask, StoreWorker
from kvfleet.tensors import PutBlock, TakeBlock, filler, taker
from kvfleet.writing import StoreJob, Writing

__all__ = ["Client", "PutBlock", "TakeBlock"]


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
        self.planning = Planning(spec.layout, enabled=config.plan_loads)
        self._node = AttachedNode(manager, self.planning.tell)
        self._nearby = Nearby(self._node, config.lookup_timeout_s)
        self._namespace = Namespace(spec.namespace_id, spec.layout.to_json())
        writing = Writing(self._node, manager, config, spec.layout, self._namespace, shard)
        self._loads = Loads(self._nearby, manager, self._namespace, spec.layout, shard, self.planning)
        self._worker = StoreWorker(self._node, writing, spec.layout, config.store_queue_bytes_max)
        self._stats = writing.stats
        self._recorder = Recorder(spec.block_tokens, shard, spec.layout.bytes_per_token)
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
        self._loads.close(min(1.0, timeout_s))
        if self._worker.close(max(0.0, deadline - time.monotonic())):
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

    def lookup(
        self, token_ids: TokenIds, *, extra: Mapping[int, bytes] | None = None, label: str = "", hints: Hints = NO_HINTS
    ) -> PrefixHit:
        """The longest prefix of `token_ids`, in whole blocks, that the fleet says it holds.

        No remote call if all of it is in this node's arena or on its drives, else one to the directory. Blocks that
        are being written to this node's arena count: a load waits for them.

        Args:
            token_ids: 1-D; a uint32 buffer is fastest (numpy, torch, array); lists work.
            extra: block index → digest of what else that block depends on (images, ...).
            label: the engine's name for the request, by which `kvfleet explain` finds it.
            hints: as in `store`, for `kvfleet record`.

        Raises:
            ValueError: the ids are no token ids.
        """
        arguments.check_extra(extra)
        arguments.check_kind(hints, "hints", Hints)
        hit = self.lookup_keys(self.spec.keys(token_ids, extra), label=label, counted=False)
        self.count(hit, num_tokens=len(token_ids) if isinstance(token_ids, Sized) else 0, hints=hints)
        return hit

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
        arena, asked.fault = self._nearby.arena(self._config.lookup_timeout_s, asked.calls)
        hit = self._looking.everywhere(asked, arena)
        self._stats.called(*hit.calls)
        if counted:
            self.count(hit)
        return hit

    def count(self, hit: PrefixHit, plan: Plan | None = None, *, num_tokens: int = 0, hints: Hints = NO_HINTS) -> None:
        """Count a hit that its lookup did not. Blocking: never.

        Args:
            hit: from `lookup_keys`.
            plan: what of it will be loaded, if not all.
            num_tokens: of the whole prompt, for `kvfleet record`; 0: those of its whole blocks.
            hints: of the request, for `kvfleet record`.
        """
        arguments.check_kind(hit, "hit", PrefixHit)
        self._stats.looked_up(hit, plan)
        hints = hints.within(self.spec.namespace_id)
        self._recorder.note(self._nearby.now(), hit.asked_ns, hit.keys, num_tokens, hints)

    def lookup_local(self, keys: bytes, *, start_block: int = 0, label: str = "") -> PrefixHit:
        """Like `lookup_keys`, but only what this node has, and not counted. Blocking: never; makes no remote call."""
        arguments.check_keys(keys, start_block, label)
        return self._looking.here(Asked(keys, start_block, label), self._nearby.now())

    def absent(self, keys: bytes) -> npt.NDArray[np.bool_]:
        """Which blocks of this client's shard are not in this node's arena; the others count as used now.

        For an engine that has them itself: what it keeps using is kept here too. Blocking: never; makes no remote call.
        """
        arguments.check_keys(keys)
        return self._nearby.absent(keys, self.shard)

    # load

    def load(
        self,
        hit: PrefixHit,
        into: object,
        timeout_s: float | None = None,
        *,
        plan: Plan | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> Loaded:
        """Copy the blocks of a hit into the engine's memory, first blocks first, up to the first that does not come.

        Blocks in the local arena cost no remote call; if others are among them, one to the local manager brings those.

        Args:
            hit: from `lookup`.
            into: a CPU tensor or array of the layout's shape, with a token axis of at least `hit.num_tokens`, any
                strides; or a `TakeBlock` function.
            timeout_s: deadline; default `load_timeout_s`.
            plan: of this hit, by `planning.plan`: what to load and how long it may take. Without one, all of it.
            meanwhile: called with the index of the first block that did not come while the tail of the plan is loaded;
                to compute the blocks from there up to the tail. It is not called without a tail, or without an arena.

        Returns:
            The number of tokens loaded, from the hit's start block on where there is no tail. Memory behind them may
            have been written to.

        Raises:
            LayoutMismatchError: `into` has another shape or dtype. Nothing was written.
        """
        arguments.check_kind(hit, "hit", PrefixHit)
        arguments.check_timeout(timeout_s)
        take = taker(into, self.spec.layout, hit.num_blocks)
        timeout_s = self._config.load_timeout_s if timeout_s is None else timeout_s
        loaded = self._loads.load(hit, take, timeout_s, plan, meanwhile)
        self._stats.called(*loaded.calls)
        self._stats.loaded(loaded, self.shard)
        return loaded

    def started(self, loaded: Loaded, seconds: float) -> None:
        """The engine has a prompt's KV, so many seconds after its lookup began, for `explain`. Blocking: never."""
        arguments.check_kind(loaded, "loaded", Loaded)
        arguments.check_timeout(seconds, optional=False)
        loaded.ready_s = seconds
        self._stats.started(loaded)

    def hold(self, hit: PrefixHit, seconds: float) -> Hold:
        """Keep those first blocks of a hit that are in this node's arena, 30 s at most. One call to the manager."""
        arguments.check_kind(hit, "hit", PrefixHit)
        arguments.check_seconds(seconds, "seconds", HOLD_MAX_S)
        self._stats.called("hold")
        keys = hit.keys_of(hit.start_block, hit.num_blocks)
        hold = Hold(self._node, self._manager, keys, self.shard, timeout_s=self._config.lookup_timeout_s)
        hold.renew(seconds)
        return hold

    # store

    def store(
        self, token_ids: TokenIds, kv: object, *, start_block: int = 0, extra: Mapping[int, bytes] | None = None,
        hints: Hints = NO_HINTS,
    ) -> StoreTask:  # fmt: skip
        """Put the whole blocks of a prefix into the cache, in the background.

        Args:
            token_ids: of the prefix from its first token on.
            kv: a CPU tensor or array of the layout's shape whose token axis covers the whole blocks from
                `start_block` on; or a `PutBlock` function. Must stay unchanged until the task is done.
            start_block: the first block to store; earlier ones only name the prefix.
            extra: as in `lookup`.
            hints: what is known of the prefix's future, as `Hints.of("chat 7", turn=2)`. A wrong one costs a hit.

        Returns:
            A task; `task.wait(timeout_s)` returns when the blocks it wrote can be found by the whole fleet, or when it
            is known that they will not: `dropped` and `reason` of its result tell. It raises DeadlineExceededError,
            a TimeoutError, only if that takes longer.

        Raises:
            LayoutMismatchError: `kv` has another shape or dtype than the client's model.
        """
        arguments.check_extra(extra)
        return self.store_keys(self.spec.keys(token_ids, extra), kv, start_block=start_block, hints=hints)

    def store_keys(self, keys: bytes, kv: object, *, start_block: int = 0, hints: Hints = NO_HINTS) -> StoreTask:
        """Like `store`, for an engine that has the packed keys of its blocks already."""
        arguments.check_keys(keys)
        arguments.check_index(start_block, "start_block")
        arguments.check_kind(hints, "hints", Hints)
        num_blocks = max(0, len(keys) // KEY_BYTES - start_block)
        fill = filler(kv, self.spec.layout, num_blocks, start_block)
        return self._worker.submit(StoreJob(keys, start_block, num_blocks, fill, hints.within(self.spec.namespace_id)))

    def hint(self, keys: bytes, hints: Hints) -> StoreTask:
        """Tell the manager what is known of blocks that were loaded; stores tell of theirs.

        Done after the stores before it, in the background, with one call.

        Args:
            keys: of the prefix from its first block on.
            hints: as in `store`. Their turn is not needed: uses are counted.
        """
        arguments.check_keys(keys)
        arguments.check_kind(hints, "hints", Hints)
        return self._worker.hint(HintRequest(keys, b"", hints.within(self.spec.namespace_id)))

    def retire(self, session: str | bytes) -> StoreTask:
        """A session has ended: what no other one has built on is the first to go, on all nodes that have it.

        Done as `hint` is. Nothing is known of a session without `hints` at its stores.

        Raises:
            ValueError: `session`, the id given to `Hints.of`, is empty, or neither text nor bytes.
        """
        hints = Hints.of(session, final=True)
        if not hints.session:
            raise ValueError("session must not be empty")
        return self.hint(b"", hints)

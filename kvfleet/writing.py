"""One store, as the client does it: reserve slots, copy in place, commit; batch by batch."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from kvfleet.attachment import AttachedNode, ManagerPort
from kvfleet.config import FleetConfig
from kvfleet.core.block import KEY_BYTES, split
from kvfleet.core.hints import NO_HINTS, Hints
from kvfleet.core.layout import BlockLayout
from kvfleet.counts import Stats
from kvfleet.errors import DeadlineExceededError, KvFleetError, ManagerAvoidedError
from kvfleet.hits import StoreResult
from kvfleet.node.arena import Arena
from kvfleet.node.messages import (
    Bytes,
    CommitReply,
    CommitRequest,
    HintRequest,
    Namespace,
    ReserveReply,
    ReserveRequest,
)

__all__ = ["Fill", "StoreJob", "Writing"]

_log = logging.getLogger(__name__)
_COMMIT_RETRY_S = 0.25
_GIVE_BACK_TIMEOUT_S = 1.0
_GIVEN_UP_BYTES_MAX = 4096 * KEY_BYTES  # kept until the manager can be told; hints, so more are not
_TOLD = frozenset({"draining", "no_room", "not_worth"})  # reasons that come from the manager
_GAPS_MAX = 4096

Fill: TypeAlias = Callable[[int, Bytes], int]
"""Writes block `index` of the prefix into a slot and returns the xxh3-64 of what it wrote."""


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Blocks of a prefix to be stored.

    Attributes:
        keys: of all blocks of the prefix up to the last one to store, packed.
        first: index of the first block to store.
        num_blocks: how many to store.
        fill: see `Fill`.
        hints: of the caller; the session as managers know it.
    """

    keys: bytes
    first: int
    num_blocks: int
    fill: Fill
    hints: Hints = NO_HINTS

    def parent(self, start: int) -> bytes:
        """The key before block `start`; b"" if there is none."""
        return self.keys[(start - 1) * KEY_BYTES : start * KEY_BYTES] if start else b""


class Writing:
    """The stores of one client, one after the other.

    Threads: `store` from one at a time, `remember` from any.
    """

    def __init__(
        self, node: AttachedNode, manager: ManagerPort, config: FleetConfig, layout: BlockLayout, namespace: Namespace,
        shard: int,
    ) -> None:  # fmt: skip
        self._node = node
        self._manager = manager
        self._config = config
        self._layout = layout
        self._namespace = namespace
        self._shard = shard
        self.stats = Stats(layout, node.tally)
        self._sequence = 0
        self._lock = threading.Lock()
        self._given_up = b""
        self._gaps: OrderedDict[bytes, str] = OrderedDict()  # last keys of stores that dropped blocks, with the reason

    def store(self, job: StoreJob) -> StoreResult:
        """All blocks of a job, batch by batch; stops at the first batch that does not get through.

        Nothing is stored that builds on a block that was dropped, and is not here by now: no lookup would find it here.
        """
        deadline = time.monotonic() + self._config.store_timeout_s
        stored = already = 0
        published, reason = True, self._gap(job)
        position, stop = job.first, job.first + job.num_blocks
        while position < stop and not reason:
            try:
                position, one = self._store_next(job, position, deadline)
            except KvFleetError as error:
                published, reason = False, "deadline" if time.monotonic() >= deadline else "manager_unavailable"
                _log.info("store stopped short: %s", error)
            else:
                stored, already = stored + one.stored, already + one.already
                published, reason = published and one.published, one.reason
        dropped = job.num_blocks - stored - already
        assert dropped >= 0
        published = published and dropped < job.num_blocks
        return StoreResult(stored, already, dropped, published, stored * self._layout.block_bytes, reason)

    def hint(self, request: HintRequest) -> StoreResult:
        """Tell the manager what is known of blocks; once, as it only costs hits if it does not hear of it."""
        already = len(request.keys) // KEY_BYTES
        try:
            self._node.attach(self._config.attach_timeout_s)
            self._manager.hint(request, self._config.lookup_timeout_s)
        except ManagerAvoidedError:
            return StoreResult(already=already, published=False, reason="manager_unavailable")
        except KvFleetError as error:
            _log.info("hints not told: %s", error)
            self.stats.called("hint")
            return StoreResult(already=already, published=False, reason="manager_unavailable")
        self.stats.called("hint")
        return StoreResult(already=already)

    def remember(self, job: StoreJob, result: StoreResult) -> None:
        """Keep what was given up without the manager's knowledge, so that lookups can be told why nobody has it."""
        keys = job.keys[job.first * KEY_BYTES :]
        if result.dropped and result.reason not in _TOLD:
            self._keep(keys)
        with self._lock:
            if not result.dropped:
                for key in split(keys) if self._gaps else ():
                    self._gaps.pop(key, None)
            elif result.reason != "not_worth":  # a policy is to hear of each that it declines
                self._gaps[keys[-KEY_BYTES:]] = result.reason
                if len(self._gaps) > _GAPS_MAX:
                    self._gaps.popitem(last=False)

    def _gap(self, job: StoreJob) -> str:
        """Why the block before a job's first was dropped; "" if it was not, or is here by now."""
        parent = job.parent(job.first)
        with self._lock:
            reason = self._gaps.get(parent, "")
        arena = self._node.arena if reason else None
        return "" if arena is not None and (arena.records.find(parent, self._shard).slots >= 0).all() else reason

    def _keep(self, keys: bytes) -> None:
        with self._lock:
            self._given_up = (self._given_up + keys[:_GIVEN_UP_BYTES_MAX])[-_GIVEN_UP_BYTES_MAX:]

    def _store_next(self, job: StoreJob, start: int, deadline: float) -> tuple[int, StoreResult]:
        """One batch of a job, from block `start` on. Returns where the next one starts, and what became of this one.

        Raises:
            KvFleetError: the manager could not be asked.
        """
        left = deadline - time.monotonic()
        if left <= 0:
            return start, StoreResult(published=False, reason="deadline")
        # A manager may take its time to start, but one that did not answer is only probed.
        patience_s = self._config.holder_timeout_s if self._node.suspect else self._config.attach_timeout_s
        arena = self._node.attach(min(left, patience_s))
        stop = min(start + self._batch_blocks(arena), job.first + job.num_blocks)
        keys = job.keys[start * KEY_BYTES : stop * KEY_BYTES]
        if (arena.records.find(keys, self._shard).slots >= 0).all():
            if job.hints.lasting:
                self.hint(HintRequest(keys, job.parent(start), job.hints))
            return stop, StoreResult(already=stop - start)
        reply = self._reserve(job, start, keys, arena, deadline)
        if reply.arena_id != arena.arena_id:
            # Only a reservation made while our lock file is beside the arena is safe to write to: ask again.
            self._node.attach(left, again=True)
            return start, StoreResult()
        if not reply.slots:
            return stop, StoreResult(already=reply.already, reason="draining" if reply.draining else _left_out(reply))
        written = self._write(job, start, reply, arena, deadline)
        if reply.refused and written.stored == len(reply.slots):  # once these are saved below there may be room
            num_done = reply.indexes[-1] + 1
            return start + num_done, replace(written, already=num_done - len(reply.slots), reason="")
        return stop, written

    def _batch_blocks(self, arena: Arena) -> int:
        return max(1, int(arena.capacity_bytes * self._config.reserve_fraction) // self._layout.block_bytes)

    def _reserve(self, job: StoreJob, start: int, keys: bytes, arena: Arena, deadline: float) -> ReserveReply:
        self._sequence += 1
        left = max(0.0, deadline - time.monotonic())
        with self._lock:
            given_up, self._given_up = self._given_up, b""
        request = ReserveRequest(
            client_id=self._node.client_id,
            sequence=self._sequence,
            namespace=self._namespace,
            keys=keys,
            parent=job.parent(start),
            depth=start,
            shard=self._shard,
            num_bytes=self._layout.block_bytes,
            timeout_s=left,
            given_up=given_up,
            hints=job.hints,
        )
        try:
            reply = self._manager.reserve(request, left)
        except ManagerAvoidedError:
            self._keep(given_up)
            raise
        except KvFleetError:
            self.stats.called("reserve")
            self._keep(given_up)
            self._give_back(arena)  # whatever was reserved without our hearing of it
            raise
        self.stats.called("reserve")
        return reply

    def _write(self, job: StoreJob, start: int, reply: ReserveReply, arena: Arena, deadline: float) -> StoreResult:
        """Fill the granted slots and commit them."""
        try:
            checksums = self._fill(job, start, reply, arena)
        except Exception as error:  # noqa: BLE001  whatever a caller's fill raises must not end the thread
            _log.warning("store dropped: %r", error)
            self._give_back(arena)
            return StoreResult(already=reply.already, published=False, reason=type(error).__name__)
        commit = self._commit(reply, checksums, deadline)
        if commit is None:
            self._give_back(arena)  # else they stay ours until the next store, if there is one
            return StoreResult(already=reply.already, published=False, reason="commit_lost")
        lost = len(reply.slots) - commit.committed
        reason = _left_out(reply) or ("reservation_lost" if lost else "")
        return StoreResult(commit.committed, reply.already, 0, commit.published, 0, reason)

    def _fill(self, job: StoreJob, start: int, reply: ReserveReply, arena: Arena) -> tuple[int, ...]:
        length = self._layout.block_bytes
        return tuple(
            job.fill(start + index, arena.slot_view(offset, length))
            for index, offset in zip(reply.indexes, reply.offsets, strict=True)
        )

    def _commit(self, reply: ReserveReply, checksums: tuple[int, ...], deadline: float) -> CommitReply | None:
        """Commit, through a restart of the manager if need be: it is idempotent. None: it hangs, or it is too late."""
        while (left := deadline - time.monotonic()) > 0:
            request = CommitRequest(
                self._node.client_id, self._sequence, reply.arena_id, reply.slots, reply.generations, checksums, left
            )
            self.stats.called("commit")
            try:
                return self._manager.commit(request, left)
            except DeadlineExceededError as error:
                _log.info("commit given up: %s", error)
                return None
            except KvFleetError as error:
                _log.info("commit will be tried again: %s", error)
                time.sleep(min(_COMMIT_RETRY_S, left))
        return None

    def _give_back(self, arena: Arena) -> None:
        """Free what this client has reserved. Tried once: if it fails, the next reserve does it, or our end."""
        self._sequence += 1
        request = CommitRequest(self._node.client_id, self._sequence, arena.arena_id, (), (), (), _GIVE_BACK_TIMEOUT_S)
        self.stats.called("commit")
        try:
            self._manager.commit(request, _GIVE_BACK_TIMEOUT_S)
        except KvFleetError as error:
            _log.info("slots not given back: %s", error)


def _left_out(reply: ReserveReply) -> str:
    """Why some blocks got no slot; "" if none was left out."""
    return "no_room" if reply.refused else "not_worth" if reply.declined else ""

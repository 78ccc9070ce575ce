"""Stores: reserve, copy in place, commit; in the background, in order, and bounded.

One thread a client does them one after the other, so a client never has more than one reservation. Stores that
would make the queue longer than its bound are dropped at once: a store not done costs a recompute, a store waited
for costs the request.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvfleet.attachment import AttachedNode, ManagerPort
from kvfleet.config import FleetConfig
from kvfleet.core.block import KEY_BYTES
from kvfleet.core.layout import BlockLayout
from kvfleet.counts import Stats
from kvfleet.errors import DeadlineExceededError, KvFleetError
from kvfleet.hits import StoreResult
from kvfleet.node.arena import Arena
from kvfleet.node.messages import Bytes, CommitReply, CommitRequest, Namespace, ReserveReply, ReserveRequest

__all__ = ["StoreJob", "StoreTask", "StoreWorker"]

_log = logging.getLogger(__name__)
_COMMIT_RETRY_S = 0.25
_GIVE_BACK_TIMEOUT_S = 1.0

Fill = Callable[[int, Bytes], int]
"""Writes block `index` of the prefix into a slot and returns the xxh3-64 of what it wrote."""


class StoreTask:
    """A store under way."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._result = StoreResult()

    def wait(self, timeout_s: float | None = None) -> StoreResult:
        """Wait until the blocks are readable here and the directory has acknowledged those that this store wrote.

        Raises:
            DeadlineExceededError: not within `timeout_s`. The store goes on.
        """
        if not self._done.wait(timeout_s):
            assert timeout_s is not None
            raise DeadlineExceededError("store", timeout_s)
        return self._result

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once. From then on the source memory is not read any more."""
        return self._done.is_set()

    def finish(self, result: StoreResult) -> None:
        """Called once, by the worker."""
        assert not self._done.is_set()
        self._result = result
        self._done.set()


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Blocks of a prefix to be stored.

    Attributes:
        keys: of all blocks of the prefix up to the last one to store, packed.
        first: index of the first block to store.
        num_blocks: how many to store.
        fill: see `Fill`.
    """

    keys: bytes
    first: int
    num_blocks: int
    fill: Fill
    task: StoreTask = field(default_factory=StoreTask)


class StoreWorker:
    """Does a client's stores on one background thread.

    Threads: `submit` and `close` from any.
    """

    def __init__(
        self,
        node: AttachedNode,
        manager: ManagerPort,
        config: FleetConfig,
        layout: BlockLayout,
        namespace: Namespace,
        shard: int,
    ) -> None:
        self._node = node
        self._manager = manager
        self._config = config
        self._layout = layout
        self._namespace = namespace
        self._shard = shard
        self.stats = Stats(layout, node.tally)
        self._sequence = 0
        self._jobs: queue.SimpleQueue[StoreJob | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._queued_bytes = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, job: StoreJob) -> StoreTask:
        """Queue a job, or finish it as dropped."""
        if not job.num_blocks:
            job.task.finish(StoreResult())
            return job.task
        if self._node.forked:  # the thread that would do it is the parent's
            self._finish(job, StoreResult(dropped=job.num_blocks, published=False, reason="forked"))
            return job.task
        num_bytes = job.num_blocks * self._layout.block_bytes
        with self._lock:
            reason = "closed" if self._closed else ""
            if self._queued_bytes and self._queued_bytes + num_bytes > self._config.store_queue_bytes_max:
                reason = "queue_full"
            if not reason:
                self._queued_bytes += num_bytes
                self._jobs.put(job)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="kvfleet-store", daemon=True)
                    self._thread.start()
                return job.task
        self._finish(job, StoreResult(dropped=job.num_blocks, published=False, reason=reason))
        return job.task

    def close(self, timeout_s: float) -> bool:
        """Finish what is queued, then stop. False if that takes longer than `timeout_s`; it then goes on."""
        with self._lock:
            self._closed = True
            thread = self._thread
            self._jobs.put(None)
        if thread is None:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _finish(self, job: StoreJob, result: StoreResult) -> None:
        self.stats.stored(result)
        job.task.finish(result)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                result = self._store(job)
            except Exception as error:  # noqa: BLE001  a bug of ours must not end the thread
                _log.exception("store dropped")
                result = StoreResult(dropped=job.num_blocks, published=False, reason=type(error).__name__)
            with self._lock:
                self._queued_bytes -= job.num_blocks * self._layout.block_bytes
            self._finish(job, result)
            del job, result  # while we wait for the next one, this one's memory is the caller's again

    def _store(self, job: StoreJob) -> StoreResult:
        """All blocks of a job, batch by batch; stops at the first batch that does not get through."""
        deadline = time.monotonic() + self._config.store_timeout_s
        stored = already = 0
        published, reason = True, ""
        position, stop = job.first, job.first + job.num_blocks
        while position < stop and not reason:
            try:
                position, one = self._store_next(job, position, deadline)
            except KvFleetError as error:
                published, reason = False, type(error).__name__
                _log.info("store stopped short: %s", error)
            else:
                stored, already = stored + one.stored, already + one.already
                published, reason = published and one.published, one.reason
        dropped = job.num_blocks - stored - already
        assert dropped >= 0
        return StoreResult(stored, already, dropped, published, stored * self._layout.block_bytes, reason)

    def _store_next(self, job: StoreJob, start: int, deadline: float) -> tuple[int, StoreResult]:
        """One batch of a job, from block `start` on. Returns where the next one starts, and what became of this one.

        Raises:
            KvFleetError: the manager could not be asked.
        """
        left = deadline - time.monotonic()
        if left <= 0:
            return start, StoreResult(published=False, reason="deadline")
        arena = self._node.attach(min(left, self._config.attach_timeout_s))
        stop = min(start + self._batch_blocks(arena), job.first + job.num_blocks)
        keys = job.keys[start * KEY_BYTES : stop * KEY_BYTES]
        if (arena.records.find(keys, self._shard).slots >= 0).all():
            return stop, StoreResult(already=stop - start)
        reply = self._reserve(job, start, keys, arena, deadline)
        if reply.arena_id != arena.arena_id:
            # Only a reservation made while our lock file is beside the arena is safe to write to: ask again.
            self._node.attach(left, again=True)
            return start, StoreResult()
        if not reply.slots:
            reason = "draining" if reply.draining else "no_room" if reply.refused else ""
            return stop, StoreResult(already=reply.already, reason=reason)
        return stop, self._write(job, start, reply, arena, deadline)

    def _batch_blocks(self, arena: Arena) -> int:
        return max(1, int(arena.capacity_bytes * self._config.reserve_fraction) // self._layout.block_bytes)

    def _reserve(self, job: StoreJob, start: int, keys: bytes, arena: Arena, deadline: float) -> ReserveReply:
        self._sequence += 1
        left = max(0.0, deadline - time.monotonic())
        request = ReserveRequest(
            client_id=self._node.client_id,
            sequence=self._sequence,
            namespace=self._namespace,
            keys=keys,
            parent=job.keys[(start - 1) * KEY_BYTES : start * KEY_BYTES] if start else b"",
            depth=start,
            shard=self._shard,
            num_bytes=self._layout.block_bytes,
            timeout_s=left,
        )
        self.stats.called("reserve")
        try:
            return self._manager.reserve(request, left)
        except KvFleetError:
            self._give_back(arena)  # whatever was reserved without our hearing of it
            raise

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
        reason = "no_room" if reply.refused else "reservation_lost" if lost else ""
        return StoreResult(commit.committed, reply.already, 0, commit.published, 0, reason)

    def _fill(self, job: StoreJob, start: int, reply: ReserveReply, arena: Arena) -> tuple[int, ...]:
        length = self._layout.block_bytes
        return tuple(
            job.fill(start + index, arena.slot_view(offset, length))
            for index, offset in zip(reply.indexes, reply.offsets, strict=True)
        )

    def _commit(self, reply: ReserveReply, checksums: tuple[int, ...], deadline: float) -> CommitReply | None:
        """Commit, through a restart of the manager if need be: it is idempotent. None: not before the deadline."""
        while (left := deadline - time.monotonic()) > 0:
            request = CommitRequest(
                self._node.client_id, self._sequence, reply.arena_id, reply.slots, reply.generations, checksums, left
            )
            self.stats.called("commit")
            try:
                return self._manager.commit(request, left)
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

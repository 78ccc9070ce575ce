"""Stores: reserve, copy in place, commit; in the background, in order, and bounded.

One thread a client does them one after the other, so a client never has more than one reservation. Stores that
would make the queue longer than its bound are dropped at once, and so are those that would wait for a manager which is
known not to answer: a store not done costs a recompute, a store waited for costs the request.
"""

from __future__ import annotations

import logging
import queue
import threading

from kvfleet.arguments import check_timeout
from kvfleet.attachment import AttachedNode
from kvfleet.core.layout import BlockLayout
from kvfleet.errors import DeadlineExceededError
from kvfleet.hits import StoreResult
from kvfleet.node.messages import HintRequest
from kvfleet.writing import StoreJob, Writing

__all__ = ["StoreTask", "StoreWorker"]

_log = logging.getLogger(__name__)
_HINT_BYTES = 4096  # what hints count in the queue besides their keys, so that they are bounded too


class StoreTask:
    """A store under way."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._result = StoreResult()

    def wait(self, timeout_s: float | None = None) -> StoreResult:
        """Wait until the blocks are readable here and the directory has acknowledged those that this store wrote.

        A store that fails raises nothing: what it dropped, and why, is in the result.

        Args:
            timeout_s: longest wait; None for no limit, as the store has its own: `store_timeout_s` from its turn on.

        Raises:
            DeadlineExceededError: a TimeoutError: not within `timeout_s`. The store goes on.
            ValueError: `timeout_s` is negative.
        """
        check_timeout(timeout_s)
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


class StoreWorker:
    """Does a client's stores on one background thread.

    Threads: `submit` and `close` from any.
    """

    def __init__(self, node: AttachedNode, writing: Writing, layout: BlockLayout, queue_bytes_max: int) -> None:
        """Start nothing yet.

        Args:
            node: of the client.
            writing: does a store.
            layout: of the blocks.
            queue_bytes_max: of the blocks of stores that wait or are under way.
        """
        self._node = node
        self._writing = writing
        self._block_bytes = layout.block_bytes
        self._queue_bytes_max = queue_bytes_max
        self._jobs: queue.SimpleQueue[tuple[StoreJob | HintRequest, StoreTask] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._queued_bytes = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, job: StoreJob) -> StoreTask:
        """Queue a job, or finish it as dropped."""
        task = StoreTask()
        reason = self._queue(job, task)
        if reason:
            self._finish(job, task, StoreResult(dropped=job.num_blocks, published=False, reason=reason))
        return task

    def _queue(self, job: StoreJob, task: StoreTask) -> str:
        """Returns why it cannot be done, or ""."""
        if not job.num_blocks:
            task.finish(StoreResult())
            return ""
        if self._node.forked:  # the thread that would do it is the parent's
            return "forked"
        return self._put(job, task, job.num_blocks * self._block_bytes)

    def hint(self, request: HintRequest) -> StoreTask:
        """Tell the manager what is known of blocks, after what is queued; the session as managers know it."""
        task = StoreTask()
        reason = "forked" if self._node.forked else self._put(request, task, _hint_bytes(request))
        if reason:
            task.finish(StoreResult(published=False, reason=reason))
        return task

    def _put(self, job: StoreJob | HintRequest, task: StoreTask, num_bytes: int) -> str:
        with self._lock:
            if self._closed:
                return "closed"
            if self._queued_bytes and self._queued_bytes + num_bytes > self._queue_bytes_max:
                return "queue_full"
            if self._thread is None and not self._start():
                return "no_thread"
            self._queued_bytes += num_bytes
            self._jobs.put((job, task))
        return ""

    def _start(self) -> bool:
        """Begin with what is queued. False: no thread is to be had now."""
        thread = threading.Thread(target=self._run, name="kvfleet-store", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            _log.info("nothing is stored: %s", error)
            return False
        self._thread = thread
        return True

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

    def _finish(self, job: StoreJob, task: StoreTask, result: StoreResult) -> None:
        self._writing.remember(job, result)
        self._writing.stats.stored(result)
        task.finish(result)

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, task = item
            if isinstance(job, StoreJob):
                self._do_store(job, task)
            else:
                self._do_hint(job, task)
            del item, job, task  # while we wait for the next one, this one's memory is the caller's again

    def _do_store(self, job: StoreJob, task: StoreTask) -> None:
        try:
            result = self._writing.store(job)
        except Exception as error:  # noqa: BLE001  a bug of ours must not end the thread
            _log.exception("store dropped")
            result = StoreResult(dropped=job.num_blocks, published=False, reason=type(error).__name__)
        with self._lock:
            self._queued_bytes -= job.num_blocks * self._block_bytes
        self._finish(job, task, result)

    def _do_hint(self, request: HintRequest, task: StoreTask) -> None:
        try:
            result = self._writing.hint(request)
        except Exception as error:  # noqa: BLE001  likewise
            _log.exception("hints are not told")
            result = StoreResult(published=False, reason=type(error).__name__)
        with self._lock:
            self._queued_bytes -= _hint_bytes(request)
        task.finish(result)


def _hint_bytes(request: HintRequest) -> int:
    return _HINT_BYTES + len(request.keys)

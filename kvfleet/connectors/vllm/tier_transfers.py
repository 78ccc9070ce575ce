"""What a tier of vLLM's offloading connector has its client do: lookups, loads and stores, on threads of their own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvfleet.client import Client
from kvfleet.connectors.vllm.tier_book import ChunkRun, Question
from kvfleet.core.block import engine_keys
from kvfleet.core.hints import NO_HINTS, Hints
from kvfleet.errors import DeadlineExceededError
from kvfleet.storing import StoreTask

__all__ = ["Finished", "Rows", "Transfers"]

# A load waits for other nodes or for storage most of the time. One that copies from this node's arena is bound by
# memory, of which four threads use all that there is.
_LOAD_THREADS = 4

Rows: TypeAlias = npt.NDArray[np.uint8]
"""The engine's memory for chunks, shape (num_chunks, row_bytes)."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A job that has ended.

    Attributes:
        is_load: from the fleet into the engine's memory, or the other way.
        num_blocks: how many of the job's blocks came through; of a load the first ones.
        total: how many it had.
        num_bytes: copied.
        seconds: from the submission on.
    """

    job_id: int
    is_load: bool
    num_blocks: int
    total: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Stores:
    """A job of stores under way."""

    job_id: int
    tasks: tuple[StoreTask, ...]
    total: int
    started: float


class _MemoryClosedError(Exception):
    """The engine's memory for chunks is not to be touched any more."""


class _Memory:
    """The engine's memory for chunks, until it is closed.

    Threads: any. Several may copy at once.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows: Rows | None = rows
        self._copying = 0
        self._turn = threading.Condition()

    @contextmanager
    def _used(self) -> Iterator[Rows]:
        with self._turn:
            if self._rows is None:
                raise _MemoryClosedError
            rows = self._rows
            self._copying += 1
        try:
            yield rows
        finally:
            with self._turn:
                del rows  # who closes the memory may unmap it next
                self._copying -= 1
                self._turn.notify_all()

    def read(self, row: int, into: npt.NDArray[Any]) -> None:
        """Copy a chunk out.

        Raises:
            _MemoryClosedError: it is closed.
        """
        with self._used() as rows:
            into[:] = rows[row]

    def write(self, row: int, chunk: npt.NDArray[Any]) -> None:
        """Copy a chunk in.

        Raises:
            _MemoryClosedError: it is closed.
        """
        with self._used() as rows:
            rows[row] = chunk

    def close(self) -> None:
        """No more copies. Blocking: until those under way are done, each of one chunk."""
        with self._turn:
            self._rows = None
            self._turn.wait_for(lambda: not self._copying)


class Transfers:
    """Jobs of one engine, done by one client.

    Stores are bounded by the client's queue: what is too much is dropped at once. Loads are bounded by the memory
    that the engine has set aside for them, and by their deadline, which runs from the submission on.

    Threads: the methods from one; the work is done on others. Blocking: `drain` and `close`, see there.

    Args:
        client: of this engine; the caller closes it.
        rows: the engine's memory for chunks.
        load_timeout_s: deadline of a load.
        failed: told where a bug of ours was caught, and the error. It costs a miss.
    """

    def __init__(
        self, client: Client, rows: Rows, load_timeout_s: float, failed: Callable[[str, Exception], None]
    ) -> None:
        self.client = client
        self._memory = _Memory(rows)
        self._load_timeout_s = load_timeout_s
        self._failed = failed
        self._asking = ThreadPoolExecutor(1, thread_name_prefix="kvfleet-lookup")
        self._loading = ThreadPoolExecutor(_LOAD_THREADS, thread_name_prefix="kvfleet-load")
        self._answers: queue.SimpleQueue[tuple[Question, int]] = queue.SimpleQueue()
        self._loads: dict[int, tuple[Future[int], int, float]] = {}
        self._stores: list[_Stores] = []

    # lookups

    def ask(self, question: Question) -> None:
        """Look up a question's chunks in the background."""
        self._asking.submit(self._ask, question)

    def _ask(self, question: Question) -> None:
        def look_up() -> int:
            hit = self.client.lookup_keys(engine_keys(self.client.spec.root, question.names), counted=False)
            # A load looks up again and counts what was found: only what is missing ends here.
            self.client.count(replace(hit, runs=(), start_block=hit.num_blocks))
            return hit.num_blocks

        in_time = time.monotonic() < question.deadline
        self._answers.put((question, self._counted("lookup", look_up) if in_time else 0))

    def _counted(self, where: str, work: Callable[[], int]) -> int:
        """What `work` counts, 0 if it fails: an engine lives on without its cache, whatever happened to that."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001  see above
            self._failed(where, error)
            return 0

    def answers(self) -> list[tuple[Question, int]]:
        """Questions answered since the last call, each with the number of its first chunks that are there."""
        answers = []
        while not self._answers.empty():
            answers.append(self._answers.get())
        return answers

    # loads

    def load(self, job_id: int, run: ChunkRun) -> None:
        """Load chunks in the background, up to the first that does not come."""
        started = time.monotonic()
        deadline = started + self._load_timeout_s
        future = self._loading.submit(self._counted, "load", lambda: self._load(run, deadline))
        self._loads[job_id] = (future, len(run.rows), started)

    def _load(self, run: ChunkRun, deadline: float) -> int:
        """Load chunks. Returns how many came."""
        if time.monotonic() > deadline:
            return 0

        def take(index: int, block: npt.NDArray[Any]) -> None:
            self._memory.write(run.rows[index - run.first], block)

        # Looked up again: where blocks are may have changed, and those on this node cost no call.
        hit = self.client.lookup_keys(run.keys, start_block=run.first)
        try:
            loaded = self.client.load(hit, take, max(0.0, deadline - time.monotonic()))
        except _MemoryClosedError:
            return 0
        return loaded // self.client.spec.block_tokens

    # stores

    def store(self, job_id: int, runs: Sequence[ChunkRun], hints: Hints = NO_HINTS) -> None:
        """Store chunks in the background. Their memory must not change until the job is among the finished ones."""
        started = time.monotonic()
        tasks = tuple(
            self.client.store_keys(run.keys, self._put(run), start_block=run.first, hints=hints) for run in runs
        )
        self._stores.append(_Stores(job_id, tasks, sum(len(run.rows) for run in runs), started))

    def _put(self, run: ChunkRun) -> Callable[[int, npt.NDArray[Any]], None]:
        return lambda index, block: self._memory.read(run.rows[index - run.first], block)

    # the end of jobs

    @property
    def busy(self) -> bool:
        """Whether a job is under way, or has ended and not been reported."""
        return bool(self._loads or self._stores)

    def finished(self) -> list[Finished]:
        """Jobs that have ended since the last call. Their memory is the engine's again."""
        done = [self._loaded(job_id) for job_id, (future, _, _) in list(self._loads.items()) if future.done()]
        under_way = []
        for job in self._stores:
            if all(task.done for task in job.tasks):
                done.append(self._stored(job))
            else:
                under_way.append(job)
        self._stores = under_way
        return done

    def _loaded(self, job_id: int) -> Finished:
        future, total, started = self._loads.pop(job_id)
        num_bytes = future.result() * self.client.spec.layout.block_bytes
        return Finished(job_id, True, future.result(), total, num_bytes, time.monotonic() - started)

    def _stored(self, job: _Stores) -> Finished:
        results = [task.wait() for task in job.tasks]
        num_blocks = sum(result.stored + result.already for result in results)
        num_bytes = sum(result.num_bytes for result in results)
        return Finished(job.job_id, False, num_blocks, job.total, num_bytes, time.monotonic() - job.started)

    def drain(self, timeout_s: float) -> None:
        """Wait until all jobs have ended, at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        wait([future for future, _, _ in self._loads.values()], timeout_s)
        with suppress(DeadlineExceededError):
            for job in self._stores:
                for task in job.tasks:
                    task.wait(max(0.0, deadline - time.monotonic()))

    def close(self) -> list[Finished]:
        """Do no more: jobs that have not ended yet have failed, and let go of the engine's memory.

        Blocking: until the chunks that are being copied are; half a chunk would be worse than none.

        Returns:
            All jobs that are not reported yet.
        """
        self._memory.close()
        ended = self.finished()
        now = time.monotonic()
        ended += [Finished(job_id, True, 0, total, 0, now - began) for job_id, (_, total, began) in self._loads.items()]
        ended += [Finished(job.job_id, False, 0, job.total, 0, now - job.started) for job in self._stores]
        self._loads.clear()
        self._stores.clear()
        for threads in (self._asking, self._loading):
            threads.shutdown(wait=False, cancel_futures=True)
        return ended

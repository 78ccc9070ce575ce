"""The workers' half of the connector: moves the bytes of one rank between vLLM's memory and the fleet.

Loads run on threads of their own, straight from the arena into vLLM's blocks. What is to be saved is first copied to
buffers of ours, before the step after the one that computed it, and stored from there in the background: vLLM may do
with its blocks what it likes from the next step on, and no request waits for a store.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import numpy.typing as npt

from kvfleet.client import Client
from kvfleet.connectors.vllm.plan import Load, Save
from kvfleet.connectors.vllm.pool import EnginePool
from kvfleet.connectors.vllm.scopes import ScopedClients
from kvfleet.connectors.vllm.staging import Staging
from kvfleet.core.block import KEY_BYTES
from kvfleet.hits import Loaded
from kvfleet.storing import StoreTask

__all__ = ["Transfers"]

# One that waits for a slow node must not keep those behind it from what is in this node's arena.
_LOAD_THREADS = 4


class _CancelledError(Exception):
    """The request that a load was for has ended."""


class Transfers:
    """Loads and saves of one rank.

    Threads: vLLM's worker thread calls; nothing waits.

    Args:
        pool: vLLM's memory.
        staging: buffers for what is being saved.
        block_tokens: tokens in a block.
        failed: told what failed, with the error.
    """

    def __init__(
        self, pool: EnginePool, staging: Staging, block_tokens: int, failed: Callable[[str, Exception], None]
    ) -> None:
        self._pool = pool
        self._staging = staging
        self._block_tokens = block_tokens
        self._failed = failed
        self._clients: ScopedClients | None = None
        self._load_timeout_s = 0.0
        self._threads = ThreadPoolExecutor(_LOAD_THREADS, "kvfleet-load")
        self._lock = threading.Lock()
        self._loading: set[str] = set()
        self._writing = 0  # loads that may be at vLLM's memory
        self._cancelled: set[str] = set()
        self._done: set[str] = set()
        self._bad: set[int] = set()
        self._stores: list[tuple[StoreTask, list[int]]] = []
        self._broken: set[str] = set()  # requests of which a block was dropped: nobody would find those behind it
        self._counts: Counter[str] = Counter()

    def start(self, clients: ScopedClients, load_timeout_s: float) -> None:
        """The fleet is there. Until this is called, loads fail and nothing is saved.

        Args:
            clients: of this process; the one of `Scope()` is ready.
            load_timeout_s: from the step in which a load begins to its end.
        """
        self._load_timeout_s, self._clients = load_timeout_s, clients

    def close(self, timeout_s: float = 5.0) -> None:
        """End all loads; stores go on. Afterwards the arena may be unmapped."""
        with self._lock:
            self._cancelled |= self._loading
        self._threads.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + timeout_s
        while self._writing and time.monotonic() < deadline:
            time.sleep(0.01)
        if not self._writing:
            self._pool.close()

    # loads

    def begin(self, loads: Iterable[Load]) -> None:
        """Begin loads; each is in an answer of `ended` once, however it ends."""
        deadline = time.monotonic() + self._load_timeout_s
        for load in loads:
            with self._lock:
                self._loading.add(load.request_id)
            if self._clients is None or load.hit is None:
                self._end(load, good=0)
                continue
            try:
                self._threads.submit(self._load, self._clients, load, deadline)
            except RuntimeError as error:  # no more threads, or the end of it all
                self._failed("load", error)
                self._end(load, good=0)

    def _load(self, clients: ScopedClients, load: Load, deadline: float) -> None:
        good = 0
        with self._lock:
            self._writing += 1
        try:
            assert load.hit is not None
            self._check(load)
            left = max(0.0, deadline - time.monotonic())
            loaded = clients.get(load.scope).load(load.hit, partial(self._take, load), left, plan=load.plan)
            blocks = load.hit.start_block + loaded // self._block_tokens
            good = max(0, blocks * self._pool.blocks_per - load.first)
            self._count_load(loaded)
        except _CancelledError:
            self._count("loads_cancelled")
        except Exception as error:  # noqa: BLE001  vLLM waits for this request: it must hear of it
            self._failed("load", error)
        self._end(load, good)
        with self._lock:
            self._writing -= 1

    def _check(self, load: Load) -> None:
        if load.request_id in self._cancelled:
            raise _CancelledError

    def _take(self, load: Load, index: int, block: npt.NDArray[np.uint8]) -> None:
        """Copy what a request lacks of a block into vLLM's memory."""
        self._check(load)
        per_block, last = self._pool.blocks_per, load.first + len(load.engine_blocks)
        start, stop = max(load.first, index * per_block), min(last, (index + 1) * per_block)
        engine_blocks = load.engine_blocks[start - load.first : stop - load.first]
        self._pool.write(engine_blocks, start - index * per_block, block)

    def _end(self, load: Load, good: int) -> None:
        with self._lock:
            self._bad.update(load.engine_blocks[good:])
            self._done.add(load.request_id)
            self._loading.discard(load.request_id)
            self._cancelled.discard(load.request_id)

    def _count_load(self, loaded: Loaded) -> None:
        with self._lock:
            self._counts["loads"] += 1
            for outcome in loaded.outcomes:
                self._counts[f"blocks:{outcome.value}"] += 1
            for source, num_bytes in loaded.bytes_by_source.items():
                self._counts[f"loaded_bytes:{source.value}"] += num_bytes

    def ended(self, finished_requests: Collection[str]) -> set[str]:
        """Requests whose loads have ended since the last call.

        Args:
            finished_requests: that have left the engine: their loads end as soon as they can.
        """
        with self._lock:
            self._cancelled |= self._loading.intersection(finished_requests)
            self._broken.difference_update(finished_requests)
            done, self._done = self._done, set()
        return done

    def bad_engine_blocks(self) -> set[int]:
        """Ids of vLLM's blocks that loads did not fill since the last call. To be asked after `ended`."""
        with self._lock:
            bad, self._bad = self._bad, set()
        return bad

    # saves

    def fence(self) -> None:
        """What vLLM computes from now on comes after the copies of `save`."""
        self._pool.fence()

    def save(self, saves: Iterable[Save]) -> None:
        """Copy blocks that are computed, or enqueued to be, to our buffers, and store them from there."""
        self._reclaim()
        for save in saves:
            client = self._clients.ready(save.scope) if self._clients is not None else None
            if client is None and self._clients is not None:
                self._clients.prepare(save.scope)
            if client is None or save.request_id in self._broken:
                self._drop(save, 0, "not_ready" if client is None else "behind_dropped")
                continue
            runs = _runs(client.absent(save.keys[save.start_block * KEY_BYTES :]))
            if not runs and save.hints.lasting:
                client.hint(save.keys, save.hints)  # it is all here: there is no store to tell it
            for start, stop in runs:
                if not self._store(client, save, start, stop):
                    break

    def _drop(self, save: Save, start: int, reason: str) -> None:
        """Give up the blocks of a save from `start` on, counted from its first, and those that follow them."""
        self._broken.add(save.request_id)
        self._count(f"dropped_blocks:{reason}", len(save.engine_blocks) // self._pool.blocks_per - start)

    def _store(self, client: Client, save: Save, start: int, stop: int) -> bool:
        """Store blocks [start, stop), counted from the save's first. False: not all of them had room."""
        buffers = self._staging.take(stop - start)
        first = save.start_block + start

        def put(index: int, slot: npt.NDArray[np.uint8]) -> None:
            copied()
            np.copyto(slot, self._staging.view(buffers[index - first]))

        if buffers:
            try:
                copied = self._pool.read(
                    self._engine_blocks(save, start, len(buffers)), [self._staging.view(buffer) for buffer in buffers]
                )
                keys = save.keys[: (first + len(buffers)) * KEY_BYTES]
                self._stores.append((client.store_keys(keys, put, start_block=first, hints=save.hints), buffers))
            except Exception:
                self._give_back(buffers)
                raise
        if len(buffers) < stop - start:
            self._drop(save, start + len(buffers), "buffer_full")
            return False
        return True

    def _engine_blocks(self, save: Save, start: int, count: int) -> list[tuple[int, ...]]:
        per_block = self._pool.blocks_per
        return [save.engine_blocks[at * per_block : (at + 1) * per_block] for at in range(start, start + count)]

    def _give_back(self, buffers: Iterable[int]) -> None:
        for buffer in buffers:
            self._staging.give(buffer)

    def _reclaim(self) -> None:
        """Take back the buffers of stores that are done."""
        under_way = []
        for task, buffers in self._stores:
            if not task.done:
                under_way.append((task, buffers))
                continue
            self._give_back(buffers)
            result = task.wait()
            self._count("saved_blocks", result.stored)
            self._count("saved_bytes", result.num_bytes)
            self._count(f"dropped_blocks:{result.reason or 'unknown'}", result.dropped)
        self._stores = under_way

    def idle(self) -> bool:
        """Whether no store is under way."""
        return all(task.done for task, _ in self._stores)

    # counts

    def _count(self, name: str, number: int = 1) -> None:
        if number:
            with self._lock:
                self._counts[name] += number

    def take_counts(self) -> dict[str, int]:
        """What happened since the last call: see `metrics`."""
        self._reclaim()
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return dict(counts)


def _runs(flags: Sequence[bool] | npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Ranges of consecutive set flags."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], np.asarray(flags, bool), [False])).astype(np.int8)))
    return [(int(start), int(stop)) for start, stop in zip(edges[::2], edges[1::2], strict=True)]

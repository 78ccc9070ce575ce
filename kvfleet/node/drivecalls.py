"""The calls to one drive: in threads of its own, bounded and watched, so that a drive that hangs holds up nothing else.

A call that hangs cannot be ended. Whoever waits for it can be let go, its thread stays until the drive answers; nobody
begins another call meanwhile than its pool has threads for.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, TypeVar

from typing_extensions import override

from kvfleet.errors import TierUnavailableError
from kvfleet.node.drivefile import TIER
from kvfleet.node.waiting import settled

__all__ = ["DaemonThreads", "DriveCalls"]

T = TypeVar("T")


class DaemonThreads(Executor):
    """A pool of threads that do not keep the process from ending, as those of `ThreadPoolExecutor` would."""

    def __init__(self, threads_max: int, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads_max = threads_max
        self._threads: list[threading.Thread] = []

    @override
    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        if len(self._threads) < self._threads_max:
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()
        self._jobs.put(lambda: _run(future, partial(fn, *args, **kwargs)))
        return future

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # and what it holds

    @override
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads once they are done with what was submitted."""
        for _ in self._threads:
            self._jobs.put(None)
        if wait:
            for thread in self._threads:
                thread.join()


def _run(future: Future[T], work: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001 - raised again where the result is awaited
        future.set_exception(error)


class _Lane:
    """Calls of one kind: a number of them at once, the others wait in order."""

    def __init__(self, places: int, name: str) -> None:
        self.threads = DaemonThreads(places, name)
        self.places = places
        self.num_running = 0
        self.waiting: deque[asyncio.Future[None]] = deque()

    def next(self) -> None:
        """Let those in whose turn it is."""
        while self.waiting and self.num_running < self.places:
            turn = self.waiting.popleft()
            if not turn.done():
                self.num_running += 1
                turn.set_result(None)


class DriveCalls:
    """Runs what blocks on a drive.

    Threads: the event loop.
    """

    def __init__(self, inflight_max: int) -> None:
        """No thread is started yet.

        Args:
            inflight_max: reads at once, and as many writes beside them.
        """
        self._lanes = {kind: _Lane(inflight_max, f"kvfleet-drive-{kind}") for kind in ("read", "write")}
        self._lanes["index"] = _Lane(2, "kvfleet-drive-index")
        self._lanes["look"] = _Lane(1, "kvfleet-drive-look")
        self._begun: dict[int, float] = {}
        self._serial = 0
        self._failure = ""
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_reads(self) -> int:
        """Reads that are under way or wait for their turn."""
        lane = self._lanes["read"]
        return lane.num_running + len(lane.waiting)

    def oldest(self) -> float | None:
        """When the call was begun that has taken longest so far."""
        return min(self._begun.values(), default=None)

    def fail(self, reason: str) -> None:
        """Begin no more calls; those that wait for their turn fail."""
        self._failure = self._failure or reason
        for lane in self._lanes.values():
            while lane.waiting:
                turn = lane.waiting.popleft()
                if not turn.done():
                    turn.set_exception(TierUnavailableError(TIER, reason))

    async def read(self, work: Callable[[], T]) -> T:
        """Run a call that writes to memory of the caller's: if we are cancelled meanwhile, still wait for its end.

        Raises:
            TierUnavailableError: the drive failed before its turn came.
        """
        return await settled(await self._begin("read", lambda _: work()))

    async def write(self, work: Callable[[Callable[[], float]], T]) -> T:
        """Run a call. If we are cancelled meanwhile, it goes on without us. Raises as `read` does.

        Args:
            work: gets what to call now and then, to show that the drive answers; it returns the time.
        """
        return await asyncio.shield(await self._begin("write", work))

    async def index(self, work: Callable[[], T]) -> T:
        """As `write`, for what makes things durable; it does not wait for writes."""
        return await asyncio.shield(await self._begin("index", lambda _: work()))

    async def look(self, work: Callable[[], T]) -> T:
        """As `write`, for small things that wait for nothing but each other."""
        return await asyncio.shield(await self._begin("look", lambda _: work()))

    async def _begin(self, kind: str, work: Callable[[Callable[[], float]], T]) -> asyncio.Future[T]:
        lane, loop = self._lanes[kind], asyncio.get_running_loop()
        if self._failure:
            raise TierUnavailableError(TIER, self._failure)
        if lane.num_running < lane.places and not lane.waiting:
            lane.num_running += 1
        else:
            turn = loop.create_future()
            lane.waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled() and turn.exception() is None:
                    lane.num_running -= 1
                    lane.next()
                raise
            if self._failure:  # since its turn came
                lane.num_running -= 1
                raise TierUnavailableError(TIER, self._failure)
        self._serial += 1
        serial = self._serial
        begun = self._begun

        def beat() -> float:
            begun[serial] = time = loop.time()
            return time

        beat()
        self._idle.clear()
        job = loop.run_in_executor(lane.threads, partial(work, beat))
        job.add_done_callback(lambda job: self._ended(lane, serial, job))
        return job

    def _ended(self, lane: _Lane, serial: int, job: asyncio.Future[Any]) -> None:
        del self._begun[serial]
        lane.num_running -= 1
        if not job.cancelled():
            job.exception()  # nobody may be left to tell
        if not self._begun:
            self._idle.set()
        lane.next()

    async def idle(self) -> None:
        """Wait until no call is under way."""
        await self._idle.wait()

    async def close(self, work: Callable[[], object]) -> None:
        """Run the last call of all, and end the threads."""
        lane = self._lanes["look"]
        try:
            await settled(asyncio.get_running_loop().run_in_executor(lane.threads, work))
        finally:
            for lane in self._lanes.values():
                lane.threads.shutdown(wait=False)

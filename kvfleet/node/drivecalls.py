"""The calls to one drive: in threads of its own, bounded and watched, so that a drive that hangs holds up nothing else.

A call that hangs cannot be ended. Whoever waits for it can be let go, its thread stays until the drive answers; nobody
begins another call meanwhile than its pool has threads for.

Calls wait in a queue from which the threads take them themselves: between two calls a thread does not wait for the
event loop, which may be busy, nor the drive for the thread.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from typing_extensions import override

from kvfleet.errors import TierUnavailableError
from kvfleet.node.drivefile import TIER
from kvfleet.node.waiting import settled

__all__ = ["DaemonThreads", "DriveCalls"]

T = TypeVar("T")


class DaemonThreads(Executor):
    """A pool of threads that do not keep the process from ending, as those of `ThreadPoolExecutor` would.

    What is submitted when no thread is to be had, and there is none yet, fails with a `TierUnavailableError`. Nothing
    that failed so is run later, as `ThreadPoolExecutor` would run it: its memory may be another's by then.

    Threads: one at a time may submit.
    """

    def __init__(self, threads_max: int, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads_max = threads_max
        self._threads: list[threading.Thread] = []
        self._ended = False

    @override
    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        if self._ended:
            raise RuntimeError("the threads were told to end")
        future: Future[T] = Future()
        if len(self._threads) < self._threads_max:
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no more threads: those that there are do it
                if not self._threads:
                    future.set_exception(TierUnavailableError(self._name, f"no thread for it: {error}"))
                    return future
            else:
                self._threads.append(thread)
        self._jobs.put(lambda: _run(future, partial(fn, *args, **kwargs)))
        return future

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # and what it holds

    @override
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads once they are done with what was submitted."""
        self._ended = True
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


@dataclass(eq=False, slots=True)
class _Call:
    """What waits for a thread, or is under way in one. Who takes it out of its queue decides what becomes of it."""

    work: Callable[[Callable[[], float]], Any]
    done: asyncio.Future[Any]


class _Hand:
    """A thread that takes calls, one after the other, until none waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop, waiting: deque[_Call]) -> None:
        self._loop = loop
        self._waiting = waiting
        self.since: float | None = None  # when its call began, or last showed that the drive answers

    def beat(self) -> float:
        """The drive answers."""
        self.since = time = self._loop.time()
        return time

    def work(self) -> None:
        """Runs in the thread."""
        while True:
            try:
                call = self._waiting.popleft()
            except IndexError:
                return
            self.beat()
            try:
                tell = partial(call.done.set_result, call.work(self.beat))
            except Exception as error:  # noqa: BLE001  raised again where the call is awaited
                tell = partial(call.done.set_exception, error)
            self.since = None
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(_tell, call.done, tell)
            del call, tell  # and what they hold


def _tell(done: asyncio.Future[Any], tell: Callable[[], None]) -> None:
    tell()
    done.exception()  # nobody may be left to be told


class _Lane:
    """Calls of one kind: a number of them at once, the others wait in order."""

    def __init__(self, places: int, name: str) -> None:
        self.threads = DaemonThreads(places, name)
        self.places = places
        self.hands: list[_Hand] = []
        self.waiting: deque[_Call] = deque()

    def refuse(self, reason: str) -> None:
        """Fail what waits."""
        while True:
            try:
                call = self.waiting.popleft()
            except IndexError:
                return
            call.done.set_exception(TierUnavailableError(TIER, reason))
            call.done.exception()  # whoever asked may be gone


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
        self._failure = ""
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_reads(self) -> int:
        """Reads that are under way or wait for their turn."""
        lane = self._lanes["read"]
        return len(lane.hands) + len(lane.waiting)

    def oldest(self) -> float | None:
        """When the call was begun that has taken longest so far."""
        begun = (hand.since for lane in self._lanes.values() for hand in lane.hands)
        return min((since for since in begun if since is not None), default=None)

    def fail(self, reason: str) -> None:
        """Begin no more calls; those that wait for their turn fail."""
        self._failure = self._failure or reason
        for lane in self._lanes.values():
            lane.refuse(reason)

    async def read(self, work: Callable[[], T]) -> T:
        """Run a call that writes to memory of the caller's: if we are cancelled meanwhile, still wait for its end.

        Raises:
            TierUnavailableError: the drive failed before its turn came, or no thread was to be had for it.
        """
        lane, call = self._begin("read", lambda _: work())
        try:
            return await asyncio.shield(call.done)
        except asyncio.CancelledError:
            gone = _take_back(lane, call)
            while not (gone or call.done.done()):
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({call.done})
            raise

    async def write(self, work: Callable[[Callable[[], float]], T]) -> T:
        """Run a call. If we are cancelled meanwhile, it goes on without us if it was begun. Raises as `read` does.

        Args:
            work: gets what to call now and then, to show that the drive answers; it returns the time.
        """
        return await self._run("write", work)

    async def index(self, work: Callable[[], T]) -> T:
        """As `write`, for what makes things durable; it does not wait for writes."""
        return await self._run("index", lambda _: work())

    async def look(self, work: Callable[[], T]) -> T:
        """As `write`, for small things that wait for nothing but each other."""
        return await self._run("look", lambda _: work())

    async def _run(self, kind: str, work: Callable[[Callable[[], float]], T]) -> T:
        lane, call = self._begin(kind, work)
        try:
            return await asyncio.shield(call.done)
        except asyncio.CancelledError:
            _take_back(lane, call)
            raise

    def _begin(self, kind: str, work: Callable[[Callable[[], float]], object]) -> tuple[_Lane, _Call]:
        if self._failure:
            raise TierUnavailableError(TIER, self._failure)
        lane, call = self._lanes[kind], _Call(work, asyncio.get_running_loop().create_future())
        lane.waiting.append(call)
        self._next(lane)
        return lane, call

    def _next(self, lane: _Lane) -> None:
        """Have another thread take what waits, if one may."""
        if lane.waiting and len(lane.hands) < lane.places:
            loop = asyncio.get_running_loop()
            hand = _Hand(loop, lane.waiting)
            lane.hands.append(hand)
            self._idle.clear()
            loop.run_in_executor(lane.threads, hand.work).add_done_callback(partial(self._ended, lane, hand))

    def _ended(self, lane: _Lane, hand: _Hand, job: asyncio.Future[None]) -> None:
        lane.hands.remove(hand)
        try:
            job.result()
        except TierUnavailableError as error:  # there is no thread
            lane.refuse(error.detail)
        self._next(lane)  # it may have seen an empty queue just before
        if not any(other.hands for other in self._lanes.values()):
            self._idle.set()

    async def idle(self) -> None:
        """Wait until no call is under way."""
        await self._idle.wait()

    async def close(self, work: Callable[[], object]) -> None:
        """Run the last call of all, and end the threads."""
        lane = self._lanes["read"]  # it has a thread if there is anything to close: it was opened there
        try:
            await settled(asyncio.get_running_loop().run_in_executor(lane.threads, work))
        finally:
            for lane in self._lanes.values():
                lane.threads.shutdown(wait=False)


def _take_back(lane: _Lane, call: _Call) -> bool:
    """Take a call out of its queue. False: a thread has it, or had it."""
    try:
        lane.waiting.remove(call)
    except ValueError:
        return False
    return True

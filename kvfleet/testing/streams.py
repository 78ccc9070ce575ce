"""Answers of simulated actors: single ones, and streams of them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ray.exceptions import ActorUnavailableError, RayError

from kvfleet.errors import KvFleetError
from kvfleet.node.messages import Window
from kvfleet.testing.blocking import wait
from kvfleet.testing.loop import VirtualLoop
from kvfleet.testing.processes import Process

if TYPE_CHECKING:
    from kvfleet.testing.actors import Actor

__all__ = ["Answer", "Stream", "gone"]


def _copied(item: Any) -> Any:  # noqa: ANN401  any message
    if isinstance(item, Window):
        return Window(tuple(replace(part, data=part.data.copy()) for part in item.parts))
    return item


def _bytes_of(item: object) -> int:
    return sum(len(part.data) for part in item.parts) if isinstance(item, Window) else 0


class Answer:
    """A call under way, or one item of a stream: `await` it or `get` it."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.future = loop.create_future()

    def settle(self, result: object = None, error: Exception | None = None) -> None:
        """It has come; only the first counts."""
        if self.future.done():
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)
            self.future.exception()  # maybe nobody waits any more

    def __await__(self) -> Generator[Any, None, Any]:
        # Each waiter has its own future: Ray's answers outlive those that stop waiting for them.
        return asyncio.shield(self.future).__await__()


def gone(name: str) -> RayError:
    """What callers of an actor that is away are told."""
    return ActorUnavailableError(f"{name} is away", b"0" * 16)


class Stream:
    """A generator's answers, at the reader's end and at the generator's.

    Items arrive in order: behind one that is lost none comes any more.
    """

    def __init__(self, actor: Actor, source: Process, method: str, ahead: int) -> None:
        self.source = source
        self.flying_bytes = 0  # sent and not taken
        self._actor = actor
        self._loop = actor.cluster.loop
        self._network = actor.cluster.network
        self._method = method
        self._ahead = ahead
        self._task: asyncio.Task[None] | None = None
        self._cancelled = False
        self._num_sent = self._num_credited = 0
        self._credit = self._loop.create_future()
        self._num_arrived = self._num_taken = 0
        self._early: dict[int, Callable[[], None]] = {}
        self._items: deque[Any] = deque()
        self._ended: Exception | None = None
        self._change = self._loop.create_future()

    # at the generator's end

    def open(self, request: object) -> None:
        """Ask for it."""
        self._network.send(self.source.host, self._actor.host, partial(self._begin, request), self.away)

    def _begin(self, request: object) -> None:
        process = self._actor.process
        if process is None:
            self._send(self.away)
        elif not self._cancelled:
            self._actor.streams[self] = None
            self._task = process.run(self._loop.create_task, self._serve(request))

    async def _serve(self, request: object) -> None:
        generator: AsyncGenerator[Any, None] = getattr(self._actor.instance, self._method)(request)
        try:
            async for item in generator:
                copy = _copied(item)
                self.flying_bytes += _bytes_of(copy)
                self._send(partial(self._arrive, copy))
                while self._num_sent - self._num_credited >= self._ahead:
                    await self._credit
            self._send(partial(self.fail, StopAsyncIteration()))
        except KvFleetError as error:
            self._send(partial(self.fail, error))
        except Exception as error:  # noqa: BLE001  a bug
            self._actor.cluster.report(f"{self._actor.name}.{self._method} raised {error!r}")
            self._send(partial(self.fail, RayError(repr(error))))
        finally:
            self._actor.streams.pop(self, None)

    def _send(self, deliver: Callable[[], None]) -> None:
        number, self._num_sent = self._num_sent, self._num_sent + 1
        self._network.send(self._actor.host, self.source.host, partial(self._order, number, deliver), self.away)

    def _take_note(self, num_taken: int) -> None:
        """The reader has taken so many."""
        self._num_credited = max(self._num_credited, num_taken)
        credit, self._credit = self._credit, self._loop.create_future()
        if not credit.done():  # else its waiter was cancelled
            credit.set_result(None)

    def _stop(self) -> None:
        self._cancelled = True
        if self._task is not None:
            self._task.cancel()

    # at the reader's end

    def _order(self, number: int, deliver: Callable[[], None]) -> None:
        self._early[number] = deliver
        while self._num_arrived in self._early:
            self._early.pop(self._num_arrived)()
            self._num_arrived += 1

    def _arrive(self, item: object) -> None:
        if self._ended is None:
            self._items.append(item)
            self._changed()
        else:
            self.flying_bytes -= _bytes_of(item)

    def away(self) -> None:
        """The actor is not there."""
        self.fail(gone(self._actor.name))

    def fail(self, error: Exception) -> None:
        """No more items."""
        if self._ended is None:
            self._ended = error
            self._changed()

    def _changed(self) -> None:
        change, self._change = self._change, self._loop.create_future()
        if not change.done():
            change.set_result(None)

    @property
    def ready(self) -> bool:
        """Whether there is an item or the end."""
        return bool(self._items) or self._ended is not None

    def _take(self) -> Answer | None:
        """The next item, which has come; None at the end."""
        answer = Answer(self._loop)
        if self._items:
            item = self._items.popleft()
            self.flying_bytes -= _bytes_of(item)
            self._num_taken += 1
            self._network.send(self.source.host, self._actor.host, partial(self._take_note, self._num_taken))
            answer.settle(item)
            return answer
        assert self._ended is not None
        if isinstance(self._ended, StopAsyncIteration):
            return None
        answer.settle(error=self._ended)
        return answer

    async def __anext__(self) -> Answer:
        while not self.ready:
            await asyncio.shield(self._change)
        answer = self._take()
        if answer is None:
            raise StopAsyncIteration
        return answer

    def __next__(self) -> Answer:
        while not self.ready:
            wait(self._loop, self._change, None)
        answer = self._take()
        if answer is None:
            raise StopIteration
        return answer

    def wait(self, timeout_s: float) -> bool:
        """Wait for an item or the end."""
        until = self._loop.time() + timeout_s
        while not self.ready:
            if not wait(self._loop, self._change, until - self._loop.time()):
                return False
        return True

    def cancel(self) -> None:
        """Stop the generator, if it hears of it."""
        self.fail(RayError("cancelled"))
        while self._items:
            self.flying_bytes -= _bytes_of(self._items.popleft())
        self._network.send(self.source.host, self._actor.host, self._stop)

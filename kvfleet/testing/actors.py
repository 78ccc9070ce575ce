"""Ray, as far as kvfleet uses it: named actors that die and start again, calls, streams of answers.

Calls have Ray's habits: a caller that gives up does not stop a call; a stream is stopped by `cancel`, if that arrives;
its generator goes on when its reader has taken enough; what is sent is copied.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from ray.exceptions import GetTimeoutError, RayError

from kvfleet.errors import KvFleetError
from kvfleet.testing.blocking import wait
from kvfleet.testing.loop import VirtualLoop
from kvfleet.testing.network import Network
from kvfleet.testing.processes import Process, current_process
from kvfleet.testing.streams import Answer, Stream, gone

__all__ = ["Actor", "Cluster", "Handle", "RayModule"]

_REPEATABLE = {"apply", "inventory", "commit"}


class Actor:
    """A named actor. Its instance lives in a process, and may have none for a while."""

    def __init__(self, cluster: Cluster, name: str, host: str) -> None:
        self.cluster = cluster
        self.name = name
        self.host = host
        self.process: Process | None = None
        self.instance: Any = None
        self.streams: dict[Stream, None] = {}
        self._calls: dict[Answer, str] = {}

    def start(self, make: Callable[[], Any]) -> None:
        """Begin a life."""
        assert self.process is None
        self.process = Process(self.cluster.loop, self.name, self.host)
        self.instance = self.process.run(make)

    def kill(self) -> None:
        """End it. Some callers hear of it."""
        assert self.process is not None
        self.process.kill()
        self.process = self.instance = None
        rng, network = self.cluster.network.random, self.cluster.network
        calls, self._calls = self._calls, {}
        streams, self.streams = self.streams, {}
        for answer, source in calls.items():
            if rng.random() < network.weather.told:
                network.send(self.host, source, partial(self._gone, answer))
        for stream in streams:
            if rng.random() < network.weather.told:
                network.send(self.host, stream.source.host, stream.away)

    def call(self, method: str, args: tuple[Any, ...]) -> Answer:
        """Call a method from the current process."""
        source = _source()
        answer = Answer(self.cluster.loop)
        self.cluster.note("call", source.name, self.name, method)
        for _ in range(2 if method in _REPEATABLE and self.cluster.network.twice() else 1):
            self.cluster.network.send(
                source.host,
                self.host,
                partial(self._deliver, method, args, answer, source.host),
                partial(self._gone, answer),
            )
        return answer

    def _deliver(self, method: str, args: tuple[Any, ...], answer: Answer, source: str) -> None:
        if self.process is None:
            self.cluster.network.send(self.host, source, partial(self._gone, answer))
            return
        self._calls[answer] = source
        self.process.run(self.cluster.loop.create_task, self._serve(method, args, answer, source))

    async def _serve(self, method: str, args: tuple[Any, ...], answer: Answer, source: str) -> None:
        cluster, instance = self.cluster, self.instance
        try:
            result = await cluster.serve(instance, method, args)
            reply = partial(answer.settle, result)
        except KvFleetError as error:
            reply = partial(answer.settle, error=error)
        except Exception as error:  # noqa: BLE001  a bug
            cluster.report(f"{self.name}.{method} raised {error!r}")
            reply = partial(answer.settle, error=RayError(repr(error)))
        self._calls.pop(answer, None)
        cluster.network.send(self.host, source, reply, partial(self._gone, answer))

    def _gone(self, answer: Answer) -> None:
        answer.settle(error=gone(self.name))

    def stream(self, method: str, request: object, ahead: int) -> Stream:
        """Call a generator from the current process."""
        stream = Stream(self, _source(), method, ahead)
        self.cluster.note("stream", stream.source.name, self.name, method)
        stream.open(request)
        return stream


def _source() -> Process:
    source = current_process()
    assert source is not None, "calls are made by processes"
    return source


class Handle:
    """An actor's handle."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> _Method:
        return _Method(self._actor, name)


class _Method:
    def __init__(self, actor: Actor, name: str, ahead: int = 0) -> None:
        self._actor = actor
        self._name = name
        self._ahead = ahead

    def options(self, **options: Any) -> _Method:  # noqa: ANN401  as in Ray
        """Streams only."""
        ahead = options.get("_generator_backpressure_num_objects", 0)
        return _Method(self._actor, self._name, ahead)

    def remote(self, *args: object) -> Any:  # noqa: ANN401  an `Answer`, or a `Stream`
        """Call it."""
        if self._ahead:
            (request,) = args
            return self._actor.stream(self._name, request, self._ahead)
        return self._actor.call(self._name, args)


class Cluster:
    """The actors by name.

    Args:
        note: writes a line of the trace.
        report: takes what must not happen.
        serve: calls a method of an actor's instance.
    """

    def __init__(
        self,
        network: Network,
        note: Callable[..., None],
        report: Callable[[str], None],
        serve: Callable[[Any, str, tuple[Any, ...]], Awaitable[Any]],
    ) -> None:
        self.network = network
        self.loop = network.loop
        self.note = note
        self.report = report
        self.serve = serve
        self.actors: dict[str, Actor] = {}

    def actor(self, name: str, host: str) -> Actor:
        """Name an actor, which has no life yet."""
        assert name not in self.actors
        actor = self.actors[name] = Actor(self, name, host)
        return actor

    def find(self, name: str) -> Handle | None:
        """A handle; None if there is no such actor."""
        actor = self.actors.get(name)
        return None if actor is None else Handle(actor)

    def get(self, name: str) -> Handle:
        """A handle. ValueError: there is no such actor."""
        handle = self.find(name)
        if handle is None:
            raise ValueError(f"no actor {name}")
        return handle


class RayModule:
    """In place of the module `ray`."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def get(self, answer: Answer, timeout: float | None = None) -> Any:  # noqa: ANN401  as in Ray
        """Wait for an answer."""
        if not wait(self._loop, answer.future, timeout):
            raise GetTimeoutError(f"no answer for {timeout} s")
        return answer.future.result()

    def wait(
        self, streams: list[Stream], *, timeout: float, fetch_local: bool = True
    ) -> tuple[list[Stream], list[Stream]]:
        """Wait for the next item of one stream."""
        assert not fetch_local
        (stream,) = streams
        return (streams, []) if stream.wait(timeout) else ([], streams)

    def cancel(self, stream: Stream) -> None:
        """Stop a stream."""
        stream.cancel()

    def nodes(self) -> list[dict[str, Any]]:
        """No node is known: each process stays with that which it has."""
        return []

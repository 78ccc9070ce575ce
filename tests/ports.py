"""The ways between the parts of a `tests.rig.Rig`, in place of Ray's: calls of clients and managers, and windows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

from typing_extensions import override

from kvfleet.attachment import DirectoryPort, ManagerPort
from kvfleet.core.directory import NodeId
from kvfleet.errors import DeadlineExceededError, DirectoryUnavailableError, TierError, TierUnavailableError
from kvfleet.node.messages import (
    CommitRequest,
    FetchRequest,
    HintRequest,
    HoldRequest,
    LoadProgress,
    LoadRequest,
    ReserveRequest,
    Window,
)
from kvfleet.node.transport import Transport
from kvfleet.node.waiting import within
from kvfleet.node.windows import ByteBudget, stream_share

GRACE_S = 0.25  # as in kvfleet.calls


async def ended(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait for its end, however often we are cancelled meanwhile."""
    while not task.done():
        task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait({task})


class RigManagerPort(ManagerPort):
    def __init__(self, rig: Any, number: int) -> None:
        self._rig = rig
        self._number = number

    def _call(self, name: str, timeout_s: float, *args: object) -> Any:
        return self._rig.ask(self._rig.at_manager(self._number, name, *args), name, timeout_s + GRACE_S)

    @override
    def attach(self, timeout_s: float) -> Any:
        return self._call("attach", timeout_s)

    @override
    def reserve(self, request: ReserveRequest, timeout_s: float) -> Any:
        return self._call("reserve", timeout_s, request)

    @override
    def commit(self, request: CommitRequest, timeout_s: float) -> Any:
        return self._call("commit", timeout_s, request)

    @override
    def hold(self, request: HoldRequest, timeout_s: float) -> Any:
        return self._call("hold", timeout_s, request)

    @override
    def release(self, client_id: int, number: int, timeout_s: float) -> None:
        self._call("release", timeout_s, client_id, number)

    @override
    def hint(self, request: HintRequest, timeout_s: float) -> Any:
        return self._call("hint", timeout_s, request)

    @override
    def load(self, request: LoadRequest) -> Generator[LoadProgress, None, None]:
        deadline = time.monotonic() + request.timeout_s + GRACE_S
        stream = self._rig.stream(self._number, "load", "step", request)

        async def step() -> Any:
            return await anext(stream, None)

        async def end() -> None:
            with suppress(RuntimeError):  # the last step was abandoned just now, which ends the stream as well
                await stream.aclose()

        begun = self._rig.begin(step())
        try:
            while (progress := self._rig.end(begun, "load", max(0.0, deadline - time.monotonic()))) is not None:
                begun = self._rig.begin(step())  # as with Ray, to take an item resumes the generator
                yield progress
        finally:
            begun.cancel()
            asyncio.run_coroutine_threadsafe(end(), self._rig.loop)


class RigDirectoryPort(DirectoryPort):
    def __init__(self, rig: Any) -> None:
        self._rig = rig

    @override
    def locate(self, keys: bytes, shard: int, num_shards: int, timeout_s: float) -> Any:
        try:
            return self._rig.ask(self._rig.at_directory("locate", keys, shard, num_shards), "locate", timeout_s)
        except DeadlineExceededError as error:
            raise DirectoryUnavailableError("locate") from error


class RigLink:
    """A manager's calls to the directory."""

    def __init__(self, rig: Any) -> None:
        self._rig = rig

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*args: Any) -> Any:
            *arguments, timeout_s = args
            try:
                return await within(timeout_s, self._rig.at_directory(name, *arguments))
            except asyncio.TimeoutError as error:
                raise DirectoryUnavailableError(name) from error

        return call


class Loopback(Transport):
    """Windows straight from the holder's generator, copied as Ray would."""

    def __init__(self, rig: Any, budget: ByteBudget) -> None:
        self._rig = rig
        self._budget = budget

    @override
    async def fetch(self, node: NodeId, request: FetchRequest, total_bytes: int) -> AsyncGenerator[Window, None]:
        deadline = time.monotonic() + request.timeout_s
        config = self._rig.config
        share = stream_share(
            total_bytes, request.window_bytes_max, config.windows_in_flight, self._budget.capacity_bytes
        )
        await self._budget.acquire(share.num_bytes, request.timeout_s)
        left = max(0.0, deadline - time.monotonic())
        request = replace(request, window_bytes_max=share.window_bytes_max, timeout_s=left)
        windows = self._rig.stream(int(node, 16), "fetch", "window", request)
        try:
            async with aclosing(windows):
                while (window := await self._next(windows, deadline)) is not None:
                    if window.parts:
                        yield Window(tuple(replace(part, data=part.data.copy()) for part in window.parts))
        finally:
            self._budget.release(share.num_bytes)

    @override
    async def ping(self, node: NodeId, timeout_s: float) -> None:
        try:
            await within(timeout_s, self._rig.at_manager(int(node, 16), "ping"))
        except asyncio.TimeoutError as error:
            raise DeadlineExceededError("ping", timeout_s) from error

    async def _next(self, windows: AsyncGenerator[Window, None], deadline: float) -> Window | None:
        left = max(0.0, deadline - time.monotonic())
        task = asyncio.ensure_future(anext(windows, None))
        try:
            await asyncio.wait({task}, timeout=min(left, self._rig.config.holder_timeout_s))
            if task.done():
                return task.result()
        except (TierError, DeadlineExceededError):
            raise
        except Exception as error:
            raise TierUnavailableError("peer", repr(error)) from error
        finally:
            await ended(task)
        if left < self._rig.config.holder_timeout_s:
            raise DeadlineExceededError("fetch", left)
        raise DeadlineExceededError("the next window", self._rig.config.holder_timeout_s)

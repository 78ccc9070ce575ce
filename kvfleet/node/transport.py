"""Windows of blocks from another node's manager, through Ray's object store.

The holder's manager is an async streaming generator: each `Window` it yields is copied once, from the arena into the
object store of its node; the raylets move it; here it is a read-only view of this node's object store.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import ray
from ray.exceptions import RayError
from typing_extensions import override

from kvfleet.core.directory import NodeId
from kvfleet.errors import DeadlineExceededError, TierUnavailableError
from kvfleet.node.messages import FetchRequest, Window
from kvfleet.node.waiting import within
from kvfleet.node.windows import ByteBudget, stream_share

__all__ = ["ObjectStoreTransport", "Transport"]

T = TypeVar("T")


class Transport(Protocol):
    """Brings blocks of another node as windows."""

    def fetch(self, node: NodeId, request: FetchRequest, total_bytes: int) -> AsyncGenerator[Window, None]:
        """Ask `node` for the blocks of `request`.

        Use it with `contextlib.aclosing`: leaving it early stops the holder too. A window's data are borrowed: drop
        every reference to them before asking for the next window.

        Args:
            node: the holder.
            request: what to send; the holder stops before the first block it does not have.
            total_bytes: of all blocks asked for.

        Yields:
            Windows in order, each block's bytes without gaps. Nothing is verified.

        Raises:
            TierUnavailableError: the holder is gone or failed. What came is good.
            DeadlineExceededError: it sent nothing for too long, or had no room to send; or `request.timeout_s` ran
                out.
            TierFullError: too many streams wait for room on this node.
        """
        ...

    async def ping(self, node: NodeId, timeout_s: float) -> None:
        """Have an answer from a node's manager, which has an arena.

        Raises:
            TierUnavailableError: the node or its manager is gone, or has no arena.
            DeadlineExceededError: no answer within `timeout_s`.
        """


class ObjectStoreTransport(Transport):
    """The transport that is always there: Ray's object store.

    Two windows of a stream are on this node at a time: the one the caller has, and the next one, pulled meanwhile.
    Copying and verifying belong in a thread (numpy and xxhash release the GIL), else the pull waits for them.

    Threads: for the event loop of the actor that owns it.
    """

    def __init__(
        self,
        resolve: Callable[[NodeId], Any],
        budget: ByteBudget,
        *,
        holder_timeout_s: float,
        windows_in_flight: int,
    ) -> None:
        """Make a transport.

        Args:
            resolve: gives the handle of a node's manager; may block, runs in a thread; ValueError if there is none.
            budget: bytes of this node's object store that arriving windows may occupy. A manager that also sends
                keeps another one for that: two nodes reading from each other would otherwise wait for each other.
            holder_timeout_s: longest wait for a holder's next window.
            windows_in_flight: windows a holder makes ahead of the reader.
        """
        assert holder_timeout_s > 0
        assert windows_in_flight > 0
        self._resolve = resolve
        self._budget = budget
        self._holder_timeout_s = holder_timeout_s
        self._windows_in_flight = windows_in_flight
        self._managers: dict[NodeId, Any] = {}

    @override
    async def fetch(self, node: NodeId, request: FetchRequest, total_bytes: int) -> AsyncGenerator[Window, None]:
        patience = _Patience(node, self._holder_timeout_s, request.timeout_s)
        share = stream_share(
            total_bytes, request.window_bytes_max, self._windows_in_flight, self._budget.capacity_bytes
        )
        await self._budget.acquire(share.num_bytes, request.timeout_s)
        try:
            manager = await self._manager(node, patience)
            method = manager.fetch.options(
                num_returns="streaming", _generator_backpressure_num_objects=self._windows_in_flight
            )
            request = dataclasses.replace(
                request, window_bytes_max=share.window_bytes_max, timeout_s=patience.remaining_s
            )
            async with aclosing(_read_ahead(method.remote(request), patience)) as windows:
                async for window in windows:
                    if window.parts:
                        yield window
                    del window
            self._managers[node] = manager
        finally:
            self._budget.release(share.num_bytes)

    @override
    async def ping(self, node: NodeId, timeout_s: float) -> None:
        patience = _Patience(node, timeout_s, timeout_s)
        manager = await self._manager(node, patience)
        await patience.wait(manager.ping.remote())
        self._managers[node] = manager

    async def _manager(self, node: NodeId, patience: _Patience) -> Any:  # noqa: ANN401  Ray's handle
        """The handle of a node's manager; to be kept again in `_managers` if all goes well."""
        manager = self._managers.pop(node, None)
        return manager or await patience.wait(asyncio.to_thread(self._resolve, node))


class _Patience:
    """How long to wait for a node: each time a little, altogether until the deadline."""

    def __init__(self, node: NodeId, holder_timeout_s: float, timeout_s: float) -> None:
        self._node = node
        self._holder_timeout_s = holder_timeout_s
        self._timeout_s = timeout_s
        self._deadline = asyncio.get_running_loop().time() + timeout_s

    @property
    def remaining_s(self) -> float:
        return max(0.0, self._deadline - asyncio.get_running_loop().time())

    async def wait(self, awaitable: Awaitable[T]) -> T:
        """The awaitable's result; Ray's errors and lost time as our own."""
        seconds = min(self._holder_timeout_s, self.remaining_s)
        try:
            return await within(seconds, awaitable)
        except DeadlineExceededError as error:  # the holder's own, through Ray
            raise DeadlineExceededError(f"room at node {self._node}", seconds) from error
        except (RayError, ValueError) as error:  # ValueError: Ray knows no such actor
            raise TierUnavailableError("peer", f"node {self._node}: {type(error).__name__}") from error
        except asyncio.TimeoutError as error:
            if seconds < self._holder_timeout_s:
                raise DeadlineExceededError(f"fetch from node {self._node}", self._timeout_s) from error
            raise DeadlineExceededError(f"the next window of node {self._node}", seconds) from error


async def _read_ahead(stream: ray.ObjectRefGenerator, patience: _Patience) -> AsyncGenerator[Window, None]:
    """The windows of a stream, the next one on its way while the caller has one. Stops the holder when left."""
    pull = asyncio.ensure_future(_next_window(stream))
    try:
        while (window := await patience.wait(pull)) is not None:
            pull = asyncio.ensure_future(_next_window(stream))
            yield window
            del window
    finally:
        pull.cancel()
        ray.cancel(stream)
        await asyncio.gather(pull, return_exceptions=True)  # an error of a window nobody waits for


async def _next_window(stream: ray.ObjectRefGenerator) -> Window | None:
    """Pull the next window onto this node; None at the end of the stream."""
    ref = await anext(stream, None)
    return None if ref is None else await ref

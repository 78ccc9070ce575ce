"""Fetches from other nodes, and how their failures are remembered: one that fails is left alone until it answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any

from kvfleet.core.directory import NodeId
from kvfleet.core.holders import Holders
from kvfleet.errors import DeadlineExceededError, KvFleetError, TierFullError
from kvfleet.node.messages import FetchRequest, Miss, Window
from kvfleet.node.transport import Transport
from kvfleet.node.waiting import now, within

__all__ = ["PeerStream", "Peers"]

_log = logging.getLogger(__name__)

_PROBES_MAX = 16  # at once
_IDLE_S = 60.0
_LATE_S = 1e-3  # a wait that ends so close to the deadline has ended by it


class Peers:
    """The other holders of blocks, as this node gets along with them.

    A holder that fails, or sends nothing for too long, is avoided by all loads of the node at once: those that wait
    for its first bytes give up as well. A background probe finds out when it answers again.

    Threads: the manager's event loop.

    Args:
        node: this one.
        transport: to the others.
        fits: whether this node's object store has room for so many bytes on their way to it.
        timeout_s: longest wait for the answer to a probe.
    """

    def __init__(
        self, node: NodeId, transport: Transport, fits: Callable[[int], Awaitable[bool]], timeout_s: float
    ) -> None:
        self.holders = Holders(node)
        self.transport = transport
        self.fits = fits
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(_PROBES_MAX)
        self._wake = asyncio.Event()
        self._waiting: dict[NodeId, set[asyncio.Future[None]]] = {}

    def failed(self, node: NodeId) -> None:
        """A holder failed, or was too slow."""
        if node not in self.holders.avoided:
            _log.info("node %s is avoided until it answers", node)
        self.holders.failed(node, now())
        for waiter in self._waiting.pop(node, ()):
            if not waiter.done():
                waiter.set_result(None)
        self._wake.set()

    def doubted(self, node: NodeId) -> None:
        """A holder sent nothing until a deadline."""
        self.holders.doubted(node, now())
        self._wake.set()

    async def run(self) -> None:
        """Probe the holders that have failed. Runs until cancelled."""
        probes: set[asyncio.Task[None]] = set()
        try:
            while True:
                self._wake.clear()
                for node in self.holders.due(now()):
                    probe = asyncio.create_task(self._probe(node))
                    probes.add(probe)
                    probe.add_done_callback(probes.discard)
                pause_s = min(_IDLE_S, max(0.0, self.holders.next_due() - now()))
                with suppress(asyncio.TimeoutError):
                    await within(pause_s, self._wake.wait())
        finally:
            for probe in probes:
                probe.cancel()
            await asyncio.gather(*probes, return_exceptions=True)

    async def _probe(self, node: NodeId) -> None:
        async with self._places:
            try:
                await self.transport.ping(node, self._timeout_s)
            except KvFleetError as error:
                _log.debug("node %s does not answer: %s", node, error)
                self.holders.unanswered(node, now())
            else:
                _log.info("node %s answers", node)
                self.holders.answered(node)
        self._wake.set()

    def stream(self, node: NodeId, request: FetchRequest, total_bytes: int, patience_s: float | None) -> PeerStream:
        """Ask a node for blocks; see `Transport.fetch`.

        Args:
            node: to ask.
            request: for what.
            total_bytes: of all blocks.
            patience_s: longest wait for the first of them; None: as long as for any.
        """
        return PeerStream(self, node, request, total_bytes, patience_s)

    def waiter(self, node: NodeId) -> asyncio.Future[None]:
        """Done when the node is avoided."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(node, set()).add(waiter)
        return waiter

    def forget_waiter(self, node: NodeId, waiter: asyncio.Future[None]) -> None:
        """Nobody waits for it any more."""
        waiters = self._waiting.get(node, set())
        waiters.discard(waiter)
        if not waiters:
            self._waiting.pop(node, None)


class PeerStream:
    """One fetch from a node.

    Attributes:
        miss: why it ended early, once `windows` has ended; None if the holder has sent what it has.
    """

    def __init__(
        self, peers: Peers, node: NodeId, request: FetchRequest, total_bytes: int, patience_s: float | None
    ) -> None:
        self._peers = peers
        self._node = node
        self._request = request
        self._total_bytes = total_bytes
        self._patience_s = patience_s
        self._deadline = now() + request.timeout_s
        self.miss: Miss | None = None

    async def windows(self) -> AsyncGenerator[Window, None]:
        """The windows that come. They are borrowed, as those of `Transport.fetch` are; raises nothing of ours."""
        if not await self._peers.fits(self._total_bytes):
            self.miss = Miss.NO_ROOM
            return
        holders = self._peers.holders
        holders.began(self._node, self._total_bytes)
        try:
            fetch = self._peers.transport.fetch(self._node, self._request, self._total_bytes)
            async with aclosing(fetch) as stream:
                window = await self._first(stream)
                while window is not None:
                    yield window
                    window = None
                    window = await anext(stream, None)
            if self.miss is None:
                holders.worked(self._node)
        except KvFleetError as error:
            _log.info("%s", error)
            self.miss = self._failed(error)
        except asyncio.CancelledError:  # while waiting for the holder: maybe by the deadline of the load
            if self._is_late():
                self._peers.doubted(self._node)
            raise
        finally:
            holders.ended(self._node, self._total_bytes)

    async def _first(self, stream: AsyncGenerator[Window, None]) -> Window | None:
        """The first window; None at the end, or if the node turns out to be a bad one, or a slow one, meanwhile."""
        waiter = self._peers.waiter(self._node)
        pull: asyncio.Future[Window | None] = asyncio.ensure_future(anext(stream, None))
        try:
            either: set[asyncio.Future[Any]] = {pull, waiter}
            await asyncio.wait(either, timeout=self._patience_s, return_when=asyncio.FIRST_COMPLETED)
            if pull.done():
                return pull.result()
            self.miss = Miss.UNREACHABLE if waiter.done() else Miss.TOO_SLOW
            if not waiter.done():
                self._peers.doubted(self._node)
            return None
        finally:
            self._peers.forget_waiter(self._node, waiter)
            waiter.cancel()
            await _end(pull)  # a generator cannot be closed while it runs

    def _failed(self, error: KvFleetError) -> Miss:
        if isinstance(error, TierFullError):  # on our side
            return Miss.NO_ROOM
        if not isinstance(error, DeadlineExceededError):
            self._peers.failed(self._node)
            return Miss.UNREACHABLE
        if self._is_late():
            self._peers.doubted(self._node)
            return Miss.DEADLINE
        self._peers.failed(self._node)
        return Miss.TOO_SLOW

    def _is_late(self) -> bool:
        return self._deadline - now() <= _LATE_S


async def _end(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait for its end, even if we are cancelled meanwhile."""
    told = False
    while not task.done():
        task.cancel()
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            told = True
    if not task.cancelled():
        task.exception()  # nobody else is told
    if told:
        raise asyncio.CancelledError

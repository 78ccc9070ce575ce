"""Sends blocks of this node to another one: the holder's side of a fetch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack

from kvfleet.config import FleetConfig
from kvfleet.core.block import BlockKey, split
from kvfleet.errors import TierUnavailableError
from kvfleet.node.admission import Admitter
from kvfleet.node.dram import NS, DramTier
from kvfleet.node.messages import FetchRequest, Window, WindowPart
from kvfleet.node.records import Record
from kvfleet.node.storeroom import StoreRoom
from kvfleet.node.waiting import now
from kvfleet.node.windows import ByteBudget, Span, plan_windows, stream_share

__all__ = ["Server"]


class Server:
    """Streams of windows to other nodes. Threads: the manager's event loop.

    Args:
        budget: bytes of this node's object store that windows on their way out may occupy.
        store: that object store, which others use as well.
    """

    def __init__(
        self, dram: DramTier, admitter: Admitter, budget: ByteBudget, store: StoreRoom, config: FleetConfig
    ) -> None:
        self._dram = dram
        self._admitter = admitter
        self._budget = budget
        self._store = store
        self._config = config
        self.streams = 0
        self.sent_bytes = 0

    async def fetch(self, request: FetchRequest) -> AsyncGenerator[Window, None]:
        """The requested blocks that are here, up to the first that is not, as windows.

        A window's data are views of the arena: whoever takes it copies it before asking for the next one.

        Raises:
            DeadlineExceededError: no room for another stream in time.
            TierUnavailableError: others have filled the object store.
        """
        deadline = now() + request.timeout_s
        stream = _Stream(self._dram, self._admitter, request)
        if not stream.records:
            return
        sizes = [record.length for record in stream.records]
        share = stream_share(
            sum(sizes), request.window_bytes_max, self._config.windows_in_flight, self._budget.capacity_bytes
        )
        timeout_s = min(request.timeout_s, self._config.holder_timeout_s)
        await self._budget.acquire(share.num_bytes, timeout_s)
        end = ExitStack()
        end.callback(self._budget.release, share.num_bytes)
        end.callback(stream.close)
        # A reader that stops asking leaves this generator paused inside Ray: the timer ends the stream for it.
        timer = asyncio.get_running_loop().call_at(deadline, end.close)
        self.streams += 1
        try:
            if not await self._store.fits(share.num_bytes):
                raise TierUnavailableError("peer", "this node's object store is full")
            for spans in plan_windows(sizes, self._config.window_bytes_min, share.window_bytes_max):
                if stream.closed:
                    return
                parts = stream.parts(spans)
                if parts:
                    yield Window(tuple(parts))
                    self.sent_bytes += sum(len(part.data) for part in parts)
                    stream.release_copied(parts[-1])
                if len(parts) < len(spans):
                    break
            # Ray takes this many windows ahead of the reader: by the last of these it has taken all that hold bytes.
            for _ in range(self._config.windows_in_flight):
                yield Window(())
        finally:
            timer.cancel()
            end.close()


class _Stream:
    """The blocks of one fetch; each is held while windows of it are on their way."""

    def __init__(self, dram: DramTier, admitter: Admitter, request: FetchRequest) -> None:
        self._dram = dram
        self._admitter = admitter
        self._shard = request.shard
        self._keys = split(request.keys)
        self._held: dict[int, BlockKey] = {}
        self.closed = False
        self.records: list[Record] = []
        for key in self._keys:
            slot = dram.placement.resident(key, self._shard)
            if slot is None:
                break
            self.records.append(dram.arena.records.record(slot))

    def parts(self, spans: Sequence[Span]) -> list[WindowPart]:
        """The bytes of some spans, up to the first block that is not here any more."""
        parts = []
        for span in spans:
            part = self._part(span.index, span.start, span.stop)
            if part is None:
                break
            parts.append(part)
        return parts

    def _part(self, index: int, start: int, stop: int) -> WindowPart | None:
        record, key = self.records[index], self._keys[index]
        if index not in self._held:
            if self._dram.placement.resident(key, self._shard) != record.slot:
                return None
            current = self._dram.arena.records.record(record.slot)
            if current.generation != record.generation:
                return None
            self._dram.hold(key)
            self._held[index] = key
            self._dram.arena.records.last_access[record.slot] = int(now() * NS)
        view = self._dram.view(record.slot, record.length)[start:stop]
        return WindowPart(index, start, record.length, record.checksum, view)

    def release_copied(self, last: WindowPart) -> None:
        """All parts up to this one are copied: blocks before it, and its own if this is its end, may go."""
        whole = last.start + len(last.data) == last.num_bytes
        self._release([i for i in self._held if i < last.index or (whole and i == last.index)])

    def close(self) -> None:
        """Nothing is on its way any more."""
        self.closed = True
        self._release(list(self._held))

    def _release(self, indexes: list[int]) -> None:
        for index in indexes:
            self._dram.release(self._held.pop(index))
        if indexes:
            self._admitter.freed()

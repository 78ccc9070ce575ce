"""Sends blocks of this node to another one: the holder's side of a fetch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing

from kvfleet.config import FleetConfig
from kvfleet.core.block import BlockKey, split
from kvfleet.errors import DeadlineExceededError, TierError, TierUnavailableError
from kvfleet.node.admission import Admitter
from kvfleet.node.dram import NS, DramTier
from kvfleet.node.drivereads import DriveReads
from kvfleet.node.landing import BlockSlots
from kvfleet.node.messages import FetchRequest, LoadRequest, Miss, Window, WindowPart
from kvfleet.node.records import Record
from kvfleet.node.storeroom import StoreRoom
from kvfleet.node.waiting import now
from kvfleet.node.windows import ByteBudget, Share, Span, plan_windows, stream_share

__all__ = ["Server"]

_log = logging.getLogger(__name__)

_WINDOW_PART = 16  # of the arena, for one window from the drives: several streams must find room


class Server:
    """Streams of windows to other nodes. Threads: the manager's event loop.

    Args:
        budget: bytes of this node's object store that windows on their way out may occupy.
        store: that object store, which others use as well.
    """

    def __init__(
        self, dram: DramTier, admitter: Admitter, budget: ByteBudget, store: StoreRoom, config: FleetConfig,
        drive_reads: DriveReads | None = None,
    ) -> None:  # fmt: skip
        self._dram = dram
        self._admitter = admitter
        self._drive_reads = drive_reads
        self._budget = budget
        self._store = store
        self._config = config
        self.streams = 0
        self.sent_bytes = 0

    async def fetch(self, request: FetchRequest) -> AsyncGenerator[Window, None]:
        """The requested blocks that are here, up to the first that is not, as windows.

        Those that are only on this node's drives are brought into its arena first.

        A window's data are views of the arena: whoever takes it copies it before asking for the next one.

        Raises:
            DeadlineExceededError: no room for another stream in time.
            TierUnavailableError: others have filled the object store.
        """
        deadline = now() + request.timeout_s
        stream = _Stream(self._dram, self._admitter, self._drive_reads, request)
        sizes = stream.sizes
        if not sizes:
            return
        share = self._share(sum(sizes), request.window_bytes_max)
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
                await stream.bring(spans, min(max(0.0, deadline - now()), self._config.holder_timeout_s))
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

    def _share(self, total_bytes: int, window_bytes_max: int) -> Share:
        """What a stream may have of the object store."""
        if self._drive_reads is not None:  # what is read for a window is in the arena at once
            window_bytes_max = min(window_bytes_max, self._dram.arena.capacity_bytes // _WINDOW_PART)
        return stream_share(total_bytes, window_bytes_max, self._config.windows_in_flight, self._budget.capacity_bytes)


class _Stream:
    """The blocks of one fetch; each is held while windows of it are on their way."""

    def __init__(self, dram: DramTier, admitter: Admitter, drives: DriveReads | None, request: FetchRequest) -> None:
        self._dram = dram
        self._admitter = admitter
        self._drives = drives
        self._request = request
        self._keys = split(request.keys)
        self._held: dict[int, Record] = {}
        self.closed = False
        self.sizes: list[int] = []
        for key in self._keys:
            num_bytes = self._size(key)
            if num_bytes is None:
                break
            self.sizes.append(num_bytes)

    def _size(self, key: BlockKey) -> int | None:
        """Bytes of a block that is in the arena or on a drive."""
        slot, request = self._dram.placement.resident(key, self._request.shard), self._request
        if slot is not None:
            return self._dram.arena.records.record(slot).length
        here = self._drives is not None and self._drives.has(key, request.shard, request.num_bytes)
        return request.num_bytes if here else None

    async def bring(self, spans: Sequence[Span], timeout_s: float) -> None:
        """Bring what spans need from the drives into the arena, and hold it, up to the first block that does not come.

        One window at a time: while it is read, the last ones are on their way.
        """
        index = spans[0].index
        while index <= spans[-1].index and not self.closed:
            if not self._hold(index):
                stop = next((i for i in range(index, spans[-1].index + 1) if self._resident(i)), spans[-1].index + 1)
                if self._drives is None or not await self._read(self._drives, index, stop, timeout_s):
                    return
            index += 1

    async def _read(self, drives: DriveReads, first: int, stop: int, timeout_s: float) -> bool:
        """Read blocks [first, stop) from the drives. False: the first did not come."""
        request = self._request
        load = LoadRequest(
            request.namespace, request.keys, request.parent, request.depth, request.shard, request.num_bytes, (),
            timeout_s,
        )  # fmt: skip
        slots, index = BlockSlots(self._dram, self._admitter, load), first
        try:
            async with aclosing(drives.bring(slots, first, stop)) as outcomes:
                async for outcome in outcomes:
                    if isinstance(outcome, Miss) or self.closed:
                        break
                    await slots.settled(index, timeout_s)
                    if not self._hold(index):
                        break
                    index += 1
        except (TierError, DeadlineExceededError) as error:
            _log.info("a peer gets fewer blocks than are on the drives: %s", error)
        return index > first

    def _resident(self, index: int) -> bool:
        return self._dram.placement.resident(self._keys[index], self._request.shard) is not None

    def _hold(self, index: int) -> bool:
        """Hold a block, if it is in the arena as it was planned. Once the stream is closed, none is."""
        if index in self._held:
            return True
        key = self._keys[index]
        slot = self._dram.placement.resident(key, self._request.shard)
        if slot is None or self.closed:
            return False
        record = self._dram.arena.records.record(slot)
        if record.length != self.sizes[index]:
            return False
        self._dram.hold(key)
        self._held[index] = record
        self._dram.arena.records.last_access[slot] = int(now() * NS)
        return True

    def parts(self, spans: Sequence[Span]) -> list[WindowPart]:
        """The bytes of some spans, up to the first block that is not held."""
        parts = []
        for span in spans:
            record = self._held.get(span.index)
            if record is None:
                break
            view = self._dram.view(record.slot, record.length)[span.start : span.stop]
            parts.append(WindowPart(span.index, span.start, record.length, record.checksum, view))
        return parts

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
            del self._held[index]
            self._dram.release(self._keys[index])
        if indexes:
            self._admitter.freed()

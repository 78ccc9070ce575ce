"""The NVMe tier of a node: its drives, and which of them has which block.

What a drive does is in `drive*.py`: this decides which one a block goes to, and finds it again. A drive that fails is
taken out and its blocks are misses; it is opened again, at last once a minute, and what it holds then is back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from kvfleet.config import DriveConfig, FleetConfig
from kvfleet.core.block import BlockKey
from kvfleet.core.drives import Load, choose, takes
from kvfleet.core.inventory import record_id
from kvfleet.node.driveatwork import DriveAtWork
from kvfleet.node.drivebay import DriveBay
from kvfleet.node.driveentry import Entry
from kvfleet.node.drivestatus import DriveReport, DriveStatus
from kvfleet.node.drivestored import Stored, entry_of, stored_of
from kvfleet.node.waiting import now, within

__all__ = ["DriveReport", "DriveStatus", "NvmeTier", "Stored"]

_log = logging.getLogger(__name__)
_OPEN_TIMEOUT_S = 30.0  # the node does not wait longer for a drive that does not open
_CLOSE_TIMEOUT_S = 4.0
_ALL_USES = 1 << 30
Bytes = npt.NDArray[np.uint8]


class NvmeTier:
    """The drives of a node.

    No drive that fails, hangs or is full fails a call but with a TierError, which is a miss. A read that has begun
    on a drive that hangs ends when the drive answers, because until then it may write to its target: who has a
    deadline lets it go on by itself.

    Threads: the event loop; each drive has threads of its own, twice `nvme_inflight_max` and three at most.

    Attributes:
        on_change: told of each record that can be read now (True), or no longer. Set it before `run`.
        opened: set once all drives were tried, or take too long.
    """

    def __init__(self, drives: Sequence[DriveConfig], config: FleetConfig) -> None:
        """Open nothing yet. The `drives` are in directories of their own; `config` is for the limits and the codec."""
        self.on_change: Callable[[Stored, bool], None] = _untold
        self.opened = asyncio.Event()
        self._queue_bytes_max = config.nvme_queue_bytes_max
        self._tick_s = config.heartbeat_s
        self._bays = [DriveBay(drive, config, self._changed) for drive in drives]
        self._told: dict[bytes, DriveBay] = {}
        self._writing: dict[bytes, asyncio.Future[bool]] = {}
        self._runs: list[asyncio.Task[None]] = []
        self._ended = False
        self._closed = False

    # Life

    async def run(self) -> None:
        """Keep the drives open as far as they work. Runs until cancelled, or closed: nothing is opened after that."""
        if self._runs:
            await asyncio.wait(self._runs)  # of an earlier call
        if self._closed:
            return
        self._ended = False
        runs = self._runs = [asyncio.create_task(bay.run()) for bay in self._bays]
        runs += [asyncio.create_task(self._judge()), asyncio.create_task(self._opening())]
        try:
            done, _ = await asyncio.wait(runs, return_when=asyncio.FIRST_EXCEPTION)
            for run in sorted(done, key=lambda run: run.cancelled()):  # a bug before that others were ended
                run.result()
        finally:
            self._end()

    def _end(self) -> None:
        """Have all drives closed; once, as to be told again would disturb those that are at it."""
        if not self._ended:
            self._ended = True
            for run in self._runs:
                run.cancel()

    async def _opening(self) -> None:
        async def tried() -> None:
            for bay in self._bays:
                await bay.tried.wait()

        with suppress(asyncio.TimeoutError):
            await within(_OPEN_TIMEOUT_S, tried())
        self.opened.set()

    async def _judge(self) -> None:
        """Look which drives are slow."""
        while True:
            await asyncio.sleep(self._tick_s)
            for bay in self._bays:
                slow = bay.health.slow
                bay.health.judge([other.health for other in self._bays if other is not bay and other.works], now())
                if slow != bay.health.slow:
                    _log.warning("%s is %s", bay.config.directory, "fast again" if slow else "slow: no more writes")

    async def close(self) -> None:
        """Close all drives, with what is to be saved of them; a drive that hangs is left as it is.

        Nobody is told of what cannot be read any more: the node ends.
        """
        self.on_change = _untold
        self._closed = True
        self._end()
        if self._runs:
            await asyncio.wait(self._runs, timeout=_CLOSE_TIMEOUT_S)

    @property
    def num_working(self) -> int:
        """How many drives can be used, as far as is known."""
        return sum(bay.works for bay in self._bays)

    @property
    def capacity_bytes(self) -> int:
        """Of the slots of the drives that are open."""
        return sum(drive.drive.books.slabs.capacity_bytes for drive in self._at_work())

    def _changed(self, bay: DriveBay, entry: Entry, present: bool) -> None:
        """A drive has a record, or has it no more."""
        other = self._told.get(entry.record)
        if present and other is not None and other is not bay and other.works:
            bay.drop(BlockKey(entry.key))  # came to another drive while this one was out
        elif present:
            self._told[entry.record] = bay
            if other is None:
                self.on_change(stored_of(entry), True)
        elif other is bay:
            del self._told[entry.record]
            self.on_change(stored_of(entry), False)

    # What is there

    def find(self, key: BlockKey, shard: int) -> Stored | None:
        """What is known of a record, if it can be read."""
        found = self._find(key, shard)
        return None if found is None else stored_of(found[1])

    def last_uses(self) -> dict[bytes, float]:
        """When each record was used last, in seconds before the newest use of its drive."""
        return {r: s for drive in self._at_work() for r, s in drive.last_uses().items()}

    def where(self, key: BlockKey, shard: int) -> str:
        """The directory of the drive that has a record, as it was configured; "" if none has it."""
        bay = self._told.get(record_id(key, shard))
        return "" if bay is None else bay.config.directory

    def records(self) -> Iterable[bytes]:
        """The ids of all records that can be read, 18 bytes each."""
        return self._told

    def _find(self, key: BlockKey, shard: int) -> tuple[DriveBay, Entry] | None:
        record = record_id(key, shard)
        bay = self._told.get(record)
        if bay is None:
            return None
        entry = bay.entry(record)
        assert entry is not None, "what was told of is there"
        return bay, entry

    def touch(self, key: BlockKey, now: float) -> None:
        """Note a use of a block; one that is not here is ignored."""
        for drive in self._at_work():
            drive.touch(key, now)

    def retire(self, keys: Sequence[BlockKey]) -> None:
        """It is said that blocks will not be used again: the first to go. Those that are not here are ignored."""
        for drive in self._at_work():
            drive.drive.books.placement.retire(keys)

    def _at_work(self) -> list[DriveAtWork]:
        return [bay.at_work for bay in self._bays if bay.at_work is not None]

    def drop(self, key: BlockKey) -> None:
        """Take out a block, all shards of it: an operator says so, or it is corrupt."""
        for bay in self._bays:
            bay.drop(key)

    async def read(self, key: BlockKey, shard: int, target: Bytes, itemsize: int) -> int | None:
        """Fill `target` with a block, verified.

        Args:
            key: of the block.
            shard: of the record.
            target: `(num_bytes,)`, uint8, contiguous, beginning on a page. It may be written to until this returns,
                also if it is cancelled.
            itemsize: of the numbers in it; unused for what was coded with another.

        Returns:
            The xxh3-64 of `target`; None if the block is not here, or was replaced by one of another length.

        Raises:
            CorruptBlockError: the bytes were not the block's. It is dropped.
            TierUnavailableError: the drive failed. It is taken out.
        """
        found = self._find(key, shard)
        if found is None or found[1].num_bytes != len(target):
            return None
        bay, entry = found
        assert bay.at_work is not None, "what was told of is there"
        return await bay.at_work.read(entry, target)

    # Writing

    def admits(self, num_bytes: int, uses: int, expected_uses: float | None = None) -> bool:
        """Whether a drive would take a block now; see `Gate`."""
        most = self._queue_bytes_max
        return any(takes(load, num_bytes, uses, most, expected_uses=expected_uses) for load in self._loads().values())

    def _loads(self) -> dict[DriveAtWork, Load]:
        return {drive: load for drive in self._at_work() if (load := drive.load()) is not None}

    async def write(
        self, stored: Stored, parent: BlockKey | None, source: Bytes, itemsize: int, check: Callable[[], bool]
    ) -> bool:
        """Have a block on a drive, if there is room.

        Args:
            stored: what it is.
            parent: key of the block before it.
            source: `(num_bytes,)`, uint8, contiguous, beginning on a page: a slot of the arena as a rule. It is read
                until this returns, and maybe longer if this is cancelled.
            itemsize: bytes of one number in it.
            check: whether `source` still holds the block, asked after it was read.

        Returns:
            Whether it is on a drive now, durably.

        Raises:
            CorruptBlockError: `source` was read to be coded, and does not have the checksum, though it holds the block.
            TierError: the drive failed or is full.
        """
        record = record_id(stored.key, stored.shard)
        found = self._find(stored.key, stored.shard)
        if found is not None and found[0].works:
            return True
        writing = self._writing.get(record)
        if writing is None:
            drive = self._choose(stored)
            if drive is None:
                return False
            entry = entry_of(record, stored, itemsize)
            writing = self._writing[record] = drive.write(entry, parent, source, check)
            writing.add_done_callback(lambda _: self._writing.pop(record))
        return await asyncio.shield(writing)

    def _choose(self, stored: Stored) -> DriveAtWork | None:
        """The drive for a record: the one that has other shards of its block, else the best."""
        most = self._queue_bytes_max
        loads = {d: load for d, load in self._loads().items() if takes(load, stored.num_bytes, _ALL_USES, most)}
        if not loads:
            return None
        drives = [drive for drive in loads if drive.has(stored.key)] or list(loads)
        return drives[choose([loads[drive] for drive in drives])]

    # For operators

    async def problem_of(self, key: BlockKey, shard: int) -> str:
        """Read a block and say why it is not sound; "" if it is, or if it is not here. Nothing is dropped.

        Raises:
            TierUnavailableError: the drive failed.
        """
        found = self._find(key, shard)
        if found is None:
            return ""
        assert found[0].at_work is not None, "what was told of is there"
        return await found[0].at_work.problem_of(found[1])

    def status(self) -> tuple[DriveStatus, ...]:
        """How the drives are."""
        return tuple(bay.status() for bay in self._bays)

    async def doctor(self, *, repair: bool) -> list[DriveReport]:
        """Read all that is on the drives, one block of each at a time, and compare books, index and slots.

        Args:
            repair: drop blocks that are not what they should be, and have the index forget what nobody knows.
        """
        return list(await asyncio.gather(*(bay.examine(repair=repair) for bay in self._bays)))

    def audit(self) -> list[str]:
        """What does not add up in the books; nothing, unless there is a bug."""
        findings = [line for bay in self._bays for line in bay.audit()]
        findings += [f"{record.hex()}: told, but gone" for record, bay in self._told.items() if not bay.entry(record)]
        return findings


def _untold(stored: Stored, present: bool) -> None:
    """Nobody has to know."""

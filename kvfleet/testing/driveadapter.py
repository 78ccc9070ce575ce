"""The NVMe tier of a node behind the plain `Tier`."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from typing_extensions import override

from kvfleet.config import DriveConfig, FleetConfig
from kvfleet.copying import checksum
from kvfleet.errors import CorruptBlockError, TierFullError, TierUnavailableError
from kvfleet.node.drive import pages
from kvfleet.node.nvme import NvmeTier, Stored
from kvfleet.node.tier import Bytes, Tier
from kvfleet.testing.adapters import NAMESPACE_ID, split_record

__all__ = ["DriveBlocks"]

T = TypeVar("T")
_PATIENCE_S = 60.0


class DriveBlocks(Tier):
    """Drives, as the manager has them, on an event loop in a thread of its own. They evict."""

    def __init__(self, directories: Sequence[Path], block_bytes: int, max_bytes: int, codec: str = "raw") -> None:
        """Open the drives, or make them in empty directories.

        Args:
            directories: of the drives.
            block_bytes: of each block.
            max_bytes: of each drive.
            codec: as `FleetConfig.nvme_codec`.

        Raises:
            TierUnavailableError: none could be opened, and why.
        """
        super().__init__(block_bytes)
        drives = tuple(DriveConfig(directory=str(path), max_bytes=max_bytes, dwpd=1000.0) for path in directories)
        self._config = FleetConfig(nvme=drives, nvme_codec=codec, heartbeat_s=0.02)
        self._never = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="drives", daemon=True)
        self._thread.start()
        self.nvme: NvmeTier = self._ask(self._begin())
        if not self._works():
            problems = "; ".join(status.problem for status in self.nvme.status())
            self.close()
            raise TierUnavailableError("nvme", problems)

    async def _begin(self) -> NvmeTier:
        nvme = NvmeTier(self._config.nvme, self._config)
        self._run = asyncio.create_task(nvme.run())
        await nvme.opened.wait()
        return nvme

    def _ask(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_PATIENCE_S)

    def _on_loop(self, work: Callable[[], T]) -> T:
        async def call() -> T:
            return work()

        return self._ask(call())

    def _works(self) -> bool:
        return self._on_loop(lambda: all(status.works for status in self.nvme.status()))

    def wait_until_open(self) -> None:
        """Wait until all drives are open, after one has failed, and have forgotten what they gave up."""
        self._until(lambda: all(status.works for status in self.nvme.status()))
        self._settle()

    def _settle(self) -> None:
        """Wait until the indexes on the media have forgotten what was dropped."""
        drives = [bay.at_work.drive for bay in self.nvme._bays if bay.at_work is not None]
        self._until(lambda: not any(drive.books.deleted for drive in drives))

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not self._on_loop(condition):
            assert time.monotonic() < deadline, "the drives are done some time"
            self._never.wait(0.001)

    @property
    @override
    def used_bytes(self) -> int:
        return self._on_loop(lambda: sum(status.used_bytes for status in self.nvme.status()))

    @property
    @override
    def capacity_bytes(self) -> int:
        return self._on_loop(lambda: sum(status.capacity_bytes for status in self.nvme.status()))

    @override
    def _write(self, record: bytes, data: Bytes) -> None:
        source = pages(len(data))
        np.copyto(source, data)
        key, shard = split_record(record)
        stored = Stored(key, shard, len(data), checksum(source), NAMESPACE_ID, 0, 0)
        if not self._ask(self.nvme.write(stored, None, source, 1, lambda: True)):
            if not self._works():
                raise TierUnavailableError("nvme", "a drive is out")
            raise TierFullError("nvme", "no drive takes it")

    @override
    def _read(self, record: bytes, target: Bytes) -> bool:
        memory = pages(len(target))
        try:
            found = self._ask(self.nvme.read(*split_record(record), memory, 1))
        except CorruptBlockError:
            self._settle()
            raise
        if found is None:
            return False
        assert found == checksum(memory), "it was verified"
        np.copyto(target, memory)
        return True

    @override
    def _delete(self, records: Sequence[bytes]) -> int:
        def drop() -> int:
            there = {record for record in records if self.nvme.find(*split_record(record)) is not None}
            for record in there:
                self.nvme.drop(split_record(record)[0])
            return len(there)

        dropped = self._on_loop(drop)
        self._settle()
        return dropped

    @override
    def _find(self, records: Sequence[bytes]) -> list[bool]:
        return self._on_loop(lambda: [self.nvme.find(*split_record(record)) is not None for record in records])

    @override
    def _records(self) -> Iterator[bytes]:
        return iter(self._on_loop(lambda: list(self.nvme.records())))

    @override
    def _close(self) -> None:
        async def close() -> None:
            await self.nvme.close()
            self._run.cancel()
            await asyncio.wait({self._run})

        self._ask(close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

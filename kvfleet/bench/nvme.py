"""Writing blocks to a drive and reading them, beside a plain O_DIRECT loop."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvfleet.bench.cputime import CpuTimes
from kvfleet.bench.report import Row, measure
from kvfleet.bench.workload import spec_of
from kvfleet.config import GIB, MIB, DriveConfig, FleetConfig
from kvfleet.core.block import BlockKey
from kvfleet.errors import TierUnavailableError
from kvfleet.node.drive import pages
from kvfleet.node.drivefile import DriveFile, drive_errors
from kvfleet.node.nvme import NvmeTier, Stored

__all__ = ["MEASURES", "Site", "open_site", "rows"]

MEASURES = (
    "write: `NvmeTier.write` of new blocks of random bytes from page-aligned memory to a full drive: eviction, both "
    "index transactions and flush included; read: `NvmeTier.read` into other memory, verified; {inflight} at once. "
    "Floor: as many threads that write, then flush, or read as many bytes of a plain file by O_DIRECT. CPU s/GB: {cpu}."
)

_SEED = 20250101
_WARMUPS = 1
_FULL = 2  # times what a run writes, that the drive holds
_RATED_BYTES = 1 << 60  # its write budget is not what is measured

Bytes = npt.NDArray[np.uint8]
_Work = Callable[[], Coroutine[Any, Any, object]]


@dataclass(frozen=True, slots=True)
class Site:
    """Where it is measured.

    Attributes:
        directory: the bench's own, on the drive.
        inflight: transfers at once.
        codec: of the blocks.
        cpu: what each case costs.
    """

    directory: Path
    inflight: int
    codec: str
    cpu: CpuTimes = field(default_factory=lambda: CpuTimes(_WARMUPS))


@contextmanager
def open_site(directory: Path, inflight: int, codec: str) -> Iterator[Site]:
    """Use a drive, in a directory that is gone afterwards.

    Raises:
        TierUnavailableError: nothing can be made there.
    """
    own = directory / f"kvfleet-bench-{os.getpid()}"
    with drive_errors(own, "make a directory"):
        own.mkdir(mode=0o700)
    try:
        yield Site(own, inflight, codec)
    finally:
        shutil.rmtree(own)


def rows(site: Site, block_tokens: int, num_blocks: int, repeats: int) -> list[Row]:
    """Measure one size, both ways."""
    block_bytes = spec_of(block_tokens).layout.block_bytes
    random = np.random.default_rng(_SEED)
    sources, targets = [pages(block_bytes) for _ in range(num_blocks)], [pages(block_bytes) for _ in range(num_blocks)]
    for block in sources:
        block[:] = np.frombuffer(random.bytes(block_bytes), np.uint8)
    moved = num_blocks * block_bytes
    found: list[Row] = []
    with _plain(site, moved) as plain, _tier(site, moved) as tier:
        tier.fill(sources, _FULL + 1)
        for cases in (
            {"O_DIRECT write": lambda: plain.write(sources), "write": lambda: tier.write(sources)},
            {"O_DIRECT read": lambda: plain.read(targets), "read": lambda: tier.read(sources, targets)},
        ):
            found += measure(
                cases, block_bytes=block_bytes, num_blocks=num_blocks, moves=True, repeats=repeats, warmups=_WARMUPS
            )
    return found


class _Plain:
    """A file, and threads that write and read it."""

    def __init__(self, site: Site, file: DriveFile, threads: ThreadPoolExecutor, room: int) -> None:
        self._site = site
        self._file = file
        self._threads = threads
        self._room = room
        self._next = 0

    def write(self, blocks: Sequence[Bytes]) -> float:
        """Write blocks to the next places, and flush."""
        places = []
        for block in blocks:
            if self._next + len(block) > self._room:
                self._next = 0
            places.append(self._next)
            self._next += len(block)

        def work() -> None:
            list(self._threads.map(self._file.write, places, blocks))
            self._file.flush()

        return self._site.cpu.timed("O_DIRECT write", sum(map(len, blocks)), work)

    def read(self, targets: Sequence[Bytes]) -> float:
        """Read blocks from the beginning on."""
        places = np.cumsum([0, *map(len, targets[:-1])]).tolist()

        def work() -> None:
            list(self._threads.map(self._file.read, places, targets))

        return self._site.cpu.timed("O_DIRECT read", sum(map(len, targets)), work)


@contextmanager
def _plain(site: Site, moved: int) -> Iterator[_Plain]:
    room = _FULL * moved
    file = DriveFile(site.directory / "plain")
    try:
        if not file.direct:
            raise TierUnavailableError("nvme", f"{site.directory}: no O_DIRECT here")
        file.allocate(room, MIB)
        with ThreadPoolExecutor(site.inflight, "kvfleet-bench") as threads:
            plain = _Plain(site, file, threads, room)
            step = pages(MIB)
            for place in range(0, room, MIB):  # what was never written is slower
                file.write(place, step[: min(MIB, room - place)])
            yield plain
    finally:
        file.close()
        (site.directory / "plain").unlink()


class _Tier:
    """A tier of one drive, driven from this thread."""

    def __init__(self, site: Site, tier: NvmeTier, do: Callable[[_Work], object]) -> None:
        self._site = site
        self._tier = tier
        self._do = do
        self._numbers = count()
        self._last: list[BlockKey] = []

    def fill(self, blocks: Sequence[Bytes], times: int) -> None:
        """Write blocks until the drive is full."""
        for _ in range(times):
            self._do(self._storing(blocks))

    def write(self, blocks: Sequence[Bytes]) -> float:
        """Store blocks that are new."""
        work = self._storing(blocks)
        return self._site.cpu.timed("write", sum(map(len, blocks)), lambda: self._do(work))

    def _storing(self, blocks: Sequence[Bytes]) -> _Work:
        """What stores blocks under keys that are new."""
        numbers = [next(self._numbers) for _ in blocks]
        self._last = [BlockKey(xxhash.xxh3_128_digest(number.to_bytes(8, "little"))) for number in numbers]
        sums = [xxhash.xxh3_64_intdigest(block.data) for block in blocks]
        what = [
            Stored(key, 0, len(block), checksum, bytes(16), 0, 0)
            for key, block, checksum in zip(self._last, blocks, sums, strict=True)
        ]

        async def work() -> None:
            writes = (
                self._tier.write(each, None, block, 2, lambda: True) for each, block in zip(what, blocks, strict=True)
            )
            assert all(await asyncio.gather(*writes)), self._tier.status()

        return work

    def read(self, blocks: Sequence[Bytes], targets: Sequence[Bytes]) -> float:
        """Read what was stored last."""

        async def work() -> None:
            reads = (self._tier.read(key, 0, target, 2) for key, target in zip(self._last, targets, strict=True))
            assert None not in await asyncio.gather(*reads)

        seconds = self._site.cpu.timed("read", sum(map(len, targets)), lambda: self._do(work))
        assert all(np.array_equal(*pair) for pair in zip(blocks, targets, strict=True)), "what was written is read"
        return seconds


@contextmanager
def _tier(site: Site, moved: int) -> Iterator[_Tier]:
    directory = site.directory / "drive"
    directory.mkdir(mode=0o700)
    drive = DriveConfig(directory=str(directory), max_bytes=_FULL * moved + 64 * MIB, rated_bytes=_RATED_BYTES)
    config = FleetConfig(
        nvme=(drive,), nvme_codec=site.codec, nvme_inflight_max=site.inflight, nvme_queue_bytes_max=max(GIB, 2 * moved)
    )
    loop = asyncio.new_event_loop()
    tier = NvmeTier(config.nvme, config)

    def do(work: _Work) -> object:
        return loop.run_until_complete(work())

    run = loop.create_task(tier.run())
    try:
        do(tier.opened.wait)
        yield _Tier(site, tier, do)
    finally:
        do(tier.close)
        run.cancel()
        do(lambda: asyncio.wait({run}))
        loop.close()
        shutil.rmtree(directory)

"""What tests of drives share: blocks made from numbers, and an NVMe tier in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from kvfleet.config import KIB, MIB, DriveConfig, FleetConfig
from kvfleet.core.block import BlockKey
from kvfleet.errors import TierError
from kvfleet.node.drive import pages
from kvfleet.node.nvme import NvmeTier, Stored
from kvfleet.node.records import key_fingerprint
from kvfleet.testing.blocking import wait
from kvfleet.testing.loop import VirtualLoop

CAP = 16 * MIB
SIZE = 200 * KIB + 5
NAMESPACE = bytes(range(16))


def key_of(number: int) -> BlockKey:
    return BlockKey(xxhash.xxh3_128_digest(number.to_bytes(8, "little")))


def block_of(number: int, num_bytes: int = SIZE) -> np.ndarray:
    """Content made from the number, so that a mix-up of blocks shows."""
    block = pages(num_bytes)
    block[:] = np.frombuffer(key_of(number) * (num_bytes // 16 + 1), np.uint8)[:num_bytes]
    return block


def stored_of(number: int, num_bytes: int = SIZE, *, parent: int | None = None, depth: int = 0, shard: int = 0):
    checksum = xxhash.xxh3_64_intdigest(block_of(number, num_bytes).data)
    fingerprint = 0 if parent is None else key_fingerprint(key_of(parent))
    return Stored(key_of(number), shard, num_bytes, checksum, NAMESPACE, depth, fingerprint)


def drive_directories(root: Path, count: int = 1) -> list[Path]:
    directories = [root / f"drive{number}" for number in range(count)]
    for directory in directories:
        directory.mkdir(mode=0o700, exist_ok=True)
    return directories


def settings(
    directories: Sequence[Path],
    *,
    max_bytes: int = CAP,
    rated_bytes: int | None = None,
    dwpd: float = 1.0,
    **fields: Any,
) -> FleetConfig:
    drives = tuple(
        DriveConfig(directory=str(each), max_bytes=max_bytes, rated_bytes=rated_bytes, dwpd=dwpd)
        for each in directories
    )
    return FleetConfig(nvme=drives, **fields)


class Rig:
    """An open tier, and what it has told of itself.

    Attributes:
        told: records that can be read, by key and shard.
    """

    def __init__(self, config: FleetConfig, on_change: Callable[[BlockKey, bool], None]) -> None:
        self._on_change = on_change
        self.tier = NvmeTier(config.nvme, config)
        self.tier.on_change = self._changed
        self.told: dict[tuple[BlockKey, int], Stored] = {}

    def _changed(self, stored: Stored, present: bool) -> None:
        record = stored.key, stored.shard
        assert (record not in self.told) is present, "each change is news"
        if present:
            self.told[record] = stored
        else:
            del self.told[record]
        self._on_change(stored.key, present)

    async def write(self, number: int, num_bytes: int = SIZE, *, parent: int | None = None, depth: int = 0) -> bool:
        stored = stored_of(number, num_bytes, parent=parent, depth=depth)
        above = None if parent is None else key_of(parent)
        return await self.tier.write(stored, above, block_of(number, num_bytes), 1, lambda: True)

    async def write_all(self, numbers: Sequence[int], num_bytes: int = SIZE) -> list[bool]:
        return await asyncio.gather(*(self.write(number, num_bytes) for number in numbers))

    async def read(self, number: int, num_bytes: int = SIZE) -> bool:
        """Whether the block is here, and right."""
        target = pages(num_bytes)
        checksum = await self.tier.read(key_of(number), 0, target, 1)
        if checksum is None:
            return False
        assert (target == block_of(number, num_bytes)).all(), "the bytes are the block's"
        assert checksum == xxhash.xxh3_64_intdigest(target.data)
        return True

    async def check(self, numbers: Sequence[int], num_bytes: int = SIZE) -> set[int]:
        """Which of some blocks are here, all right; and the books are."""
        there = {number for number in numbers if await self.read(number, num_bytes)}
        assert {key for key, _ in self.told} >= {key_of(number) for number in there}
        self.check_books()
        return there

    def check_books(self) -> None:
        assert self.tier.audit() == []
        assert {(BlockKey(r[:16]), int.from_bytes(r[16:], "little")) for r in self.tier.records()} == set(self.told)
        for status in self.tier.status():
            assert status.used_bytes <= status.capacity_bytes


@asynccontextmanager
async def running(config: FleetConfig, on_change: Callable[[BlockKey, bool], None] = lambda key, present: None):
    """A tier at work. Closed at the end."""
    rig = Rig(config, on_change)
    run = asyncio.ensure_future(rig.tier.run())
    try:
        await rig.tier.opened.wait()
        yield rig
    finally:
        await rig.tier.close()
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)


def play(work: Callable[[], Coroutine[Any, Any, None]], seed: int = 0) -> None:
    """Run a test in virtual time: what takes minutes is done at once."""
    loop = VirtualLoop(seed)  # type: ignore[abstract]

    def main() -> asyncio.Task[None]:
        task = loop.create_task(work())
        wait(loop, task, None)
        return task

    try:
        loop.run(main).result()
    finally:
        loop.close()


async def attempt(action: Awaitable[bool]) -> bool | None:
    """What an action gives, or None if the drive could not."""
    try:
        return await action
    except TierError:
        return None


def disk_bytes(directory: Path) -> int:
    """What the filesystem says that a drive takes."""
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*"))

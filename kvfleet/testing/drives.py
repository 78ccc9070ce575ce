"""Drives that can be slow, fail, hang, take little and rot, for the nodes of a simulated fleet."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import xxhash

from kvfleet.config import KIB, MIB
from kvfleet.core.block import BlockKey
from kvfleet.core.inventory import record_id
from kvfleet.core.placement import NewBlock, Placement
from kvfleet.core.policies import POLICIES
from kvfleet.core.slabs import SlabMap
from kvfleet.errors import CorruptBlockError, TierUnavailableError
from kvfleet.testing.loop import VirtualLoop
from kvfleet.testing.processes import current_process

if TYPE_CHECKING:
    from kvfleet.node.messages import Bytes
    from kvfleet.node.nvme import DriveStatus, Stored

__all__ = ["CAPACITY_BYTES", "Media", "Medium", "SimulatedNvme"]

Mood = Literal["well", "slow", "failing", "hanging"]
CAPACITY_BYTES = MIB + 512 * KIB
_UNIT_BYTES = 128 * KIB
_SLOTS = 256
_TIER = "nvme"


@dataclass
class Kept:
    """A block on a medium."""

    stored: Stored
    parent: BlockKey | None
    data: bytearray
    used: float


@dataclass
class Medium:
    """What outlives a manager, and what its drive is like now.

    Attributes:
        blocks: by key and shard.
        mood: how it answers.
        uses_wanted: how often a block must have been used again to be written; None for none at all.
        rotten: blocks that were damaged.
    """

    blocks: dict[tuple[BlockKey, int], Kept] = field(default_factory=dict)
    mood: Mood = "well"
    uses_wanted: int | None = 0
    rotten: set[bytes] = field(default_factory=set)


class Media:
    """The drives of all hosts, one each."""

    def __init__(self, loop: VirtualLoop, seed: int) -> None:
        self.loop = loop
        self.random = random.Random(f"drives {seed}")
        self.by_host: dict[str, Medium] = {}

    def of(self, host: str) -> Medium:
        """The drive of a host."""
        return self.by_host.setdefault(host, Medium())

    @property
    def rotten(self) -> set[bytes]:
        """Keys of blocks that are damaged."""
        return {key for medium in self.by_host.values() for key in medium.rotten}

    def heal(self) -> None:
        """All are as they should be; what is rotten stays so."""
        for medium in self.by_host.values():
            medium.mood, medium.uses_wanted = "well", 0

    def damage(self, host: str) -> bool:
        """A byte of a block changes. False: there is none."""
        medium = self.of(host)
        if not medium.blocks:
            return False
        kept = medium.blocks[self.random.choice(sorted(medium.blocks))]
        kept.data[self.random.randrange(len(kept.data))] ^= 1 << self.random.randrange(8)
        medium.rotten.add(kept.stored.key)
        return True


class SimulatedNvme:
    """In place of `NvmeTier`: one drive, whose I/O takes virtual time."""

    def __init__(self, media: Media, *_: object) -> None:
        process = current_process()
        assert process is not None, "it is made by a manager"
        self.medium = media.of(process.host)
        self.opened = asyncio.Event()
        self.on_change: Callable[[Stored, bool], None] = lambda _stored, _present: None
        self.is_open = False
        self._loop = media.loop
        self._random = media.random
        self._failed = asyncio.Event()
        self._life = 0
        self._placement = self._new_placement()

    @staticmethod
    def _new_placement() -> Placement:
        return Placement(SlabMap(CAPACITY_BYTES, _UNIT_BYTES, _SLOTS), POLICIES["lru"])

    @property
    def num_working(self) -> int:
        """See `NvmeTier.num_working`."""
        return int(self.is_open)

    @property
    def capacity_bytes(self) -> int:
        """See `NvmeTier.capacity_bytes`."""
        return CAPACITY_BYTES if self.is_open else 0

    async def run(self) -> None:
        """Open the drive, and again when it failed."""
        while True:
            await asyncio.sleep(self._random.expovariate(1 / 0.02))
            if self.medium.mood in {"well", "slow"}:
                await self._open()
                self.opened.set()
                await self._failed.wait()
                await self._take_out()
            self.opened.set()
            await asyncio.sleep(1.0)

    async def _open(self) -> None:
        self._failed.clear()
        self._placement = self._new_placement()
        self.is_open = True
        for record, kept in sorted(self.medium.blocks.items(), key=lambda item: (item[1].used, item[0])):
            block = NewBlock(*record, kept.parent, kept.stored.num_bytes)
            assert len(self._placement.admit([block], kept.used).grants) == 1, "what was there has room"
            self._placement.commit(*record, kept.used)
        await self._tell(self.medium.blocks, present=True)

    async def _take_out(self) -> None:
        self.is_open = False
        self._life += 1
        await self._tell(self.medium.blocks, present=False)

    async def _tell(self, records: Iterable[tuple[BlockKey, int]], *, present: bool) -> None:
        """Tell of blocks that came or went with the drive; writes that end meanwhile tell of their own."""
        for record in list(records):
            kept = self.medium.blocks.get(record)
            if kept is not None:
                self.on_change(kept.stored, present)

    def find(self, key: BlockKey, shard: int) -> Stored | None:
        """What is said of a block that can be read."""
        kept = self.medium.blocks.get((key, shard)) if self.is_open else None
        return None if kept is None else kept.stored

    def last_uses(self) -> dict[bytes, float]:
        """When each record was used last, in seconds before now."""
        blocks = self.medium.blocks if self.is_open else {}
        return {record_id(*record): self._loop.time() - kept.used for record, kept in blocks.items()}

    def where(self, key: BlockKey, shard: int) -> str:
        """The directory of the drive that has a block, "" if none has it."""
        return "" if self.find(key, shard) is None else "/drive"

    def records(self) -> list[bytes]:
        """The ids of all records that can be read."""
        return [record_id(*record) for record in self.medium.blocks] if self.is_open else []

    def admits(self, num_bytes: int, uses: int, expected_uses: float | None = None) -> bool:
        """Whether a block would be taken. One that is not to be used again is not."""
        wanted = self.medium.uses_wanted
        earned = wanted is not None and uses >= wanted and expected_uses != 0
        return self.is_open and earned and num_bytes <= CAPACITY_BYTES

    async def write(
        self, stored: Stored, parent: BlockKey | None, source: Bytes, itemsize: int, check: Callable[[], bool]
    ) -> bool:
        """Write a block, half by half."""
        assert len(source) % itemsize == 0
        key, shard = record = (BlockKey(stored.key), stored.shard)
        if not self.admits(stored.num_bytes, 1 << 30):
            return False
        life, placement = self._life, self._placement
        admission = placement.admit([NewBlock(key, shard, parent, stored.num_bytes)], self._loop.time())
        for gone in admission.evicted:
            self._gone(gone.key, gone.shard)
        if not admission.grants:
            return self.find(key, shard) is not None
        done = False
        try:
            data = await self._halves(source, life)
            done = check()
        finally:
            if not done:
                placement.abort(key, shard)
        if done:
            placement.commit(key, shard, self._loop.time())
            self.medium.blocks[record] = Kept(stored, parent, data, self._loop.time())
            self.medium.rotten.discard(key)
            self.on_change(stored, True)
        return done

    async def _halves(self, source: Bytes, life: int) -> bytearray:
        """What a copy gets of bytes that may change under it."""
        half = len(source) // 2
        await self._take_time(life)
        data = bytearray(source[:half].tobytes())
        await self._take_time(life)
        data += source[half:].tobytes()
        return data

    async def read(self, key: BlockKey, shard: int, target: Bytes, itemsize: int) -> int | None:
        """Read a block, half by half, and verify it."""
        assert len(target) % itemsize == 0
        kept, life, placement = self.medium.blocks.get((key, shard)), self._life, self._placement
        if kept is None or not self.is_open:
            return None
        half = len(target) // 2
        placement.hold(key)
        try:
            await self._take_time(life)
            target[:half] = memoryview(kept.data)[:half]
            await self._take_time(life)
            target[half:] = memoryview(kept.data)[half:]
        finally:
            placement.release(key)
        checksum = xxhash.xxh3_64_intdigest(target.data)
        if checksum != kept.stored.checksum:
            if self.medium.blocks.get((key, shard)) is kept:
                self.drop(key)
            raise CorruptBlockError(_TIER, f"{key.hex()}: checksum mismatch")
        return checksum

    async def _take_time(self, life: int) -> None:
        """What a call costs.

        Raises:
            TierUnavailableError: the drive does not work, or has failed meanwhile.
        """
        mood = self.medium.mood
        seconds = self._random.expovariate(1 / 0.001)
        if mood == "slow":
            seconds += self._random.expovariate(1 / 0.2)
        if mood == "hanging":
            seconds += self._random.choice((1.0, 1.0, 4.0))
        await asyncio.sleep(seconds)
        if mood in {"failing", "hanging"}:
            self._failed.set()
        if life != self._life or self._failed.is_set():
            raise TierUnavailableError(_TIER, "the drive failed")

    def touch(self, key: BlockKey, now: float) -> None:
        """Note a use."""
        self._placement.touch(key, now)

    def drop(self, key: BlockKey) -> None:
        """Forget a block."""
        for gone in self._placement.drop(key):
            self._gone(gone.key, gone.shard)

    def _gone(self, key: BlockKey, shard: int) -> None:
        self.on_change(self.medium.blocks.pop((key, shard)).stored, False)

    def status(self) -> tuple[DriveStatus, ...]:
        """Nothing to tell."""
        return ()

    def audit(self) -> list[str]:
        """What does not add up."""
        if not self.is_open:
            return []
        known = {(record.key, record.shard) for record in self._placement.records()}
        differ = known ^ self.medium.blocks.keys()
        return self._placement.audit() + ([f"{len(differ)} blocks are known or there, not both"] if differ else [])

    async def close(self) -> None:
        """End."""
        self.is_open = False

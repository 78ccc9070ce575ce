"""The tiers of a node behind the plain `Tier`, so that one contract holds for all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from typing_extensions import override

from kvfleet.copying import checksum
from kvfleet.core.block import KEY_BYTES, BlockKey
from kvfleet.core.layout import BlockLayout
from kvfleet.core.placement import NewBlock
from kvfleet.errors import TierFullError
from kvfleet.node.arena import ARENA_FILE, Arena
from kvfleet.node.dram import DramTier, Incoming, record_id
from kvfleet.node.messages import Namespace
from kvfleet.node.shared import SharedTier
from kvfleet.node.tier import RECORD_BYTES, Bytes, Tier

__all__ = ["NAMESPACE_ID", "ArenaBlocks", "SharedBlocks", "namespace_for", "split_record"]

NAMESPACE_ID = bytes(range(16))
_NUM_SHARDS = 1 << 16


def namespace_for(block_bytes: int) -> Namespace:
    """A namespace whose blocks have a given size and any shard."""
    layout = BlockLayout.opaque(
        block_bytes=block_bytes, block_tokens=16, inner_order="contract", num_shards=_NUM_SHARDS
    )
    return Namespace(NAMESPACE_ID, layout.to_json())


def split_record(record: bytes) -> tuple[BlockKey, int]:
    """Key and shard of a record."""
    return BlockKey(record[:KEY_BYTES]), int.from_bytes(record[KEY_BYTES:], "little")


class ArenaBlocks(Tier):
    """The arena with its record table and placement, as the manager has them; reads are an engine's. It evicts."""

    def __init__(self, directory: Path, block_bytes: int, capacity_bytes: int) -> None:
        """Take over the arena in a directory, or make one.

        Args:
            directory: of the arena.
            block_bytes: of each block.
            capacity_bytes: of a new arena.
        """
        super().__init__(block_bytes)
        path = directory / ARENA_FILE
        self._arena = Arena.attach(path) if path.exists() else Arena.create(directory, capacity_bytes)
        self._dram = DramTier(self._arena, directory / "namespaces", lower={}, now=time.monotonic)
        self._namespace = namespace_for(block_bytes)
        self._writer = threading.Lock()

    @property
    @override
    def used_bytes(self) -> int:
        return self._dram.placement.used_bytes

    @property
    @override
    def capacity_bytes(self) -> int:
        return self._arena.capacity_bytes

    @override
    def _write(self, record: bytes, data: Bytes) -> None:
        key, shard = split_record(record)
        with self._writer:
            block = Incoming(NewBlock(key, shard, None, len(data)), 0)
            reserved = self._dram.reserve([block], self._namespace, 0)
            if reserved.refused:
                raise TierFullError("dram", "nothing can be evicted")
            for granted in reserved.granted:
                view = self._arena.slot_view(granted.offset, len(data))
                np.copyto(view, data)
                if not self._dram.commit(granted.slot, granted.generation, checksum(view)):
                    raise TierFullError("dram", "no room for another hint")

    @override
    def _read(self, record: bytes, target: Bytes) -> bool:
        key, shard = split_record(record)
        found = self._arena.records.find(key, shard)
        if found.slots[0] < 0:
            return False
        copy = self._arena.slot_view(int(found.offsets[0]), int(found.lengths[0])).copy()
        there = bool(self._arena.records.unchanged(found.slots, found.generations)[0])
        if there:
            np.copyto(target, copy)
        return there

    @override
    def _delete(self, records: Sequence[bytes]) -> int:
        with self._writer:
            there = {split_record(r)[0] for r in records if self._dram.placement.resident(*split_record(r)) is not None}
            before = self._dram.holdings.digest().count
            for key in there:
                self._dram.drop(key)
            return before - self._dram.holdings.digest().count

    @override
    def _find(self, records: Sequence[bytes]) -> list[bool]:
        return [bool(self._arena.records.find(key, shard).slots[0] >= 0) for key, shard in map(split_record, records)]

    @override
    def _records(self) -> Iterator[bytes]:
        with self._writer:
            return iter([record_id(record.key, record.shard) for record in self._arena.records.live()])

    @override
    def _close(self) -> None:
        self._arena.close()


class SharedBlocks(Tier):
    """The shared tier below any fsspec URL. It has no limit of its own, and neither knows what it holds: it lists."""

    def __init__(self, url: str, block_bytes: int, *, timeout_s: float = 15.0) -> None:
        super().__init__(block_bytes)
        self.shared = SharedTier(url, {}, timeout_s)
        self.shared.check()
        self._namespace = namespace_for(block_bytes)

    @property
    @override
    def used_bytes(self) -> int:
        objects = self.shared._objects
        folders = [f"{NAMESPACE_ID.hex()}/{folder.name}" for folder in objects.children(NAMESPACE_ID.hex())]
        return sum(child.num_bytes for folder in folders for child in objects.children(folder))

    @property
    @override
    def capacity_bytes(self) -> None:
        return None

    @override
    def _write(self, record: bytes, data: Bytes) -> None:
        self.shared.write(self._namespace, _NUM_SHARDS, *split_record(record), data, checksum(data))

    @override
    def _read(self, record: bytes, target: Bytes) -> bool:
        return self.shared.read(self._namespace, _NUM_SHARDS, *split_record(record), target) is not None

    @override
    def _delete(self, records: Sequence[bytes]) -> int:
        there = {record for record, found in zip(records, self._find(records), strict=True) if found}
        for record in there:
            self.shared.delete(NAMESPACE_ID, _NUM_SHARDS, *split_record(record))
        return len(there)

    @override
    def _find(self, records: Sequence[bytes]) -> list[bool]:
        listed = set(self._records())
        return [record in listed for record in records]

    @override
    def _records(self) -> Iterator[bytes]:
        for page in self.shared.list(1 << 20, [NAMESPACE_ID]):
            for start in range(0, len(page), RECORD_BYTES):
                yield page[start : start + RECORD_BYTES]

    @override
    def _close(self) -> None:
        self.shared.close()

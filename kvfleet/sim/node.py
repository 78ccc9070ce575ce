"""One simulated node: its arena and drives, and the writes from one to the other.

What the parts of `kvfleet.node` do with production placement is done here in the same order, at once. What takes time
is told by links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvfleet.core.admission import PREFIX_PART, UNBOUNDED, shared_takes
from kvfleet.core.block import BlockKey
from kvfleet.core.directory import NodeId
from kvfleet.core.hints import NO_HINTS, Hints
from kvfleet.core.holders import Holders
from kvfleet.core.placement import Gate, LowerTier, NewBlock, Transfer
from kvfleet.core.policies import POLICIES
from kvfleet.sim.arena import SHARD, SimArena
from kvfleet.sim.config import SimConfig
from kvfleet.sim.drive import SimDrive
from kvfleet.sim.links import Link
from kvfleet.sim.shared import SimShared

__all__ = ["SimNode", "Stored"]

_RESERVE_FRACTION = 0.25  # of the arena, in one call: as `FleetConfig` has it
_SHARD = SHARD.to_bytes(2, "little")


@dataclass(slots=True)
class Stored:
    """What became of a store.

    Attributes:
        stored: blocks written.
        refused: that found no room, or were not worth it.
        calls: to the manager.
    """

    stored: int = 0
    refused: tuple[BlockKey, ...] = ()
    calls: int = 0


class SimNode:
    """A node.

    Attributes:
        node_id: as the directory knows it.
        arena: its memory.
        drive: its drives, or None.
        holders: whom it asks first.
        out: its network, outwards.
        into: inwards.
        memory: the speed of copies out of the arena; they do not queue.
        objects: reads of the shared tier.
    """

    def __init__(self, number: int, config: SimConfig, shared: SimShared | None) -> None:
        policy, size = POLICIES[config.policy], config.block_bytes
        self.node_id = NodeId(f"{number:032x}")
        self.drive = SimDrive(config.drives, size) if config.drives.max_bytes else None
        self._shared = shared
        self._now = 0.0
        gates: dict[LowerTier, Gate] = {}
        if self.drive is not None:
            gates["nvme"] = self._drive_takes
        if shared is not None:
            gates["shared"] = shared_takes
        self._lower = tuple(gates)
        self.arena = SimArena(config.dram_bytes, size, policy, gates)
        below = 0 if self.drive is None else int(PREFIX_PART * self.drive.capacity_bytes)
        if shared is not None:
            below = max(below, config.shared_bytes_max or UNBOUNDED)
        self._prefix_blocks_max = max(self.arena.capacity_bytes, below) // size
        self._batch_blocks = max(1, int(self.arena.capacity_bytes * _RESERVE_FRACTION) // size)
        self.holders = Holders(self.node_id)
        self._changes: dict[bytes, bool] = {}  # by record, as `kvfleet.node.holdings` has them
        self.out, self.into = Link(config.network), Link(config.network)
        self.memory = config.dram
        self.objects = Link(config.shared) if config.shared is not None else None
        self._join()

    def _join(self) -> None:
        """Have all told of what comes and goes that count on it."""
        arena, drive = self.arena, self.drive
        if drive is None:
            arena.on_change = self._changed
            return

        def in_arena(key: BlockKey, present: bool) -> None:
            if not drive.has(key):
                self._changed(key, present)

        def on_drive(key: BlockKey, present: bool) -> None:
            if present:
                arena.placement.saved(key, SHARD, "nvme")
            else:
                arena.placement.lost(key, SHARD, "nvme", again=False)
            if not arena.has(key):
                self._changed(key, present)

        arena.on_change, drive.on_change, arena.on_use = in_arena, on_drive, drive.touch

    def _changed(self, key: BlockKey, present: bool) -> None:
        """A block came to this node, or left it."""
        record = key + _SHARD
        if self._changes.pop(record, present) == present:  # else it came and went: no news
            self._changes[record] = present

    def _drive_takes(self, num_bytes: int, uses: int, expected_uses: float | None) -> bool:
        assert self.drive is not None
        return self.drive.takes(num_bytes, uses, expected_uses, self._now)

    def stores(self, key: BlockKey) -> bool:
        """Whether a block can be read here, from the arena or the drives."""
        return self.arena.has(key) or (self.drive is not None and self.drive.has(key))

    def source(self, key: BlockKey) -> str | None:
        """Where a block can be read from here, as the planner names it; None if it is not here."""
        if self.arena.has(key):
            return "dram"
        return "nvme" if self.drive is not None and self.drive.has(key) else None

    # room

    def bring(self, block: NewBlock, depth: int, now: float) -> bool:
        """Have a block that arrives in the arena, held once. False: there is no room."""
        granted, _ = self._reserve([block], depth, now, None)
        if not granted:
            return False
        self.arena.commit(block.key, now, brought=True)
        self.arena.placement.hold(block.key)
        return True

    def serve(self, key: BlockKey, parent: BlockKey | None, depth: int, now: float) -> bool:
        """Another node copies a block that is here, from the arena: what is on the drives is brought there first."""
        if not self.arena.has(key):
            block = NewBlock(key, SHARD, parent, self.arena.block_bytes)
            if self.drive is None or not self.drive.has(key) or not self.bring(block, depth, now):
                return False
            self.arena.placement.release(key)
            self.drive.touch(key, now)
            self.arena.placement.saved(key, SHARD, "nvme")
        self.arena.read((key,), now)
        return True

    def store(self, blocks: Sequence[NewBlock], depth: int, now: float, hints: Hints = NO_HINTS) -> Stored:
        """A client stores consecutive blocks of a prefix, batch by batch; it stops where there is no room.

        Args:
            blocks: of it.
            depth: of the first.
            now: seconds.
            hints: of who stores them.
        """
        done, first = Stored(), 0
        while first < len(blocks):
            batch = blocks[first : first + self._batch_blocks]
            if all(self.arena.has(block.key) for block in batch):
                first += len(batch)
                continue
            done.calls += 1
            fit = max(0, self._prefix_blocks_max - depth - first)  # as `kvfleet.node.writers` has it
            granted, num_refused = self._reserve(batch[:fit], depth + first, now, hints)
            if granted:
                done.calls += 1
                for key in granted:
                    self.arena.commit(key, now, brought=False)
                done.stored += len(granted)
                if num_refused:  # there may be room now
                    first += next(i for i, block in enumerate(batch) if not self.arena.has(block.key))
                    continue
            refused = [block.key for block in batch if not self.arena.has(block.key)]
            done.refused += tuple(refused)
            if refused:
                break
            first += len(batch)
        return done

    def _reserve(
        self, blocks: Sequence[NewBlock], depth: int, now: float, hints: Hints | None
    ) -> tuple[dict[BlockKey, None], int]:
        """Slots for blocks that are not here, moving others down if that makes room.

        A load, which has no hints, has blocks in use leave for it.

        Returns:
            The keys of those that got one, and how many found no room.
        """
        self._now = now
        got: dict[BlockKey, None] = {}
        left = list(enumerate(blocks, depth))
        while left:
            admission = self.arena.reserve([block for _, block in left], now, hints)
            for grant in admission.grants:
                at, block = left[grant.index]
                got[block.key] = None
                self.arena.depths[block.key] = at
            left = [left[index] for index in admission.refused]
            if left and admission.transfers:
                self._move(admission.transfers, now)
            elif left and (hints is not None or not self.arena.give_way()):
                break
        return got, len(left)

    # down

    def save(self, now: float) -> None:
        """Write behind what is to be written."""
        self._now = now
        for tier in self._lower:
            while transfers := self.arena.placement.next_saves(tier, UNBOUNDED):
                self._move(transfers, now)

    def _move(self, transfers: Sequence[Transfer], now: float) -> None:
        placement = self.arena.placement
        down = [transfer for transfer in transfers if transfer.tier == "nvme"]
        if self.drive is not None and down:
            written = self.drive.write([self._block(transfer) for transfer in down], now)
            for transfer in down:
                placement.complete(transfer, ok=transfer.key in written, again=False)
        for transfer in transfers:
            if transfer.tier == "shared":
                assert self._shared is not None
                self._shared.write(*self._block(transfer), now)
                placement.complete(transfer, ok=True)

    def _block(self, transfer: Transfer) -> tuple[NewBlock, int]:
        """A block that goes down, and its depth."""
        placement, key = self.arena.placement, transfer.key
        return NewBlock(key, SHARD, placement.parent(key), transfer.num_bytes), self.arena.depths[key]

    def take_changes(self) -> tuple[bytes, bytes]:
        """Packed records that came to this node, and that left it, since the last time."""
        changes, self._changes = self._changes, {}
        added = b"".join(record for record, present in changes.items() if present)
        return added, b"".join(record for record, present in changes.items() if not present)

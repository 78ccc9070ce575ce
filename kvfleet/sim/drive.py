"""The drives of a simulated node: production placement, write budget and gate."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvfleet.core.block import BlockKey
from kvfleet.core.drives import Load, takes
from kvfleet.core.placement import NewBlock, Placement
from kvfleet.core.policies import POLICIES
from kvfleet.core.slabs import SlabMap
from kvfleet.core.speeds import Speed
from kvfleet.core.writebudget import Moment, WriteBudget
from kvfleet.node.driveformat import plan_drive
from kvfleet.sim.arena import SHARD
from kvfleet.sim.config import SimDrives
from kvfleet.sim.links import Link

__all__ = ["SimDrive"]

_START = Moment("simulated", 0.0, 0.0)
_EARLIER_BY_DEPTH_S = 1e-6  # as `DriveWatch` has it


class SimDrive:
    """What `kvfleet.node.nvme` and the drives below it do, without the bytes. All drives of a node count as one.

    Args:
        config: of the drives.
        block_bytes: of each block.

    Attributes:
        capacity_bytes: of the slots.
        placement: the production code.
        read: what reads go over.
        written_bytes: so far.
        on_change: told of each block that came or went.
    """

    def __init__(self, config: SimDrives, block_bytes: int) -> None:
        plan = plan_drive(config.max_bytes)
        capacity, size = plan.num_units * plan.unit_bytes, SlabMap.slot_size(block_bytes)
        self._slabs = SlabMap(capacity, plan.unit_bytes, min(plan.records_max, capacity // size))
        self.capacity_bytes = capacity
        self._size = size
        self._queue_bytes_max = config.queue_bytes_max
        self._budget = WriteBudget(config.rated_bytes or config.max_bytes, config.dwpd, _START)
        self._writes = Link(Speed(0.0, config.write_bytes_per_s))
        self._depths: dict[BlockKey, int] = {}
        self.placement = Placement(self._slabs, POLICIES["lru"])  # as in `kvfleet.node.drivebooks`
        self.read = Link(config.read)
        self.written_bytes = 0
        self.on_change: Callable[[BlockKey, bool], None] = lambda _key, _present: None

    def has(self, key: BlockKey) -> bool:
        """Whether a block can be read."""
        return key in self._depths

    def load(self, now: float) -> Load:
        """What the drives have to do, as the gate asks."""
        slabs, queued = self._slabs, self._writes.queued_bytes(now)
        free = slabs.capacity_bytes - slabs.used_bytes
        return Load(slabs.capacity_bytes, free, queued, self._budget.pressure(now), self.written_bytes)

    def takes(self, num_bytes: int, uses: int, expected_uses: float | None, now: float) -> bool:
        """The gate: whether a block would be written now that was used so often."""
        return takes(self.load(now), num_bytes, uses, self._queue_bytes_max, expected_uses=expected_uses)

    def touch(self, key: BlockKey, now: float) -> None:
        """Note a use of a block; one that is not here is ignored."""
        depth = self._depths.get(key)
        if depth is not None:
            self.placement.touch(key, max(0.0, now - _EARLIER_BY_DEPTH_S * depth))

    def write(self, blocks: Sequence[tuple[NewBlock, int]], now: float) -> set[BlockKey]:
        """Write blocks, each with its depth, as far as the budget and the room go. Returns those that are here now."""
        depths = {block.key: depth for block, depth in blocks if block.key not in self._depths}
        wanted: list[NewBlock] = []
        for block, _ in blocks:
            if block.key in depths and self._budget.allows((len(wanted) + 1) * self._size, now):
                wanted.append(NewBlock(block.key, SHARD, block.parent, self._size))
        admission = self.placement.admit(wanted, now)
        for gone in admission.evicted:
            del self._depths[gone.key]
            self.on_change(gone.key, False)
        for grant in admission.grants:
            key = wanted[grant.index].key
            self._budget.charge(self._size, now)
            self._writes.take(now, self._size)
            self.written_bytes += self._size
            self.placement.commit(key, SHARD, now)
            self._depths[key] = depths[key]
            self.on_change(key, True)
        return {block.key for block, _ in blocks if block.key in self._depths}

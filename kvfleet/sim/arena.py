"""The memory of a simulated node: production placement, and what readers leave in the record table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvfleet.core.block import BlockKey
from kvfleet.core.hints import NO_HINTS, Hints
from kvfleet.core.placement import Admission, Evicted, Gate, LowerTier, NewBlock, Placement
from kvfleet.core.policies import PolicyFactory
from kvfleet.core.slabs import SlabMap
from kvfleet.node.arenafile import Geometry

__all__ = ["SHARD", "SimArena"]

SHARD = 0  # a simulated block has one


class SimArena:
    """What `kvfleet.node.dram` does, without the bytes.

    Args:
        num_bytes: of the arena.
        block_bytes: of each block.
        policy: of the placement.
        lower: the gates of the tiers below.

    Attributes:
        num_slots: blocks that there is room for.
        placement: the production code.
        has: whether a block can be read.
        depths: of the blocks that are here or coming: their indexes in their prefixes.
        on_change: told of each block that came or went.
        on_use: told of each use that readers have left word of, with its time.
    """

    def __init__(
        self, num_bytes: int, block_bytes: int, policy: PolicyFactory, lower: Mapping[LowerTier, Gate]
    ) -> None:
        plan = Geometry.plan(num_bytes)
        self.num_slots = min(plan.num_records, plan.capacity_bytes // SlabMap.slot_size(block_bytes))
        slabs = SlabMap(plan.capacity_bytes, plan.unit_bytes, self.num_slots)
        self.block_bytes = block_bytes
        self.capacity_bytes = plan.capacity_bytes
        self.placement = Placement(slabs, policy, lower=lower)
        self.on_change: Callable[[BlockKey, bool], None] = lambda _key, _present: None
        self.on_use: Callable[[BlockKey, float], None] = lambda _key, _now: None
        self.depths: dict[BlockKey, int] = {}
        self._slots: dict[BlockKey, int] = {}  # of blocks that can be read
        self.has: Callable[[BlockKey], bool] = self._slots.__contains__
        self._accesses: dict[int, tuple[float, int]] = {}  # time and depth by slot, not yet told to placement

    def read(self, keys: Sequence[BlockKey], now: float) -> None:
        """A reader copies blocks that are here; placement learns of it with the next reservation."""
        for key in keys:
            assert key in self._slots, "what is read is here"
            self._accesses[self._slots[key]] = now, self.depths[key]

    def note_accesses(self) -> None:
        """Tell placement what readers did since the last time, oldest first; of what was read at once parents first."""
        accesses, self._accesses = self._accesses, {}
        for slot, (now, _) in sorted(accesses.items(), key=lambda access: (access[1], access[0])):
            key = self.placement.touch_slot(slot, now)
            if key is not None:
                self.on_use(key, now)

    def reserve(self, blocks: Sequence[NewBlock], now: float, hints: Hints | None) -> Admission:
        """Slots for blocks of one prefix, evicting what must go for them.

        Args:
            blocks: in order.
            now: seconds.
            hints: of who stores them; None for a load, which lands in any case.
        """
        self.note_accesses()
        admission = self.placement.admit(blocks, now, hints=hints or NO_HINTS, optional=hints is not None)
        self._gone(admission.evicted)
        return admission

    def commit(self, key: BlockKey, now: float, *, brought: bool) -> None:
        """A block is written. `brought`: by a load."""
        self.placement.commit(key, SHARD, now, brought=brought)
        slot = self.placement.resident(key, SHARD)
        assert slot is not None, "what is committed is here"
        self._slots[key] = slot
        self.on_change(key, True)

    def give_way(self) -> bool:
        """See `Placement.give_way`."""
        evicted = self.placement.give_way(self.block_bytes)
        self._gone(evicted)
        return bool(evicted)

    def _gone(self, evicted: Sequence[Evicted]) -> None:
        for gone in evicted:
            del self.depths[gone.key], self._slots[gone.key]
            self.on_change(gone.key, False)

"""Which records still need a copy in which lower tier, and which copies are being made."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvfleet.core.admission import Counters, Gate, LowerTier, Transfer
from kvfleet.core.block import BlockKey
from kvfleet.core.residents import Record, Residents

__all__ = ["Saves"]

_READS_MAX = 8  # of one load at once, about


@dataclass(slots=True)
class _Lower:
    """A lower tier: whether it takes a block, what waits for its copy there, and how many copies are being made."""

    gate: Gate
    queue: OrderedDict[tuple[BlockKey, int], None] = field(default_factory=OrderedDict)
    in_transfer: int = 0


class Saves:
    """For each lower tier the queue of write-behind, oldest commit first, and the transfers given out.

    What a tier's gate refuses leaves its queue until the block is used again. What a load brought is written to the
    shared tier only if it is used once more than for that load: where it came from, it was saved, or will be.
    """

    def __init__(self, residents: Residents, counters: Counters, lower: Mapping[LowerTier, Gate]) -> None:
        """Start with nothing queued; `lower` is in order of demotion."""
        self._residents = residents
        self._counters = counters
        self._lower = {tier: _Lower(gate) for tier, gate in lower.items()}
        self._last_serial = 0

    @property
    def in_transfer(self) -> int:
        """Transfers given out and not completed."""
        return sum(lower.in_transfer for lower in self._lower.values())

    def num_in_transfer(self, tier: LowerTier) -> int:
        """Those to one tier; 0 if it is not there."""
        lower = self._lower.get(tier)
        return 0 if lower is None else lower.in_transfer

    def num_unsaved(self, tier: LowerTier) -> int:
        """Records that are queued for a tier, or being copied to it."""
        lower = self._lower.get(tier)
        return 0 if lower is None else len(lower.queue) + lower.in_transfer

    def unsaved(self, tiers: Collection[LowerTier]) -> tuple[int, int]:
        """How many committed records have no copy in any of some tiers, and their bytes."""
        sizes = [
            self._residents.blocks[key].num_bytes
            for key, _, record in self._residents.records()
            if record.committed and not any(tier in record.saved for tier in tiers)
        ]
        return len(sizes), sum(sizes)

    def waiting(self, postponed: Iterable[tuple[BlockKey, int]]) -> int:
        """How many records have no copy in any tier, and are to have one.

        Args:
            postponed: records that are in no queue because another try comes later.
        """
        wanted = {*postponed}.union(*(lower.queue for lower in self._lower.values()))
        records = {(key, shard): record for key, shard, record in self._residents.records() if not record.saved}
        return sum(bool(record.transfers) or name in wanted for name, record in records.items())

    def is_saved(self, key: BlockKey, shard: int, tier: LowerTier) -> bool:
        """Whether a record is here and has a copy in a tier."""
        record = self._residents.record(key, shard)
        return record is not None and tier in record.saved

    def refuge(self, key: BlockKey, record: Record) -> LowerTier | None:
        """Where a record has to be copied to before it goes; None if it can go as it is."""
        if not record.saved:
            for tier, lower in self._lower.items():
                if tier not in record.given_up and self._takes(lower, key):
                    return tier
        return None

    def takes_new(self, num_bytes: int) -> bool:
        """Whether a tier would take a block of which nothing is known yet."""
        return any(lower.gate(num_bytes, 0, None) for lower in self._lower.values())

    def _takes(self, lower: _Lower, key: BlockKey) -> bool:
        block = self._residents.blocks[key]
        return lower.gate(block.num_bytes, block.uses, self._residents.policy_of(key).expected_uses(key))

    def want(self, key: BlockKey) -> None:
        """Queue a block's committed records for write-behind to each tier that has no copy of them, if it is here."""
        block = self._residents.blocks.get(key)
        if block is not None:
            for tier in self._lower:
                for shard in block.records:
                    self._want(key, shard, tier)

    def used(self, key: BlockKey) -> None:
        """A block was used: that has it saved where it is not, unless a read was due."""
        block = self._residents.blocks.get(key)
        if block is not None and block.read_due:
            block.read_due = False
        else:
            self.want(key)

    def brought(self, key: BlockKey) -> None:
        """A load has brought a block: for the node's own drives it is new, the shared tier waits for another use."""
        block = self._residents.blocks[key]
        block.read_due = block.awaited = True
        for shard in block.records if "nvme" in self._lower else ():
            self._want(key, shard, "nvme")
            self._order(self._lower["nvme"].queue, key)

    def _order(self, queue: OrderedDict[tuple[BlockKey, int], None], key: BlockKey) -> None:
        """Queue what builds on a block that has just come behind it: reads of one load end in any order.

        A block that came to a drive before its parent would be an orphan there, and the first to go for it.
        """
        before = {key}
        for other, shard in reversed([*islice(reversed(queue), _READS_MAX)]):
            if self._residents.blocks[other].parent in before and other not in before:
                queue.move_to_end((other, shard))
                before.add(other)

    def requeue(self, tier: LowerTier, *, every: bool) -> None:
        """Queue all that has no copy in a tier, also what its gate refused or what could not be demoted before.

        `every`: also those of which a read is due. They were in no queue before.
        """
        for key, shard, record in self._residents.records():
            record.given_up = tuple(other for other in record.given_up if other != tier)
            if every or not self._residents.blocks[key].read_due:
                self._want(key, shard, tier)

    def _want(self, key: BlockKey, shard: int, tier: LowerTier) -> None:
        if self._residents.blocks[key].records[shard].wants(tier):
            self._lower[tier].queue[key, shard] = None

    def saved(self, key: BlockKey, shard: int, tier: LowerTier) -> None:
        """A tier has a copy of a record; one that is not here is ignored."""
        record = self._residents.record(key, shard)
        if record is not None:
            if tier not in record.saved:
                record.saved += (tier,)
            self._lower[tier].queue.pop((key, shard), None)

    def lost(self, key: BlockKey, shard: int, tier: LowerTier, *, again: bool) -> None:
        """A tier has no copy of a record any more; one that is not here is ignored. `again`: queue it again."""
        record = self._residents.record(key, shard)
        if record is not None:
            record.saved = tuple(other for other in record.saved if other != tier)
            if again:
                self._want(key, shard, tier)
            else:
                self._residents.blocks[key].read_due = True

    def next(self, tier: LowerTier, max_bytes: int) -> list[Transfer]:
        """Write-behind to be done next: at most `max_bytes`, but at least one record if the tier takes any."""
        transfers: list[Transfer] = []
        lower = self._lower.get(tier)
        while lower is not None and lower.queue:
            key, shard = next(iter(lower.queue))
            block = self._residents.blocks[key]
            if transfers and block.num_bytes > max_bytes:
                break
            if self._takes(lower, key):
                max_bytes -= block.num_bytes
                transfers.append(self.begin("save", tier, key, shard))
            else:
                del lower.queue[key, shard]
        return transfers

    def rank(self, tier: LowerTier, heat: npt.NDArray[np.float64]) -> None:
        """Queue the dearest first instead of the oldest.

        Args:
            tier: whose queue.
            heat: of each slot.
        """
        blocks, lower = self._residents.blocks, self._lower.get(tier)
        if lower is None:
            return
        records = {item: float(heat[blocks[item[0]].records[item[1]].slot]) for item in lower.queue}
        lower.queue = OrderedDict.fromkeys(sorted(records, key=lambda item: (-records[item], item)))

    def begin(self, kind: Literal["save", "demote"], tier: LowerTier, key: BlockKey, shard: int) -> Transfer:
        """Give out a transfer of a committed record; its block stays until the end of it."""
        block, lower = self._residents.blocks[key], self._lower[tier]
        record = block.records[shard]
        assert record.committed, "only what is written can be copied"
        assert record.wants(tier), "one copy of a record in a tier"
        lower.queue.pop((key, shard), None)
        lower.in_transfer += 1
        self._last_serial += 1
        transfer = Transfer(kind, tier, key, shard, record.slot, block.num_bytes, self._last_serial)
        record.transfers += (transfer,)
        block.busy += 1
        return transfer

    def complete(self, transfer: Transfer, *, ok: bool, again: bool) -> None:
        """See `Placement.complete`."""
        key, shard, tier = transfer.key, transfer.shard, transfer.tier
        record = self._residents.record(key, shard)
        if record is None or transfer not in record.transfers:
            return
        record.transfers = tuple(other for other in record.transfers if other != transfer)
        self._residents.blocks[key].busy -= 1
        self._lower[tier].in_transfer -= 1
        demoted = transfer.kind == "demote"
        if ok:
            self.saved(key, shard, tier)
            self._counters.demoted += demoted
            self._counters.saved += not demoted
            return
        self._counters.transfers_failed += 1
        if demoted and tier not in (*record.saved, *record.given_up):
            record.given_up += (tier,)
        if again:
            self._want(key, shard, tier)

    def forget(self, key: BlockKey, shard: int, record: Record) -> None:
        """A record has left: it is not queued any more, and transfers of it are void."""
        for lower in self._lower.values():
            lower.queue.pop((key, shard), None)
        for transfer in record.transfers:
            self._lower[transfer.tier].in_transfer -= 1

    def audit(self) -> list[str]:
        """What does not add up; nothing, unless there is a bug."""
        findings = []
        records = {(key, shard): record for key, shard, record in self._residents.records()}
        for tier, lower in self._lower.items():
            transfers = sum(transfer.tier == tier for record in records.values() for transfer in record.transfers)
            if transfers != lower.in_transfer:
                findings.append(f"{transfers} records in transfer to {tier}, {lower.in_transfer} counted")
            for key, shard in lower.queue:
                record = records.get((key, shard))
                if record is None or not record.wants(tier):
                    findings.append(f"{key.hex()}.{shard}: queued for {tier}, but not to be saved")
        return findings

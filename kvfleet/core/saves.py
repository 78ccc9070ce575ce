"""Which records still need a copy in the tier below, and which copies are being made."""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvfleet.core.admission import Counters, Transfer
from kvfleet.core.block import BlockKey
from kvfleet.core.residents import Record, Residents

__all__ = ["Saves"]


class Saves:
    """The queue of write-behind, oldest commit first, and the transfers given out."""

    def __init__(self, residents: Residents, counters: Counters, *, lower_tier: bool) -> None:
        self.in_transfer = 0
        self._residents = residents
        self._counters = counters
        self._lower_tier = lower_tier
        self._queue: OrderedDict[tuple[BlockKey, int], None] = OrderedDict()
        self._last_serial = 0

    @property
    def num_unsaved(self) -> int:
        """Records that are queued or being copied."""
        return len(self._queue) + self.in_transfer

    def needed(self, record: Record) -> bool:
        """Whether a record must not go without a copy being tried."""
        return self._lower_tier and not record.saved and not record.given_up

    def want(self, key: BlockKey, shard: int) -> None:
        """Queue a committed record for write-behind, if it has no copy below."""
        record = self._residents.blocks[key].records[shard]
        if self._lower_tier and not record.saved:
            self._queue[key, shard] = None

    def saved(self, key: BlockKey, shard: int) -> None:
        """The tier below has a copy of a record; one that is not here is ignored."""
        record = self._residents.record(key, shard)
        if record is not None:
            record.saved = True
            self._queue.pop((key, shard), None)

    def next(self, max_bytes: int) -> list[Transfer]:
        """Write-behind to be done next: at most `max_bytes`, but at least one record if any is queued."""
        transfers: list[Transfer] = []
        while self._queue:
            key, shard = next(iter(self._queue))
            max_bytes -= self._residents.blocks[key].num_bytes
            if transfers and max_bytes < 0:
                break
            transfers.append(self.begin("save", key, shard))
        return transfers

    def rank(self, heat: npt.NDArray[np.float64]) -> None:
        """Queue the dearest first instead of the oldest.

        Args:
            heat: of each slot.
        """
        blocks = self._residents.blocks
        records = {item: float(heat[blocks[item[0]].records[item[1]].slot]) for item in self._queue}
        self._queue = OrderedDict.fromkeys(sorted(records, key=lambda item: (-records[item], item)))

    def begin(self, kind: Literal["save", "demote"], key: BlockKey, shard: int) -> Transfer:
        """Give out a transfer of a committed record; its block stays until the end of it."""
        block = self._residents.blocks[key]
        record = block.records[shard]
        assert record.committed, "only what is written can be copied"
        assert not record.transfer, "one transfer of a record at a time"
        self._queue.pop((key, shard), None)
        self._last_serial += 1
        self.in_transfer += 1
        record.transfer = self._last_serial
        block.busy += 1
        return Transfer(kind, key, shard, record.slot, block.num_bytes, record.transfer)

    def complete(self, transfer: Transfer, *, ok: bool) -> None:
        """Tell the outcome of a transfer. One whose record was dropped meanwhile is void.

        After it a demoted block can be evicted at once: one that could not be copied goes without.
        """
        record = self._residents.record(transfer.key, transfer.shard)
        if record is None or record.transfer != transfer.serial:
            return
        record.transfer = 0
        self._residents.blocks[transfer.key].busy -= 1
        self.in_transfer -= 1
        demoted = transfer.kind == "demote"
        if ok:
            record.saved = True
            self._counters.demoted += demoted
            self._counters.saved += not demoted
        else:
            record.given_up = record.given_up or (demoted and not record.saved)
            self._counters.transfers_failed += 1
            self.want(transfer.key, transfer.shard)

    def forget(self, key: BlockKey, shard: int, record: Record) -> None:
        """A record has left: it is not queued any more, and a transfer of it is void."""
        self._queue.pop((key, shard), None)
        self.in_transfer -= record.transfer != 0

    def audit(self) -> list[str]:
        """What does not add up; nothing, unless there is a bug."""
        findings = []
        records = {(key, shard): record for key, shard, record in self._residents.records()}
        transfers = sum(record.transfer != 0 for record in records.values())
        if transfers != self.in_transfer:
            findings.append(f"{transfers} records in transfer, {self.in_transfer} counted")
        for key, shard in self._queue:
            record = records.get((key, shard))
            if record is None or record.saved or record.transfer or not record.committed:
                findings.append(f"{key.hex()}.{shard}: queued, but not to be saved")
        return findings

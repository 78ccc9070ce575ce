"""The shared tier of a simulated fleet: production catalog, no objects."""

from __future__ import annotations

import numpy as np

from kvfleet.core.block import KEY_BYTES, BlockKey
from kvfleet.core.catalog import Catalog
from kvfleet.core.directory import Directory
from kvfleet.core.inventory import record_id, split_records
from kvfleet.core.objectrows import SharedObject, record_ids, rows_of
from kvfleet.core.placement import NewBlock
from kvfleet.sim.arena import SHARD

__all__ = ["SimShared"]

_NAMESPACE = bytes(16)
_ROWS_MAX = 20_000_000
_LATELY = 1024  # rows that the catalog is told at once
_MARGIN = 32  # as the keeper of a real catalog has it: a part of the limit that is freed at once
_MARK_MAX = 1 << 20


class SimShared:
    """What is written once for the whole fleet.

    Args:
        directory: knows what is there.
        bytes_max: what may be there; None for no limit.

    Attributes:
        added: packed records that the directory has to be told of.
        written_bytes: so far.
        deleted_bytes: of these.
    """

    def __init__(self, directory: Directory, bytes_max: int | None) -> None:
        self._directory = directory
        self._bytes_max = bytes_max
        self._catalog = Catalog(_ROWS_MAX)
        self._rows: list[bytes] = []
        self._untold_bytes = 0  # of what was stored, in those rows
        self.added: list[bytes] = []
        self.written_bytes = 0
        self.deleted_bytes = 0

    def write(self, block: NewBlock, depth: int, now: float) -> None:
        """A node saves a block, unless it is there."""
        record = record_id(block.key, SHARD)
        if self._directory.shared_among(record):
            return
        self.written_bytes += block.num_bytes
        self.added.append(record)
        self._untold_bytes += block.num_bytes
        self._tell(block, depth, 1 + int(1000 * now), now)

    def used(self, block: NewBlock, depth: int, now: float) -> None:
        """A node has read a block."""
        self._tell(block, depth, 0, now)

    def _tell(self, block: NewBlock, depth: int, stored_at: int, now: float) -> None:
        if self._bytes_max is not None:
            parent = int.from_bytes((block.parent or b"")[:4], "little")
            thing = SharedObject(_NAMESPACE, block.key, SHARD, 1, block.num_bytes, depth, parent)
            self._rows.append(thing.row(stored_at=stored_at, last_used=1 + int(1000 * now)))

    def trim(self) -> list[BlockKey]:
        """The keeper looks: blocks that have to go, as there are too many."""
        if self._bytes_max is None or not self._rows:
            return []
        if self._catalog.num_bytes + self._untold_bytes <= self._bytes_max and len(self._rows) < _LATELY:
            return []
        self._catalog.apply(rows_of(b"".join(self._rows)))
        self._rows.clear()
        self._untold_bytes = 0
        if self._catalog.num_bytes <= self._bytes_max:
            return []
        self._catalog.shrink(self._bytes_max - self._bytes_max // _MARGIN, _MARK_MAX)
        doomed = self._catalog.deleting(_MARK_MAX)
        self.deleted_bytes += int(doomed["bytes"].astype(np.int64).sum())
        self._catalog.deleted(doomed)
        return [BlockKey(record[:KEY_BYTES]) for record in split_records(record_ids(doomed))]

"""What the keeper of the shared tier's catalog works with: the catalog, and the manifests it is written down in."""

from __future__ import annotations

import logging
from itertools import islice

import numpy as np
from typing_extensions import Self

from kvfleet.config import FleetConfig
from kvfleet.core.catalog import Catalog
from kvfleet.core.inventory import split_records
from kvfleet.core.objectrows import ROW, ObjectRows, record_ids
from kvfleet.node.listing import listed_rows
from kvfleet.node.manifests import ManifestReader
from kvfleet.node.manifestwriter import APPEND_ROWS_MAX, ManifestWriter
from kvfleet.node.shared import SharedTier

__all__ = ["CatalogBook"]

_log = logging.getLogger(__name__)
_ANNOUNCED_MAX = 8192


class CatalogBook:
    """A catalog that was read, and what of it is not written down.

    Threads: one at a time.

    Attributes:
        catalog: all that is known.
        listed: whether the tier had to be listed.
        changes: rows that are in no manifest yet, oldest first.
        life: of the directory whose mailbox is read.
        written: position in it up to which rows are in a manifest.
        position: of the last row read.
        stored_bytes: of objects that were stored since the last append, and between that and the one before.
        told: whether a directory was told what is there.
        appended_at: seconds, by the loop's clock.
        announced: the last records that were said to be gone, or to go, also to an earlier keeper.
    """

    def __init__(self, writer: ManifestWriter, catalog: Catalog) -> None:
        self._writer = writer
        self.catalog = catalog
        self.listed = False
        self.changes: list[ObjectRows] = []
        self.life = 0
        self.written = 0
        self.position = 0
        self.stored_bytes = [0, 0]
        self.told = False
        self.appended_at = float("-inf")
        self.announced: dict[bytes, None] = {}

    @classmethod
    def open(cls, shared: SharedTier, config: FleetConfig) -> Self:
        """Take over from the keeper before, and read what it has written; list the tier if that is not all.

        Blocking: until all is read.

        Raises:
            TierUnavailableError: the storage does not answer.
            StaleEpochError: somebody else has taken over meanwhile.
        """
        writer = ManifestWriter(shared.objects, config.listing_records_max)
        catalog = Catalog(config.listing_records_max)
        reader = ManifestReader(shared.objects)
        book = cls(writer, catalog)
        for rows in reader.read():
            catalog.apply(rows)
            book.announce(rows[(rows["bytes"] == 0) | (rows["deleting"] == 1)])
        if not writer.has_snapshot or reader.skipped.total():
            _log.info("the shared tier is listed: %s", dict(reader.skipped) or "there are no manifests")
            book._list(shared, config.listing_records_max)
        _log.info("the shared tier has %d objects, %d bytes", catalog.num_rows, catalog.num_bytes)
        return book

    def _list(self, shared: SharedTier, rows_max: int) -> None:
        self.listed = True
        for rows in listed_rows(shared, rows_max):
            self.changes.append(self.catalog.apply(self.catalog.unknown(rows)))
            if self.num_changes >= APPEND_ROWS_MAX:
                self.append()
        self.append()
        self._writer.compact(doubting=False)

    def announce(self, rows: ObjectRows) -> None:
        """Some objects are gone, or go: what is said of them from now on may be older than that."""
        self.announced.update(dict.fromkeys(split_records(record_ids(rows))))
        for record in list(islice(self.announced, max(0, len(self.announced) - _ANNOUNCED_MAX))):
            del self.announced[record]

    @property
    def num_changes(self) -> int:
        """How many rows are in no manifest."""
        return sum(map(len, self.changes))

    def append(self) -> None:
        """Write down all changes so far.

        Raises:
            StaleEpochError: there is a newer keeper; nothing was written.
            TierUnavailableError: some changes are not written down, and still among them.
        """
        rows = np.concatenate([np.empty(0, ROW), *self.changes])
        while len(rows):
            self._writer.append(rows[:APPEND_ROWS_MAX])
            rows = rows[APPEND_ROWS_MAX:]
            self.changes = [rows]
        self.changes = []

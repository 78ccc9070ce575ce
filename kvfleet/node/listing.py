"""Finds out what the shared tier holds where no manifest tells it."""

from __future__ import annotations

import time
from collections.abc import Iterator

from kvfleet.core.objectrows import ObjectRows, rows_of
from kvfleet.node.shared import SharedTier

__all__ = ["listed_rows"]

_PAGE_ROWS = 1 << 13


def listed_rows(shared: SharedTier, rows_max: int) -> Iterator[ObjectRows]:
    """List the shared tier and yield its objects in pages, as if they were stored now.

    Blocking: all of it, for a request a folder of each namespace.

    Raises:
        TierUnavailableError: the listing cannot go on; the pages before are right.
    """
    ms = time.time_ns() // 1_000_000
    waiting: list[bytes] = []
    for page in shared.list_objects(rows_max):
        waiting += [thing.row(stored_at=ms, last_used=ms) for thing in page]
        while len(waiting) >= _PAGE_ROWS:
            yield rows_of(b"".join(waiting[:_PAGE_ROWS]))
            waiting = waiting[_PAGE_ROWS:]
    yield rows_of(b"".join(waiting))

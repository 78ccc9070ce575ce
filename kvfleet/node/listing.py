"""Finds out what the shared tier holds where no manifest tells it."""

from __future__ import annotations

import time
from collections.abc import Iterator

from kvfleet.core.objectrows import ObjectRows, rows_of
from kvfleet.node.shared import SharedTier

__all__ = ["listed_rows"]

_PAGE_ROWS = 1 << 13


def listed_rows(shared: SharedTier, rows_max: int) -> Iterator[ObjectRows]:
    """List the shared tier and yield its objects in pages, as if they were last used when they were stored.

    So the oldest are the first to go when there are too many. Where in its prefix a block is, is not known: but blocks
    of one prefix were stored at about one time, and what is used again tells it.

    Blocking: all of it, for a request a folder of each namespace.

    Raises:
        TierUnavailableError: the listing cannot go on; the pages before are right.
    """
    ms = time.time_ns() // 1_000_000
    waiting: list[bytes] = []
    for page in shared.list_objects(rows_max):
        for thing, modified_ms in page:
            stored_ms = min(ms, modified_ms or ms)
            waiting.append(thing.row(stored_at=stored_ms, last_used=stored_ms))
        while len(waiting) >= _PAGE_ROWS:
            yield rows_of(b"".join(waiting[:_PAGE_ROWS]))
            waiting = waiting[_PAGE_ROWS:]
    yield rows_of(b"".join(waiting))

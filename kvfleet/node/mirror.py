"""What this node's drives hold, for clients to see: a table in the arena.

A client that finds a block there knows, without a call and without a directory, that its manager can load it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial

from kvfleet.config import MIB, DriveConfig
from kvfleet.core.block import BlockKey
from kvfleet.errors import ConfigError
from kvfleet.node.nvme import Stored
from kvfleet.node.records import RecordTable
from kvfleet.node.threads import TimedThreads

__all__ = ["Mirror", "num_drive_records"]

_log = logging.getLogger(__name__)

_BYTES_PER_RECORD = MIB
_RECORDS_MIN, _RECORDS_MAX = 4096, 4_000_000
_MEASURING_TIMEOUT_S = 2.0  # for all drives: a manager starts without what a hung one would say


def num_drive_records(drives: Sequence[DriveConfig]) -> int:
    """How many blocks a node's table of its drives has room for: one a MiB that the cache may take of them.

    Where blocks are smaller than that, drives can hold more than clients see without the directory.

    Blocking: asks the filesystem of each drive that has no `max_bytes` for its size; for 2 s at most.
    """
    if not drives:
        return 0
    deadline = time.monotonic() + _MEASURING_TIMEOUT_S
    threads = TimedThreads(len(drives), "kvfleet-drive-size")
    wanted = sum(_drive_bytes(drive, threads, deadline) for drive in drives) // _BYTES_PER_RECORD
    return min(max(wanted, _RECORDS_MIN), _RECORDS_MAX)


def _drive_bytes(drive: DriveConfig, threads: TimedThreads, deadline: float) -> int:
    if drive.max_bytes is not None:
        return drive.max_bytes
    try:
        found = threads.run(partial(os.statvfs, drive.path()), deadline - time.monotonic())
    except (OSError, ConfigError) as error:  # a TimeoutError is an OSError
        _log.warning("size of a drive not known: %s: %s", drive.directory, error or "no answer")
        return 0
    return found.f_blocks * found.f_frsize


class Mirror:
    """The table of a node's drives.

    Threads: the manager's event loop.

    Attributes:
        num_left_out: records that the table has no room for: clients learn of them from the directory only.
    """

    def __init__(self, table: RecordTable, changed: Callable[[BlockKey, int, bool], None]) -> None:
        """Start empty, whatever an earlier manager left: the drives tell what they hold when they are open.

        Args:
            table: in the arena.
            changed: called with the key and the shard of each record that can be read from now on, or no longer.
        """
        self._table = table
        self._changed = changed
        self._unused = 0
        self._free: list[int] = []
        self.num_left_out = 0
        table.clear()

    def note(self, stored: Stored, present: bool) -> None:
        """A record came to the drives, or left them."""
        slot = self._table.slot_of(stored.key, stored.shard)
        if present:
            assert slot is None, "what comes was not there"
            self._enter(stored)
        elif slot is not None:
            self._table.free(slot)
            self._free.append(slot)
        else:
            self.num_left_out -= 1
            assert self.num_left_out >= 0, "what goes was there"
        self._changed(stored.key, stored.shard, present)

    def _enter(self, stored: Stored) -> None:
        slot = self._take()
        if slot is None:
            if not self.num_left_out:
                _log.info("more than %d blocks on the drives: lookups need the directory", self._table.num_records)
            self.num_left_out += 1
            return
        generation = self._table.reserve(
            slot,
            key=stored.key,
            shard=stored.shard,
            parent_fingerprint=stored.parent_fingerprint,
            depth=stored.depth,
            namespace=0,
            offset=0,
            length=stored.num_bytes,
            client_id=0,
        )
        if not self._table.commit(slot, generation, stored.checksum, 0):  # its bucket of hints is full
            self._free.append(slot)
            self.num_left_out += 1

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        if self._unused == self._table.num_records:
            return None
        self._unused += 1
        return self._unused - 1

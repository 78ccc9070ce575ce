"""What becomes of a block that was asked for: exactly one of these, counted."""

from __future__ import annotations

from enum import Enum

__all__ = ["Miss", "Outcome", "Source"]


class Source(str, Enum):
    """Where a block came from."""

    DRAM = "dram"
    NVME = "nvme"
    PEER = "peer"
    SHARED = "shared"


class Miss(str, Enum):
    """Why a block did not come."""

    NEVER_STORED = "never_stored"
    NOT_ADMITTED = "not_admitted"  # it was offered, and found no room, no manager, or what is worth more
    EVICTED = "evicted"  # it was here or at its holder, and had to go; or it went during the copy
    HOLDER_LOST = "holder_lost"  # the node that had it is gone
    OBJECT_LOST = "object_lost"  # its object in the shared tier was deleted or damaged, by others than the fleet
    UNKNOWN = "unknown"  # one of these five: too long ago to be remembered
    NO_ROOM = "no_room"  # this node's arena or object store could not take it in time
    UNREACHABLE = "unreachable"  # the nodes that have it failed, died or are known not to answer
    STORAGE_FAILED = "storage_failed"  # the shared tier, or a drive, failed or is known not to answer
    TOO_SLOW = "too_slow"  # its holder sent nothing for too long
    CORRUPT = "corrupt"  # bytes came, but not the block's
    LAYOUT_REFUSED = "layout_refused"  # a block of that key is there, but of another size or layout
    DEADLINE = "deadline"
    SLOWER_THAN_COMPUTE = "slower_than_compute"  # not loaded, or not to its end: the engine computes it sooner
    MANAGER_UNAVAILABLE = "manager_unavailable"
    DIRECTORY_UNAVAILABLE = "directory_unavailable"
    BEHIND_MISS = "behind_miss"  # it was found, but an earlier block of the prefix did not come


Outcome = Source | Miss

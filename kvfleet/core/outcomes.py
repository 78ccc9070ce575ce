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
    NOT_ADMITTED = "not_admitted"  # it was offered, and found no room, or no manager that takes it
    EVICTED = "evicted"  # it was here or at its holder, and had to go; or it went during the copy
    HOLDER_LOST = "holder_lost"  # the node that had it is gone
    UNKNOWN = "unknown"  # one of these four: too long ago to be remembered
    NO_ROOM = "no_room"  # this node's arena or object store could not take it in time
    UNREACHABLE = "unreachable"  # holders or the shared tier failed, died or are known not to answer
    TOO_SLOW = "too_slow"  # its holder sent nothing for too long
    CORRUPT = "corrupt"  # bytes came, but not the block's
    LAYOUT_REFUSED = "layout_refused"  # a block of that key is there, but of another size or layout
    DEADLINE = "deadline"
    MANAGER_UNAVAILABLE = "manager_unavailable"
    DIRECTORY_UNAVAILABLE = "directory_unavailable"
    BEHIND_MISS = "behind_miss"  # it was found, but an earlier block of the prefix did not come


Outcome = Source | Miss

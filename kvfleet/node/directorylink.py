"""What a manager and the directory say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvfleet.core.directory import Applied, Delta, InventoryPage, NodeId
from kvfleet.core.mailbox import ObjectPage
from kvfleet.node.messages import Located

__all__ = ["CALL_TIMEOUT_S", "Claimed", "DeltaReply", "DirectoryLink", "ObjectRequest"]

CALL_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class ObjectRequest:
    """The keeper of the catalog asks for what was said of objects.

    Attributes:
        epoch: of its manager.
        life: of the directory that the positions are of; others know nothing of them.
        written: up to here rows are in a manifest.
        position: rows after it are wanted.
        rows_max: of the answer.
    """

    node: NodeId
    epoch: int
    life: int
    written: int
    position: int
    rows_max: int


@dataclass(frozen=True, slots=True)
class DeltaReply:
    """The directory's answer.

    Attributes:
        life: of the directory: another number each time it starts, empty.
        keeper: this manager is the one that keeps the catalog of the shared tier.
        told: this directory was told what the shared tier holds.
        position: in its mailbox, after the delta's rows; None if they were not taken in.
        written: position up to which rows are in a manifest.
        dropped: packed records that this node holds, or did, and whose copy in the shared tier was deleted for good.
        lost: packed records that this node holds, or did, and whose copy in the shared tier was found gone or bad.
        retired: packed records that this node holds, or did, and that another says will not be used again.
    """

    applied: Applied
    life: int
    keeper: bool = False
    told: bool = True
    position: int | None = None
    written: int = 0
    lost: bytes = b""
    dropped: bytes = b""
    retired: bytes = b""


@dataclass(frozen=True, slots=True)
class Claimed:
    """What a node that wants to write records to the shared tier need not write. The others are its own for a while.

    Attributes:
        saved: packed records that the shared tier has.
        taken: packed records that another node is writing.
    """

    saved: bytes
    taken: bytes


class DirectoryLink(Protocol):
    """A manager's calls to the directory. Each raises `KvFleetError` kinds only, within `timeout_s`."""

    async def apply(self, delta: Delta, timeout_s: float) -> DeltaReply:
        """See `DirectoryService.apply`."""

    async def inventory(self, page: InventoryPage, timeout_s: float) -> Applied:
        """See `DirectoryService.inventory`."""

    async def claim(self, node: NodeId, records: bytes, timeout_s: float) -> Claimed:
        """See `DirectoryService.claim`."""

    async def listed(self, node: NodeId, life: int, timeout_s: float) -> bool:
        """See `DirectoryService.listed`."""

    async def objects(self, request: ObjectRequest, timeout_s: float) -> ObjectPage | None:
        """See `DirectoryService.objects`."""

    async def locate(self, keys: bytes, shard: int, num_shards: int, timeout_s: float) -> Located:
        """See `DirectoryService.locate`."""

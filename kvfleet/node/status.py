"""What a node says of itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvfleet.core.totals import Totals
from kvfleet.node.catalogstatus import CatalogStatus
from kvfleet.node.drivestatus import DriveStatus

__all__ = ["NodeStatus"]


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node at a moment.

    Attributes:
        node_id: Ray's.
        epoch: of its manager; grows with each start.
        problem: why the node has no arena, or "".
        used_bytes: of slots that hold or await a block; never above `capacity_bytes`.
        reserved_blocks: being written.
        unsaved_blocks: that wait for a copy in the shared tier; without one, on the drives. Not those that it did not
            take, or had and dropped, as too many.
        evicted_blocks: left since the manager started; `lost_blocks` of them without a copy in the shared tier.
        retired_blocks: of which somebody has said that they will not be used again, since the manager started.
        loaded_blocks: brought for clients, by outcome.
        loaded_bytes: by source.
        sent_bytes: to other nodes.
        shared_problem: why the shared tier's last answer was an error, or "".
        shared_tried: it was tried out, or there is none; False right after the start of the manager.
        shared_counts: what became of requests to the shared tier, by reason; `SharedEndpoint.counts`.
        saved_blocks: written to the shared tier; `save_failures` attempts failed.
        resyncs: full inventories sent to the directory.
        draining: it is to leave, and takes no stores.
        held_bytes: of slots that clients hold.
        avoided: Ray node ids of holders that did not answer, and `shared` if the shared tier did not.
        totals: what this node's clients asked for and got, those that are gone included, since the arena was made.
        drives: of its NVMe tier.
        catalog: of the shared tier, if this node keeps it.
        audit: what is wrong with the books; empty if all is well, or there is too much to look at in passing.
    """

    node_id: str
    epoch: int
    problem: str
    capacity_bytes: int = 0
    populated_bytes: int = 0
    used_bytes: int = 0
    blocks: int = 0
    reserved_blocks: int = 0
    unsaved_blocks: int = 0
    evicted_blocks: int = 0
    lost_blocks: int = 0
    retired_blocks: int = 0
    loaded_blocks: dict[str, int] | None = None
    loaded_bytes: dict[str, int] | None = None
    sent_bytes: int = 0
    shared_problem: str = ""
    shared_tried: bool = True
    shared_counts: dict[str, int] | None = None
    saved_blocks: int = 0
    save_failures: int = 0
    resyncs: int = 0
    draining: bool = False
    held_bytes: int = 0
    avoided: tuple[str, ...] = ()
    totals: Totals = field(default_factory=Totals)
    drives: tuple[DriveStatus, ...] = ()
    catalog: CatalogStatus | None = None
    audit: tuple[str, ...] = ()

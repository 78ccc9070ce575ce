"""What the placement of a node is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvfleet.core.block import BlockKey

__all__ = [
    "EXPECTED_MIN", "PREFIX_PART", "UNBOUNDED", "Admission", "Counters", "Evicted", "Gate", "Grant", "LowerTier",
    "NewBlock", "Restored", "Transfer", "shared_takes",
]  # fmt: skip

LowerTier = Literal["nvme", "shared"]
"""A tier that blocks are copied down to: the node's own drives, or the one that all nodes share."""

Gate = Callable[[int, int, float | None], bool]
"""`gate(num_bytes, uses, expected_uses)`: whether a lower tier would take a block now.

`uses`: how often it was used since it came. `expected_uses`: how often it will be; None: too early to say."""

EXPECTED_MIN = 0.01
"""Uses that a block must be expected to have for any tier below to take it, where that is known."""

PREFIX_PART = 7 / 8
"""Of a node's drives that one prefix may fill: more of it would push out its head."""

UNBOUNDED = 1 << 62
"""Bytes that a tier without a limit holds."""


def shared_takes(_num_bytes: int, _uses: int, expected_uses: float | None) -> bool:
    """The gate of the shared tier: what is not known to be of no use to anybody."""
    return expected_uses is None or expected_uses >= EXPECTED_MIN


class NewBlock(NamedTuple):
    """A record that wants in; `parent` is None for the first block of a prefix."""

    key: BlockKey
    shard: int
    parent: BlockKey | None
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Grant:
    """A slot for the block at `index` of those asked for."""

    index: int
    slot: int


class Evicted(NamedTuple):
    """A record that left its slot."""

    key: BlockKey
    shard: int
    slot: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy from a slot to a lower tier that is to be made, and then told by `complete`.

    The block stays where it is and readable. The copier checks the slot's generation after it has read it, as any
    reader does.

    Attributes:
        kind: "save" is write-behind; "demote" is urgent: an admission waits for the room.
        tier: where the copy goes.
        key: of the block.
        shard: of the record.
        slot: to read.
        num_bytes: of the block.
        serial: tells transfers of one record apart.
    """

    kind: Literal["save", "demote"]
    tier: LowerTier
    key: BlockKey
    shard: int
    slot: int
    num_bytes: int
    serial: int


@dataclass(frozen=True, slots=True)
class Admission:
    """What became of blocks that wanted in. All indexes are of the blocks asked for, ascending.

    Attributes:
        grants: slots to write, then to `commit` or `abort`.
        already: blocks that are here, or are being written.
        refused: no room now. The same blocks may be asked for again once the transfers are completed. If there
            are none, room can only come with a commit, abort, release or the end of another's transfer.
        declined: worth less than what is here, so that they would only do harm; with each of them all after it.
        transfers: to be done so that the refused find room.
        evicted: gone. Their generations must be bumped before a granted slot is written.
    """

    grants: list[Grant] = field(default_factory=list)
    already: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    declined: list[int] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    evicted: list[Evicted] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Restored:
    """A record found in the arena by a new manager.

    Attributes:
        slot: its number.
        key: of the block.
        shard: of the record.
        parent_fingerprint: first 4 bytes of the parent's key as little-endian integer; 0 for none.
        depth: index of the block in its prefix.
        num_bytes: of the block.
        last_access: seconds.
        committed: False if a writer that lives is still at it.
    """

    slot: int
    key: BlockKey
    shard: int
    parent_fingerprint: int
    depth: int
    num_bytes: int
    last_access: float
    committed: bool


@dataclass(slots=True)
class Counters:
    """Records since the start.

    Attributes:
        admitted: got a slot.
        refused: found no room, counted each time they were asked for.
        not_worth: were declined, as what is here is worth more.
        evicted: left to make room.
        dropped_unsaved: of those evicted, left without a copy below.
        demoted: were copied below because room was needed.
        saved: were copied below by write-behind.
        transfers_failed: copies below that failed.
    """

    admitted: int = 0
    refused: int = 0
    not_worth: int = 0
    evicted: int = 0
    dropped_unsaved: int = 0
    demoted: int = 0
    saved: int = 0
    transfers_failed: int = 0

    def count(self, answer: Admission) -> None:
        """Count what became of blocks that wanted in."""
        self.admitted += len(answer.grants)
        self.refused += len(answer.refused)
        self.not_worth += len(answer.declined)

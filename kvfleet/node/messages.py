"""What clients, managers and the directory say to each other.

Frozen dataclasses, no live objects. Keys travel packed, 16 bytes each in one `bytes`; a *record* is a key and a
shard, 18 bytes packed (key, then the shard as little-endian uint16). Deadlines travel as remaining seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvfleet.core.directory import Run
from kvfleet.core.hints import NO_HINTS, Hints
from kvfleet.core.outcomes import Miss, Outcome, Source
from kvfleet.core.speeds import Speed

__all__ = [
    "Attachment",
    "CommitReply",
    "CommitRequest",
    "FetchRequest",
    "HintRequest",
    "HoldRequest",
    "LoadProgress",
    "LoadRequest",
    "Located",
    "Miss",
    "Namespace",
    "Outcome",
    "ReserveReply",
    "ReserveRequest",
    "Source",
    "Window",
    "WindowPart",
]

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Namespace:
    """What a manager must know of a namespace to hold and save its blocks. Holds no secret.

    Attributes:
        namespace_id: 16 bytes, public.
        layout_json: the block layout as canonical JSON (`BlockLayout.to_json`).
    """

    namespace_id: bytes
    layout_json: str


@dataclass(frozen=True, slots=True)
class Attachment:
    """A manager's answer to a client that wants to use its node.

    Attributes:
        node_id: UUID hex of the node.
        epoch: of the manager.
        arena_path: file to map.
        arena_id: 16 bytes; part of every message about slots.
        clients_dir: where the client keeps its own lock file, named by its client id.
        problem: why the node has no arena, or "" if all is well.
        speeds: of the sources that this node has read, by the planner's names for them.
    """

    node_id: str
    epoch: int
    arena_path: str
    arena_id: bytes
    clients_dir: str
    problem: str = ""
    speeds: Mapping[str, Speed] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReserveRequest:
    """Slots for the blocks of a prefix that the node does not hold yet.

    Attributes:
        client_id: nonzero; its lock file is held by the client.
        sequence: grows with each request of this client; an older one is refused, a newer one ends what it reserved.
        namespace: of all keys.
        keys: packed, consecutive blocks of one prefix.
        parent: key of the block before the first, or b"" if the first is the root's child.
        depth: index of the first block in its prefix.
        shard: of these records.
        num_bytes: of each block.
        timeout_s: how long the manager may wait for room.
        given_up: packed keys of blocks that the client could not store lately.
        hints: of who stores them.
    """

    client_id: int
    sequence: int
    namespace: Namespace
    keys: bytes
    parent: bytes
    depth: int
    shard: int
    num_bytes: int
    timeout_s: float
    given_up: bytes = b""
    hints: Hints = NO_HINTS


@dataclass(frozen=True, slots=True)
class ReserveReply:
    """The granted slots.

    Attributes:
        arena_id: of the arena they are in.
        indexes: which of the requested blocks, ascending.
        slots: record numbers, same length.
        generations: odd, to be given back at commit.
        offsets: of the slots in the arena file, bytes.
        already: how many of the requested blocks are on the node (or being written) already.
        refused: how many got no room.
        declined: how many are worth less than what is on the node; the last ones.
        draining: the node is to leave and takes nothing.
    """

    arena_id: bytes
    indexes: tuple[int, ...]
    slots: tuple[int, ...]
    generations: tuple[int, ...]
    offsets: tuple[int, ...]
    already: int
    refused: int
    declined: int = 0
    draining: bool = False


@dataclass(frozen=True, slots=True)
class HintRequest:
    """What is known of the future of blocks that the node holds.

    Attributes:
        keys: packed, consecutive blocks of one prefix; none for the end of a session (`final`).
        parent: key of the block before the first, or b"" if the first is the root's child.
        hints: of who uses them.
    """

    keys: bytes
    parent: bytes
    hints: Hints


@dataclass(frozen=True, slots=True)
class CommitRequest:
    """The slots are written: make them visible. Idempotent.

    Attributes:
        sequence: of the reserve, or a later one if its answer never came.
        checksums: xxh3-64 of each slot's bytes; an empty tuple gives all the client's slots back unwritten.
        timeout_s: how long to wait for the directory's acknowledgement.
    """

    client_id: int
    sequence: int
    arena_id: bytes
    slots: tuple[int, ...]
    generations: tuple[int, ...]
    checksums: tuple[int, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class CommitReply:
    """How many blocks are readable now, whoever wrote them, and whether the directory knows them."""

    committed: int
    published: bool


@dataclass(frozen=True, slots=True)
class HoldRequest:
    """Keep the first blocks of a prefix for a while. Asked again with the same number it replaces what was held.

    Attributes:
        client_id: nonzero; its lock file is held by the client.
        number: of the hold, the client's own.
        keys: packed, consecutive blocks of one prefix.
        shard: of these records.
        seconds: how long; the manager has a limit of its own.
    """

    client_id: int
    number: int
    keys: bytes
    shard: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Bring the blocks of a prefix into the arena, first blocks first.

    Attributes:
        namespace: of all keys.
        keys: packed, consecutive blocks of one prefix.
        parent: key of the block before the first, or b"".
        depth: index of the first block in its prefix.
        shard: of the records.
        num_bytes: of each block.
        runs: holders as the directory named them; indexes count from the first of `keys`.
        timeout_s: remaining seconds.
        grace_s, pace_s: the load ends as soon as more than `grace_s`, and `pace_s` for each block that came, have
            passed: the client computes the rest sooner. Infinite: it does not.
        spare_s: of `grace_s`, what a source that sends nothing leaves to the next one.
    """

    namespace: Namespace
    keys: bytes
    parent: bytes
    depth: int
    shard: int
    num_bytes: int
    runs: tuple[Run, ...]
    timeout_s: float
    grace_s: float = float("inf")
    pace_s: float = float("inf")
    spare_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Outcomes of the next blocks of a load, in order.

    Blocks with a `Source` stay in the arena at least until the progress after this one was taken.
    """

    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class Located:
    """The directory's answer to who holds the blocks of a prefix.

    Attributes:
        runs: consecutive, from the first block asked for up to the first that nobody has whole.
        missing: why nobody has that one; None if all are there.
    """

    runs: tuple[Run, ...]
    missing: Miss | None


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """A manager asks another for blocks it holds.

    Attributes:
        namespace: of all keys.
        keys: packed, consecutive blocks of one prefix; the holder sends those it has up to the first it has not.
        parent: key of the block before the first, or b"".
        depth: index of the first block in its prefix.
        shard: of the records.
        num_bytes: of each block.
        window_bytes_max: largest window the reader takes.
        timeout_s: remaining seconds.
    """

    namespace: Namespace
    keys: bytes
    parent: bytes
    depth: int
    shard: int
    num_bytes: int
    window_bytes_max: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class WindowPart:
    """A byte range of one block in a window.

    Attributes:
        index: of the block in the request's keys.
        start: byte offset within the block.
        num_bytes: of the whole block.
        checksum: xxh3-64 of the whole block.
        data: uint8, the range's bytes: a view of the arena at the holder, of Ray's store, read-only, at the reader.
    """

    index: int
    start: int
    num_bytes: int
    checksum: int
    data: Bytes


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive byte ranges of the requested blocks; none in those that a holder sends at the end."""

    parts: tuple[WindowPart, ...]

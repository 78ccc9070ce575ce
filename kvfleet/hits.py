"""What lookups, loads and stores answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
import numpy.typing as npt

from kvfleet.core.block import KEY_BYTES
from kvfleet.core.directory import NodeId, Run
from kvfleet.core.layout import BlockLayout
from kvfleet.core.planner import Plan
from kvfleet.node.messages import Miss, Outcome, Source

__all__ = ["Claim", "HitRun", "Loaded", "PrefixHit", "StoreResult", "merge_runs", "true_head"]


@dataclass(frozen=True, slots=True)
class HitRun:
    """Blocks [start, stop) of a hit and where they are said to be.

    Attributes:
        local: in this node's arena when looked up.
        nodes: other nodes that hold them, as the directory said; a hint.
        shared: the shared tier has them, as the directory said; a hint.
        pending: some were still being written by a process of this node. A load waits for them.
        nvme: on this node's drives when looked up, and some not in its arena.
    """

    start: int
    stop: int
    local: bool
    nodes: tuple[NodeId, ...] = ()
    shared: bool = False
    pending: bool = False
    nvme: bool = False


class Claim:
    """Says whether the blocks of a hit were counted as asked for and wait for their outcome. Threads: any."""

    def __init__(self) -> None:
        self._open: list[bool] = []

    def give(self) -> None:
        """They are counted."""
        self._open.append(True)

    def take(self) -> bool:
        """They have their outcome now. False: they were not counted, or had one before."""
        try:
            return self._open.pop()
        except IndexError:
            return False


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The longest prefix of a request that the fleet says it holds.

    Attributes:
        num_tokens: tokens of the prefix, a multiple of `block_tokens`; 0 is a miss.
        num_blocks: whole blocks of it.
        asked_blocks: whole blocks of the request.
        keys: of all asked blocks, packed, 16 bytes each.
        runs: cover blocks [start_block, num_blocks) in order.
        fault: why the answer may be shorter than the truth, or None.
        start_block: blocks before it were not looked for: the engine has them. At most `num_blocks`.
        missing: why the first block behind the hit is missing, for the client's shard or another; None if none is.
        shard: of the client that looked it up.
        label: the engine's name for the request, or "".
        asked_ns: when it was looked up: wall time.
        lookup_s: how long that took.
        calls: remote calls it took, by name.
        claim: whether its blocks are counted.
    """

    num_tokens: int
    num_blocks: int
    asked_blocks: int
    keys: bytes = field(repr=False)
    runs: tuple[HitRun, ...]
    fault: Miss | None = None
    start_block: int = 0
    missing: Miss | None = None
    shard: int = 0
    label: str = ""
    asked_ns: int = field(default=0, compare=False, repr=False)
    lookup_s: float = field(default=0.0, compare=False, repr=False)
    calls: tuple[str, ...] = field(default=(), compare=False, repr=False)
    claim: Claim = field(default_factory=Claim, compare=False, repr=False)

    def __post_init__(self) -> None:
        assert len(self.keys) == self.asked_blocks * KEY_BYTES
        assert 0 <= self.start_block <= self.num_blocks <= self.asked_blocks

    def part(self, start: int, stop: int) -> PrefixHit:
        """Blocks [start, stop) of this hit, as one of its own. Whoever loads one part of a counted hit loads all."""
        assert self.start_block <= start <= stop <= self.num_blocks
        runs = tuple(
            replace(run, start=max(run.start, start), stop=min(run.stop, stop))
            for run in self.runs
            if run.start < stop and run.stop > start
        )
        num_tokens = self.num_tokens // self.num_blocks * stop if stop else 0
        return replace(self, num_tokens=num_tokens, num_blocks=stop, runs=runs, start_block=start)

    def keys_of(self, start: int, stop: int) -> bytes:
        """Packed keys of blocks [start, stop)."""
        return self.keys[start * KEY_BYTES : stop * KEY_BYTES]


def merge_runs(
    local: npt.NDArray[np.bool_],
    head: int,
    runs: Sequence[Run],
    start: int = 0,
    *,
    stored: npt.NDArray[np.bool_] | None = None,
    coming: npt.NDArray[np.bool_] | None = None,
) -> tuple[HitRun, ...]:
    """The runs of a hit.

    Args:
        local: which blocks from `start` on are in this node's arena.
        head: the first of them that is not, nor on this node's drives, counted from `start`.
        runs: what the directory said about the blocks from `head` on.
        start: the hit's first block.
        stored: which blocks are in this node's arena or on its drives; None: as `local`.
        coming: which blocks are here or being written to this node's arena; None: as `stored`.
    """
    stored = local if stored is None else stored
    coming = stored if coming is None else coming
    merged: list[HitRun] = []
    stop = 0
    for here, group in groupby(local[:head].tolist()):
        begin, stop = stop, stop + len(list(group))
        merged.append(HitRun(start + begin, start + stop, local=here, nvme=not here))
    for run in runs:
        assert run.start + head == stop, "the directory's runs leave no gap"
        stop = head + run.stop
        merged.append(HitRun(start + head + run.start, start + stop, local=False, nodes=run.nodes, shared=run.shared))
    more = slice(stop, stop + true_head(coming[stop:]))
    if more.stop > stop:
        here, kept = bool(local[more].all()), bool(stored[more].all())
        merged.append(HitRun(start + stop, start + more.stop, here, pending=not kept, nvme=kept and not here))
    return tuple(merged)


def true_head(flags: npt.NDArray[np.bool_]) -> int:
    """How many of the first flags are set."""
    return len(flags) if flags.all() else int(flags.argmin())


_SOURCES = tuple(Source)


class Loaded(int):
    """Tokens really loaded: an `int`, with how it came about.

    Attributes:
        outcomes: of every block of the hit, in order: a `Source`, or the reason of a `Miss`.
        bytes_by_source: bytes copied into the caller's memory, by where they came from.
        counts: blocks by outcome.
        miss: why the load stopped short of the hit, or None.
        hit: what was loaded; None if it was not a client of a fleet that loaded it.
        plan: by which it was, or None.
        ready_s: from the lookup on until the engine had the whole prompt's KV; None if it has not said.
        load_s: how long it took.
        calls: remote calls it took, by name.
    """

    outcomes: tuple[Outcome, ...]
    bytes_by_source: Mapping[Source, int]
    counts: Mapping[Outcome, int]
    miss: Miss | None
    hit: PrefixHit | None = None
    plan: Plan | None = None
    ready_s: float | None = None
    load_s: float = 0.0
    calls: tuple[str, ...] = ()

    @classmethod
    def of(cls, outcomes: Iterable[Outcome], layout: BlockLayout) -> Loaded:
        """Count the blocks that came."""
        outcomes = tuple(outcomes)
        counts = {source: n for source in _SOURCES if (n := outcomes.count(source))}  # no hash of an enum a block
        came = sum(counts.values())
        loaded = cls(came * layout.block_tokens)
        loaded.outcomes = outcomes
        loaded.bytes_by_source = {source: n * layout.block_bytes for source, n in counts.items()}
        missed = outcomes[came:]
        if any(isinstance(outcome, Source) for outcome in missed):  # the engine has computed some in between
            missed = tuple(outcome for outcome in outcomes if isinstance(outcome, Miss))
        loaded.counts = Counter[Outcome](missed) | Counter[Outcome](counts)
        loaded.miss = next((outcome for outcome in missed if isinstance(outcome, Miss)), None)
        return loaded


@dataclass(frozen=True, slots=True)
class StoreResult:
    """What became of a store.

    Attributes:
        stored: blocks written and readable now.
        already: blocks that were here or being written by another.
        dropped: blocks not stored. They cost a later recompute, nothing else.
        published: the directory has acknowledged the stored blocks; False as well if all blocks were dropped. Blocks
            that were there already are made known by whoever stored them, which may be a moment later.
        num_bytes: bytes copied into the arena.
        reason: why blocks were dropped, or "": `not_worth` (less than what the node has), `queue_full`, `no_room`,
            `draining`, `deadline`, `manager_unavailable`, `reservation_lost`, `commit_lost`, `closed`, `forked`,
            `no_thread`, or the name of an exception that the source raised.
    """

    stored: int = 0
    already: int = 0
    dropped: int = 0
    published: bool = True
    num_bytes: int = 0
    reason: str = ""

"""What lookups, loads and stores answer."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvfleet.core.block import KEY_BYTES
from kvfleet.core.directory import NodeId, Run
from kvfleet.core.layout import BlockLayout
from kvfleet.node.messages import Miss, Outcome, Source

__all__ = ["ClientStats", "HitRun", "Loaded", "PrefixHit", "Stats", "StoreResult", "merge_runs", "true_head"]


@dataclass(frozen=True, slots=True)
class HitRun:
    """Blocks [start, stop) of a hit and where they are said to be.

    Attributes:
        local: in this node's arena when looked up.
        nodes: other nodes that hold them, as the directory said; a hint.
        shared: the shared tier has them, as the directory said; a hint.
        pending: some were still being written by a process of this node. A load waits for them.
    """

    start: int
    stop: int
    local: bool
    nodes: tuple[NodeId, ...] = ()
    shared: bool = False
    pending: bool = False


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
    """

    num_tokens: int
    num_blocks: int
    asked_blocks: int
    keys: bytes = field(repr=False)
    runs: tuple[HitRun, ...]
    fault: Miss | None = None
    start_block: int = 0

    def __post_init__(self) -> None:
        assert len(self.keys) == self.asked_blocks * KEY_BYTES
        assert 0 <= self.start_block <= self.num_blocks <= self.asked_blocks

    def keys_of(self, start: int, stop: int) -> bytes:
        """Packed keys of blocks [start, stop)."""
        return self.keys[start * KEY_BYTES : stop * KEY_BYTES]


def merge_runs(
    local: npt.NDArray[np.bool_],
    head: int,
    runs: Sequence[Run],
    start: int = 0,
    coming: npt.NDArray[np.bool_] | None = None,
) -> tuple[HitRun, ...]:
    """The runs of a hit.

    Args:
        local: which blocks from `start` on are in this node's arena.
        head: the first of them that is not, counted from `start`.
        runs: what the directory said about the blocks from `head` on.
        start: the hit's first block.
        coming: which blocks are in this node's arena or being written to it; None: as `local`.
    """
    merged = [HitRun(start, start + head, local=True)] if head else []
    stop = head
    for run in runs:
        assert run.start + head == stop, "the directory's runs leave no gap"
        stop = head + run.stop
        merged.append(HitRun(start + head + run.start, start + stop, local=False, nodes=run.nodes, shared=run.shared))
    more = true_head((local if coming is None else coming)[stop:])
    if more:
        here = bool(local[stop : stop + more].all())
        merged.append(HitRun(start + stop, start + stop + more, local=here, pending=not here))
    return tuple(merged)


def true_head(flags: npt.NDArray[np.bool_]) -> int:
    """How many of the first flags are set."""
    return len(flags) if flags.all() else int(flags.argmin())


class Loaded(int):
    """Tokens really loaded: an `int`, with how it came about.

    Attributes:
        outcomes: of every block of the hit, in order: a `Source`, or the reason of a `Miss`.
        bytes_by_source: bytes copied into the caller's memory, by where they came from.
    """

    outcomes: tuple[Outcome, ...]
    bytes_by_source: Mapping[Source, int]

    @classmethod
    def of(cls, outcomes: Iterable[Outcome], layout: BlockLayout) -> Loaded:
        """Count the blocks that came; none comes behind one that did not."""
        outcomes = tuple(outcomes)
        came = [outcome for outcome in outcomes if isinstance(outcome, Source)]
        loaded = cls(len(came) * layout.block_tokens)
        loaded.outcomes = outcomes
        loaded.bytes_by_source = {source: n * layout.block_bytes for source, n in Counter(came).items()}
        return loaded

    @property
    def miss(self) -> Miss | None:
        """Why the load stopped short of the hit, or None."""
        return next((o for o in self.outcomes if isinstance(o, Miss)), None)


@dataclass(frozen=True, slots=True)
class StoreResult:
    """What became of a store.

    Attributes:
        stored: blocks written and readable now.
        already: blocks that were here or being written by another.
        dropped: blocks not stored; `reason` says why. They cost a later recompute, nothing else.
        published: the directory has acknowledged the stored blocks. Blocks that were there already are made known
            by whoever stored them, which may be a moment later.
        num_bytes: bytes copied into the arena.
    """

    stored: int = 0
    already: int = 0
    dropped: int = 0
    published: bool = True
    num_bytes: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ClientStats:
    """Totals of one client since it was made.

    Attributes:
        lookups: calls of `lookup`; `lookup_blocks` asked for, `lookup_hit_blocks` said to be there.
        blocks: blocks of all loads by outcome; their sum is what loads asked for.
        num_bytes: bytes loaded by source.
        stored_blocks: blocks written by stores; `stored_bytes` likewise; `already_blocks` were there.
        dropped_blocks: blocks that stores gave up, by reason.
        faults: failed waits by reason, whatever they cost.
        calls: remote calls made, by name.
    """

    lookups: int
    lookup_blocks: int
    lookup_hit_blocks: int
    blocks: Mapping[Outcome, int]
    num_bytes: Mapping[Source, int]
    stored_blocks: int
    stored_bytes: int
    already_blocks: int
    dropped_blocks: Mapping[str, int]
    faults: Mapping[Miss, int]
    calls: Mapping[str, int]


class Stats:
    """Counts behind `ClientStats`. Threads: any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lookups = self._lookup_blocks = self._lookup_hit_blocks = 0
        self._blocks: Counter[Outcome] = Counter()
        self._num_bytes: Counter[Source] = Counter()
        self._stored = self._stored_bytes = self._already = 0
        self._dropped: Counter[str] = Counter()
        self._faults: Counter[Miss] = Counter()
        self._calls: Counter[str] = Counter()

    def looked_up(self, hit: PrefixHit) -> None:
        """A lookup was answered."""
        with self._lock:
            self._lookups += 1
            self._lookup_blocks += hit.asked_blocks - hit.start_block
            self._lookup_hit_blocks += hit.num_blocks - hit.start_block
            if hit.fault is not None:
                self._faults[hit.fault] += 1

    def loaded(self, loaded: Loaded) -> None:
        """A load ended."""
        with self._lock:
            self._blocks.update(loaded.outcomes)
            self._num_bytes.update(loaded.bytes_by_source)

    def stored(self, result: StoreResult) -> None:
        """A store ended."""
        with self._lock:
            self._stored += result.stored
            self._stored_bytes += result.num_bytes
            self._already += result.already
            if result.dropped:
                self._dropped[result.reason] += result.dropped

    def called(self, name: str) -> None:
        """A remote call was made."""
        with self._lock:
            self._calls[name] += 1

    def snapshot(self) -> ClientStats:
        """The counts now."""
        with self._lock:
            return ClientStats(
                self._lookups, self._lookup_blocks, self._lookup_hit_blocks, dict(self._blocks),
                dict(self._num_bytes), self._stored, self._stored_bytes, self._already, dict(self._dropped),
                dict(self._faults), dict(self._calls),
            )  # fmt: skip

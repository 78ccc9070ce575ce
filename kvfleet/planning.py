"""A client's planner: what a hit's runs cost, what loads and prefills showed, and which source to look at again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from kvfleet.core.layout import BlockLayout
from kvfleet.core.outcomes import Miss, Source
from kvfleet.core.planner import PEER, Leg, Piece, Plan, Planner
from kvfleet.core.speeds import PrefillSpeed, Speed
from kvfleet.hits import HitRun, PrefixHit
from kvfleet.reading import Reading, Span

__all__ = ["Planning"]

_PROBE_S = 5.0  # between two looks at sources that are not used
_PROBE_BLOCKS = 4
_FORGET_S = 60.0  # a source that is not read for so long, as it seems slow, is tried again within a load's grace
_MUCH = 2.0
_WAITED_IN_VAIN = {Miss.SLOWER_THAN_COMPUTE, Miss.TOO_SLOW, Miss.DEADLINE}


class Planning:
    """Plans for one client. Threads: any. Blocking: never.

    Args:
        layout: of its blocks.
        enabled: whether it plans at all; False: all that is found is loaded.

    Attributes:
        probe: loads a few blocks in the background, to learn how fast their source is now; does not block.
    """

    def __init__(self, layout: BlockLayout, *, enabled: bool = True) -> None:
        self._layout = layout
        self._enabled = enabled
        self._lock = threading.Lock()
        self._planner = Planner()
        self._probe_at = 0.0
        self._forget_at = time.monotonic() + _FORGET_S
        self.probe: Callable[[PrefixHit], object] = lambda _: None

    def plan(self, hit: PrefixHit, prompt_tokens: int, *, can_split: bool = False, may_probe: bool = True) -> Plan:
        """What of a hit is worth loading, by what loads and the engine have taken so far.

        All of it, as long as the engine's speed is not known.

        Args:
            hit: of a lookup.
            prompt_tokens: of the whole prompt.
            can_split: the engine can compute blocks while later ones are loaded.
            may_probe: blocks of this hit may be loaded to look again at a source that is not used.
        """
        if not self._enabled:
            return Plan(Leg(hit.start_block, hit.num_blocks))
        pieces = [Piece(run.start, run.stop, _names(run)) for run in hit.runs if run.stop > run.start]
        layout = self._layout
        with self._lock:
            self._forget()
            plan = self._planner.plan(
                pieces, layout.block_bytes, layout.block_tokens, prompt_tokens, can_split=can_split
            )
            due = self._due(hit, plan) if may_probe else None
        if due is not None:
            self.probe(due)
        return plan

    def _forget(self) -> None:
        """Not every source that seems slow is looked at: some hits may not be probed, some have another source too."""
        if time.monotonic() >= self._forget_at:
            self._forget_at = time.monotonic() + _FORGET_S
            self._planner.sources.forget_unread()

    def _due(self, hit: PrefixHit, plan: Plan) -> PrefixHit | None:
        """The first blocks of a source that is not used, once in a while. A tail is use enough."""
        first, now = plan.head.stop, time.monotonic()
        if plan.tail is not None or first == hit.num_blocks or now < self._probe_at:
            return None
        stop = next(run.stop for run in hit.runs if run.stop > first)
        self._probe_at = now + _PROBE_S
        return hit.part(first, min(stop, first + _PROBE_BLOCKS))

    def nearest(self, hit: PrefixHit) -> PrefixHit:
        """A hit without the nodes that are much slower than another source of their run, or brought nothing lately.

        The manager asks nodes before the shared tier, the least busy first. That a copy is in the shared tier stays
        known: what is loaded is not saved again.
        """
        with self._lock:
            return replace(hit, runs=tuple(self._near(run) for run in hit.runs))

    def _near(self, run: HitRun) -> HitRun:
        if run.local or run.nvme or run.pending or len(_names(run)) < 2:
            return run
        sources, num_bytes = self._planner.sources, (run.stop - run.start) * self._layout.block_bytes
        usable = [name for name in _names(run) if not sources.stalled(name)]
        known = {name: speed.seconds(num_bytes) for name in usable if (speed := sources.speed(name)) is not None}
        limit_s = _MUCH * min(known.values(), default=0.0)
        nodes = tuple(node for node in run.nodes if PEER + node in usable and known.get(PEER + node, 0.0) <= limit_s)
        return replace(run, nodes=nodes) if nodes or "shared" in usable else run

    def computed(self, context_tokens: int, num_tokens: int, seconds: float) -> None:
        """The engine has computed `num_tokens` behind `context_tokens`."""
        with self._lock:
            self._planner.observe_prefill(context_tokens, num_tokens, seconds)

    def read(self, hit: PrefixHit, reading: Reading) -> None:
        """A load has ended, however."""
        miss = reading.outcomes[-1] if reading.outcomes else None
        at = hit.start_block + len(reading.outcomes) - 1
        spans = reading.spans
        with self._lock:
            if miss in _WAITED_IN_VAIN and reading.waited_s:
                run = next((run for run in hit.runs if run.start <= at < run.stop), None)
                source = _expected(run) if run is not None else None
                if spans and source is not None and spans[-1].source is source:
                    last = spans[-1]  # what was waited for in vain is time it took for what came
                    spans = [*spans[:-1], Span(source, last.start, last.stop, last.seconds + reading.waited_s)]
                else:
                    for name in _stalled(run):
                        self._planner.observe(name, 0, reading.waited_s)
            self._spans(hit, spans)

    def _spans(self, hit: PrefixHit, spans: Iterable[Span]) -> None:
        for span in spans:
            if span.seconds > 0 and not (span.source is Source.DRAM and not _local(hit, span)):
                name = _measured(hit, span)
                self._planner.observe(
                    name, (span.stop - span.start) * self._layout.block_bytes, span.seconds, span.first_s
                )

    def took(self, hit: PrefixHit, stop: int, seconds: float) -> None:
        """A load by another process took so long as a whole; it brought the blocks before `stop`.

        It tells of a source if only one was asked besides this node's arena.
        """
        runs = [run for run in hit.runs if not run.local] or list(hit.runs)
        names = {_stalled(run)[:1] or _names(run)[:1] for run in runs}
        if len(names) != 1 or seconds <= 0:
            return
        name = next(iter(names.pop()), "")
        blocks = sum(max(0, min(stop, run.stop) - run.start) for run in runs)
        if name in {"", "pending"} or (name == "dram" and not blocks):
            return  # a writer that was waited for is no source, and a block that left memory does not make that slow
        with self._lock:
            self._planner.observe(name, blocks * self._layout.block_bytes, seconds)

    def tell(self, speeds: Mapping[str, Speed]) -> None:
        """What this node's manager has measured of sources."""
        with self._lock:
            for source, speed in speeds.items():
                self._planner.tell(source, speed)

    def prefill(self) -> PrefillSpeed | None:
        """The engine's speed; None if it has not computed yet."""
        with self._lock:
            return self._planner.prefill()

    def speeds(self) -> dict[str, Speed]:
        """Those of sources that were read."""
        with self._lock:
            return self._planner.sources.speeds()


def _names(run: HitRun) -> tuple[str, ...]:
    """Who a run's blocks come from, in the order in which the manager asks them."""
    if run.local:
        return ("dram",)
    if run.pending:
        return ("pending",)
    if run.nvme:
        return ("nvme",)
    return (*(PEER + node for node in run.nodes), *(("shared",) if run.shared else ()))


def _expected(run: HitRun) -> Source:
    """Where the manager looks first for the blocks of a run."""
    if run.local or run.pending:
        return Source.DRAM
    if run.nvme:
        return Source.NVME
    return Source.PEER if run.nodes else Source.SHARED


def _stalled(run: HitRun | None) -> tuple[str, ...]:
    if run is None or run.local or run.pending:
        return ()
    names = _names(run)
    return names[:-1] if len(names) > 1 and run.shared else names


def _measured(hit: PrefixHit, span: Span) -> str:
    """The name under which a span's time is kept: of one node only where no other can have sent it."""
    if span.source is not Source.PEER:
        return str(span.source.value)
    run = next((run for run in hit.runs if run.start <= span.start < run.stop), None)
    return PEER + run.nodes[0] if run is not None and len(run.nodes) == 1 else PEER[:-1]


def _local(hit: PrefixHit, span: Span) -> bool:
    """Whether a span was copied from the arena without the manager's help."""
    return bool(hit.runs) and hit.runs[0].local and span.stop <= hit.runs[0].stop

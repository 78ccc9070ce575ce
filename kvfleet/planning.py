"""A client's planner: what a hit's runs cost, what loads and prefills showed, and which source to look at again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from kvfleet.core.layout import BlockLayout
from kvfleet.core.outcomes import Miss, Source
from kvfleet.core.planner import PEER, Leg, Piece, Plan, Planner
from kvfleet.core.speeds import PrefillSpeed, SourceSpeeds, Speed
from kvfleet.hits import HitRun, PrefixHit
from kvfleet.reading import Reading, Span

__all__ = ["FORGET_S", "Planning"]

FORGET_S = 60.0  # a source that is not read for so long, as it seems slow, is tried again within a load's grace
_MUCH = 2.0
_WAITED_IN_VAIN = {Miss.SLOWER_THAN_COMPUTE, Miss.TOO_SLOW}  # not `DEADLINE`: the caller may have had no time


@dataclass(slots=True)
class _Known:
    """What clients have learned. Its lock is held by whoever uses it."""

    planner: Planner = field(default_factory=Planner)
    lock: threading.Lock = field(default_factory=threading.Lock)
    forget_at: float = field(default_factory=lambda: time.monotonic() + FORGET_S)


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
        self._known = _Known()
        self.probe: Callable[[PrefixHit], object] = lambda _: None

    def share(self, other: Planning) -> None:
        """Learn together with another client of the same engine, and know what it knows."""
        self._known = other._known

    def plan(self, hit: PrefixHit, prompt_tokens: int, *, can_split: bool = False) -> Plan:
        """What of a hit is worth loading, by what loads and the engine have taken so far.

        All of it, as long as the engine's speed is not known.

        Args:
            hit: of a lookup.
            prompt_tokens: of the whole prompt.
            can_split: the engine can compute blocks while later ones are loaded.
        """
        if not self._enabled:
            return Plan(Leg(hit.start_block, hit.num_blocks))
        layout, known = self._layout, self._known
        with known.lock:
            _forget(known)
            pieces = _pieces(hit)
            plan = known.planner.plan(
                pieces, layout.block_bytes, layout.block_tokens, prompt_tokens, can_split=can_split
            )
            look = known.planner.look(plan, pieces, time.monotonic())
        if look is not None:
            self.probe(hit.part(look.start, look.stop))
        return plan

    def narrowed(self, plan: Plan, hit: PrefixHit, prompt_tokens: int) -> Plan:
        """A plan without a tail, of which only a part of the head is loaded.

        Args:
            plan: to narrow.
            hit: that part.
            prompt_tokens: of the whole prompt.
        """
        assert plan.tail is None
        if (plan.head.start, plan.head.stop) == (hit.start_block, hit.num_blocks):
            return plan
        if not self._enabled or not hit.runs:
            return Plan(Leg(hit.start_block, hit.num_blocks), reason=plan.reason)
        layout, known = self._layout, self._known
        with known.lock:
            part = known.planner.whole(_pieces(hit), layout.block_bytes, layout.block_tokens, prompt_tokens)
        return replace(part, reason=plan.reason)

    def nearest(self, hit: PrefixHit) -> PrefixHit:
        """A hit without the nodes that are much slower than another source of their run, or brought nothing lately.

        The manager asks nodes before the shared tier, the least busy first. That a copy is in the shared tier stays
        known: what is loaded is not saved again.
        """
        known = self._known
        with known.lock:
            return replace(hit, runs=tuple(self._near(known.planner.sources, run) for run in hit.runs))

    def _near(self, sources: SourceSpeeds, run: HitRun) -> HitRun:
        if run.local or run.nvme or run.pending or len(_names(run)) < 2:
            return run
        num_bytes = (run.stop - run.start) * self._layout.block_bytes
        usable = [name for name in _names(run) if not sources.stalled(name)]
        known = {name: speed.seconds(num_bytes) for name in usable if (speed := sources.speed(name)) is not None}
        limit_s = _MUCH * min(known.values(), default=0.0)
        nodes = tuple(node for node in run.nodes if PEER + node in usable and known.get(PEER + node, 0.0) <= limit_s)
        return replace(run, nodes=nodes) if nodes or "shared" in usable else run

    def computed(self, context_tokens: int, num_tokens: int, seconds: float) -> None:
        """The engine has computed `num_tokens` behind `context_tokens`."""
        known = self._known
        with known.lock:
            known.planner.observe_prefill(context_tokens, num_tokens, seconds)

    def read(self, hit: PrefixHit, reading: Reading) -> None:
        """A load has ended, however."""
        miss = reading.outcomes[-1] if reading.outcomes else None
        at = hit.start_block + len(reading.outcomes) - 1
        spans, known = reading.spans, self._known
        with known.lock:
            if miss in _WAITED_IN_VAIN and reading.waited_s:
                run = next((run for run in hit.runs if run.start <= at < run.stop), None)
                source = _expected(run) if run is not None else None
                if spans and source is not None and spans[-1].source is source:
                    last = spans[-1]  # what was waited for in vain is time it took for what came
                    spans = [*spans[:-1], Span(source, last.start, last.stop, last.seconds + reading.waited_s)]
                else:
                    for name in _stalled(run):
                        known.planner.observe(name, 0, reading.waited_s)
            self._spans(known.planner, hit, spans)

    def _spans(self, planner: Planner, hit: PrefixHit, spans: Iterable[Span]) -> None:
        for span in spans:
            if span.seconds > 0 and not (span.source is Source.DRAM and not _local(hit, span)):
                num_bytes = (span.stop - span.start) * self._layout.block_bytes
                planner.observe(_measured(hit, span), num_bytes, span.seconds, span.first_s)

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
        known = self._known
        with known.lock:
            known.planner.observe(name, blocks * self._layout.block_bytes, seconds)

    def tell(self, speeds: Mapping[str, Speed]) -> None:
        """What this node's manager has measured of sources."""
        known = self._known
        with known.lock:
            for source, speed in speeds.items():
                known.planner.tell(source, speed)

    def forget(self) -> None:
        """Forget all sources: they are other ones now."""
        known = self._known
        with known.lock:
            known.planner.sources.forget()

    def prefill(self) -> PrefillSpeed | None:
        """The engine's speed; None if it has not computed yet."""
        known = self._known
        with known.lock:
            return known.planner.prefill()

    def speeds(self) -> dict[str, Speed]:
        """Those of sources that were read."""
        known = self._known
        with known.lock:
            return known.planner.sources.speeds()


def _forget(known: _Known) -> None:
    """Not every source that seems slow is looked at: of some hits another source is used."""
    if time.monotonic() >= known.forget_at:
        known.forget_at = time.monotonic() + FORGET_S
        known.planner.sources.forget_unread()


def _pieces(hit: PrefixHit) -> list[Piece]:
    return [Piece(run.start, run.stop, _names(run)) for run in hit.runs if run.stop > run.start]


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

"""Loads of one client: as planned, in one piece or with a tail that comes while the engine computes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvfleet.attachment import ManagerPort
from kvfleet.core.layout import BlockLayout
from kvfleet.core.planner import Leg, Plan
from kvfleet.errors import KvFleetError, ManagerAvoidedError
from kvfleet.hits import Loaded, PrefixHit
from kvfleet.nearby import Nearby
from kvfleet.node.arena import Arena
from kvfleet.node.messages import Bytes, Miss, Namespace, Outcome, Source
from kvfleet.planning import Planning
from kvfleet.reading import Reading

__all__ = ["Ended", "Loads", "Meanwhile", "TakeSlot"]

_log = logging.getLogger(__name__)
_PROBE_TIMEOUT_S = 30.0

TakeSlot = Callable[[int, Bytes], None]
"""Copies a block out of a slot, by its index in the prefix."""

Meanwhile = Callable[[int], None]
"""Computes the blocks of a prompt between those that came and the tail of its plan; takes the index of the first."""


@dataclass(slots=True)
class Ended:
    """What became of a load.

    Attributes:
        outcomes: of the blocks from the first on; those behind the last one did not come either.
        calls: remote calls made, by name.
        error: why it stopped short, or None.
    """

    outcomes: list[Outcome]
    calls: list[str]
    error: KvFleetError | None = None


class Loads:
    """Carries out the loads of one client. Threads: any."""

    def __init__(
        self,
        nearby: Nearby,
        manager: ManagerPort,
        namespace: Namespace,
        layout: BlockLayout,
        shard: int,
        planning: Planning,
    ) -> None:
        self._nearby = nearby
        self._manager = manager
        self._namespace = namespace
        self._layout = layout
        self._shard = shard
        self._planning = planning
        self._probing: threading.Thread | None = None
        planning.probe = self._probe

    def load(
        self, hit: PrefixHit, take: TakeSlot, timeout_s: float, plan: Plan | None, meanwhile: Meanwhile | None
    ) -> Loaded:
        """Load a hit as planned; without a plan, all of it.

        Args:
            hit: what to load.
            take: copies a block out of a slot, by its index.
            timeout_s: for all of it.
            plan: of this hit.
            meanwhile: for a plan with a tail, which is not loaded without it.
        """
        start_s, deadline = time.perf_counter(), time.monotonic() + timeout_s
        calls: list[str] = []
        outcomes: list[Outcome] = []
        num_blocks = hit.num_blocks - hit.start_block
        if num_blocks:
            arena, fault = self._nearby.arena(timeout_s, calls)
            outcomes = [fault] if fault is not None else []
            if arena is not None:
                ended = self._planned(arena, hit, take, deadline, plan, meanwhile)
                calls += ended.calls
                if ended.error is not None:
                    self._nearby.warn("load stopped short: %s", ended.error)
                outcomes = ended.outcomes
                if Miss.EVICTED in outcomes[-1:]:
                    self._nearby.doubt()
        outcomes += [Miss.BEHIND_MISS] * (num_blocks - len(outcomes))
        loaded = Loaded.of(outcomes, self._layout)
        loaded.hit, loaded.load_s, loaded.calls = hit, time.perf_counter() - start_s, tuple(calls)
        loaded.plan = plan
        return loaded

    def _planned(
        self,
        arena: Arena,
        hit: PrefixHit,
        take: TakeSlot,
        deadline: float,
        plan: Plan | None,
        meanwhile: Meanwhile | None,
    ) -> Ended:
        """Load a hit that has blocks."""
        if plan is None:
            return self._leg(arena, hit, Leg(hit.start_block, hit.num_blocks), take, deadline)
        assert plan.head.start == hit.start_block, "the plan is of this hit"
        hit = self._planning.nearest(hit)
        if plan.tail is None or meanwhile is None:
            return _filled(self._leg(arena, hit, plan.head, take, deadline), hit.num_blocks - hit.start_block)
        return self._split(arena, hit, plan, take, deadline, meanwhile)

    def _split(
        self, arena: Arena, hit: PrefixHit, plan: Plan, take: TakeSlot, deadline: float, meanwhile: Meanwhile
    ) -> Ended:
        """Load the head; then the tail, in a thread, while the engine computes what is between."""
        assert plan.tail is not None
        head, start = self._leg(arena, hit, plan.head, take, deadline), hit.start_block
        came = sum(isinstance(outcome, Source) for outcome in head.outcomes)
        tail = _Tail(partial(self._leg, arena, hit, plan.tail), take, deadline)
        tail.start()
        try:
            meanwhile(start + came)
        except BaseException:
            tail.abandon()
            raise
        ended = _filled(head, plan.tail.start - start, computed=True)
        behind = _filled(tail.result(), hit.num_blocks - plan.tail.start)
        calls = [*ended.calls, *behind.calls]
        return Ended(ended.outcomes + behind.outcomes, calls, ended.error or behind.error)

    def _leg(self, arena: Arena, hit: PrefixHit, leg: Leg, take: TakeSlot, deadline: float) -> Ended:
        """Load some blocks of a hit; the outcomes end with the first that did not come."""
        part = hit.part(leg.start, leg.stop)
        reading = Reading(arena, part, self._shard, take, deadline, leg)
        calls: list[str] = []
        reading.local()
        if not reading.complete:
            reading.rest(self._manager, self._namespace, self._layout.block_bytes)
            calls = [] if isinstance(reading.error, ManagerAvoidedError) else ["load"]
        self._planning.read(part, reading)
        return Ended(reading.outcomes, calls, reading.error)

    # sources that are not used

    def _probe(self, hit: PrefixHit) -> None:
        """Load a few blocks, one such load at a time and counted nowhere. They stay in the arena, as after any load."""
        arena = self._nearby.now()
        if arena is None or (self._probing is not None and self._probing.is_alive()):
            return
        leg, deadline = Leg(hit.start_block, hit.num_blocks), time.monotonic() + _PROBE_TIMEOUT_S

        def look() -> None:
            try:
                self._leg(arena, hit, leg, lambda *_: None, deadline)
            except Exception:  # noqa: BLE001  nobody waits for it
                _log.warning("a look at a source that is not used failed", exc_info=True)

        self._probing = threading.Thread(target=look, name="kvfleet-probe", daemon=True)
        try:
            self._probing.start()
        except RuntimeError as error:  # no more threads
            self._probing = None
            _log.info("a source that is not used is not looked at: %s", error)

    def close(self, timeout_s: float) -> None:
        """Wait for what goes on in the background, for at most `timeout_s`."""
        if self._probing is not None:
            self._probing.join(timeout_s)


class _AbandonedError(Exception):
    """Ends a load that nobody waits for."""


class _Tail:
    """A load in a thread of its own."""

    def __init__(self, load: Callable[[TakeSlot, float], Ended], take: TakeSlot, deadline: float) -> None:
        self._load = load
        self._take = take
        self._deadline = deadline
        self._abandoned = False
        self._ended = Ended([], [])
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kvfleet-tail", daemon=True)

    def start(self) -> None:
        """Begin. Without a thread to be had, nothing is loaded."""
        try:
            self._thread.start()
        except RuntimeError as error:
            _log.warning("the rest of a prompt is not loaded: %s", error)

    def _run(self) -> None:
        try:
            self._ended = self._load(self._copy, self._deadline)
        except BaseException as error:  # noqa: BLE001  raised again where the result is asked for
            self._error = error

    def _copy(self, index: int, slot: Bytes) -> None:
        if self._abandoned:
            raise _AbandonedError
        self._take(index, slot)

    def abandon(self) -> None:
        """End soon; what was copied may be overwritten from now on."""
        self._abandoned = True
        self._join()

    def _join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def result(self) -> Ended:
        """What became of it. Blocking: until it has ended."""
        self._join()
        if self._error is not None:
            raise self._error
        return self._ended


def _filled(ended: Ended, num_blocks: int, *, computed: bool = False) -> Ended:
    """With an outcome for each of `num_blocks`.

    Args:
        ended: a load of the first of them.
        num_blocks: how many there are.
        computed: the engine has computed all that did not come.
    """
    outcomes = ended.outcomes
    missed = outcomes[-1] if outcomes and isinstance(outcomes[-1], Miss) else None
    computed = computed or missed in {None, Miss.SLOWER_THAN_COMPUTE}
    rest = Miss.SLOWER_THAN_COMPUTE if computed else Miss.BEHIND_MISS
    return Ended(outcomes + [rest] * (num_blocks - len(outcomes)), ended.calls, ended.error)

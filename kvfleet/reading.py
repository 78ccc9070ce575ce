"""One load, as the client does it: copy what is in the arena, have the manager bring the rest, copy that too."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby

from kvfleet.attachment import ManagerPort
from kvfleet.copying import checksum
from kvfleet.core.directory import Run
from kvfleet.core.planner import Leg
from kvfleet.errors import DeadlineExceededError, KvFleetError
from kvfleet.hits import PrefixHit
from kvfleet.node.arena import Arena
from kvfleet.node.messages import Bytes, LoadProgress, LoadRequest, Miss, Namespace, Outcome, Source
from kvfleet.node.records import ORDERED

__all__ = ["Reading", "Span"]

_ANSWER_S = 0.5  # for the manager to say that a load fell behind; one that says nothing is not waited for longer


@dataclass(slots=True)
class Span:
    """Blocks [start, stop) that came from one kind of source, and how long that took with their copies.

    Attributes:
        seconds: from the request on, or from the block before them.
        first_s: until the first of them were copied; None if all were at once.
    """

    source: Source
    start: int
    stop: int
    seconds: float
    first_s: float | None = None


class Reading:
    """Copies the blocks of a hit, in order, up to the first that does not come.

    Attributes:
        outcomes: of the blocks so far; at most the last one is a `Miss`.
        spans: of those that came, from the first to the last.
        waited_s: how long the manager was waited for in vain at last.
        error: why the manager's answer stopped short, or None.
    """

    def __init__(
        self,
        arena: Arena,
        hit: PrefixHit,
        shard: int,
        take: Callable[[int, Bytes], None],
        deadline: float,
        leg: Leg | None = None,
    ) -> None:
        """Prepare.

        Args:
            arena: of this node.
            hit: what to read.
            shard: which shard of it.
            take: copies block `index` out of a slot, which it may only read.
            deadline: monotonic seconds.
            leg: how the load is paced; None: it is not.
        """
        self._arena = arena
        self._hit = hit
        self._shard = shard
        self._take = take
        self._deadline = deadline
        self._leg = leg or Leg(hit.start_block, hit.num_blocks)
        self._began_s = self._marked_s = time.monotonic()
        self.outcomes: list[Outcome] = []
        self.spans: list[Span] = []
        self.waited_s = 0.0
        self.error: KvFleetError | None = None

    @property
    def complete(self) -> bool:
        """Whether all blocks came."""
        return self._next == self._hit.num_blocks and not self._missed

    @property
    def _next(self) -> int:
        """Index of the block after the last outcome."""
        return self._hit.start_block + len(self.outcomes)

    @property
    def _missed(self) -> bool:
        return bool(self.outcomes) and isinstance(self.outcomes[-1], Miss)

    def local(self) -> None:
        """Copy the first blocks, those that were local at the lookup, up to one that has left since."""
        runs = self._hit.runs
        if runs and runs[0].local:
            start = self._next
            self._copy([Source.DRAM] * (runs[0].stop - runs[0].start))
            self._mark(Source.DRAM, start, self._next - self._missed)
        if self._missed and self.outcomes[-1] is Miss.EVICTED:
            self.outcomes.pop()  # `rest` may find it elsewhere

    def rest(self, manager: ManagerPort, namespace: Namespace, num_bytes: int) -> None:
        """Have the manager bring the blocks from the next one on, and copy them as they come."""
        if self._missed:
            return
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            self.outcomes.append(Miss.DEADLINE)
            return
        self._marked_s = time.monotonic()
        try:
            with closing(manager.load(self._request(namespace, num_bytes, left_s))) as steps:
                for step in steps:
                    self._step(step)
                    if self._missed:
                        break
        except KvFleetError as error:
            if self.complete:
                return  # it was only the end of the stream that did not come
            self.error = error
        if not self.complete and not self._missed:
            late = isinstance(self.error, DeadlineExceededError)
            self.outcomes.append(Miss.DEADLINE if late else Miss.MANAGER_UNAVAILABLE)
        self.waited_s = time.monotonic() - self._marked_s

    def _step(self, step: LoadProgress) -> None:
        """Copy what came, and note what did not."""
        came = [outcome for outcome in step.outcomes if isinstance(outcome, Source)]
        start = self._next
        self._copy(came)
        stop = self._next - self._missed
        for source, group in groupby(came):
            end = min(stop, start + len(list(group)))
            self._mark(source, start, end)
            start = end
        if not self._missed and len(came) < len(step.outcomes):
            self.outcomes.append(step.outcomes[len(came)])

    def _mark(self, source: Source, start: int, stop: int) -> None:
        """Blocks [start, stop) came since the last mark."""
        if start == stop:
            return
        now = time.monotonic()
        seconds, self._marked_s = now - self._marked_s, now
        last = self.spans[-1] if self.spans else None
        if last is None or last.source is not source or last.stop != start:
            self.spans.append(Span(source, start, stop, seconds))
            return
        last.stop = stop
        last.first_s = last.seconds if last.first_s is None else last.first_s
        last.seconds += seconds

    def _request(self, namespace: Namespace, num_bytes: int, left_s: float) -> LoadRequest:
        head, stop, leg = self._next, self._hit.num_blocks, self._leg
        came = head - self._hit.start_block
        spent_s = time.monotonic() - self._began_s - (leg.pace_s * came if came else 0.0)
        grace_s = max(0.0, leg.grace_s - spent_s)
        return LoadRequest(
            namespace=namespace,
            keys=self._hit.keys_of(head, stop),
            parent=self._hit.keys_of(head - 1, head) if head else b"",
            depth=head,
            shard=self._shard,
            num_bytes=num_bytes,
            runs=tuple(
                Run(max(run.start, head) - head, run.stop - head, run.nodes, run.shared)
                for run in self._hit.runs
                if run.stop > head
            ),
            timeout_s=min(left_s, grace_s + leg.pace_s * (stop - head) + _ANSWER_S),
            grace_s=grace_s,
            pace_s=leg.pace_s,
            spare_s=min(leg.spare_s, grace_s / 2),
        )

    def _copy(self, sources: list[Source]) -> None:
        """Copy the next blocks, which are in the arena, and check each one's generation after its copy."""
        start = self._next
        keys = self._hit.keys_of(start, start + len(sources))
        records = self._arena.records
        found = records.find(keys, self._shard)
        records.touch(found.slots, time.monotonic_ns())
        for position, source in enumerate(sources):
            if found.slots[position] < 0:
                self.outcomes.append(Miss.EVICTED)
                return
            if time.monotonic() > self._deadline:
                self.outcomes.append(Miss.DEADLINE)
                return
            slot = self._arena.slot_view(int(found.offsets[position]), int(found.lengths[position]))
            slot.flags.writeable = False
            self._take(start + position, slot)
            one = slice(position, position + 1)
            same = bool(records.unchanged(found.slots[one], found.generations[one])[0])
            if not same or not (ORDERED or checksum(slot) == found.checksums[position]):
                self.outcomes.append(Miss.EVICTED)
                return
            self.outcomes.append(source)

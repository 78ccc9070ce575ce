"""What a load tells its client as blocks arrive, and the holds on those that the client has not copied yet."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

from kvfleet.node.landing import BlockSlots
from kvfleet.node.messages import LoadProgress, Miss, Outcome, Source
from kvfleet.node.waiting import now, within

__all__ = ["Arrivals"]


class Arrivals:
    """The outcomes of a load, from its producer to the stream its client reads.

    A stream is resumed when its reader takes an item, and a client takes the next one when it has copied the blocks
    of the last one: what was sent before an item is let go when that item was taken. Where there is nothing to say,
    an empty item tells when the client is done, so that no load keeps blocks while it waits for room itself.

    Attributes:
        outcomes: of the blocks so far; the producer's next one is that of block `len(outcomes)`.
    """

    def __init__(self, slots: BlockSlots) -> None:
        self._slots = slots
        self.outcomes: list[Outcome] = []
        self._arrived = asyncio.Event()
        self._held: deque[int] = deque()  # ascending

    def add(self, outcome: Outcome) -> None:
        """The next block came, or did not."""
        self.outcomes.append(outcome)
        self._arrived.set()

    def add_resident(self, source: Source) -> bool:
        """The next block is in the arena: hold it until the client has copied it. False: it is not there."""
        index = len(self.outcomes)
        if not self._slots.resident(index):
            return False
        self._slots.hold(index)
        self._held.append(index)
        self._slots.pace.note(len(self._held))
        self.add(source)
        return True

    async def steps(self) -> AsyncGenerator[LoadProgress, None]:
        """Outcomes as they come, up to the last block or a miss."""
        sent = 0
        while sent < len(self._slots.keys):
            if len(self.outcomes) == sent and self._held:
                yield LoadProgress(())
                self.let_go(sent)
            outcomes = await self._next(sent)
            yield LoadProgress(outcomes)
            self.let_go(sent)
            sent += len(outcomes)
            if isinstance(outcomes[-1], Miss):
                break
        if self._held:
            yield LoadProgress(())
            self.let_go(sent)

    async def _next(self, sent: int) -> tuple[Outcome, ...]:
        while len(self.outcomes) == sent:
            self._arrived.clear()
            left_s, ahead_s = self._slots.left_s, self.ahead_s(sent)
            try:
                await within(min(left_s, ahead_s), self._arrived.wait())
            except asyncio.TimeoutError:
                return (Miss.DEADLINE if left_s <= ahead_s else Miss.SLOWER_THAN_COMPUTE,)
        return tuple(self.outcomes[sent:])

    def ahead_s(self, came: int) -> float:
        """Seconds until a load of which so many blocks came falls behind computing them, at least 0."""
        request = self._slots.request
        worth_s = request.pace_s * came if came else 0.0
        return max(0.0, self._slots.began + request.grace_s + worth_s - now())

    def let_go(self, stop: int | None = None) -> None:
        """End the holds on the blocks before `stop`, or all."""
        while self._held and (stop is None or self._held[0] < stop):
            self._slots.release(self._held.popleft())
        self._slots.pace.note(len(self._held))

"""How the bytes of many blocks are cut into windows, and how many bytes may be on their way at once.

A window is what one object of Ray's object store carries: consecutive byte ranges of consecutive blocks. The first
is small so that the first bytes come early, the later ones are large because a small object costs as much waiting
as a large one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvfleet.errors import DeadlineExceededError, TierFullError

__all__ = ["ByteBudget", "Share", "Span", "plan_windows", "stream_share"]


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes `start` to `stop` of block number `index`."""

    index: int
    start: int
    stop: int


def plan_windows(sizes: Sequence[int], first_bytes: int, max_bytes: int) -> Iterator[list[Span]]:
    """Cut blocks into windows, first blocks first.

    The first window holds at most `first_bytes`, each further one at most twice as many as the one before it, up to
    `max_bytes`. A block that does not fit goes on in the next window; windows before the last are full.

    Args:
        sizes: bytes of each block, all positive.
        first_bytes: size of the first window.
        max_bytes: size of the largest window; smaller than `first_bytes` makes every window that small.

    Yields:
        The spans of a window, in order; never empty. Together they cover every byte of every block once.
    """
    assert first_bytes > 0
    assert max_bytes > 0
    limit = min(first_bytes, max_bytes)
    window: list[Span] = []
    room = limit
    for index, size in enumerate(sizes):
        assert size > 0
        start = 0
        while start < size:
            stop = min(size, start + room)
            window.append(Span(index, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield window
                limit = min(2 * limit, max_bytes)
                window, room = [], limit
    if window:
        yield window


@dataclass(frozen=True, slots=True)
class Share:
    """What one stream may have in an object store: `num_bytes`, in windows of at most `window_bytes_max`."""

    num_bytes: int
    window_bytes_max: int


def stream_share(total_bytes: int, window_bytes_max: int, windows_in_flight: int, budget_bytes: int) -> Share:
    """Size a stream of `total_bytes` so that it fits the budget of a node.

    It occupies the windows that the holder makes ahead, and the one that the reader copies out. Windows shrink
    where the budget is too small for that many large ones.
    """
    assert total_bytes > 0
    windows = windows_in_flight + 1
    window_bytes_max = min(window_bytes_max, budget_bytes // windows)
    assert window_bytes_max > 0
    return Share(min(total_bytes, windows * window_bytes_max), window_bytes_max)


class ByteBudget:
    """A bound on bytes in flight: whoever wants to move bytes takes its share first and gives it back after.

    First come, first served: a large request is not overtaken by later small ones.

    Threads: for one event loop.

    Attributes:
        capacity_bytes: the bound.
        waiters_max: how many may wait; one more is turned away at once.
    """

    def __init__(self, capacity_bytes: int, *, waiters_max: int = 1024) -> None:
        assert capacity_bytes > 0
        assert waiters_max >= 0
        self.capacity_bytes = capacity_bytes
        self.waiters_max = waiters_max
        self._taken_bytes = 0
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def taken_bytes(self) -> int:
        """Bytes taken and not yet given back."""
        return self._taken_bytes

    async def acquire(self, num_bytes: int, timeout_s: float) -> None:
        """Take `num_bytes`, waiting for them if need be.

        Args:
            num_bytes: positive, at most `capacity_bytes`.
            timeout_s: longest wait.

        Raises:
            DeadlineExceededError: not free in time. Nothing was taken.
            TierFullError: too many wait already. Likewise.
        """
        assert 0 < num_bytes <= self.capacity_bytes
        if not self._waiters and self._taken_bytes + num_bytes <= self.capacity_bytes:
            self._taken_bytes += num_bytes
            return
        if len(self._waiters) >= self.waiters_max:
            raise TierFullError("peer", f"{len(self._waiters)} streams wait for room already")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = (num_bytes, turn)
        self._waiters.append(waiter)
        try:
            await asyncio.wait({turn}, timeout=timeout_s)
            if not turn.done():
                raise DeadlineExceededError(f"room for {num_bytes} bytes in flight", timeout_s)
        except BaseException:  # out of time, or cancelled: maybe just after the bytes were granted
            if turn.done():
                self.release(num_bytes)
            else:
                self._waiters.remove(waiter)
                self._grant()
            raise

    def release(self, num_bytes: int) -> None:
        """Give back `num_bytes` that were taken."""
        assert 0 < num_bytes <= self._taken_bytes
        self._taken_bytes -= num_bytes
        self._grant()

    def _grant(self) -> None:
        while self._waiters and self._taken_bytes + self._waiters[0][0] <= self.capacity_bytes:
            num_bytes, turn = self._waiters.popleft()
            self._taken_bytes += num_bytes
            turn.set_result(None)

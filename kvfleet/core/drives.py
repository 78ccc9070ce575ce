"""Which of a node's drives a block goes to, and which drives get none for now.

Plain decisions over numbers; the drives themselves are in `node/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvfleet.core.admission import EXPECTED_MIN

__all__ = ["Backoff", "Health", "Load", "choose", "takes", "uses_wanted"]

_WEIGHT = 1 / 8  # of the newest sample
_SAMPLES_MIN = 16
_SLOWER = 10.0
_PROBE_S = (10.0, 300.0)  # first and longest pause between probes of a slow drive
_BYTES_MIN = 1 << 16  # what a shorter transfer counts as: it takes the time of the seek, not of its bytes
_PRESSURES = ((0.0, 0), (0.5, 1), (1.0, 2))  # up to which pressure, how many uses


def uses_wanted(pressure: float) -> int | None:
    """How often a block must have been used again to be written to a drive; None if nothing is written.

    Args:
        pressure: of the drive's write budget, see `WriteBudget.pressure`.
    """
    if pressure <= 0:
        return 0
    return next((uses for limit, uses in _PRESSURES[1:] if pressure < limit), None)


@dataclass(frozen=True, slots=True)
class Load:
    """A drive that works, as it is now.

    Attributes:
        capacity_bytes: of its slots.
        free_bytes: of these.
        queued_bytes: that are on their way to it.
        pressure: of its write budget.
        written_bytes: since the manager started.
    """

    capacity_bytes: int
    free_bytes: int
    queued_bytes: int
    pressure: float
    written_bytes: int


def takes(load: Load, num_bytes: int, uses: int, queue_bytes_max: int, *, expected_uses: float | None = None) -> bool:
    """Whether a drive would take a block, see `Gate`.

    What has earned it is seen by the uses it is expected to have: the more the budget is spent, the more. If it is too
    early to say, by those that it had.
    """
    if load.queued_bytes + num_bytes > queue_bytes_max or num_bytes > load.capacity_bytes:
        return False
    wanted = uses_wanted(load.pressure)
    if wanted is None:
        return False
    if expected_uses is None:
        return uses >= wanted
    return expected_uses >= max(EXPECTED_MIN, load.pressure)


def choose(loads: Sequence[Load]) -> int:
    """The drive for a block, of those that take it: where budgets are tight least, the queue is shortest, room is most.

    So a run of blocks keeps all drives busy. Full drives that are idle share what comes by their sizes.
    """

    def cost(index: int) -> tuple[int, int, float, float]:
        load = loads[index]
        free = round(load.free_bytes / load.capacity_bytes, 2)
        return uses_wanted(load.pressure) or 0, load.queued_bytes, -free, load.written_bytes / load.capacity_bytes

    return min(range(len(loads)), key=cost)


class _Speed:
    """How long a drive takes for a byte, the newest transfers counting most."""

    def __init__(self) -> None:
        self.s_per_byte = 0.0
        self.samples = 0

    def note(self, num_bytes: int, seconds: float) -> None:
        sample = seconds / max(num_bytes, _BYTES_MIN)
        self.samples += 1
        self.s_per_byte += max(_WEIGHT, 1 / self.samples) * (sample - self.s_per_byte)

    def slow(self, peers: Sequence[_Speed], samples_min: int) -> bool:
        known = sorted(peer.s_per_byte for peer in peers if peer.samples >= _SAMPLES_MIN)
        if self.samples < samples_min or not known:
            return False
        median = (known[(len(known) - 1) // 2] + known[len(known) // 2]) / 2
        return self.s_per_byte > _SLOWER * median


class Health:
    """Whether a drive is much slower than its peers: then it gets no writes but for a probe now and then.

    Slow is who takes ten times as long for a byte as the median of the others, after 16 transfers. One probe that is
    not makes it good again.

    Attributes:
        slow: it is, as far as is known.
    """

    def __init__(self) -> None:
        self.slow = False
        self._reads, self._writes = _Speed(), _Speed()
        self._pauses = Backoff(*_PROBE_S)
        self._probe_at = 0.0

    def note_read(self, num_bytes: int, seconds: float) -> None:
        """A read took so long."""
        self._reads.note(num_bytes, seconds)

    def note_write(self, num_bytes: int, seconds: float) -> None:
        """A write took so long."""
        self._writes.note(num_bytes, seconds)

    def judge(self, peers: Sequence[Health], now: float) -> None:
        """Compare with the other drives of the node."""
        if self.slow:
            if self._writes.samples and not self._writes.slow([peer._writes for peer in peers], 1):
                self.slow = False
                self._pauses.worked(now)
                self._reads, self._writes = _Speed(), _Speed()
            return
        reads, writes = [peer._reads for peer in peers], [peer._writes for peer in peers]
        if self._reads.slow(reads, _SAMPLES_MIN) or self._writes.slow(writes, _SAMPLES_MIN):
            self.slow = True
            self._writes = _Speed()
            self._probe_at = now + self._pauses.failed(now)

    def accepts(self, now: float) -> bool:
        """Whether it may be written now; a slow drive once, as a probe."""
        return not self.slow or now >= self._probe_at

    def written(self, now: float) -> None:
        """A write was given to it: if that was a probe, the next one comes later."""
        if self.slow:
            self._writes = _Speed()
            self._probe_at = now + self._pauses.failed(now)


class Backoff:
    """Pauses between attempts, doubling until something has worked for a while."""

    def __init__(self, first_s: float, max_s: float) -> None:
        assert 0 < first_s <= max_s
        self._first_s = first_s
        self._max_s = max_s
        self._pause_s = 0.0
        self._since: float | None = None

    def worked(self, now: float) -> None:
        """It works from now on, as far as is known."""
        self._since = now

    def failed(self, now: float) -> float:
        """It does not work. Returns the seconds to wait before the next attempt."""
        if self._since is not None and now - self._since >= self._max_s:
            self._pause_s = 0.0
        self._since = None
        self._pause_s = min(self._max_s, max(self._first_s, 2 * self._pause_s))
        return self._pause_s

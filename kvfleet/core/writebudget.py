"""How much may be written to a drive a day, so that it lasts as long as its maker says.

A drive is rated for so many writes of its whole capacity a day (DWPD) over some years. Days are counted by the time
that has passed since the first use of the drive, not by the calendar:

- In one life of the machine by its monotonic clock. What the wall clock says is not looked at.
- From one life to the next, when the machine was off or the drive was moved to another, only the wall clock can tell
  how long that took. It may be wrong: it is believed between no time at all and one day. So a clock that was set back
  costs no more than the rest of a day's budget, and one that was set forward gains no more than one day's.

What was written is counted before it is written. `charge` says when the state has to be on disk first, once in about a
thousandth of a day's budget: a process killed at any moment has written no more than the state it left says.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

__all__ = ["DAY_S", "BudgetState", "Moment", "WriteBudget"]

DAY_S = 86_400.0

_FORMAT = 1
_RELAXED = 0.5  # of a day's budget may go at any time of the day before admission tightens
_CLAIM = 1024  # parts of a day's budget


@dataclass(frozen=True, slots=True)
class Moment:
    """What the clocks say.

    Attributes:
        boot_id: changes with each start of the machine, /proc/sys/kernel/random/boot_id on Linux.
        monotonic_s: seconds on a clock that nobody sets, since an arbitrary moment of this boot. Best is one that goes
            on in suspend (CLOCK_BOOTTIME).
        wall_s: seconds since 1970, as far as the machine knows.
    """

    boot_id: str
    monotonic_s: float
    wall_s: float


@dataclass(frozen=True, slots=True)
class BudgetState:
    """What has to outlive the process.

    Attributes:
        saved: when this was the state.
        elapsed_s: time since the first use of the drive, as it was counted.
        total_bytes: written since then, or about to be.
        today_bytes: of these, on the day of `elapsed_s`.
    """

    saved: Moment
    elapsed_s: float
    total_bytes: int
    today_bytes: int

    def to_json(self) -> str:
        """The state as text, with the version of its format."""
        return json.dumps({"format": _FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> BudgetState:
        """Read what `to_json` wrote.

        Raises:
            ValueError: it is something else, or of another version.
        """
        try:
            fields = json.loads(text)
            if fields.pop("format") != _FORMAT:
                raise ValueError("another format")
            state = cls(**{**fields, "saved": Moment(**fields["saved"])})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not the state of a write budget in format {_FORMAT}: {error}") from error
        numbers = (state.saved.monotonic_s, state.saved.wall_s, state.elapsed_s, state.total_bytes, state.today_bytes)
        if not all(type(number) in {int, float} and math.isfinite(number) for number in numbers):
            raise ValueError("a write budget's state has numbers")
        if min(state.elapsed_s, state.today_bytes, state.total_bytes - state.today_bytes) < 0:
            raise ValueError("a write budget's state does not add up")
        return state


class WriteBudget:
    """The budget of one drive. Times are passed in: `now` is `Moment.monotonic_s` of this boot.

    Threads: calls must not overlap.

    Attributes:
        day_bytes: what may be written a day.
    """

    def __init__(
        self,
        rated_bytes: int,
        dwpd: float,
        now: Moment,
        state: BudgetState | None = None,
        *,
        rated_years: float = 5.0,
    ) -> None:
        """Begin, or go on from where an earlier process left off.

        Args:
            rated_bytes: capacity of the drive as its maker says, not what of it the cache may use.
            dwpd: drive writes per day, from its data sheet.
            now: when this process starts.
            state: as it was last saved; None for a drive that was never used.
            rated_years: for which the drive is rated, from its data sheet.
        """
        assert rated_bytes > 0, "a drive has a capacity"
        assert dwpd > 0, "a drive can be written"
        assert rated_years > 0, "a drive lasts"
        self.day_bytes = int(rated_bytes * dwpd)
        self._rated_bytes = rated_bytes * dwpd * 365 * rated_years
        self._boot_id = now.boot_id
        self._total = self._today = 0
        self._claim = -(-self.day_bytes // _CLAIM)
        elapsed = 0.0
        if state is not None:
            self._total, self._today = state.total_bytes, state.today_bytes
            elapsed = state.elapsed_s + _between(state.saved, now)
            if elapsed // DAY_S > state.elapsed_s // DAY_S:
                self._today = 0
        self._claimed = self._total  # what the state on disk says
        self._elapsed = elapsed
        self._seen = now.monotonic_s

    def allows(self, num_bytes: int, now: float) -> bool:
        """Whether so many bytes may be written today, besides what was charged."""
        self._tick(now)
        return self._today + num_bytes <= self.day_bytes

    def charge(self, num_bytes: int, now: float) -> bool:
        """Count bytes that are about to be written.

        Returns:
            Whether `state` must be on disk before they are written.
        """
        assert num_bytes >= 0, "nothing is unwritten"
        self._tick(now)
        self._total += num_bytes
        self._today += num_bytes
        return self._total > self._claimed

    def state(self, now: Moment, *, closing: bool = False) -> BudgetState:
        """What to save: now and then, when `charge` says so, and at the end.

        It counts a little more than was charged, so that it need not be saved again soon.

        Args:
            now: this moment.
            closing: nothing will be written after it: it is exact.
        """
        assert now.boot_id == self._boot_id, "one process sees one boot"
        self._tick(now.monotonic_s)
        ahead = 0 if closing else self._claim
        self._claimed = self._total + ahead
        return BudgetState(now, self._elapsed, self._total + ahead, self._today + ahead)

    def lost(self) -> None:
        """What was saved last may not be on disk: the next `charge` has it saved again."""
        self._claimed = -1

    def pressure(self, now: float) -> float:
        """How hard admission should be: 0 is as ever, 1 lets nothing in.

        It is 0 while no more of the day's budget is spent than of the day, or than half; from there it grows evenly
        with what is spent.
        """
        self._tick(now)
        spent = self._today / self.day_bytes if self.day_bytes else 1.0
        relaxed = max(_RELAXED, self._elapsed % DAY_S / DAY_S)
        if spent >= 1:
            return 1.0
        return max(0.0, (spent - relaxed) / (1 - relaxed))

    def today_bytes(self, now: float) -> int:
        """Bytes charged today."""
        self._tick(now)
        return self._today

    @property
    def total_bytes(self) -> int:
        """Bytes charged since the first use of the drive."""
        return self._total

    def elapsed_s(self, now: float) -> float:
        """Time since the first use of the drive. It never goes back, and goes on where an earlier process was."""
        self._tick(now)
        return self._elapsed

    def life_days(self, now: float) -> float:
        """Days until the drive has had the writes it is rated for, if it goes on as in all its days; may be infinite.

        Infinite too in its first day: what the hours of filling it say of its life is not true of the years after.
        Only what was charged here is known: a drive that had another use before, or has one beside, lasts shorter.
        """
        self._tick(now)
        a_day = self._total * DAY_S / self._elapsed if self._elapsed >= DAY_S else 0.0
        return max(0.0, self._rated_bytes - self._total) / a_day if a_day else math.inf

    def _tick(self, now: float) -> None:
        if now <= self._seen:
            return
        before = self._elapsed
        self._elapsed += now - self._seen
        self._seen = now
        if self._elapsed // DAY_S > before // DAY_S:
            self._today = 0
            self._claimed = self._total  # what the state on disk says of a day is of another day


def _between(saved: Moment, now: Moment) -> float:
    """Seconds that went by from one process to the next."""
    if saved.boot_id and saved.boot_id == now.boot_id:
        return max(0.0, now.monotonic_s - saved.monotonic_s)
    return min(max(0.0, now.wall_s - saved.wall_s), DAY_S)

"""Which bytes of the arena are slots of which size."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvfleet.core.runs import SLOT_ALIGN, UNITS_MAX, Run, fitting_units, kept_runs, table_value

__all__ = ["SLOT_ALIGN", "SlabMap", "Window"]


@dataclass(frozen=True, slots=True)
class Window:
    """Units that a run can be carved from once their slots are empty.

    Attributes:
        heat: of its hottest slot.
        slots: the slots that must be emptied. Each run that reaches into the window has to be given up whole.
    """

    heat: float
    slots: tuple[int, ...]


class SlabMap:
    """Divides an arena into runs of units, and runs into slots of one size.

    A slot's number is that of its record in the record table and has nothing to do with where the slot is. Freed
    slots are taken again oldest first. A run that is wholly free is given up when another size needs its units;
    `windows` says what to empty when none is.

    `on_change(unit, value)` is told the table of the units (see `runs`), so that it can be kept and `restore`d.
    """

    def __init__(
        self, capacity_bytes: int, unit_bytes: int, num_slots: int,
        on_change: Callable[[int, int], None] = lambda unit, value: None,
    ) -> None:  # fmt: skip
        """Start with all units free.

        Args:
            capacity_bytes: of the arena's slot area; what is left of it after the last whole unit is not used.
            unit_bytes: a multiple of the page size.
            num_slots: size of the record table: slots there can be at once.
            on_change: is told of each unit whose table value changes.
        """
        assert unit_bytes % SLOT_ALIGN == 0, "units are whole pages"
        assert 0 < capacity_bytes // unit_bytes < UNITS_MAX, "a unit's place fits in the table"
        self._unit_bytes = unit_bytes
        self._on_change = on_change
        self._units: list[Run | None] = [None] * (capacity_bytes // unit_bytes)
        self._places: list[tuple[Run, int] | None] = [None] * num_slots
        self._numbers = deque(range(num_slots))  # not in any run
        self._free: dict[int, OrderedDict[int, None]] = {}  # free slots by size, oldest first
        self._num_runs: Counter[int] = Counter()  # by size
        self._run_units: dict[int, int] = {}
        self._num_vacant = len(self._units)  # units without a taken slot
        self._first_free = 0  # all units before it are in runs
        self.used_bytes = 0

    @property
    def capacity_bytes(self) -> int:
        """Bytes that can be slots."""
        return len(self._units) * self._unit_bytes

    @property
    def num_units(self) -> int:
        """How many units there are."""
        return len(self._units)

    @property
    def num_slots(self) -> int:
        """How many slots there can be at once."""
        return len(self._places)

    @staticmethod
    def slot_size(num_bytes: int) -> int:
        """Bytes of the slots that blocks of `num_bytes` go to."""
        assert num_bytes > 0, "blocks have bytes"
        return -(-num_bytes // SLOT_ALIGN) * SLOT_ALIGN

    def offset(self, slot: int) -> int:
        """Where a slot begins, in bytes from the start of the slot area."""
        run, position = self._place(slot)
        return run.first_unit * self._unit_bytes + position * run.slot_bytes

    def slot_bytes(self, slot: int) -> int:
        """The size of a slot."""
        return self._place(slot)[0].slot_bytes

    def slots_per_run(self, size: int) -> int:
        """How many slots of a size one run has."""
        return self.run_units(size) * self._unit_bytes // size

    def run_units(self, size: int) -> int:
        """Units of a run of slots of `size`; more than there are if none fits."""
        if size not in self._run_units:
            self._run_units[size] = fitting_units(size, self._unit_bytes, len(self._units))
        return self._run_units[size]

    def others(self, size: int) -> bool:
        """Whether any run is of another size."""
        return self._num_runs.total() > self._num_runs[size]

    def take(self, size: int) -> int | None:
        """A free slot of `size` (a `slot_size`), or None if there is no room."""
        if not self._free.get(size) and not self._carve(size):
            return None
        slot, _ = self._free[size].popitem(last=False)
        self._taken(self._place(slot)[0], 1)
        self.used_bytes += size
        return slot

    def give(self, slot: int) -> None:
        """Make a taken slot free again."""
        run, _ = self._place(slot)
        free = self._free.get(run.slot_bytes)
        if free is None:
            free = self._free[run.slot_bytes] = OrderedDict()
        assert slot not in free, "slot is taken"
        free[slot] = None
        self._taken(run, -1)
        self.used_bytes -= run.slot_bytes

    def windows(self, size: int, heat: npt.NDArray[np.float64]) -> Iterator[Window]:
        """Where runs for `size` could be carved at the cost of other sizes, coldest first.

        No two share a unit, but they can share a run, and name the same slots then.

        Args:
            size: a `slot_size`.
            heat: of each slot number, as a rule its last use in seconds; -inf for slots that are not taken.
        """
        length = self.run_units(size)
        by_unit = np.full(len(self._units), -np.inf)
        for run in self._runs(slice(None)):
            hottest = np.inf if run.slot_bytes == size else heat[run.slots].max()
            by_unit[run.first_unit : run.first_unit + run.num_units] = hottest
        if length > len(by_unit) or np.isinf(by_unit).all():
            return
        hottest_from = np.lib.stride_tricks.sliding_window_view(by_unit, length).max(axis=1)
        claimed = np.zeros(len(by_unit), np.bool_)
        for start in np.argsort(hottest_from, kind="stable").tolist():
            units = slice(start, start + length)
            if np.isinf(hottest_from[start]) or claimed[units].any():
                continue  # has slots of this size, or nothing to empty
            claimed[units] = True
            slots = [slot for run in self._runs(units) for slot in run.slots if heat[slot] > -np.inf]
            yield Window(float(hottest_from[start]), tuple(slots))

    def restore(self, table: Sequence[int], live: Mapping[int, int]) -> list[int]:
        """Rebuild a new map from a kept table and the slots in use, by number with their offsets.

        A run of which only a part is in the table was being carved when its writer died: it held nothing yet.

        Returns:
            Live slots that are in no run. They count as not taken.
        """
        assert len(table) == len(self._units), "a table of the same arena"
        assert not self._runs(slice(None)), "a new map"
        runs, strays = kept_runs(table, self._unit_bytes)
        for run in runs:
            self._enter(run)
        for unit in strays:
            self._on_change(unit, 0)
        by_offset = {offset: slot for slot, offset in live.items()}
        lost = [slot for slot, offset in live.items() if by_offset[offset] != slot or not self._settle(slot, offset)]
        self._numbers = deque(number for number, place in enumerate(self._places) if place is None)
        for run in self._runs(slice(None)):
            self._number(run)
            if not run.slots:
                self._dissolve(run)
        return lost

    def audit(self) -> list[str]:
        """What does not add up; nothing, unless there is a bug."""
        findings = []
        free = {slot for slots in self._free.values() for slot in slots}
        runs = self._runs(slice(None))
        for run in runs:
            taken = len(set(run.slots) - free)
            if taken != run.num_taken:
                findings.append(f"run at unit {run.first_unit}: {taken} slots taken, {run.num_taken} counted")
        used = sum(run.num_taken * run.slot_bytes for run in runs)
        if used != self.used_bytes:
            findings.append(f"slots: {used} bytes taken, {self.used_bytes} counted")
        vacant = sum(run is None or not run.num_taken for run in self._units)
        if vacant != self._num_vacant:
            findings.append(f"slots: {vacant} units without a taken slot, {self._num_vacant} counted")
        numbered = sum(len(run.slots) for run in runs) + len(self._numbers)
        if numbered != len(self._places):
            findings.append(f"slots: {numbered} numbers, {len(self._places)} records")
        return findings

    def _place(self, slot: int) -> tuple[Run, int]:
        place = self._places[slot]
        assert place is not None, "slot is in a run"
        return place

    def _taken(self, run: Run, change: int) -> None:
        """A slot of a run is taken (`change` 1), or free again (-1)."""
        was_vacant = not run.num_taken
        run.num_taken += change
        self._num_vacant += run.num_units * ((not run.num_taken) - was_vacant)

    def _runs(self, units: slice) -> list[Run]:
        """The runs that reach into some units, in order."""
        runs: list[Run] = []
        for run in self._units[units]:
            if run is not None and (not runs or runs[-1] is not run):
                runs.append(run)
        return runs

    def _carve(self, size: int) -> bool:
        """Make a run of free slots, if there are units and numbers for it; empty runs of other sizes are given up."""
        length = self.run_units(size)
        if length > self._num_vacant:
            return False  # as in every full arena: that is not to cost a look at all units
        start = self._room(length, empty_runs=False)
        if start is None:
            start = self._room(length, empty_runs=True)
        if start is None:
            return False
        units = slice(start, start + length)
        for run in self._runs(units if self._numbers else slice(None)):
            if not run.num_taken and run.slot_bytes != size:
                self._dissolve(run)
        if not self._numbers:
            return False
        run = Run(start, length, size)
        self._enter(run)
        self._number(run)
        return True

    def _room(self, length: int, *, empty_runs: bool) -> int | None:
        """The first of `length` consecutive free units, those of empty runs counted or not."""
        streak = 0
        for unit in range(0 if empty_runs else self._first_free, len(self._units)):
            run = self._units[unit]
            streak = streak + 1 if run is None or (empty_runs and not run.num_taken) else 0
            if streak == length:
                return unit - length + 1
        return None

    def _enter(self, run: Run) -> None:
        """Note a run's units."""
        self._num_runs[run.slot_bytes] += 1
        self._units[run.first_unit : run.first_unit + run.num_units] = [run] * run.num_units
        for place in range(run.num_units):
            self._on_change(run.first_unit + place, table_value(run, place))
        while self._first_free < len(self._units) and self._units[self._first_free] is not None:
            self._first_free += 1

    def _dissolve(self, run: Run) -> None:
        """Make the units and numbers of an empty run free."""
        assert not run.num_taken, "run is empty"
        self._first_free = min(self._first_free, run.first_unit)
        free = self._free.get(run.slot_bytes, OrderedDict())
        for slot in run.slots:
            del free[slot]
            self._places[slot] = None
        self._numbers.extend(run.slots)
        self._num_runs[run.slot_bytes] -= 1
        if not free:
            self._free.pop(run.slot_bytes, None)
        for unit in range(run.first_unit, run.first_unit + run.num_units):
            self._units[unit] = None
            self._on_change(unit, 0)

    def _number(self, run: Run) -> None:
        """Give numbers to a run's positions that have none and make them free, as far as the numbers go."""
        numbered = {self._place(slot)[1] for slot in run.slots}
        free = self._free.setdefault(run.slot_bytes, OrderedDict())
        for position in range(run.num_units * self._unit_bytes // run.slot_bytes):
            if position not in numbered and self._numbers:
                slot = self._numbers.popleft()
                run.slots.append(slot)
                self._places[slot] = (run, position)
                free[slot] = None

    def _settle(self, slot: int, offset: int) -> bool:
        """Take a given slot at a given offset, if that is where a slot can be."""
        unit = offset // self._unit_bytes
        run = self._units[unit] if 0 <= unit < len(self._units) else None
        if run is None:
            return False
        position, rest = divmod(offset - run.first_unit * self._unit_bytes, run.slot_bytes)
        if rest or position >= run.num_units * self._unit_bytes // run.slot_bytes:
            return False
        run.slots.append(slot)
        self._taken(run, 1)
        self._places[slot] = (run, position)
        self.used_bytes += run.slot_bytes
        return True

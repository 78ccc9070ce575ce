"""Runs of units that are cut into slots of one size, and the table, kept beside the slots, that says where they are.

The table has one u64 a unit: 0 for a free one, else slot pages << 32 | units of the run << 16 | place in the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["SLOT_ALIGN", "UNITS_MAX", "Run", "fitting_units", "kept_runs", "table_value"]

SLOT_ALIGN = 4096  # slots begin on pages
UNITS_MAX = 1 << 16  # a unit's place fits in 16 bits
_WASTE_MAX = 16  # a run wastes at most one part in so many, where it can


@dataclass(slots=True)
class Run:
    """Consecutive units cut into slots of one size; `slots` are their numbers, in order of their offsets."""

    first_unit: int
    num_units: int
    slot_bytes: int
    slots: list[int] = field(default_factory=list)
    num_taken: int = 0


def fitting_units(slot_bytes: int, unit_bytes: int, num_units: int) -> int:
    """Units of a run of slots of a size: the fewest that waste at most 1/16.

    Where none up to a quarter of all units does, those that waste least. More than there are if no slot of that size
    fits.
    """
    fewest = -(-slot_bytes // unit_bytes)
    candidates = range(fewest, max(fewest, min(8 * fewest, num_units // 4)) + 1)
    wastes = {units: units * unit_bytes % slot_bytes / units for units in candidates}
    limit = max(unit_bytes / _WASTE_MAX, min(wastes.values()))
    return next(units for units, waste in wastes.items() if waste <= limit)


def table_value(run: Run, place: int) -> int:
    """What the table says of the unit at a place in a run."""
    return (run.slot_bytes // SLOT_ALIGN) << 32 | run.num_units << 16 | place


def kept_runs(table: Sequence[int], unit_bytes: int) -> tuple[list[Run], list[int]]:
    """What a kept table says.

    Returns:
        The runs that are in it as a whole, without slots, and the units of which it says something else than that
        they are free.
    """
    runs: list[Run] = []
    strays: list[int] = []
    unit = 0
    while unit < len(table):
        value = int(table[unit])
        size, length = (value >> 32) * SLOT_ALIGN, value >> 16 & 0xFFFF
        run = Run(unit, length, size)
        kept = [int(entry) for entry in table[unit : unit + length]]
        if 0 < size <= length * unit_bytes and kept == [table_value(run, place) for place in range(length)]:
            runs.append(run)
            unit += length
        else:
            strays += [unit] if value else []
            unit += 1
    return runs, strays

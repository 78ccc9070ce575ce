"""Which bytes are slots of which size: no overlap, exact sizes, reclaim between sizes, restart."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from kvfleet.config import KIB, MIB
from kvfleet.core.slabs import SlabMap

BIG = 11_796_480  # a block of 256 tokens of SmolLM2-135M in float32: 11.25 MiB
HALF = BIG // 2  # and in bfloat16


class Table:
    """Keeps what the map says of its units."""

    def __init__(self, num_units: int) -> None:
        self.values = [0] * num_units

    def __call__(self, unit: int, value: int) -> None:
        self.values[unit] = value


def take_all(slabs: SlabMap, size: int) -> list[int]:
    slots = []
    while (slot := slabs.take(size)) is not None:
        slots.append(slot)
    return slots


def spans(slabs: SlabMap, slots: list[int]) -> list[tuple[int, int]]:
    return sorted((slabs.offset(slot), slabs.offset(slot) + slabs.slot_bytes(slot)) for slot in slots)


def assert_apart(slabs: SlabMap, slots: list[int]) -> None:
    """Slots lie in the arena, on pages, and do not overlap."""
    edges = spans(slabs, slots)
    assert all(start % 4096 == 0 for start, _ in edges)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(edges))
    assert not edges or edges[-1][1] <= slabs.capacity_bytes


def heat(slabs: SlabMap, last_used: dict[int, float]) -> np.ndarray:
    by_slot = np.full(slabs.num_slots, -np.inf)
    for slot, time in last_used.items():
        by_slot[slot] = time
    return by_slot


@pytest.mark.parametrize(
    ("num_bytes", "unit_bytes", "units", "slots"),
    [
        (BIG, MIB, 12, 1),
        (HALF, MIB, 6, 1),
        (MIB, MIB, 1, 1),
        (64 * KIB, MIB, 1, 16),
        (700 * KIB, MIB, 5, 7),
        (23_040 * 256, 16 * MIB, 3, 8),
        (70 * MIB, MIB, 70, 0),
    ],
)
def test_runs_waste_little(num_bytes: int, unit_bytes: int, units: int, slots: int) -> None:
    slabs = SlabMap(64 * unit_bytes, unit_bytes, 4096)
    size = slabs.slot_size(num_bytes)
    assert slabs.run_units(size) == units
    assert len(take_all(slabs, size)) == 64 // units * slots
    assert slabs.audit() == []


def test_every_byte_is_counted() -> None:
    slabs = SlabMap(8 * MIB + 5000, MIB, 100)
    assert slabs.capacity_bytes == 8 * MIB
    slot = slabs.take(slabs.slot_size(100_000))
    assert slot is not None
    assert slabs.used_bytes == slabs.slot_bytes(slot) == 102_400
    slabs.give(slot)
    assert slabs.used_bytes == 0


def test_freed_slots_are_taken_again_oldest_first() -> None:
    slabs = SlabMap(4 * MIB, MIB, 100)
    slots = take_all(slabs, MIB)
    for slot in (slots[2], slots[0], slots[3]):
        slabs.give(slot)
    assert take_all(slabs, MIB) == [slots[2], slots[0], slots[3]]


def test_a_slot_is_given_back_once() -> None:
    slabs = SlabMap(4 * MIB, MIB, 100)
    slot = slabs.take(MIB)
    assert slot is not None
    slabs.give(slot)
    with pytest.raises(AssertionError, match="slot is taken"):
        slabs.give(slot)


def test_another_size_takes_over_empty_runs() -> None:
    slabs = SlabMap(64 * MIB, MIB, 1024)
    big = take_all(slabs, BIG)
    assert len(big) == 5
    assert slabs.take(HALF) is None
    slabs.give(big[1])
    half = take_all(slabs, HALF)
    assert len(half) == 2
    assert_apart(slabs, [big[0], *big[2:], *half])
    for slot in half:
        slabs.give(slot)
    assert len(take_all(slabs, BIG)) == 1
    assert slabs.audit() == []


def test_windows_name_the_coldest_that_another_size_can_use() -> None:
    slabs = SlabMap(64 * MIB, MIB, 1024)
    half = take_all(slabs, HALF)
    assert len(half) == 10
    last_used = {slot: float(100 - index) for index, slot in enumerate(half)}
    windows = list(slabs.windows(BIG, heat(slabs, last_used)))
    emptied = windows[0].slots
    assert set(emptied) == {half[8], half[9]}
    assert windows[0].heat == 92.0
    assert [window.heat for window in windows] == sorted(window.heat for window in windows)
    assert slabs.take(BIG) is None
    for slot in emptied:
        slabs.give(slot)
    assert slabs.take(BIG) is not None
    assert slabs.take(BIG) is None


def test_windows_leave_runs_of_the_same_size_alone() -> None:
    slabs = SlabMap(24 * MIB, MIB, 1024)
    big = slabs.take(BIG)
    half = take_all(slabs, HALF)
    assert big is not None
    assert len(half) == 2
    used = heat(slabs, {big: 1.0, half[0]: 5.0, half[1]: 6.0})
    assert [window.slots for window in slabs.windows(BIG, used)] == [tuple(half)]
    assert [window.slots for window in slabs.windows(HALF, used)] == [(big,), (big,)]
    assert list(slabs.windows(25 * MIB, used)) == []


def test_the_record_table_is_a_limit_too() -> None:
    slabs = SlabMap(4 * MIB, MIB, 20)
    small = take_all(slabs, 64 * KIB)
    assert len(small) == 20
    assert slabs.take(MIB) is None
    for slot in small[16:]:
        slabs.give(slot)
    assert len(take_all(slabs, MIB)) == 3
    assert slabs.audit() == []


def restored(table: Table, live: dict[int, int], num_slots: int = 1024) -> tuple[SlabMap, list[int], Table]:
    again = Table(len(table.values))
    slabs = SlabMap(len(table.values) * MIB, MIB, num_slots, again)
    return slabs, slabs.restore(table.values, live), again


def test_restart_keeps_every_slot_where_it_is() -> None:
    table = Table(64)
    slabs = SlabMap(64 * MIB, MIB, 1024, table)
    slots = [slabs.take(size) for size in (BIG, 64 * KIB, HALF, BIG, 64 * KIB)]
    live = {slot: slabs.offset(slot) for slot in slots if slot is not None}
    again, lost, new_table = restored(table, live)
    assert lost == []
    assert new_table.values == table.values
    assert {slot: again.offset(slot) for slot in live} == live
    assert again.used_bytes == slabs.used_bytes
    more = take_all(again, 64 * KIB) + take_all(again, BIG) + take_all(again, HALF)
    assert_apart(again, [*live, *more])
    assert again.audit() == []


def test_restart_after_a_run_was_half_entered() -> None:
    table = Table(64)
    slabs = SlabMap(64 * MIB, MIB, 1024, table)
    first, second = slabs.take(BIG), slabs.take(BIG)
    assert first is not None
    assert second is not None
    for unit in range(17, 24):
        table.values[unit] = 0
    again, lost, new_table = restored(table, {first: slabs.offset(first)})
    assert lost == []
    assert new_table.values[:12] == table.values[:12]
    assert new_table.values[12:] == [0] * 52
    assert len(take_all(again, BIG)) == 4


@pytest.mark.parametrize("offset", [-4096, 4096, 63 * MIB, 64 * MIB, 1 << 40])
def test_restart_refuses_slots_that_are_nowhere(offset: int) -> None:
    table = Table(64)
    slabs = SlabMap(64 * MIB, MIB, 1024, table)
    slot = slabs.take(BIG)
    assert slot is not None
    again, lost, _ = restored(table, {slot: slabs.offset(slot), 7: offset})
    assert lost == [7]
    assert again.used_bytes == slabs.used_bytes
    assert again.audit() == []


def test_restart_refuses_one_of_two_slots_in_one_place() -> None:
    table = Table(64)
    slabs = SlabMap(64 * MIB, MIB, 1024, table)
    slabs.take(BIG)
    again, lost, _ = restored(table, {3: 0, 4: 0})
    assert len(lost) == 1
    assert again.used_bytes == BIG
    assert again.audit() == []


def test_restart_of_nonsense_is_an_empty_arena() -> None:
    table = Table(64)
    table.values = [random.Random(7).getrandbits(64) for _ in range(64)]
    slabs, lost, new_table = restored(table, {})
    assert lost == []
    assert new_table.values == [0] * 64
    assert len(take_all(slabs, MIB)) == 64


@pytest.mark.parametrize("seed", range(5))
def test_random_use(seed: int) -> None:
    chance = random.Random(seed)
    table = Table(64)
    slabs = SlabMap(64 * MIB, MIB, 300, table)
    sizes = [BIG, HALF, MIB, 64 * KIB, slabs.slot_size(700 * KIB)]
    taken: list[int] = []
    for step in range(600):
        if chance.random() < 0.55:
            slot = slabs.take(chance.choice(sizes))
            taken += [] if slot is None else [slot]
        elif taken:
            slabs.give(taken.pop(chance.randrange(len(taken))))
        if step % 50 == 0:
            live = {slot: slabs.offset(slot) for slot in taken}
            slabs, lost, table = restored(table, live, 300)
            assert lost == []
        assert slabs.audit() == []
        assert_apart(slabs, taken)
        assert slabs.used_bytes == sum(slabs.slot_bytes(slot) for slot in taken)

from __future__ import annotations

import dataclasses
import json
import math
import random

import pytest

from kvfleet.core.writebudget import DAY_S, BudgetState, Moment, WriteBudget

CAPACITY = 1_024_000
HOUR_S = 3600.0


class Machine:
    """Clocks that a test turns, and the disk that the state goes to."""

    def __init__(self) -> None:
        self.boot, self.monotonic, self.wall = 1, 500.0, 1.7e9
        self.disk: str | None = None
        self.budget = self.start()

    @property
    def moment(self) -> Moment:
        return Moment(f"boot-{self.boot}", self.monotonic, self.wall)

    def start(self) -> WriteBudget:
        """A new process, with what the one before left on disk."""
        state = None if self.disk is None else BudgetState.from_json(self.disk)
        self.budget = WriteBudget(CAPACITY, 2.0, self.moment, state)
        return self.budget

    def save(self, *, closing: bool = False) -> None:
        self.disk = self.budget.state(self.moment, closing=closing).to_json()

    def wait(self, seconds: float) -> None:
        self.monotonic += seconds
        self.wall += seconds

    def reboot(self, off_s: float) -> None:
        self.boot += 1
        self.monotonic = 1.0
        self.wall += off_s

    def write(self, num_bytes: int) -> bool:
        """Charge, save if it must be, write."""
        if not self.budget.allows(num_bytes, self.monotonic):
            return False
        if self.budget.charge(num_bytes, self.monotonic):
            self.save()
        return True

    @property
    def today(self) -> int:
        return self.budget.today_bytes(self.monotonic)


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_a_day_has_its_bytes(machine: Machine) -> None:
    assert machine.budget.day_bytes == 2 * CAPACITY
    assert machine.write(2 * CAPACITY)
    assert not machine.write(1)
    assert machine.write(0)
    machine.wait(DAY_S - 1)
    assert not machine.write(1)
    machine.wait(1)
    assert machine.write(2 * CAPACITY)
    assert (machine.today, machine.budget.total_bytes) == (2 * CAPACITY, 4 * CAPACITY)


def test_what_is_not_written_one_day_is_not_kept_for_the_next(machine: Machine) -> None:
    machine.wait(10 * DAY_S)
    assert not machine.write(2 * CAPACITY + 1)


def test_a_process_that_ends_well_leaves_the_exact_count(machine: Machine) -> None:
    machine.write(CAPACITY)
    machine.save(closing=True)
    machine.start()
    assert (machine.today, machine.budget.total_bytes) == (CAPACITY, CAPACITY)


def test_a_killed_process_has_written_no_more_than_it_left_word_of(machine: Machine, seed: int) -> None:
    rng = random.Random(seed)
    written = saves = lives = 0
    for _ in range(3000):
        num_bytes = rng.randrange(1000)
        before = machine.disk
        if machine.write(num_bytes):
            written += num_bytes
        saves += machine.disk is not before
        if rng.random() < 0.01:
            lives += 1
            machine.start()
        assert written <= machine.budget.total_bytes <= written + lives * 2001
    assert saves < 1000 + lives
    assert machine.today <= machine.budget.day_bytes


def test_a_process_killed_on_a_new_day_has_its_writes_counted(machine: Machine) -> None:
    machine.write(1)
    machine.wait(DAY_S)
    machine.write(1000)
    machine.start()
    assert machine.today >= 1000


def test_time_goes_on_from_process_to_process(machine: Machine) -> None:
    machine.write(2 * CAPACITY)
    machine.save(closing=True)
    machine.wait(DAY_S - 1)
    machine.start()
    assert not machine.write(1)
    machine.save(closing=True)
    machine.wait(1)
    machine.start()
    assert machine.write(1)
    assert machine.budget.elapsed_s(machine.monotonic) == DAY_S


@pytest.mark.parametrize("years", [-20, -1, 1, 20])
def test_a_wall_clock_that_is_set_changes_nothing_in_one_boot(machine: Machine, years: int) -> None:
    machine.write(2 * CAPACITY)
    machine.wall += years * 365 * DAY_S
    assert not machine.write(1)
    machine.save(closing=True)
    machine.wall += years * 365 * DAY_S
    machine.start()
    assert not machine.write(1)
    machine.wait(DAY_S)
    assert machine.write(1)


def test_a_monotonic_clock_that_goes_back_is_not_believed(machine: Machine) -> None:
    machine.wait(HOUR_S)
    machine.save()
    machine.monotonic -= 2 * HOUR_S
    assert machine.budget.elapsed_s(machine.monotonic) == HOUR_S
    machine.start()
    assert machine.budget.elapsed_s(machine.monotonic) == HOUR_S


@pytest.mark.parametrize(
    ("off_s", "elapsed_s"),
    [(10 * HOUR_S, 11 * HOUR_S), (0, HOUR_S), (-20 * 365 * DAY_S, HOUR_S), (20 * 365 * DAY_S, DAY_S + HOUR_S)],
)
def test_time_off_counts_up_to_a_day(machine: Machine, off_s: float, elapsed_s: float) -> None:
    machine.write(CAPACITY)
    machine.wait(HOUR_S)
    machine.save(closing=True)
    machine.reboot(off_s)
    machine.start()
    assert machine.budget.elapsed_s(machine.monotonic) == elapsed_s
    assert machine.today == (0 if elapsed_s >= DAY_S else CAPACITY)
    machine.wait(HOUR_S)
    assert machine.budget.elapsed_s(machine.monotonic) == elapsed_s + HOUR_S


def test_a_machine_that_does_not_know_its_boot_goes_by_the_bounded_wall_clock(machine: Machine) -> None:
    state = WriteBudget(CAPACITY, 2.0, Moment("", 5.0, 100.0)).state(Moment("", 6.0, 101.0))
    again = WriteBudget(CAPACITY, 2.0, Moment("", 1e6, 111.0), state)
    assert again.elapsed_s(1e6) == 11.0


@pytest.mark.parametrize(
    ("hour", "share", "pressure"),
    [(0, 0, 0), (0, 0.5, 0), (0, 0.75, 0.5), (0, 1, 1), (18, 0.75, 0), (18, 0.875, 0.5), (18, 1, 1), (23.99, 1, 1)],
)
def test_pressure_grows_with_what_is_spent_ahead_of_the_day(
    machine: Machine, hour: float, share: float, pressure: float
) -> None:
    machine.wait(hour * HOUR_S)
    machine.write(int(2 * CAPACITY * share))
    assert machine.budget.pressure(machine.monotonic) == pytest.approx(pressure)


def test_pressure_ends_with_the_day(machine: Machine) -> None:
    machine.write(2 * CAPACITY)
    machine.wait(DAY_S)
    assert machine.budget.pressure(machine.monotonic) == 0


def test_projected_life(machine: Machine) -> None:
    assert machine.budget.life_days(machine.monotonic) == math.inf
    machine.write(CAPACITY)
    machine.wait(DAY_S)
    # Rated for two a day in five years; one a day so far.
    assert machine.budget.life_days(machine.monotonic) == pytest.approx(2 * 5 * 365 - 1)
    machine.wait(DAY_S)
    assert machine.budget.life_days(machine.monotonic) == pytest.approx(2 * (2 * 5 * 365 - 1))


def test_a_worn_drive_has_no_days_left(machine: Machine) -> None:
    state = BudgetState(machine.moment, DAY_S, 10**12, 0)
    assert WriteBudget(CAPACITY, 2.0, machine.moment, state).life_days(machine.monotonic) == 0


@pytest.mark.parametrize("closing", [True, False])
def test_state_survives_the_disk(machine: Machine, closing: bool) -> None:
    machine.write(12_345)
    state = machine.budget.state(machine.moment, closing=closing)
    assert BudgetState.from_json(state.to_json()) == state
    assert (state.total_bytes > 12_345) == (not closing)


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"format": None},
        {"saved": None},
        {"saved": {"boot_id": "x"}},
        {"elapsed_s": -1},
        {"elapsed_s": math.nan},
        {"today_bytes": -1},
        {"today_bytes": 10**9},
        {"total_bytes": "many"},
        {"more": 1},
    ],
)
def test_another_state_is_refused(machine: Machine, change: dict[str, object]) -> None:
    fields = json.loads(machine.budget.state(machine.moment).to_json())
    with pytest.raises(ValueError, match="write budget"):
        BudgetState.from_json(json.dumps({**fields, **change}))


@pytest.mark.parametrize("text", ["", "[]", "null", "{"])
def test_what_is_no_state_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write budget"):
        BudgetState.from_json(text)


def test_a_state_is_frozen(machine: Machine) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        machine.budget.state(machine.moment).total_bytes = 0  # type: ignore[misc]

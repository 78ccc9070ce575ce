"""Whole fleets in virtual time: thousands of random lives, each of which must keep all rules."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvfleet.testing.processes import SimulationError
from kvfleet.testing.schedule import run_schedule
from tests.simulation.planted import PLANTED

BUDGET = 400  # schedules to find a planted bug with


def test_schedules_keep_the_rules(seeds):
    for seed in seeds:
        run_schedule(seed)


def test_a_seed_decides_everything():
    first = [run_schedule(seed).digest for seed in range(8)]
    assert [run_schedule(seed).digest for seed in range(8)] == first
    assert len(set(first)) == len(first)


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_a_seed_decides_the_same_in_another_process(hash_seed):
    program = "from kvfleet.testing.schedule import run_schedule\nprint(*(run_schedule(s).digest for s in range(4)))"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, env=environment)
    assert done.stdout.split() == [run_schedule(seed).digest for seed in range(4)]


@pytest.mark.parametrize("bug", PLANTED, ids=str)
def test_planted_bugs_are_found(bug, monkeypatch):
    bug.plant(monkeypatch)
    for seed in range(bug.first, bug.first + BUDGET):
        try:
            run_schedule(seed)
        except SimulationError:
            return
    pytest.fail(f"not found by {BUDGET} schedules: {bug}")

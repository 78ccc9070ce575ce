"""How many schedules to run: `pytest tests/simulation --schedules 100000` for a long run."""

from __future__ import annotations

import pytest

SCHEDULES = 2000
AT_ONCE = 100  # in one test


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--schedules",
        type=int,
        default=SCHEDULES,
        help=f"simulated schedules to run, {SCHEDULES} by default; `--seed` is that of the first",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" in metafunc.fixturenames:
        first, count = metafunc.config.option.seed, metafunc.config.getoption("--schedules", SCHEDULES)
        starts = range(0, count, AT_ONCE)
        metafunc.parametrize(
            "seeds",
            [range(first + start, first + min(start + AT_ONCE, count)) for start in starts],
            ids=[f"{start}-{min(start + AT_ONCE, count) - 1}" for start in starts],
        )

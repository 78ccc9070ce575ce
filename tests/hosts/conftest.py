"""Hosts for the tests of this folder, which need root and iproute2.

`pytest tests/hosts` takes some minutes; `--seconds 600` works and hurts the fleet for longer, `--seed` repeats a run.
"""

from __future__ import annotations

import pytest

LONG_S = 600  # what a test may take beyond `--seconds`: nodes start slowly on a busy machine


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds", type=int, default=60, help="how long the fleet is worked and hurt")


@pytest.fixture(scope="session")
def seconds(pytestconfig: pytest.Config) -> int:
    """How long the fleet is worked and hurt."""
    return int(pytestconfig.option.seconds)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "hosts":
            item.add_marker(pytest.mark.timeout(config.option.seconds + LONG_S))

"""Calls of the NVMe tier to the system fail: a block is right or missing, and the tier goes on.

Every fourth call here, another fourth each time; all of them in `tests/endurance`.
"""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.drivefaults import fail_each_call

STEP = 4


@pytest.mark.parametrize("how", [errno.EIO, "torn", "short"])
def test_calls_that_fail_once(arena_root: Path, monkeypatch: pytest.MonkeyPatch, how: int | str, seed: int) -> None:
    fail_each_call(arena_root, monkeypatch, how, first=seed % STEP, step=STEP)

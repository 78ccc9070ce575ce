"""Each call of the NVMe tier to the system fails once: a block is right or missing, and the tier goes on."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.drivefaults import fail_each_call


@pytest.mark.parametrize("how", [errno.EIO, errno.ENOSPC, "torn", "short"])
def test_each_call_fails_once(arena_root: Path, monkeypatch: pytest.MonkeyPatch, how: int | str) -> None:
    fail_each_call(arena_root, monkeypatch, how, first=0, step=1)

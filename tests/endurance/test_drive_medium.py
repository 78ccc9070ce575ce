"""Drives on media that really fail: a loop device over a file that was cut, a filesystem that is shut down.

It takes root, to mount things, in a namespace of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.endurance import drive_on_loop

_REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("scene", ["truncated", "index_lost", "gone_and_back"])
def test_a_medium_that_fails_costs_misses(tmp_path: Path, scene: str) -> None:
    command = ["unshare", "--mount", sys.executable, drive_on_loop.__file__, scene, str(tmp_path)]
    done = subprocess.run(command, cwd=_REPOSITORY, env={"PYTHONPATH": str(_REPOSITORY), "PATH": "/usr/sbin:/usr/bin"},
                          capture_output=True, check=False, text=True, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr

"""As in `tests/fault`, at many more points: 200 in stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drivekills import kill_in_a_store, kill_while_it_shrinks


@pytest.mark.parametrize("part", range(4))
def test_kills_in_a_store(arena_root: Path, seed: int, part: int) -> None:
    kill_in_a_store(arena_root, seed + part, 48)


def test_kills_in_a_store_on_a_disk(tmp_path: Path, seed: int) -> None:
    kill_in_a_store(tmp_path, seed + 4, 8)


def test_kills_while_a_drive_shrinks(arena_root: Path, seed: int) -> None:
    kill_while_it_shrinks(arena_root, seed, 40)

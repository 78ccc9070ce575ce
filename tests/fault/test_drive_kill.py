"""A process killed anywhere in a store leaves a drive whose blocks are whole or absent, and whose books are right."""

from __future__ import annotations

from pathlib import Path

from tests.drivekills import kill_in_a_store, kill_while_it_shrinks


def test_a_process_killed_anywhere_in_a_store_leaves_whole_blocks(arena_root: Path, seed: int) -> None:
    kill_in_a_store(arena_root, seed, 8)


def test_a_process_killed_while_it_shrinks_a_drive_loses_none_of_what_stays(arena_root: Path, seed: int) -> None:
    kill_while_it_shrinks(arena_root, seed, 4)

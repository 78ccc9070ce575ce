"""Finds out what a path is, and has it inspected."""

from __future__ import annotations

from pathlib import Path

from kvfleet.errors import ConfigError
from kvfleet.node.arena import ARENA_FILE
from kvfleet.node.findings import Findings
from kvfleet.node.inspectarena import inspect_arena
from kvfleet.node.inspectdrive import drive_of, inspect_drive
from kvfleet.node.inspectfolder import inspect_beside_arena, inspect_homes
from kvfleet.node.inspecting import BLOCK_BYTES_MAX, inspect_bytes, inspect_url

__all__ = ["inspect_path"]

_MAGIC = b"kvarena\n"


def inspect_path(path: Path) -> Findings:
    """What a file or directory is, and whether it is sound.

    Raises:
        ConfigError: it is nothing of kvfleet's, or cannot be read.

    Blocking: as long as it takes to read all of it.
    """
    try:
        drive = drive_of(path)
        if drive is not None:
            return inspect_drive(drive)
        beside = inspect_beside_arena(path.absolute())
        if beside is not None:
            return beside
        if path.is_dir():
            return _directory(path)
        with path.open("rb") as file:
            head = file.read(len(_MAGIC))
            if head == _MAGIC:
                return inspect_arena(path)
            return inspect_bytes(head + file.read(BLOCK_BYTES_MAX), str(path.absolute()))
    except OSError as error:
        raise ConfigError("", f"{path}: {error.strerror}") from error


def _directory(path: Path) -> Findings:
    if (path / ARENA_FILE).exists():
        return inspect_arena(path)
    homes = inspect_homes(path.absolute())
    if homes is not None:
        return homes
    if not any(path.iterdir()):
        raise ConfigError("", f"{path}: an empty directory")
    return inspect_url(f"file://{path.absolute()}")

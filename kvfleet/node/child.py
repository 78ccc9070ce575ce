"""What a listing of storage says of one entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

__all__ = ["Child", "child_of"]


@dataclass(frozen=True, slots=True)
class Child:
    """An entry of a directory.

    Attributes:
        name: its last name.
        is_directory: or a file.
        num_bytes: of the file.
        modified_ms: when it was written, in ms since 1970 by the storage's clock; 0 if that is not told.
    """

    name: str
    is_directory: bool
    num_bytes: int
    modified_ms: int = 0


def child_of(name: str, info: Mapping[str, Any]) -> Child:
    """The entry that a filesystem of fsspec tells of: S3 says by a date when it was written, files by seconds."""
    modified = info.get("LastModified", info.get("mtime"))
    seconds = modified.timestamp() if isinstance(modified, datetime) else modified
    modified_ms = int(1000 * seconds) if isinstance(seconds, float | int) else 0
    return Child(name, info["type"] == "directory", info["size"] or 0, modified_ms)

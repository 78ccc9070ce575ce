"""The catalog of the shared tier, as shown to people."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CatalogStatus"]


@dataclass(frozen=True, slots=True)
class CatalogStatus:
    """The catalog at a moment, on the node that keeps it.

    Attributes:
        objects: known.
        num_bytes: of them.
        bytes_max: of all objects that there may be; None for no limit.
        refused: rows for which the catalog had no room.
        deleted: objects that this manager has deleted, as there were too many.
        unwritten: rows that are in no manifest yet.
        listed: whether this manager had to list the tier.
        problem: why it cannot be kept now, or "".
    """

    objects: int
    num_bytes: int
    bytes_max: int | None
    refused: int
    deleted: int
    unwritten: int
    listed: bool
    problem: str

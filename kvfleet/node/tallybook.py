"""The totals of all clients of a node, as its manager reads them from their files.

Before the file of a client that is gone is removed, its counts are added to a sum, which is kept beside the arena and
so survives a restart of the manager. The sum's file ends with the name of the client that was added last: if its own
file is still there, the manager was killed between the two, and the client is in the sum already.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

from kvfleet.core.totals import NAMES, Totals
from kvfleet.node.tallies import LABEL_BYTES, Request, pack_counts, read_counts, read_note, read_requests

__all__ = ["TallyBook"]

_log = logging.getLogger(__name__)


class TallyBook:
    """All clients of a node: those that are there, and the sum of those that are gone.

    Args:
        clients: directory of the lock files.
        departed: file for the sum.
    """

    def __init__(self, clients: Path, departed: Path) -> None:
        self._clients = clients
        self._file = departed
        self._departed = read_counts(departed) or [0] * len(NAMES)
        self._last = read_note(departed)

    def depart(self, path: Path) -> None:
        """A client is gone, and its file is about to be. Told again of the same client, it counts it once."""
        counts = read_counts(path)
        if counts is None or not any(counts) or path.name == self._last:
            return
        self._departed = _sum(self._departed, counts)
        self._last = path.name
        partial = self._file.with_suffix(".partial")
        try:
            partial.write_bytes(pack_counts(self._departed, path.name))
            partial.replace(self._file)
        except OSError as error:
            _log.warning("totals of clients that are gone will not survive this manager: %s", error)
            with contextlib.suppress(OSError):
                partial.unlink()

    def totals(self) -> Totals:
        """Of all clients since the arena was made."""
        counts = self._departed
        for path in self._files():
            if path.name != self._last:
                counts = _sum(counts, read_counts(path) or [0] * len(NAMES))
        return Totals.of(counts)

    def _files(self) -> list[Path]:
        try:
            return list(self._clients.iterdir())
        except FileNotFoundError:  # somebody has removed the directory of an arena in use
            return []

    def requests(self, wanted: str, limit: int) -> list[Request]:
        """The newest requests of clients that are there.

        Args:
            wanted: beginning of a label or of a key in hex, "" for all.
            limit: at most so many.
        """
        found = [r for path in self._files() for r in read_requests(path) if _is(r, wanted)]
        return sorted(found, key=lambda request: request.asked_ns, reverse=True)[:limit]


def _is(request: Request, wanted: str) -> bool:
    keys = (request.first_key.hex(), request.last_key.hex())
    label = wanted.encode(errors="replace")[:LABEL_BYTES].decode(errors="ignore")
    return request.label.startswith(label) or any(key.startswith(wanted.lower()) for key in keys)


def _sum(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(one, other, strict=True)]

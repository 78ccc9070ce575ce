"""Who is said to hold the blocks of one load: what its client knew from the directory, and what that says now."""

from __future__ import annotations

import logging
from dataclasses import replace

from kvfleet.core.block import KEY_BYTES
from kvfleet.core.directory import Run
from kvfleet.errors import KvFleetError
from kvfleet.node.messages import LoadRequest, Miss
from kvfleet.node.namespaces import layout_of
from kvfleet.node.publishing import DirectoryLink

__all__ = ["Whereabouts"]

_log = logging.getLogger(__name__)


class Whereabouts:
    """Holders of the blocks of one load. Indexes count from the first block of the request."""

    def __init__(self, link: DirectoryLink, request: LoadRequest) -> None:
        self._link = link
        self._request = request
        self._runs = request.runs
        self._missing: dict[int, Miss] = {}
        self._asked = False

    def run_at(self, index: int) -> Run:
        """The run that block `index` is in."""
        return next((r for r in self._runs if r.start <= index < r.stop), Run(index, index + 1, (), shared=False))

    async def ask(self, first: int, timeout_s: float) -> bool:
        """Ask the directory about the blocks from `first` on, once a load.

        Returns:
            False: it has been asked before, or there is no answer.
        """
        if self._asked:
            return False
        self._asked = True
        request = self._request
        num_shards = layout_of(request.namespace).num_shards
        try:
            found = await self._link.locate(request.keys[first * KEY_BYTES :], request.shard, num_shards, timeout_s)
        except KvFleetError as error:
            _log.info("nobody known to hold a block: %s", error)
            return False
        if found.missing is not None:
            self._missing[first + (found.runs[-1].stop if found.runs else 0)] = found.missing
        # Nothing behind the first block that nobody has can come.
        self._runs = tuple(replace(run, start=first + run.start, stop=first + run.stop) for run in found.runs)
        return True

    def why_gone(self, index: int) -> Miss:
        """Why a block is nowhere, though all who were said to have it could be asked."""
        run = self.run_at(index)
        return Miss.EVICTED if run.nodes or run.shared else self._missing.get(index, Miss.EVICTED)

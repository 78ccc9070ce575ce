"""One lookup, as the client does it: what is on this node, and unless that is all, what the directory says."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvfleet.attachment import DirectoryPort
from kvfleet.core.block import KEY_BYTES
from kvfleet.core.layout import ModelSpec
from kvfleet.errors import DirectoryAvoidedError, KvFleetError
from kvfleet.hits import HitRun, PrefixHit, merge_runs, true_head
from kvfleet.node.arena import Arena
from kvfleet.node.messages import Located, Miss

__all__ = ["Asked", "Looking"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Asked:
    """A lookup under way.

    Attributes:
        keys: of the whole prefix, packed.
        start_block: the first block to look for.
        label: the engine's name for the request, or "".
        fault: why the answer may be shorter than the truth, as far as is known.
        calls: remote calls made so far, by name.
    """

    keys: bytes
    start_block: int
    label: str
    fault: Miss | None = None
    calls: list[str] = field(default_factory=list)
    start_s: float = field(default_factory=lambda: time.perf_counter())  # noqa: PLW0108  a simulation has another clock


@dataclass(slots=True)
class _Here:
    """What this node has of a prefix, a flag a block; a block is there if all its shards are.

    Attributes:
        local: in the arena.
        stored: in the arena or on the drives.
        coming: there, or being written to the arena.
    """

    local: npt.NDArray[np.bool_]
    stored: npt.NDArray[np.bool_]
    coming: npt.NDArray[np.bool_]


class Looking:
    """Lookups of one client. Threads: any."""

    def __init__(self, spec: ModelSpec, shard: int, directory: DirectoryPort, timeout_s: float) -> None:
        self._spec = spec
        self._shard = shard
        self._directory = directory
        self._timeout_s = timeout_s

    def here(self, asked: Asked, arena: Arena | None) -> PrefixHit:
        """What is in the arena and on the node's drives. Blocking: never."""
        found = self._blocks(asked, arena)
        head = true_head(found.stored)
        runs = merge_runs(found.local[:head], head, (), asked.start_block)
        return self._hit(asked, runs, None if head == len(found.local) else Miss.DIRECTORY_UNAVAILABLE)

    def everywhere(self, asked: Asked, arena: Arena | None) -> PrefixHit:
        """What is on this node, written to its arena, or said to be elsewhere. One call, unless all is on this node."""
        found = self._blocks(asked, arena)
        head = true_head(found.stored)
        located = Located((), None)
        if not found.coming.all():
            asked.calls.append("locate")
            try:
                located = self._directory.locate(
                    asked.keys[(asked.start_block + head) * KEY_BYTES :],
                    self._shard,
                    self._spec.layout.num_shards,
                    self._timeout_s,
                )
            except KvFleetError as error:
                if isinstance(error, DirectoryAvoidedError):
                    asked.calls.remove("locate")
                asked.fault = Miss.DIRECTORY_UNAVAILABLE
                _log.debug("lookup without directory: %s", error)
        runs = merge_runs(found.local, head, located.runs, asked.start_block, stored=found.stored, coming=found.coming)
        said = head + (located.runs[-1].stop if located.runs else 0)
        missing = located.missing
        if runs and runs[-1].stop > asked.start_block + said:
            missing = Miss.UNKNOWN  # the directory spoke of a block that is here after all
        if asked.fault is Miss.DIRECTORY_UNAVAILABLE:
            missing = asked.fault
        return self._hit(asked, runs, missing)

    def _blocks(self, asked: Asked, arena: Arena | None) -> _Here:
        keys = asked.keys[asked.start_block * KEY_BYTES :]
        local = np.full(len(keys) // KEY_BYTES, arena is not None)
        here = _Here(local, local.copy(), local.copy())
        if arena is not None:
            drives = arena.drive_records
            for shard in range(self._spec.layout.num_shards):
                found = arena.records.find(keys, shard)
                stored = found.slots >= 0
                here.local &= stored
                if drives is not None and not stored.all():
                    stored |= drives.find(keys, shard).slots >= 0
                here.stored &= stored
                here.coming &= stored | found.pending
        return here

    def _hit(self, asked: Asked, runs: tuple[HitRun, ...], missing: Miss | None) -> PrefixHit:
        num_blocks, asked_blocks = runs[-1].stop if runs else asked.start_block, len(asked.keys) // KEY_BYTES
        return PrefixHit(
            num_tokens=num_blocks * self._spec.block_tokens,
            num_blocks=num_blocks,
            asked_blocks=asked_blocks,
            keys=asked.keys,
            runs=runs,
            fault=asked.fault,
            start_block=asked.start_block,
            missing=None if num_blocks == asked_blocks else missing or Miss.UNKNOWN,
            shard=self._shard,
            label=asked.label,
            asked_ns=time.time_ns(),
            lookup_s=time.perf_counter() - asked.start_s,
            calls=tuple(asked.calls),
        )

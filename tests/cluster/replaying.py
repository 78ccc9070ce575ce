"""An engine that serves a trace, a request at a time, and says what came from where."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import ray

import kvfleet
from kvfleet.core.block import KEY_BYTES, BlockKey, split
from tests.cluster.engine_process import BLOCK_TOKENS, MODEL, on

__all__ = ["RemoteReplayer", "Served", "keys_of"]


def _tokens(blocks: tuple[int, ...]) -> npt.NDArray[np.uint32]:
    """A prompt of whole blocks: each block id stands for tokens of its own."""
    first = np.repeat(np.asarray(blocks, np.uint32) * np.uint32(BLOCK_TOKENS), BLOCK_TOKENS)
    return first + np.tile(np.arange(BLOCK_TOKENS, dtype=np.uint32), len(blocks))


def keys_of(blocks: tuple[int, ...]) -> list[BlockKey]:
    """The keys of a request's blocks."""
    return split(MODEL.keys(_tokens(blocks)))


@dataclass(frozen=True)
class Served:
    """How a request went.

    Attributes:
        outcomes: of the blocks that were found.
        read_s: when the last of them was read, monotonic seconds; 0 if there was none.
        asked_s: when the rest was about to be stored.
    """

    outcomes: tuple[str, ...]
    read_s: float
    asked_s: float


class Replayer:
    """Serves requests in a process of its own."""

    def __init__(self, fleet: str) -> None:
        self._fleet = kvfleet.connect(fleet)
        self._client = self._fleet.client(MODEL)
        self._client.attach()

    def serve(self, blocks: tuple[int, ...]) -> Served:
        """Serve a request to the end."""
        tokens = _tokens(blocks)
        keys = MODEL.keys(tokens)
        loaded = self._client.load(self._client.lookup(tokens), lambda _index, _view: None)
        first = int(loaded) // BLOCK_TOKENS
        read_s = self._last_used_s(keys[: first * KEY_BYTES])

        def put(index: int, view: npt.NDArray[np.uint8]) -> None:
            view[:KEY_BYTES] = np.frombuffer(keys[index * KEY_BYTES : (index + 1) * KEY_BYTES], np.uint8)

        asked_s = time.monotonic()
        if first < len(blocks):
            self._client.store(tokens, put, start_block=first).wait(30)
        return Served(tuple(outcome.value for outcome in loaded.outcomes), read_s, asked_s)

    def holdings(self) -> tuple[frozenset[BlockKey], frozenset[BlockKey]]:
        """Keys of what can be read here: in memory, and on the drives."""
        arena = self._client._node.arena
        assert arena is not None
        memory, drives = (
            frozenset(BlockKey(record.key) for record in (table.live() if table else ()) if record.committed)
            for table in (arena.records, arena.drive_records)
        )
        return memory, drives

    def _last_used_s(self, keys: bytes) -> float:
        """When the newest use of some blocks was that are in the arena; 0 without one."""
        arena = self._client._node.arena
        assert arena is not None
        slots = arena.records.find(keys, 0).slots
        return float(arena.records.last_access[slots[slots >= 0]].max(initial=0)) / 1e9


class RemoteReplayer:
    """A `Replayer` on a given node."""

    def __init__(self, fleet: str, node: str) -> None:
        self._actor: Any = ray.remote(Replayer).options(**on(node)).remote(fleet)

    def serve(self, blocks: tuple[int, ...]) -> Served:
        """See `Replayer.serve`."""
        served: Served = ray.get(self._actor.serve.remote(blocks), timeout=60)
        return served

    def holdings(self) -> tuple[frozenset[BlockKey], frozenset[BlockKey]]:
        """See `Replayer.holdings`."""
        found: tuple[frozenset[BlockKey], frozenset[BlockKey]] = ray.get(self._actor.holdings.remote(), timeout=60)
        return found

    def kill(self) -> None:
        ray.kill(self._actor)


@ray.remote(num_cpus=0)
def raylet() -> str:
    """What tells a node's processes from another's on the same machine."""
    return os.environ["RAY_RAYLET_PID"]

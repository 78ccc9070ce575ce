"""The clients that store blocks on a node: their reservations, their commits, and their deaths."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvfleet.core.block import KEY_BYTES, BlockKey, split
from kvfleet.core.hints import Hints
from kvfleet.core.inventory import split_records
from kvfleet.core.placement import NewBlock
from kvfleet.core.sessions import Sessions
from kvfleet.errors import TierUnavailableError
from kvfleet.node.admission import Admitter
from kvfleet.node.arenadir import FileLock
from kvfleet.node.dram import DramTier, Incoming, record_id
from kvfleet.node.lowertiers import LowerTiers
from kvfleet.node.messages import CommitReply, CommitRequest, HintRequest, ReserveReply, ReserveRequest
from kvfleet.node.publishing import CALL_TIMEOUT_S, Publisher

__all__ = ["Writers"]

_log = logging.getLogger(__name__)
_FILE_AGE_S = 60.0  # a client may need that long between making its lock file and its first request


class Writers:
    """Stores of one node's clients. Threads: the manager's event loop.

    Attributes:
        retired_blocks: of which somebody has said that they will not be used again, since the start.
    """

    def __init__(self, dram: DramTier, admitter: Admitter, lower: LowerTiers, publisher: Publisher) -> None:
        self.retired_blocks = 0
        self._dram = dram
        self._admitter = admitter
        self._lower = lower
        self._publisher = publisher
        self._sequences: dict[int, int] = {}
        self._sessions = Sessions(dram.arena.records.num_records)

    async def reserve(self, request: ReserveRequest, *, draining: bool) -> ReserveReply:
        """See `ReserveRequest`. A node that drains gives nothing, but takes back what the client had.

        Raises:
            TierUnavailableError: the request is not the client's newest: nothing is reserved for it.
        """
        client, sequence = request.client_id, request.sequence
        if sequence <= self._sequences.get(client, 0):
            raise TierUnavailableError("dram", f"request {sequence} of client {client:x} came late")
        self._sequences[client] = sequence
        if self._dram.abort_all(client):
            self._admitter.freed()
        keys = split(request.keys)
        self._publisher.refused(record_id(key, request.shard) for key in split(request.given_up))
        if draining:
            self._publisher.refused(record_id(key, request.shard) for key in keys)
            return ReserveReply(self._dram.arena.arena_id, (), (), (), (), 0, len(keys), 0, draining=True)
        parents = [BlockKey(request.parent) if request.parent else None, *keys[:-1]]
        blocks = [
            Incoming(NewBlock(key, request.shard, parent, request.num_bytes), request.depth + i)
            for i, (key, parent) in enumerate(zip(keys, parents, strict=True))
        ]
        fit = self._fit(request)
        got = await self._admitter.reserve(
            blocks[:fit], request.namespace, client, request.timeout_s, patient=False, hints=request.hints
        )
        self._note(request.hints, keys, parents[0])
        refused = (*got.refused, *range(fit, len(keys)))
        self._publisher.refused(record_id(keys[i], request.shard) for i in (*refused, *got.declined))
        self._publisher.wake()
        if self._sequences.get(client) != sequence:
            for granted in got.granted:
                self._dram.abort(granted.slot, granted.generation)
            self._admitter.freed()
            raise TierUnavailableError("dram", f"request {sequence} of client {client:x} was overtaken")
        return ReserveReply(
            self._dram.arena.arena_id,
            tuple(g.index for g in got.granted),
            tuple(g.slot for g in got.granted),
            tuple(g.generation for g in got.granted),
            tuple(g.offset for g in got.granted),
            len(got.already),
            len(refused),
            len(got.declined),
        )

    def _fit(self, request: ReserveRequest) -> int:
        """How many of the blocks are of a prefix that fits this node's largest tier: more would push out its head.

        Of a block's shards those count that this node is known to have.
        """
        placement = self._dram.placement
        shards = max(1, len(placement.shards(BlockKey(request.parent)))) if request.parent else 1
        prefix_bytes = max(self._dram.arena.capacity_bytes, self._lower.prefix_bytes_max)
        return min(len(request.keys) // KEY_BYTES, max(0, prefix_bytes // (request.num_bytes * shards) - request.depth))

    def _note(self, hints: Hints, keys: list[BlockKey], parent: BlockKey | None) -> None:
        """Remember whose blocks these are. Blocks before them may have come otherwise, as from another node."""
        above: dict[BlockKey, None] = {}  # in a circle, if a client says so
        placement = self._dram.placement
        known = self._sessions
        while hints.session and parent and not (parent in known or parent in above) and placement.shards(parent):
            above[parent] = None
            parent = placement.parent(parent)
        self._sessions.stored(hints.session, [*reversed(above), *keys], parent)
        if hints.final and hints.session:
            self._end(hints.session)
        elif hints.final:
            self._retire(keys)

    def hint(self, request: HintRequest) -> int:
        """See `TierManager.hint`."""
        before = self.retired_blocks
        self._note(request.hints, split(request.keys), BlockKey(request.parent) if request.parent else None)
        self._publisher.wake()
        return self.retired_blocks - before

    def _end(self, session: bytes) -> None:
        """A session has ended: what is its alone goes first, here and, by way of the directory, on other nodes."""
        shards = self._dram.placement.shards
        keys = self._sessions.retire(session)
        self._retire(keys)
        self._publisher.retired(record_id(key, shard) for key in keys for shard in shards(key) or (0,))

    def hear_retired(self, records: bytes) -> None:
        """Another node says that these are of a session that has ended."""
        self._retire([BlockKey(record[:KEY_BYTES]) for record in split_records(records)])

    def _retire(self, keys: Sequence[BlockKey]) -> None:
        """Blocks will not be used again, it is said: they go first, in the arena and on drives. Shared ones stay.

        What readers have left word of comes first: uses before that are no reason to keep them.
        """
        alone = [key for key in keys if not self._sessions.is_shared(key)]
        if alone:
            self._dram.note_accesses()
            self._dram.placement.retire(alone)
            self._lower.retire(alone)
            self.retired_blocks += len(alone)

    async def commit(self, request: CommitRequest) -> CommitReply:
        """See `CommitRequest`."""
        if request.arena_id != self._dram.arena.arena_id:
            return CommitReply(0, published=False)
        if not request.checksums:
            self._give_back(request)
            return CommitReply(0, published=True)
        slots = zip(request.slots, request.generations, request.checksums, strict=True)
        committed = sum(self._dram.commit(*slot) for slot in slots)
        self._lower.wake()
        self._admitter.freed()
        self._publisher.wake()
        published = await self._publisher.flush(min(request.timeout_s, CALL_TIMEOUT_S))
        return CommitReply(committed, published)

    def _give_back(self, request: CommitRequest) -> None:
        """Free all that a client has reserved, also by a reserve still under way; unless it has a newer one."""
        if request.sequence >= self._sequences.get(request.client_id, 0):
            self._sequences[request.client_id] = request.sequence
            self._dram.abort_all(request.client_id)
            self._admitter.freed()

    def tend(self, lock_files: Path, leaving: Callable[[Path], None]) -> None:
        """Take back slots of dead clients, and remove the lock files of those that are gone; `leaving` reads them."""
        for client_id in self._dram.writers:
            if not FileLock.held(lock_files / f"{client_id:016x}"):
                _log.info("writer %x is gone: %d slots back", client_id, self._dram.abort_all(client_id))
                self._admitter.freed()
        busy, old = self._dram.writers, time.time() - _FILE_AGE_S
        for path in lock_files.iterdir():
            client_id = int(path.name, 16)
            if client_id in busy or path.stat().st_mtime >= old:
                continue
            lock = FileLock(path)
            if lock.acquire(0.0):  # held until the file is gone: no client can take a lock that is none
                leaving(path)
                path.unlink()
                lock.release()
                self._sequences.pop(client_id, None)

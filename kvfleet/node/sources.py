"""Where a load gets its blocks: this node's drives, else other nodes, else the shared tier.

Why a block did not come is the last failure among those who may have it. Without a failure, all who were said to have
it answered, and do not: then it is `OBJECT_LOST` if the shared tier should have had it, else what the directory says
now, or `EVICTED` where it still names somebody.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass, field

from kvfleet.config import FleetConfig
from kvfleet.core.block import KEY_BYTES
from kvfleet.core.directory import NodeId, Run
from kvfleet.core.speeds import PEER, SourceSpeeds
from kvfleet.errors import CorruptBlockError, DeadlineExceededError, LayoutMismatchError, TierError
from kvfleet.node.arrivals import Arrivals
from kvfleet.node.drivereads import DriveReads
from kvfleet.node.landing import BlockSlots, land
from kvfleet.node.messages import FetchRequest, Miss, Source
from kvfleet.node.peers import Peers
from kvfleet.node.sharedreads import SharedReads
from kvfleet.node.waiting import now
from kvfleet.node.whereabouts import Whereabouts

__all__ = ["Sources", "Tries"]

_log = logging.getLogger(__name__)
_OURS = {Miss.NO_ROOM, Miss.DEADLINE, Miss.EVICTED}  # no other holder would help

Landed = Callable[[Source, bool], Awaitable[bool]]
"""Told that the next block is in the arena, or will be by another's hand; by source, and whether the shared tier has
it. False: it is not there after all."""


@dataclass(frozen=True, slots=True)
class Sources:
    """What the loads of a node read from. Copies run in the executor's threads."""

    peers: Peers
    drives: DriveReads | None
    shared: SharedReads | None
    executor: Executor
    config: FleetConfig
    speeds: SourceSpeeds = field(default_factory=SourceSpeeds)
    """As measured here, for clients that have not read anything yet."""


class Tries:
    """What one load tries. Indexes count from the first block of the request."""

    def __init__(
        self, sources: Sources, slots: BlockSlots, arrivals: Arrivals, where: Whereabouts, landed: Landed
    ) -> None:
        self._sources = sources
        self._config = sources.config
        self._slots = slots
        self._arrivals = arrivals
        self._outcomes = arrivals.outcomes
        self._where = where
        self._landed = landed
        self._failed: dict[NodeId, Miss] = {}
        self._not_read: dict[int, Miss] = {}  # blocks that the drives were to have
        self._drives_fail = False

    def on_drives(self, index: int) -> bool:
        """Whether a block can be read from this node's drives, and was not tried in vain."""
        drives, request = self._sources.drives, self._slots.request
        if drives is None or self._drives_fail or index in self._not_read:
            return False
        return drives.has(self._slots.keys[index], request.shard, request.num_bytes)

    async def bring(self, run: Run) -> Miss | None:
        """Bring the blocks of a run from the first source that can; where one stops, the next goes on.

        Args:
            run: from the next block on; all of it is on this node's drives, or none.

        Returns:
            Why the next block did not come; None if all came, or another try may bring more.
        """
        assert run.start == len(self._outcomes)
        if self._sources.drives is not None and self.on_drives(run.start):
            return await self._attempt("nvme", self._from_drives(self._sources.drives, run.stop))
        miss = await self._from_peers(run)
        if len(self._outcomes) == run.stop or self._slots.pace.full():
            return None
        if not run.shared and miss not in _OURS:
            timeout_s = min(self._slots.left_s, self._config.lookup_timeout_s)
            if await self._where.ask(len(self._outcomes), timeout_s):
                return None
        lost: Miss | None = None
        if self._sources.shared is not None and miss is not Miss.DEADLINE:
            got = await self._attempt("shared", self._from_shared(self._sources.shared, run))
            if got not in {Miss.EVICTED, Miss.OBJECT_LOST}:
                return got
            lost = got if got is Miss.OBJECT_LOST else None
        index = len(self._outcomes)
        return miss or self._not_read.get(index) or lost or self._where.why_gone(index)

    async def _attempt(self, name: str, source: Awaitable[Miss | None]) -> Miss | None:
        """Try one source, and measure it; why it did not bring all, or None if it just ended."""
        began, before = now(), len(self._outcomes)
        try:
            return await source
        except DeadlineExceededError:
            return Miss.DEADLINE if not self._slots.left_s else Miss.NO_ROOM
        except (CorruptBlockError, LayoutMismatchError) as error:
            _log.warning("%s", error)
            return Miss.CORRUPT if isinstance(error, CorruptBlockError) else Miss.LAYOUT_REFUSED
        except TierError as error:
            _log.info("%s", error)
            return Miss.UNREACHABLE
        finally:
            came = len(self._outcomes) - before
            if came:
                self._sources.speeds.observe(name, came * self._slots.request.num_bytes, now() - began)

    async def _from_peers(self, run: Run) -> Miss | None:
        """Have the other nodes send what they have of a run, the least busy first.

        Returns:
            Why the next block did not come, if one that may have it failed; else None.
        """
        tried: set[NodeId] = set()
        miss: Miss | None = None
        while len(self._outcomes) < run.stop and miss not in _OURS and not self._slots.pace.full():
            usable = self._sources.peers.holders.order(run.nodes)
            node = next((node for node in usable if node not in tried and node not in self._failed), None)
            if node is None:
                break
            tried.add(node)
            others = run.shared or any(other not in tried | self._failed.keys() for other in usable)
            got = await self._attempt(PEER + node, self._from_peer(node, run, self._patience_s(others=others)))
            if got is not None and got not in _OURS:
                self._failed[node] = got  # also for wrong bytes: for this load, since one copy is bad, not its holder
            miss = got or miss
        return miss or self._avoided(run)

    def _avoided(self, run: Run) -> Miss | None:
        """Why holders of a run were not asked; None if all were."""
        for node in run.nodes:
            if node in self._failed:
                return self._failed[node]
        return Miss.UNREACHABLE if self._sources.peers.holders.avoided.intersection(run.nodes) else None

    def _patience_s(self, *, others: bool) -> float | None:
        """How long a source may send nothing, if the client computes meanwhile and others may have its blocks."""
        ahead_s, spare_s = self._arrivals.ahead_s(len(self._outcomes)), self._slots.request.spare_s
        return max(0.0, ahead_s - spare_s) if others and spare_s else None

    async def _from_peer(self, node: NodeId, run: Run, patience_s: float | None) -> Miss | None:
        """Bring blocks of a run, from the next one on, from another node; it may have fewer."""
        first, stop, request, config = len(self._outcomes), run.stop, self._slots.request, self._config
        before = request.keys[(first - 1) * KEY_BYTES : first * KEY_BYTES] if first else request.parent
        fetch = FetchRequest(
            namespace=request.namespace,
            keys=request.keys[first * KEY_BYTES : stop * KEY_BYTES],
            parent=before,
            depth=request.depth + first,
            shard=request.shard,
            num_bytes=request.num_bytes,
            window_bytes_max=config.window_bytes_max,
            timeout_s=self._slots.left_s,
        )
        stream = self._sources.peers.stream(node, fetch, (stop - first) * request.num_bytes, patience_s)
        windows = stream.windows()
        landing = land(windows, self._slots, first, self._sources.executor, patience_s=config.holder_timeout_s)
        async with aclosing(windows), aclosing(landing) as landed:
            async for index in landed:
                assert index == len(self._outcomes)
                if not await self._landed(Source.PEER, run.shared):
                    return Miss.EVICTED
        return stream.miss

    async def _from_drives(self, drives: DriveReads, stop: int) -> Miss | None:
        """Read blocks from the next one up to `stop` from this node's drives; one that fails may be elsewhere.

        A drive that fails or hangs costs a load once: then it gets the rest as if there were no drives.
        """
        async with aclosing(drives.bring(self._slots, len(self._outcomes), stop)) as outcomes:
            async for outcome in outcomes:
                if isinstance(outcome, Miss):
                    self._not_read[len(self._outcomes)] = outcome
                    self._drives_fail = outcome in {Miss.TOO_SLOW, Miss.STORAGE_FAILED}
                    return None
                got = await self._keep(outcome, saved=self._where.run_at(len(self._outcomes)).shared)
                if got is not None or self._slots.pace.full():
                    return got
        return None

    async def _from_shared(self, shared: SharedReads, run: Run) -> Miss | None:
        """Bring blocks from the next one to the end of a run from the shared tier."""
        first = len(self._outcomes)
        async with aclosing(shared.bring(self._slots, first, run.stop, told=run.shared)) as outcomes:
            async for outcome in outcomes:
                if isinstance(outcome, Miss):
                    return outcome
                got = await self._keep(outcome, saved=outcome is Source.SHARED)
                if got is not None or self._slots.pace.full():
                    return got
        return None

    async def _keep(self, source: Source, *, saved: bool) -> Miss | None:
        """A block was read: see to it that it stays, and that there is room for the next one."""
        if not await self._landed(source, saved):
            return Miss.EVICTED
        await self._slots.pace.room(self._config.holder_timeout_s)
        return None

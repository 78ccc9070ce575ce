"""The fleet's directory as a service: the core's `Directory`, the shared listing's election, dead nodes out.

Restarted, it is empty and serves at once; managers send their inventories when it does not know them. Until all live
nodes have done so, it does not say `NEVER_STORED`; one without a manager is waited for some seconds (`_FIRST_WORD_S`).
Large messages are taken in one at a time, with lookups in between, however many managers send them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvfleet.config import FleetConfig
from kvfleet.core.block import KEY_BYTES
from kvfleet.core.directory import Applied, Delta, Directory, DirectoryStats, InventoryPage, NodeId
from kvfleet.metrics import Meter, Sink, directory_values
from kvfleet.node.messages import Located
from kvfleet.node.publishing import CALL_TIMEOUT_S, DeltaReply
from kvfleet.node.waiting import now, within

__all__ = ["DirectoryService", "DirectoryStatus"]

_log = logging.getLogger(__name__)
_LISTING_GRACE_S = 600.0  # a node that was asked to list and says nothing for so long is given up
_RAY_TIMEOUT_S = 5.0  # a longer answer of Ray's control plane is waited for again, a heartbeat later
# A live node that says nothing for so long after a start has no manager. One that has speaks each heartbeat; but its
# call to the directory before this one may have to time out first, and the next one may be late.
_FIRST_WORD_HEARTBEATS = 3
_FIRST_WORD_S = 2 * CALL_TIMEOUT_S
_SMALL_RECORDS = 200  # taken in as it comes: 0.2 ms
_WAITING_MAX = 64  # of the calls that the actor takes at once: lookups have the rest


@dataclass(frozen=True, slots=True)
class DirectoryStatus:
    """The directory at a moment.

    Attributes:
        stats: sizes.
        shared_listed: the shared tier was listed since this directory started (True without a shared tier).
        lookups: calls of `locate`.
    """

    stats: DirectoryStats
    shared_listed: bool
    lookups: int


class DirectoryService:
    """Threads: one event loop, which must be running when it is made.

    All methods answer at once, except that managers' large messages take turns.

    Args:
        live_nodes: the nodes that Ray says are alive; may block, runs in a thread.
        sink: for metrics.
    """

    def __init__(
        self, config: FleetConfig, live_nodes: Callable[[], frozenset[NodeId]], sink: Sink | None = None
    ) -> None:
        self._config = config
        self._live_nodes = live_nodes
        self._directory = Directory(config.directory_keys_max)
        self._life = time.time_ns()
        self._listed = config.shared_url is None
        self._lister: NodeId | None = None
        self._lister_until = 0.0
        self._lookups = 0
        self._meter = Meter(sink or Sink(), {"fleet": config.name})
        self._turn = asyncio.Lock()
        self._waiting = 0  # for it, or at it
        self._asked: tuple[tuple[NodeId, ...], asyncio.Future[frozenset[NodeId]]] | None = None
        self._silent_from: float | None = None  # who has not spoken by then has no manager
        self._watch = asyncio.create_task(self._tend())

    async def config(self) -> FleetConfig:
        """The settings the fleet was started with."""
        return self._config

    async def locate(self, keys: bytes, shard: int, num_shards: int) -> Located:
        """Who holds the blocks of a prefix, up to the first that nobody holds; and why nobody does."""
        self._lookups += 1
        runs = self._directory.locate(keys, shard, num_shards)
        end = (runs[-1].stop if runs else 0) * KEY_BYTES
        missing = self._directory.why(keys[end : end + KEY_BYTES], num_shards) if end < len(keys) else None
        return Located(tuple(runs), missing)

    async def shared_among(self, records: bytes) -> bytes:
        """Those of some packed records that the shared tier is known to have."""
        return self._directory.shared_among(records)

    async def apply(self, delta: Delta) -> DeltaReply:
        """A manager's changes. BUSY: they are many, and too many messages wait."""
        if delta.num_records > _SMALL_RECORDS:
            applied = await self._in_turn(partial(self._directory.apply, delta))
        else:
            applied = self._directory.apply(delta)
        return DeltaReply(applied, self._life, self._choose_lister(delta.node))

    async def inventory(self, page: InventoryPage) -> Applied:
        """A page of what a manager holds. BUSY: too many messages wait."""
        return await self._in_turn(partial(self._directory.inventory, page))

    async def _in_turn(self, take_in: Callable[[], Applied]) -> Applied:
        """Take a large message in after those that wait; what else has arrived is done before the next one."""
        if self._waiting >= _WAITING_MAX:
            return Applied.BUSY
        self._waiting += 1
        try:
            async with self._turn:
                applied = take_in()
                await asyncio.sleep(0)
        finally:
            self._waiting -= 1
        return applied

    async def listed(self, node: NodeId, life: int) -> bool:
        """A node has reported all of the shared tier. False: not to this directory, but to one before it."""
        if life != self._life:
            return False
        if node == self._lister:
            self._lister, self._listed = None, True
        return True

    async def status(self) -> DirectoryStatus:
        """Sizes and progress."""
        return DirectoryStatus(self._directory.stats(), self._listed, self._lookups)

    def _choose_lister(self, node: NodeId) -> bool:
        """Whether this node is to list the shared tier: one does, after each start of the directory.

        It is told so until it has done it: an answer may be lost, its manager may start again.
        """
        if self._listed:
            return False
        if self._lister is None or now() > self._lister_until:
            self._lister, self._lister_until = node, now() + _LISTING_GRACE_S
        return node == self._lister

    async def _tend(self) -> None:
        """Every heartbeat: publish metrics, follow which nodes live. What goes wrong is tried again at the next."""
        while True:
            for step in (self._publish, self._follow_nodes):
                try:
                    await step()
                except Exception as error:  # noqa: BLE001  Ray may be away for a while, and nobody supervises this task
                    _log.warning("the directory's heartbeat: %r", error)
            await asyncio.sleep(self._config.heartbeat_s)

    async def _publish(self) -> None:
        self._meter.tell(directory_values(await self.status()))

    async def _follow_nodes(self) -> None:
        """Forget what dead nodes held; expect all live ones to speak, for as long as those with a manager may take."""
        known, live = await self._nodes()
        for node in known:
            if node not in live:
                _log.info("node %s is gone", node)
                self._directory.drop_node(node)
                if node == self._lister:
                    self._lister = None
        if self._silent_from is None:
            self._silent_from = now() + _FIRST_WORD_S + _FIRST_WORD_HEARTBEATS * self._config.heartbeat_s
        self._directory.expect(live if now() < self._silent_from else frozenset())

    async def _nodes(self) -> tuple[tuple[NodeId, ...], frozenset[NodeId]]:
        """The nodes that are known, and those that Ray said afterwards are alive.

        Raises:
            asyncio.TimeoutError: Ray does not answer. It is not asked anew before it has: no threads pile up.
        """
        if self._asked is None:
            known = tuple(node.node for node in self._directory.stats().nodes)  # first: later ones may be news to Ray
            self._asked = known, asyncio.get_running_loop().run_in_executor(None, self._live_nodes)
        known, answer = self._asked
        try:
            return known, await within(_RAY_TIMEOUT_S, asyncio.shield(answer))
        finally:
            if answer.done():
                self._asked = None

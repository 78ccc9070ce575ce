"""The fleet's directory as a service: the core's `Directory`, who keeps the shared tier's catalog, dead nodes out.

Restarted, it is empty and serves at once; managers send their inventories when it does not know them. Until all live
nodes have done so, it does not say `NEVER_STORED`; one without a manager is waited for some seconds (`_FIRST_WORD_S`).
Large messages are taken in one at a time, with lookups in between, however many managers send them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from kvfleet.config import FleetConfig
from kvfleet.core.block import KEY_BYTES
from kvfleet.core.claims import Claims
from kvfleet.core.directory import Applied, Delta, Directory, DirectoryStats, InventoryPage, NodeId, split_records
from kvfleet.core.mailbox import Mailbox, ObjectPage
from kvfleet.core.notices import Notices
from kvfleet.core.objectrows import gone_rows
from kvfleet.metrics import Meter, Sink, directory_values
from kvfleet.node.directorylink import CALL_TIMEOUT_S, Claimed, DeltaReply, ObjectRequest
from kvfleet.node.messages import Located
from kvfleet.node.waiting import now, within

__all__ = ["DirectoryService", "DirectoryStatus"]

_log = logging.getLogger(__name__)
_CLAIMS_MAX = 200_000
_CLAIM_S = 60.0  # to write what one claim names takes seconds; who has died with it holds others up for so long
_LOST_MAX = 10_000  # of each node
_DELETED_MAX = 4096  # fewer than a keeper remembers
_MAIL_ROWS_MAX = 1 << 18  # rows of 71 bytes that wait for the keeper
_KEEPER_HEARTBEATS = 10  # a keeper that says nothing for so long, and a call's time, is replaced
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
        shared_listed: this directory was told what the shared tier holds (True without one).
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
        self._mailbox = Mailbox(_MAIL_ROWS_MAX)
        self._claims = Claims(_CLAIMS_MAX, _CLAIM_S)
        self._lost = Notices(_LOST_MAX)
        self._dropped = Notices(_LOST_MAX)
        self._retired = Notices(_LOST_MAX)
        self._deleted: dict[bytes, None] = {}  # by the keeper, the last ones
        self._mailed: dict[NodeId, tuple[int, int, int | None]] = {}  # epoch, number, position of the last delta
        self._keeper: tuple[NodeId, int] | None = None
        self._keeper_until = 0.0
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

    async def claim(self, node: NodeId, records: bytes) -> Claimed:
        """Which of some packed records a node need not write to the shared tier; the others no one else does now."""
        saved = self._directory.shared_among(records)
        known = set(split_records(saved))
        left = [record for record in split_records(records) if record not in known]
        return Claimed(saved, b"".join(self._claims.claim(node, left, now())))

    async def apply(self, delta: Delta) -> DeltaReply:
        """A manager's changes. BUSY: they are many, and too many messages wait."""
        if delta.num_records > _SMALL_RECORDS:
            applied = await self._in_turn(lambda: self._take_in(delta))
        else:
            applied = self._take_in(delta)
        may_keep = applied is not Applied.STALE_EPOCH and delta.may_keep
        keeper = may_keep and self._choose_keeper(delta.node, delta.epoch)
        position = self._post(delta) if applied is Applied.OK else None
        message = delta.epoch, delta.seq
        told = (notices.take(delta.node, message) for notices in (self._lost, self._dropped, self._retired))
        return DeltaReply(applied, self._life, keeper, self._listed, position, self._mailbox.written, *told)

    def _take_in(self, delta: Delta) -> Applied:
        self._claims.end(split_records(delta.shared_added))
        self._claims.give_back(delta.node, split_records(delta.unclaimed))
        believed = self._believable(delta)
        applied = self._directory.apply(believed)
        self._tell_holders(believed)
        return applied

    def _believable(self, delta: Delta) -> Delta:
        """What a delta says, but not that an object is there which the keeper has deleted: that may be old news.

        The keeper looks whether such an object was stored again, and says so. One that is it no more has no word: what
        it wanted to delete, the next one does or keeps.
        """
        added = split_records(delta.shared_added)
        if self._keeper != (delta.node, delta.epoch):
            late, dropped = self._deleted.keys() & added, set(split_records(delta.shared_dropped))
            if not late and not dropped:
                return delta
            removed = split_records(delta.shared_removed)
            return replace(
                delta,
                shared_added=b"".join(record for record in added if record not in late),
                shared_removed=b"".join(record for record in removed if record not in dropped),
                shared_dropped=b"",
            )
        for record in added:
            self._deleted.pop(record, None)
        self._deleted |= dict.fromkeys(split_records(delta.shared_dropped))
        while len(self._deleted) > _DELETED_MAX:
            del self._deleted[next(iter(self._deleted))]
        return delta

    def _tell_holders(self, delta: Delta) -> None:
        """Have who holds a block told that its copy in the shared tier is gone, or that its session has ended."""
        sender = (delta.node,)
        for notices, records, knowing in (
            (self._lost, delta.shared_lost, sender),
            (self._retired, delta.retired, sender),
            (self._dropped, delta.shared_dropped, ()),
        ):
            for record in split_records(records):
                for holder in self._directory.holders(record):
                    if holder not in knowing:
                        notices.post(holder, record)

    def _post(self, delta: Delta) -> int | None:
        """Put what a delta says of objects into the mailbox, once; None if it has no room."""
        if self._config.shared_url is None:
            return self._mailbox.posted
        epoch, seq, position = self._mailed.get(delta.node, (0, 0, None))
        if (delta.epoch, delta.seq) <= (epoch, seq):
            return position if delta.seq == seq else None
        position = self._mailbox.post(delta.objects) if delta.objects else self._mailbox.posted
        dropped = set(split_records(delta.shared_dropped))  # the keeper knows
        gone = b"".join(record for record in split_records(delta.shared_removed) if record not in dropped)
        if gone:
            # Without room it is forgotten: the next one who looks for such an object says it again.
            self._mailbox.post(gone_rows(gone))
        self._mailed[delta.node] = delta.epoch, delta.seq, position
        return position

    async def objects(self, request: ObjectRequest) -> ObjectPage | None:
        """What was said of objects, for the keeper of the catalog; None to any other.

        What it has written down before is not kept any longer.
        """
        if (request.node, request.epoch) != self._keeper:
            return None
        position = self._mailbox.written
        if request.life == self._life and request.written >= position:  # else it is late, and nobody waits for it
            self._mailbox.acknowledge(request.written)
            position = request.position
        rows, position = self._mailbox.read(position, request.rows_max)
        return ObjectPage(self._life, rows, position)

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
        """The keeper has told all of the shared tier. False: not to this directory, or it is the keeper no more."""
        if life != self._life or self._keeper is None or node != self._keeper[0]:
            return False
        self._listed = True
        return True

    async def status(self) -> DirectoryStatus:
        """Sizes and progress."""
        return DirectoryStatus(self._directory.stats(), self._listed, self._lookups)

    def _choose_keeper(self, node: NodeId, epoch: int) -> bool:
        """Whether this manager is to keep the catalog of the shared tier: one does, as long as it lives and speaks."""
        if self._config.shared_url is None:
            return False
        if self._keeper is None or now() > self._keeper_until or (self._keeper[0] == node and epoch > self._keeper[1]):
            _log.info("node %s keeps the catalog of the shared tier", node)
            self._keeper = node, epoch
        if self._keeper != (node, epoch):
            return False
        self._keeper_until = now() + CALL_TIMEOUT_S + _KEEPER_HEARTBEATS * self._config.heartbeat_s
        return True

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
                self._claims.drop_node(node)
                self._lost.drop_node(node)
                self._dropped.drop_node(node)
                self._retired.drop_node(node)
                self._mailed.pop(node, None)
                if self._keeper is not None and node == self._keeper[0]:
                    self._keeper = None
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

"""Tells the directory what this node holds: deltas in sequence, a full inventory when it lost track.

The node owns the truth. A delta that may or may not have arrived is sent again with the same sequence number; a
directory that restarted, or missed one, asks for the inventory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Protocol

from kvfleet.config import FleetConfig
from kvfleet.core.directory import Applied, Delta, Digest, InventoryPage, NodeId, split_records
from kvfleet.core.objectrows import SharedObject
from kvfleet.errors import DirectoryUnavailableError, KvFleetError, StaleEpochError
from kvfleet.node.directorylink import CALL_TIMEOUT_S, DeltaReply, DirectoryLink
from kvfleet.node.outbox import Outbox, Remarks, Uses
from kvfleet.node.waiting import now, wall_ms, within

__all__ = ["CALL_TIMEOUT_S", "DeltaReply", "DirectoryLink", "Holdings", "Publisher"]

_log = logging.getLogger(__name__)
_RETRY_S = 0.5
_WRITTEN_S = 0.25  # between questions whether the manifests have it all: each is a call to the directory
_BUSY_S = 0.1
_BUSY_TRIES = 100
_SHARED_MAX = 1_000_000
_REMARKS_MAX = 10_000  # of each kind


class Holdings(Protocol):
    """What a node holds, as record ids: see `kvfleet.node.holdings`."""

    def take_changes(self, limit: int) -> dict[bytes, bool]:
        """At most so many of the records that came (True) or went (False) since they were last taken."""

    @property
    def num_changes(self) -> int:
        """How many changes are left to be taken."""

    def snapshot(self) -> list[bytes]:
        """All records that can be read now. Changes up to now are in it and are not reported again."""

    def digest(self) -> Digest:
        """Count and xor of all records that can be read now."""


class Publisher:
    """Sends what changed, in order, from one task.

    Args:
        on_reply: called with each of the directory's answers.

    Attributes:
        node: the one whose holdings it tells of.
        may_keep: whether this node may be named to keep the catalog of the shared tier.
    """

    def __init__(
        self,
        node: NodeId,
        epoch: int,
        link: DirectoryLink,
        config: FleetConfig,
        *,
        holdings: Holdings,
        on_reply: Callable[[DeltaReply], None],
    ) -> None:
        self.node = node
        self._epoch = epoch
        self._link = link
        self._config = config
        self._holdings = holdings
        self._on_reply = on_reply
        self.may_keep: Callable[[], bool] = lambda: True
        self._seq = 0
        self._shared: dict[bytes, bool] = {}
        self._dropped: dict[bytes, None] = {}  # of those that are not there
        self._lost, self._refused, self._unclaimed, self._retired = (Remarks(_REMARKS_MAX) for _ in range(4))
        self._outbox = Outbox()
        self._uses = Uses()
        self._unacked: Delta | None = None
        self._known = False
        self._wake, self._urgent = asyncio.Event(), asyncio.Event()  # urgent: somebody waits for the directory
        self._waiters: list[asyncio.Future[None]] = []
        self.directory_life = 0  # of the directory that answered last
        self.resyncs = 0
        self.unsaid = 0  # what was not kept for a directory that is away; the manifests say it to the next one

    def wake(self) -> None:
        """The holdings changed."""
        self._wake.set()

    def shared(self, record: bytes, present: bool) -> None:
        """The shared tier has a record (True), or lost it (False)."""
        self._note_shared(record, present=present)
        self._dropped.pop(record, None)
        if not present:
            self._outbox.forget(record)
        self._wake.set()

    def lost(self, record: bytes) -> None:
        """The shared tier should have had a good copy of a record, and has none: who holds it is to save it again."""
        self.shared(record, present=False)
        self._lost.add([record])

    def untold(self, records: set[bytes]) -> set[bytes]:
        """Those of which the directory may not have heard yet that the shared tier has lost them."""
        flying = records.intersection(split_records(b"" if self._unacked is None else self._unacked.shared_removed))
        return flying | {record for record in records if self._shared.get(record) is False}

    def unclaimed(self, record: bytes) -> None:
        """This node does not write a record to the shared tier for now, as it had said. Told with the next changes."""
        self._unclaimed.add([record])

    def dropped(self, record: bytes) -> None:
        """The copy of a record in the shared tier is going to be deleted, as there are too many."""
        self.shared(record, present=False)
        self._dropped[record] = None

    def stored(self, thing: SharedObject, ago_s: float = 0.0) -> None:
        """An object was written to the shared tier, of a block that was last used so long ago."""
        ms = wall_ms()
        self._uses.is_news(thing.record, now())
        self._outbox.put(thing.record, thing.row(stored_at=ms, last_used=ms - int(1000 * ago_s)))
        self.shared(thing.record, present=True)

    def used(self, thing: SharedObject, ago_s: float = 0.0) -> None:
        """An object, or a copy of it on this node, was used. Told with the next changes, once an hour."""
        if self._uses.is_news(thing.record, now()):
            self._outbox.put(thing.record, thing.row(stored_at=0, last_used=wall_ms() - int(1000 * ago_s)))

    def shared_page(self, records: bytes) -> int:
        """The shared tier has these records, packed. Returns how many they are."""
        found = split_records(records)
        for record in found:
            if record not in self._shared:
                self._note_shared(record, present=True)
        self._wake.set()
        return len(found)

    def refused(self, records: Iterable[bytes]) -> None:
        """Clients wanted to store these and could not. The directory is told with the next changes, or never."""
        self._refused.add(records)

    def retired(self, records: Iterable[bytes]) -> None:
        """These will not be used again, as a session has ended. The holders are told by the directory, or never."""
        self._retired.add(records)
        self._wake.set()

    def _note_shared(self, record: bytes, *, present: bool) -> None:
        if record in self._shared or len(self._shared) < _SHARED_MAX:
            self._shared[record] = present
        else:
            self.unsaid += 1

    async def flush(self, timeout_s: float) -> bool:
        """Wait until the directory has acknowledged all changes so far. False: not within `timeout_s`."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._wake.set()
        self._urgent.set()
        await asyncio.wait({waiter}, timeout=timeout_s)
        if waiter.done():
            return True
        waiter.cancel()
        return False

    async def written(self, timeout_s: float) -> bool:
        """Wait until what was said of objects in the shared tier is in a manifest. False: not within `timeout_s`."""
        deadline = now() + timeout_s
        while len(self._outbox):
            left = deadline - now()
            if left <= 0:
                return False
            await self.flush(min(left, self._config.heartbeat_s))
            await asyncio.sleep(min(left, self._config.heartbeat_s / 4, _WRITTEN_S))
        return True

    async def run(self) -> None:
        """Send changes as they come and a heartbeat when there are none. Runs until cancelled."""
        while True:
            try:
                await within(self._config.heartbeat_s, self._wake.wait())
                await within(self._config.delta_interval_s, self._urgent.wait())
            except asyncio.TimeoutError:
                pass
            self._wake.clear()
            self._urgent.clear()
            try:
                await self._send()
            except KvFleetError as error:
                _log.info("directory not told: %s", error)
                self._wake.set()
                await asyncio.sleep(_RETRY_S)

    async def _send(self) -> None:
        """Bring the directory up to date with everything so far, then tell those who wait for it."""
        waiters, self._waiters = self._waiters, []
        try:
            await self._bring_up_to_date()
        except KvFleetError:
            self._waiters = [waiter for waiter in waiters + self._waiters if not waiter.done()]
            raise
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _bring_up_to_date(self) -> None:
        if not self._known:
            await self._resync()
        waiting = max(self._holdings.num_changes, len(self._shared) + self._outbox.num_waiting)
        deltas = 1 + waiting // self._config.inventory_page_records  # to say all that was to be said when we came
        while True:
            again = self._unacked is not None
            self._unacked = self._unacked or self._next_delta()
            reply = await self._link.apply(self._unacked, CALL_TIMEOUT_S)
            self.directory_life = reply.life
            self._on_reply(reply)
            self._outbox.heard_gone(reply.lost + reply.dropped)
            if reply.applied is Applied.OK:
                self._unacked = None
                for record in self._outbox.landed(reply.life, reply.position, reply.written):
                    self._shared.setdefault(record, True)
                deltas -= not again
                if deltas <= 0:
                    return
            elif reply.applied is Applied.BUSY:
                raise DirectoryUnavailableError("busy with what other nodes say")
            elif reply.applied is Applied.STALE_EPOCH:
                raise StaleEpochError(self.node, self._epoch, self._epoch + 1)
            else:
                await self._resync()

    def _next_delta(self) -> Delta:
        limit = self._config.inventory_page_records
        held = self._holdings.take_changes(limit)
        shared = dict(islice(self._shared.items(), limit))
        for record in shared:
            del self._shared[record]
        gone = [record for record, here in shared.items() if not here]
        dropped = [record for record in gone if self._dropped.pop(record, ()) is None]
        self._seq += 1
        return Delta(
            node=self.node, epoch=self._epoch, seq=self._seq,
            added=b"".join(r for r, here in held.items() if here),
            removed=b"".join(r for r, here in held.items() if not here),
            shared_added=b"".join(r for r, here in shared.items() if here),
            shared_removed=b"".join(gone),
            digest=self._holdings.digest() if not self._holdings.num_changes else None,
            not_admitted=self._refused.take(limit),
            objects=self._outbox.take(0 if self._shared else limit),  # what is deleted was known to be there before
            shared_lost=self._lost.take(limit),
            shared_dropped=b"".join(dropped),
            unclaimed=self._unclaimed.take(limit),
            retired=self._retired.take(limit),
            may_keep=self.may_keep(),
        )  # fmt: skip

    async def _resync(self) -> None:
        """Send the full inventory, in pages; changes from now on follow as deltas."""
        self.resyncs += 1
        self._known = False
        if self._unacked is not None:
            self._keep_shared(self._unacked)
            for record in self._outbox.lost():
                self._shared.setdefault(record, True)
            self._unacked = None
        records = self._holdings.snapshot()
        size = self._config.inventory_page_records
        pages = [records[i : i + size] for i in range(0, len(records), size)] or [[]]
        for number, page in enumerate(pages):
            last = number == len(pages) - 1
            await self._send_page(InventoryPage(self.node, self._epoch, self._seq, number, last, b"".join(page)))
        self._known = True

    async def _send_page(self, page: InventoryPage) -> None:
        """Send one page, again while the directory is busy with those of other nodes."""
        for _ in range(_BUSY_TRIES):
            applied = await self._link.inventory(page, CALL_TIMEOUT_S)
            if applied is not Applied.BUSY:
                break
            await asyncio.sleep(_BUSY_S)
        if applied is not Applied.OK:
            raise KvFleetError(f"the directory did not take the inventory: {applied.value}")

    def _keep_shared(self, delta: Delta) -> None:
        """What an unacknowledged delta said of the shared tier is not in any inventory: say it again."""
        for packed, present in ((delta.shared_added, True), (delta.shared_removed, False)):
            for record in split_records(packed):
                self._shared.setdefault(record, present)
        self._dropped |= dict.fromkeys(split_records(delta.shared_dropped))
        self._lost.add(split_records(delta.shared_lost))

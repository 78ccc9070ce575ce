"""Keeps the catalog of the shared tier, on the one node that the directory has named for it.

    all managers -- rows with their deltas --> the directory's mailbox -- pages --> the keeper
    the keeper --> manifests (what a fleet is told that starts later), deletions (what is too much)

A keeper that is named reads the manifests; it lists the tier only if there are none, or some cannot be read. Then it
tells the directory what is there, and from now on writes down what the managers say. What it has not written down
stays in the mailbox, and is the next keeper's to write.

Two keepers at once, because one was thought dead, do no harm: the manifests of the older one are refused (see
`manifestwriter`), and it deletes only what it has told the directory and the manifests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator

import numpy as np

from kvfleet.config import FleetConfig
from kvfleet.core.block import BlockKey
from kvfleet.core.catalog import Flags
from kvfleet.core.directory import NodeId, split_records
from kvfleet.core.objectrows import ROW_BYTES, ObjectRows, record_ids, rows_of
from kvfleet.errors import DirectoryUnavailableError, KvFleetError, StaleEpochError, TierUnavailableError
from kvfleet.node.catalogbook import CatalogBook
from kvfleet.node.catalogstatus import CatalogStatus
from kvfleet.node.directorylink import CALL_TIMEOUT_S, DeltaReply, DirectoryLink, ObjectRequest
from kvfleet.node.drivecalls import DaemonThreads
from kvfleet.node.endpoint import SharedEndpoint
from kvfleet.node.landing import settle
from kvfleet.node.manifestwriter import APPEND_ROWS_MAX
from kvfleet.node.publishing import Publisher
from kvfleet.node.sweeping import sweep
from kvfleet.node.waiting import now, within

__all__ = ["CatalogKeeper"]

_log = logging.getLogger(__name__)
_PAGE_ROWS = 1 << 14
_CALLS = 8  # to the storage at once, to delete
_MARK_MAX = 1 << 16  # chosen at once: a second of work among a million objects
_DELETE_MAX = 2048  # told and deleted together
_PAUSE_MAX_S = 30.0
_HURRY_S = 0.1  # between looks at what is to be written down while a stop waits for it
_SWEEP_S = 60.0  # a folder: some hours for all of a model's, and no more load than that


class CatalogKeeper:
    """Keeps the catalog as long as the directory wants it to; waits otherwise.

    Memory, while it keeps it: 89 bytes an object, twice that for moments, and what `ManifestWriter` takes.

    Threads: the manager's event loop; the catalog and the storage are worked on in threads, one at a time, and up to
    8 more delete.
    """

    def __init__(
        self, node: NodeId, epoch: int, endpoint: SharedEndpoint, publisher: Publisher, link: DirectoryLink,
        config: FleetConfig,
    ) -> None:  # fmt: skip
        self._node = node
        self._epoch = epoch
        self._endpoint = endpoint
        self._shared = endpoint.shared
        self._publisher = publisher
        self._link = link
        self._config = config
        self._threads = DaemonThreads(1 + _CALLS, "kvfleet-catalog")
        self._named = asyncio.Event()
        self._untold_life = 0
        self._book: CatalogBook | None = None
        self._hurry_until = float("-inf")
        self._hurried = asyncio.Event()
        self._sweep: Iterator[TierUnavailableError | None] = iter(())
        self._sweep_at = now() + _SWEEP_S
        self.deleted = 0
        self.problem = ""

    def hear(self, reply: DeltaReply) -> None:
        """The directory says who keeps the catalog, and whether it knows what is in it."""
        self._untold_life = 0 if reply.told else reply.life
        if reply.keeper:
            self._named.set()
        else:
            self._named.clear()

    def hurry(self, seconds: float) -> None:
        """Write down what comes within some seconds at once: the fleet is about to stop."""
        self._hurry_until = now() + seconds
        self._hurried.set()

    @property
    def _hurries(self) -> bool:
        return now() < self._hurry_until

    def status(self) -> CatalogStatus | None:
        """Sizes; None where the catalog is not kept."""
        book = self._book
        if book is None:
            return None
        known = book.catalog
        return CatalogStatus(
            known.num_rows, known.num_bytes, self._config.shared_bytes_max, known.refused, self.deleted,
            book.num_changes, book.listed, self.problem,
        )  # fmt: skip

    async def run(self) -> None:
        """Keep the catalog whenever this node is named. Runs until cancelled."""
        pause_s = self._config.heartbeat_s
        await self._endpoint.works.wait()
        while True:
            if not self._named.is_set():
                self._book = None
                await self._named.wait()
            try:
                if self._book is None:
                    self._book = await settle(self._threads, lambda: CatalogBook.open(self._shared, self._config))
                await self._tick(self._book)
                self.problem, pause_s = "", _HURRY_S if self._hurries else self._config.heartbeat_s
            except StaleEpochError as error:
                _log.info("another node keeps the catalog of the shared tier: %s", error)
                self._named.clear()  # the directory names us again if it was the other that is out of date
                self._book = None
            except KvFleetError as error:
                self.problem = str(error)
                _log.info("the shared tier's catalog, next try in %.0f s: %s", pause_s, error)
                pause_s = min(_PAUSE_MAX_S, 2 * pause_s)
            with contextlib.suppress(asyncio.TimeoutError):
                await within(pause_s, self._hurried.wait())
            self._hurried.clear()

    async def close(self) -> None:
        """End the threads; `run` was cancelled."""
        await asyncio.to_thread(self._threads.shutdown)

    async def _tick(self, book: CatalogBook) -> None:
        """What is to be done every heartbeat."""
        if not await self._collect(book):
            return
        if self._untold_life == book.life or not book.told:
            await self._tell(book)
        await self._trim(book)
        if book.num_changes and (self._hurries or now() - book.appended_at >= self._config.manifest_interval_s):
            await self._write(book)
        elif not book.num_changes:
            book.written = book.position
        if self._shared.objects.leaves_partials and now() >= self._sweep_at:
            self._sweep_at = now() + _SWEEP_S
            await settle(self._threads, self._sweep_next)

    def _sweep_next(self) -> None:
        """The next folder, or from the beginning the next time."""
        try:
            problem = next(self._sweep)
        except StopIteration:
            self._sweep = sweep(self._shared.objects)
        else:
            if problem is not None:
                raise problem

    async def _collect(self, book: CatalogBook) -> bool:
        """Take in what the managers say, and answer whether this node is still the keeper."""
        while True:
            request = ObjectRequest(self._node, self._epoch, book.life, book.written, book.position, _PAGE_ROWS)
            page = await self._link.objects(request, CALL_TIMEOUT_S)
            if page is None:
                self._named.clear()
                return False
            if page.life != book.life:
                book.life = page.life
                book.written = book.position = page.position - len(page.rows) // ROW_BYTES
            if not page.rows:
                return True
            rows = await self._heard(book, rows_of(page.rows))
            book.stored_bytes[0] += int(rows["bytes"][rows["stored_at"] > 0].sum())
            book.changes.append(await settle(self._threads, lambda rows=rows: book.catalog.apply(rows)))  # type: ignore[misc]
            book.position = page.position
            if book.num_changes >= APPEND_ROWS_MAX:
                await self._write(book)

    async def _heard(self, book: CatalogBook, rows: ObjectRows) -> ObjectRows:
        """Look whether what was stored, of what was said to be gone, is there: the row may be older than that.

        Likewise what was used and is not known: it may have been a copy that a node still has.
        """
        book.announce(rows[rows["bytes"] == 0])
        records = split_records(record_ids(rows))
        ours = np.fromiter((record in book.announced for record in records), np.bool_, len(records))
        ours &= rows["bytes"] > 0
        stored = rows["stored_at"] > 0
        again = np.flatnonzero(ours & (stored | ~book.catalog.knows(rows)))
        stays: Flags = np.ones(len(rows), np.bool_)
        found = list[int]()
        await self._each(rows[again], self._is_there, found)
        there = set(found)
        for number, index in enumerate(again.tolist()):
            if number in there:
                self._publisher.shared(records[index], present=True)
                continue
            stays[index] = False
            if stored[index]:
                self._publisher.lost(records[index])
        return rows[stays]

    async def _write(self, book: CatalogBook) -> None:
        position = book.position
        await settle(self._threads, book.append)
        book.written, book.appended_at = position, now()
        book.stored_bytes = [0, book.stored_bytes[0]]

    async def _tell(self, book: CatalogBook) -> None:
        """Tell a directory that does not know it what is there."""
        life = book.life
        for page in book.catalog.pages():
            self._publisher.shared_page(page)
            await self._flush()
        if not await self._link.listed(self._node, life, CALL_TIMEOUT_S):
            raise DirectoryUnavailableError("it started again meanwhile")
        book.told = True

    async def _flush(self) -> None:
        if not await self._publisher.flush(self._config.shared_timeout_s):
            raise DirectoryUnavailableError("it was told of a part only")

    # What is too much

    async def _trim(self, book: CatalogBook) -> None:
        """Delete what is beyond the limit, and what an earlier keeper wanted to delete."""
        limit, catalog = self._config.shared_bytes_max, book.catalog
        if limit is not None:
            # What is stored until we look again should find room.
            free_bytes = min(limit // 4, 2 * sum(book.stored_bytes))
            if catalog.num_bytes - catalog.deleting_bytes > limit - free_bytes:
                left = limit - free_bytes - limit // 32
                book.changes.append(await settle(self._threads, lambda: catalog.shrink(left, _MARK_MAX)))
        while catalog.deleting_bytes:
            doomed = await settle(self._threads, lambda: catalog.deleting(_DELETE_MAX))
            await self._announce(book, doomed)
            doomed = doomed[await settle(self._threads, lambda rows=doomed: catalog.still_deleting(rows))]  # type: ignore[misc]
            await self._delete(book, doomed)

    async def _announce(self, book: CatalogBook, doomed: ObjectRows) -> None:
        """Tell the manifests and the directory that some objects go; who stores one meanwhile, keeps it.

        The manifests first: once the directory says it, nobody else remembers them, and the next keeper has to.
        """
        book.announce(doomed)
        if book.num_changes:
            await self._write(book)
        for record in split_records(record_ids(doomed)):
            self._publisher.dropped(record)
        await self._flush()
        if not await self._collect(book):
            raise DirectoryUnavailableError("another node keeps the catalog now")

    async def _delete(self, book: CatalogBook, doomed: ObjectRows) -> None:
        """Delete objects, as far as the storage lets us."""
        done = list[int]()
        try:
            await self._each(doomed, self._delete_one, done)
        finally:
            book.changes.append(book.catalog.deleted(doomed[sorted(done)]))
            self.deleted += len(done)

    async def _each(self, rows: ObjectRows, work: Callable[[np.void], bool], done: list[int]) -> None:
        """Work on rows in threads, several at once; `done` gets the numbers of those for which it says true."""
        numbers = iter(range(len(rows)))

        async def some() -> None:
            for number in numbers:
                said = await settle(self._threads, lambda row=rows[number]: work(row))  # type: ignore[misc]
                if said:
                    done.append(number)

        results = await asyncio.gather(*(some() for _ in range(_CALLS)), return_exceptions=True)
        for result in results:
            if result is not None:
                raise result

    def _delete_one(self, row: np.void) -> bool:
        namespace_id, key = row["namespace_id"].tobytes(), BlockKey(row["key"].tobytes())
        self._shared.delete(namespace_id, int(row["num_shards"]), key, int(row["shard"]))
        return True

    def _is_there(self, row: np.void) -> bool:
        namespace_id, key = row["namespace_id"].tobytes(), BlockKey(row["key"].tobytes())
        path = self._shared.path(namespace_id, key, int(row["shard"]), int(row["num_shards"]))
        return self._shared.objects.get(path, 1) is not None

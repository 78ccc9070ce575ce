"""A directory that starts empty, and all of a large fleet's managers tell it at once what they hold."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from kvfleet.config import FleetConfig
from kvfleet.core.directory import Applied, Delta, Digest, InventoryPage, NodeId, Run
from kvfleet.core.outcomes import Miss
from kvfleet.node import directory as directory_module
from kvfleet.node.directory import DirectoryService
from kvfleet.node.messages import Located
from kvfleet.node.publishing import DeltaReply, Publisher

NUM_NODES = 20
NODES = [NodeId(f"{number:032x}") for number in range(NUM_NODES)]


class Held:
    """A node's records, which do not change."""

    def __init__(self, records: list[bytes]) -> None:
        self.records = records
        self._digest = Digest.of(b"".join(records))
        self.num_changes = 0

    def take_changes(self, limit: int) -> dict[bytes, bool]:
        return {}

    def snapshot(self) -> list[bytes]:
        return self.records

    def saved(self) -> list[bytes]:
        eighth = len(self.records) // 8
        return self.records[eighth : 2 * eighth]

    def digest(self) -> Digest:
        return self._digest


class OldDirectory:
    """The one before: it knew everything."""

    async def apply(self, delta: Delta) -> DeltaReply:
        return DeltaReply(Applied.OK, 1)

    async def inventory(self, page: InventoryPage) -> Applied:
        return Applied.OK


class Fleet:
    """A directory and the managers' ends that talk to it, all on one loop; and what passes between them."""

    def __init__(self, records_per_node: int, config: FleetConfig, seed: int) -> None:
        draw = random.Random(seed)
        drawn = [draw.randbytes(16) + bytes(2) for _ in range(NUM_NODES * records_per_node)]
        # Every node holds a tenth of the next node's records as well.
        starts = range(0, len(drawn), records_per_node)
        extra = records_per_node // 10
        self.held = [Held((drawn + drawn)[start : start + records_per_node + extra]) for start in starts]
        self.num_records = len(drawn)
        self.config = config
        self.pages = self.deltas = self.busy = self.pages_at_once = 0
        self._pages_open = 0
        self._directory: OldDirectory | DirectoryService = OldDirectory()
        self.publishers = [
            Publisher(node, 1, self, config, holdings=held, on_reply=lambda _: None)  # type: ignore[arg-type]
            for node, held in zip(NODES, self.held, strict=True)
        ]

    def restart_directory(self) -> None:
        """An empty directory from now on."""
        self._directory = self.service = DirectoryService(self.config, lambda: frozenset(NODES))
        inventory, apply = self.service._directory.inventory, self.service._directory.apply

        def take_page(page: InventoryPage) -> Applied:
            self.pages += 1
            return inventory(page)

        def take_delta(delta: Delta) -> Applied:
            self.deltas += delta.num_records > 200
            return apply(delta)

        self.service._directory.inventory = take_page  # type: ignore[method-assign]
        self.service._directory.apply = take_delta  # type: ignore[method-assign]

    async def apply(self, delta: Delta, timeout_s: float) -> DeltaReply:
        reply = await self._directory.apply(delta)
        self.busy += reply.applied is Applied.BUSY
        return reply

    async def inventory(self, page: InventoryPage, timeout_s: float) -> Applied:
        self._pages_open += 1
        self.pages_at_once = max(self.pages_at_once, self._pages_open)
        applied = await self._directory.inventory(page)
        self._pages_open -= 1
        self.busy += applied is Applied.BUSY
        return applied

    @property
    def told(self) -> bool:
        """Whether all nodes' inventories are in effect."""
        nodes = self.service._directory.stats().nodes
        return len(nodes) == NUM_NODES and all(node.synced for node in nodes)

    async def flush(self) -> bool:
        """All managers speak at once, of their blocks first and then of the shared tier; whether all were heard."""
        heard = [await asyncio.gather(*(publisher.flush(60.0) for publisher in self.publishers))]
        for publisher, held in zip(self.publishers, self.held, strict=True):
            publisher.shared_page(b"".join(held.saved()))
        heard.append(await asyncio.gather(*(publisher.flush(60.0) for publisher in self.publishers)))
        return all(map(all, heard))

    def assert_whole(self) -> None:
        """The directory has just what the nodes hold."""
        stats = self.service._directory.stats()
        assert {node.node: node.records for node in stats.nodes} == {
            node: len(held.records) for node, held in zip(NODES, self.held, strict=True)
        }
        for node, held in zip(NODES, self.held, strict=True):
            rows = self.service._directory._nodes[node].held
            assert rows is not None
            assert not rows.differs(held.digest())
        num_saved = len({record for held in self.held for record in held.saved()})
        assert (stats.rows, stats.shared, stats.refused) == (self.num_records, num_saved, 0)


@asynccontextmanager
async def running(records_per_node: int, seed: int, **settings: object) -> AsyncIterator[Fleet]:
    fleet = Fleet(records_per_node, FleetConfig(**{"heartbeat_s": 0.05, **settings}), seed)  # type: ignore[arg-type]
    tasks = [asyncio.create_task(publisher.run()) for publisher in fleet.publishers]
    try:
        assert await fleet.flush()
        fleet.pages_at_once = 0
        fleet.restart_directory()
        tasks.append(fleet.service._watch)
        yield fleet
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def test_lookups_go_on_while_a_large_fleet_tells_all_it_holds(seed: int) -> None:
    """20 nodes, 1 million blocks: between a lookup's arrival and its answer at most one large message is taken in."""

    async def work() -> None:
        async with running(50_000, seed) as fleet:
            first = fleet.held[0].records[:512]
            keys = b"".join(record[:16] for record in first)
            passed: list[int] = []
            answers: list[Located] = []

            async def look(taken_before: int) -> None:
                answers.append(await fleet.service.locate(keys, 0, 1))
                passed.append(fleet.pages + fleet.deltas - taken_before)

            # A lookup arrives on every turn of the loop.
            flush = asyncio.create_task(fleet.flush())
            while not flush.done():
                await asyncio.create_task(look(fleet.pages + fleet.deltas))
            assert flush.result()
            size = fleet.config.inventory_page_records
            assert (fleet.pages, fleet.pages_at_once) == (NUM_NODES * -(-55_000 // size), NUM_NODES)
            assert fleet.deltas == NUM_NODES * -(-6_875 // size)
            assert len(passed) >= fleet.pages + fleet.deltas
            assert max(passed) <= 1
            assert answers[0] == Located((), Miss.UNKNOWN)
            fleet.assert_whole()
            assert await fleet.flush()
            assert fleet.told  # by their digests: nobody has to say it a second time
            assert [publisher.resyncs for publisher in fleet.publishers] == [2] * NUM_NODES
            located = await fleet.service.locate(keys, 0, 1)
            (run,) = located.runs
            holders = tuple(sorted(run.nodes))  # whoever spoke first is named first
            assert replace(located, runs=(replace(run, nodes=holders),)) == Located(
                (Run(0, 512, (NODES[0], NODES[-1]), False),), None
            )

    asyncio.run(work())


def test_messages_beyond_those_that_may_wait_come_again(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "_WAITING_MAX", 3)
    monkeypatch.setattr(directory_module, "_SMALL_RECORDS", 10)
    monkeypatch.setattr("kvfleet.node.publishing._BUSY_S", 0.001)
    monkeypatch.setattr("kvfleet.node.publishing._RETRY_S", 0.001)

    async def work() -> None:
        async with running(200, seed, inventory_page_records=20) as fleet:
            assert await fleet.flush()
            assert fleet.told
            assert fleet.pages == NUM_NODES * 11
            assert fleet.busy > 0
            fleet.assert_whole()
            assert [publisher.resyncs for publisher in fleet.publishers] == [2] * NUM_NODES

    asyncio.run(work())

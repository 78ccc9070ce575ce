"""The shared tier as a node gets along with it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvfleet.config import FleetConfig
from kvfleet.errors import TierFullError, TierUnavailableError
from kvfleet.node.endpoint import SharedEndpoint
from kvfleet.node.waiting import now, within

ERROR = TierUnavailableError("shared", "no answer")
LONG_AGO = 1000.0


class Storage:
    """In place of a `SharedTier`: answers probes as it is told."""

    def __init__(self) -> None:
        self.reads = self.writes = True
        self.probes: list[str] = []

    def _answer(self, what: str, answers: bool) -> None:
        self.probes.append(what)
        if not answers:
            raise ERROR

    def check(self, timeout_s: float) -> None:
        self._answer("check", self.writes)

    def probe_writes(self, timeout_s: float) -> None:
        self._answer("write", self.writes)

    def probe_reads(self, timeout_s: float) -> None:
        self._answer("read", self.reads)


def with_endpoint(work: Callable[[SharedEndpoint, Storage], Awaitable[None]], *, works: bool = True) -> None:
    async def run() -> None:
        storage: Any = Storage()
        storage.writes = works
        endpoint = SharedEndpoint(storage, FleetConfig(shared_url="memory://x", shared_probe_s=0.02))
        task = asyncio.create_task(endpoint.run())
        try:
            await within(10.0, endpoint.tried.wait())
            await work(endpoint, storage)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await endpoint.close()

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come about")


def test_a_tier_that_does_not_work_at_the_start_is_read_and_written_once_it_does():
    async def work(endpoint: SharedEndpoint, storage: Storage) -> None:
        wells: list[str] = []
        endpoint.on_well = wells.append
        assert (endpoint.allows("read"), endpoint.allows("write")) == (True, False)
        assert endpoint.problem == str(ERROR)
        assert not endpoint.works.is_set()
        storage.writes = True
        await within(10.0, endpoint.works.wait())
        assert endpoint.allows("write")
        assert wells == ["write"]
        assert endpoint.problem == ""
        assert set(storage.probes) == {"check"}

    with_endpoint(work, works=False)


def test_one_bad_object_closes_nothing():
    async def work(endpoint: SharedEndpoint, storage: Storage) -> None:
        endpoint.failed("write", ERROR, now())
        endpoint.failed("read", ERROR, now())
        await until(
            lambda: storage.probes == ["check", "write", "read"] or storage.probes == ["check", "read", "write"]
        )
        assert endpoint.allows("read")
        assert endpoint.allows("write")
        assert endpoint.counts == {"write_failed": 1, "read_failed": 1}

    with_endpoint(work)


@pytest.mark.parametrize("way", ["read", "write"])
def test_a_way_that_probes_find_bad_is_closed_until_they_find_it_good(way):
    other = "write" if way == "read" else "read"

    async def work(endpoint: SharedEndpoint, storage: Storage) -> None:
        setattr(storage, f"{way}s", False)
        endpoint.failed(way, ERROR, now())
        await until(lambda: not endpoint.allows(way))
        assert endpoint.allows(other)
        assert endpoint.counts[f"{way}_outages"] == 1
        assert endpoint.problem
        setattr(storage, f"{way}s", True)
        await until(lambda: endpoint.allows(way))
        assert endpoint.problem == ""

    with_endpoint(work)


def test_a_request_that_waited_long_closes_its_way_at_once_and_has_the_other_probed():
    async def work(endpoint: SharedEndpoint, storage: Storage) -> None:
        storage.reads = storage.writes = False
        endpoint.failed("read", ERROR, now() - LONG_AGO)
        assert not endpoint.allows("read")
        await until(lambda: not endpoint.allows("write"))
        storage.reads = storage.writes = True
        await until(lambda: endpoint.allows("read") and endpoint.allows("write"))

    with_endpoint(work)


def test_a_full_storage_is_not_written_and_is_read():
    async def work(endpoint: SharedEndpoint, storage: Storage) -> None:
        endpoint.failed("write", TierFullError("shared", "no space"), now())
        assert not endpoint.allows("write")
        assert endpoint.allows("read")
        assert endpoint.counts == {"write_full": 1, "write_outages": 1}
        await until(lambda: endpoint.allows("write"))

    with_endpoint(work)


def test_lost_copies_are_told_of_and_remembered_until_they_are_made_again():
    async def work(endpoint: SharedEndpoint, storage: Storage) -> None:
        lost: list[bytes] = []
        endpoint.on_lost = lost.append
        endpoint.lost(b"record")
        assert endpoint.has_lost(b"record")
        endpoint.has_written(b"record")
        assert not endpoint.has_lost(b"record")
        assert lost == [b"record"]

    with_endpoint(work)


def test_a_probe_without_a_thread_to_be_had_is_one_without_an_answer(monkeypatch: pytest.MonkeyPatch):
    def no_more(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def work(endpoint: SharedEndpoint, storage: Storage) -> None:
        assert "no thread" in endpoint.problem
        assert not endpoint.works.is_set()
        monkeypatch.undo()
        await within(10.0, endpoint.works.wait())
        assert (endpoint.allows("write"), endpoint.problem) == (True, "")

    monkeypatch.setattr(threading.Thread, "start", no_more)
    with_endpoint(work)

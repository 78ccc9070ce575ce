"""When a node's object store counts as full."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from kvfleet.node import storeroom
from kvfleet.node.storeroom import StoreRoom


def ask(capacity_bytes: int, used: Callable[[], int], *sizes: int) -> list[bool]:
    async def scenario() -> list[bool]:
        room = StoreRoom(capacity_bytes, used)
        return [await room.fits(size) for size in sizes]

    return asyncio.run(scenario())


def test_four_fifths_of_the_store_may_be_used():
    assert ask(1000, lambda: 700, 100, 101) == [True, False]
    assert ask(0, lambda: 700, 100) == [True]  # its size is not known


def test_it_is_not_measured_for_every_stream(monkeypatch):
    measured = []

    def used() -> int:
        measured.append(None)
        return 700

    assert ask(1000, used, *[100] * 50) == [True] * 50
    assert len(measured) < 50
    monkeypatch.setattr(storeroom, "_MEASURED_FOR_S", 0.0)
    measured.clear()
    ask(1000, used, 1, 1, 1)
    assert len(measured) == 3


@pytest.mark.parametrize("kind", ["fails", "hangs"])
def test_what_cannot_be_measured_stops_nothing(monkeypatch, kind):
    monkeypatch.setattr(storeroom, "_MEASURED_FOR_S", 0.0)
    monkeypatch.setattr(storeroom, "_MEASURING_TIMEOUT_S", 0.01)
    go_on, asked = threading.Event(), []

    def used() -> int:
        asked.append(None)
        if kind == "fails":
            raise OSError("away")
        go_on.wait(10)
        return 1000

    async def scenario() -> None:
        room = StoreRoom(1000, used)
        for _ in range(3):
            assert await room.fits(100)
        assert len(asked) == (3 if kind == "fails" else 1)
        go_on.set()
        if kind == "hangs":
            assert room._measuring is not None
            await room._measuring
            assert not await room.fits(100)

    asyncio.run(scenario())

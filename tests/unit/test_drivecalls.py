"""Calls to a drive: so many at once, and none after it failed."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from random import Random

import pytest

from kvfleet.errors import TierUnavailableError
from kvfleet.node.drivecalls import DaemonThreads, DriveCalls
from kvfleet.testing.blocking import pause
from kvfleet.testing.loop import VirtualLoop
from tests.drives import play


def sleep(seconds: float) -> float:
    loop = asyncio.get_event_loop()
    assert isinstance(loop, VirtualLoop)
    pause(loop, seconds)
    return loop.time()


def test_so_many_at_once_and_the_others_in_order() -> None:
    async def work() -> None:
        calls, begun = DriveCalls(2), asyncio.get_running_loop().time()
        ends = await asyncio.gather(*(calls.read(lambda: sleep(10)) for _ in range(5)))
        assert [round((end - begun) / 10) for end in ends] == [1, 1, 2, 2, 3]
        assert calls.oldest() is None
        assert calls.num_reads == 0

    play(work)


def test_whoever_waits_can_leave_and_the_next_takes_the_turn() -> None:
    async def work() -> None:
        calls = DriveCalls(1)
        reads = [asyncio.ensure_future(calls.read(lambda: sleep(10))) for _ in range(3)]
        await asyncio.sleep(1)
        reads[1].cancel()
        await asyncio.gather(*reads, return_exceptions=True)
        assert [read.cancelled() for read in reads] == [False, True, False]
        assert calls.num_reads == 0

    play(work)


def test_a_read_that_was_begun_ends_before_its_caller() -> None:
    async def work() -> None:
        calls, loop = DriveCalls(1), asyncio.get_running_loop()
        begun = loop.time()
        read = asyncio.ensure_future(calls.read(lambda: sleep(10)))
        for _ in range(3):
            await asyncio.sleep(1)
            read.cancel()
        with pytest.raises(asyncio.CancelledError):
            await read
        assert loop.time() - begun >= 10

    play(work)


@pytest.mark.parametrize("num_begun", [0, 1])
def test_after_a_failure_nothing_is_begun(num_begun: int) -> None:
    async def work() -> None:
        calls, begun = DriveCalls(1), []
        reads = [asyncio.ensure_future(calls.read(lambda: begun.append(sleep(10)))) for _ in range(3)]
        await asyncio.sleep(5 if num_begun else 0)
        calls.fail("it failed")
        results = await asyncio.gather(*reads, return_exceptions=True)
        assert len(begun) == num_begun
        assert results[:num_begun] == [None] * num_begun
        assert all(isinstance(result, TierUnavailableError) for result in results[num_begun:])
        with pytest.raises(TierUnavailableError, match="it failed"):
            await calls.index(lambda: None)
        await calls.idle()
        assert calls.num_reads == 0
        await calls.close(lambda: None)

    play(work)


def test_without_a_thread_to_be_had_calls_fail_and_no_place_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def work() -> None:
        calls = DriveCalls(2)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_more)
            results = await asyncio.gather(*(calls.read(lambda: 1) for _ in range(3)), return_exceptions=True)
            assert all(isinstance(result, TierUnavailableError) for result in results)
            await calls.idle()
        assert await calls.read(lambda: 1) == 1
        with monkeypatch.context() as patch:  # the one that there is does it
            patch.setattr(threading.Thread, "start", no_more)
            assert await asyncio.gather(*(calls.read(lambda: 1) for _ in range(3))) == [1, 1, 1]
        await calls.idle()
        await calls.close(lambda: None)
        assert (calls.num_reads, calls.oldest()) == (0, None)

    asyncio.run(work())


def test_a_drive_that_was_opened_can_be_closed_without_a_thread_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def work() -> None:
        calls, closed = DriveCalls(1), list[bool]()
        await calls.read(lambda: None)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_more)
            await calls.close(lambda: closed.append(True))
        assert closed == [True]

    asyncio.run(work())


def test_what_had_no_thread_is_not_run_later_and_nothing_is_taken_after_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_more(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads, done = DaemonThreads(2, "kvfleet-test"), list[int]()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more)
        refused = threads.submit(done.append, 1)
    with pytest.raises(TierUnavailableError, match="kvfleet-test: no thread"):
        refused.result(0)
    threads.submit(done.append, 2).result(10)
    threads.shutdown()
    assert done == [2]
    with pytest.raises(RuntimeError, match="told to end"):
        threads.submit(done.append, 3)


def test_whoever_is_cancelled_is_told_so_also_if_the_drive_fails() -> None:
    async def work() -> None:
        calls = DriveCalls(1)
        reads = [asyncio.ensure_future(calls.read(lambda: sleep(10))) for _ in range(2)]
        await asyncio.sleep(1)
        calls.fail("it failed")
        reads[1].cancel()
        reads[0].cancel()
        await asyncio.gather(*reads, return_exceptions=True)
        assert [read.cancelled() for read in reads] == [True, True]

    play(work)


def test_threads_take_what_waits_and_what_comes_as_they_end() -> None:
    async def work() -> None:
        calls, random = DriveCalls(2), Random(1)
        for _ in range(300):
            reads = [asyncio.ensure_future(calls.read(partial(id, number))) for number in range(random.randrange(5))]
            for read in reads:
                if random.random() < 0.2:
                    await asyncio.sleep(0)
                    read.cancel()
            await asyncio.wait_for(asyncio.gather(*reads, return_exceptions=True), 10)
        await calls.idle()
        await calls.close(lambda: None)
        assert (calls.num_reads, calls.oldest()) == (0, None)

    asyncio.run(work())


def test_what_shows_signs_of_life_is_not_old() -> None:
    async def work() -> None:
        calls, loop = DriveCalls(1), asyncio.get_running_loop()

        def long(beat) -> None:
            for _ in range(5):
                beat()
                sleep(4)

        write = asyncio.ensure_future(calls.write(long))
        while not write.done():
            begun = calls.oldest()
            assert begun is None or loop.time() - begun < 5
            await asyncio.sleep(1)

    play(work)

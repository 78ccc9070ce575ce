from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfleet.errors import DeadlineExceededError, TierFullError
from kvfleet.node.windows import ByteBudget, Share, Span, plan_windows, stream_share


def bytes_of(window: list[Span]) -> int:
    return sum(span.stop - span.start for span in window)


def test_windows_double_up_to_the_largest():
    windows = list(plan_windows([1] * 100, first_bytes=4, max_bytes=32))
    assert [bytes_of(window) for window in windows] == [4, 8, 16, 32, 32, 8]


def test_a_block_larger_than_a_window_is_cut():
    assert list(plan_windows([10, 3], first_bytes=4, max_bytes=8)) == [
        [Span(0, 0, 4)],
        [Span(0, 4, 10), Span(1, 0, 2)],
        [Span(1, 2, 3)],
    ]


def test_the_largest_window_bounds_the_first():
    assert [bytes_of(window) for window in plan_windows([5], first_bytes=4, max_bytes=2)] == [2, 2, 1]


def test_no_blocks_no_windows():
    assert list(plan_windows([], first_bytes=4, max_bytes=8)) == []


@given(
    sizes=st.lists(st.integers(1, 50), max_size=40),
    first_bytes=st.integers(1, 60),
    max_bytes=st.integers(1, 60),
)
def test_windows_cover_every_byte_once_and_in_order(sizes: list[int], first_bytes: int, max_bytes: int):
    windows = list(plan_windows(sizes, first_bytes, max_bytes))
    covered = [(span.index, byte) for window in windows for span in window for byte in range(span.start, span.stop)]
    assert covered == [(index, byte) for index, size in enumerate(sizes) for byte in range(size)]
    limit = min(first_bytes, max_bytes)
    for number, window in enumerate(windows):
        last = number == len(windows) - 1
        assert 0 < bytes_of(window) <= limit if last else bytes_of(window) == limit
        assert len({span.index for span in window}) == len(window)
        limit = min(2 * limit, max_bytes)


def test_a_stream_takes_what_its_windows_need():
    assert stream_share(1000, window_bytes_max=32, windows_in_flight=2, budget_bytes=500) == Share(96, 32)
    assert stream_share(50, window_bytes_max=32, windows_in_flight=2, budget_bytes=500) == Share(50, 32)


def test_windows_shrink_to_a_small_budget():
    assert stream_share(1000, window_bytes_max=32, windows_in_flight=2, budget_bytes=50) == Share(48, 16)


def test_budget_serves_in_order_and_within_the_bound():
    async def scenario() -> None:
        budget = ByteBudget(10)
        await budget.acquire(8, timeout_s=1)
        order: list[str] = []

        async def take(name: str, num_bytes: int) -> None:
            await budget.acquire(num_bytes, timeout_s=10)
            order.append(name)

        large = asyncio.create_task(take("large", 10))
        await asyncio.sleep(0)
        small = asyncio.create_task(take("small", 1))  # would fit, but came later
        await asyncio.sleep(0)
        assert (order, budget.taken_bytes) == ([], 8)
        budget.release(8)
        await large
        assert (order, budget.taken_bytes) == (["large"], 10)
        budget.release(10)
        await small
        assert (order, budget.taken_bytes) == (["large", "small"], 1)

    asyncio.run(scenario())


def test_budget_times_out_and_lets_the_next_one_through():
    async def scenario() -> None:
        budget = ByteBudget(10)
        await budget.acquire(8, timeout_s=1)
        large = asyncio.create_task(budget.acquire(10, timeout_s=0.01))
        await asyncio.sleep(0)
        small = asyncio.create_task(budget.acquire(2, timeout_s=10))
        with pytest.raises(DeadlineExceededError):
            await large
        await small
        assert budget.taken_bytes == 10

    asyncio.run(scenario())


@pytest.mark.parametrize("granted", [False, True], ids=["waiting", "just granted"])
def test_a_cancelled_waiter_takes_nothing(granted: bool):
    async def scenario() -> None:
        budget = ByteBudget(10)
        await budget.acquire(10, timeout_s=1)
        waiter = asyncio.create_task(budget.acquire(5, timeout_s=10))
        await asyncio.sleep(0)
        if granted:
            budget.release(10)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        if not granted:
            budget.release(10)
        assert budget.taken_bytes == 0
        await budget.acquire(10, timeout_s=0)

    asyncio.run(scenario())


def test_budget_turns_away_when_too_many_wait():
    async def scenario() -> None:
        budget = ByteBudget(10, waiters_max=1)
        await budget.acquire(10, timeout_s=1)
        waiter = asyncio.create_task(budget.acquire(1, timeout_s=10))
        await asyncio.sleep(0)
        with pytest.raises(TierFullError):
            await budget.acquire(1, timeout_s=10)
        budget.release(10)
        await waiter
        assert budget.taken_bytes == 1

    asyncio.run(scenario())

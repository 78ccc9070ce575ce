"""Time, and waiting with a time limit, by the clock of the event loop: a simulation has one of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

__all__ = ["now", "settled", "wall_ms", "within"]

T = TypeVar("T")


def now() -> float:
    """Monotonic seconds, as the running event loop counts them."""
    return asyncio.get_running_loop().time()


def wall_ms() -> int:
    """Ms since 1970: what is told to other nodes, and outlives this one."""
    return time.time_ns() // 1_000_000


async def settled(job: asyncio.Future[T]) -> T:
    """The result of a job; if we are cancelled meanwhile, however often, still wait for its end."""
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        while not job.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({job})
        if not job.cancelled():
            job.exception()  # nobody is left to tell
        raise


async def within(timeout_s: float, awaitable: Awaitable[T]) -> T:
    """The result of `awaitable`, which is cancelled if it does not come in time.

    Unlike `asyncio.wait_for` before Python 3.12 it never takes a result for a reason to forget that its caller is
    being cancelled: a task that is told to end does end.

    Raises:
        asyncio.TimeoutError: not within `timeout_s`.
    """
    task = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        task.cancel()

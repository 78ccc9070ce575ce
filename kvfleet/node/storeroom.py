"""Whether Ray's object store has room for windows: a full one does not refuse, it spills what others keep in it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvfleet.node.waiting import now

__all__ = ["StoreRoom"]

_log = logging.getLogger(__name__)

# Ray spills from 80 % on (RAY_object_spilling_threshold). Measured on Ray 2.60, 256 MiB stores: with 176 MiB of others'
# objects a stream of 24 MiB spills nothing, with 192 MiB it has all of those 192 MiB written to disk.
_FULL = 0.8
_MEASURED_FOR_S = 0.25
_MEASURING_TIMEOUT_S = 1.0


class StoreRoom:
    """Looks at the object store of one node, at most four times a second.

    Threads: the manager's event loop; measurements run in a thread.

    Args:
        capacity_bytes: of the store; 0 if it is not known.
        used: measures the bytes in use, windows of ours among them; may block. Raises OSError: not known.
    """

    def __init__(self, capacity_bytes: int, used: Callable[[], int]) -> None:
        self._limit_bytes = int(capacity_bytes * _FULL)
        self._used = used
        self._used_bytes = 0
        self._measured_at = float("-inf")
        self._measuring: asyncio.Future[int] | None = None

    async def fits(self, num_bytes: int) -> bool:
        """Whether so many more bytes let Ray spill nothing. Also True if it cannot be known."""
        if not self._limit_bytes:
            return True
        if now() >= self._measured_at + _MEASURED_FOR_S and self._measuring is None:
            self._measured_at = now()
            await self._measure()  # others go by the last measurement meanwhile
        return self._used_bytes + num_bytes <= self._limit_bytes

    async def _measure(self) -> None:
        """Measure. One that takes long goes on, and until it ends nothing is known."""
        self._measuring = asyncio.ensure_future(asyncio.to_thread(self._used))
        self._measuring.add_done_callback(self._measured)
        await asyncio.wait({self._measuring}, timeout=_MEASURING_TIMEOUT_S)
        if self._measuring is not None:
            self._used_bytes = 0
            _log.info("use of the object store not known: no answer")

    def _measured(self, measuring: asyncio.Future[int]) -> None:
        self._measuring = None
        self._used_bytes = 0
        if measuring.cancelled():
            return
        try:
            self._used_bytes = measuring.result()
        except OSError as error:
            _log.info("use of the object store not known: %s", error)

"""Holds: a client's promise from its node to keep the blocks of a hit for a while."""

from __future__ import annotations

import itertools
import logging
import time
from types import TracebackType

from typing_extensions import Self

from kvfleet.arguments import check_seconds
from kvfleet.attachment import AttachedNode, ManagerPort
from kvfleet.errors import KvFleetError
from kvfleet.node.holds import HOLD_MAX_S
from kvfleet.node.messages import HoldRequest

__all__ = ["Hold"]

_log = logging.getLogger(__name__)
_numbers = itertools.count(1)


class Hold:
    """Blocks of this node's arena that stay, for a scheduler that has planned with them. Use it with `with`.

    It ends with `release`, after its time, with this process, or with a restart of the node's manager. It is advice:
    without it, a block that was evicted costs a miss.

    Threads: any.
    Blocking: `renew` up to the client's `lookup_timeout_s`; `release` never.

    Attributes:
        num_blocks: how many of the first blocks are held: those that are in the arena, as far as there is room for
            holds. 0 also if the manager could not be asked.
    """

    def __init__(self, node: AttachedNode, manager: ManagerPort, keys: bytes, shard: int, *, timeout_s: float) -> None:
        """Nothing is held before `renew`.

        Args:
            node: attached.
            manager: of it.
            keys: packed, consecutive blocks of one prefix.
            shard: of the records.
            timeout_s: longest wait for the manager.
        """
        self._node = node
        self._manager = manager
        self._keys = keys
        self._shard = shard
        self._timeout_s = timeout_s
        self._number = next(_numbers)
        self.num_blocks = 0

    def renew(self, seconds: float) -> int:
        """Hold what is there now for so long from now on, above 0 and at most 30 s. Returns `num_blocks`."""
        check_seconds(seconds, "seconds", HOLD_MAX_S)
        self.num_blocks = 0
        if not self._keys:
            return 0
        deadline = time.monotonic() + self._timeout_s
        try:
            self._node.attach(self._timeout_s)  # the manager ends holds of those whose lock file is not locked
            request = HoldRequest(self._node.client_id, self._number, self._keys, self._shard, seconds)
            self.num_blocks = self._manager.hold(request, max(0.0, deadline - time.monotonic()))
        except KvFleetError as error:
            _log.info("nothing held: %s", error)
        return self.num_blocks

    def release(self) -> None:
        """End it now."""
        self.num_blocks = 0
        try:
            self._manager.release(self._node.client_id, self._number, self._timeout_s)
        except KvFleetError as error:
            _log.info("a hold ends by itself: %s", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

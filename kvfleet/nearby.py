"""This node's arena as a client's calls get it: attached when it is first needed, and without it a reason."""

from __future__ import annotations

import logging
import time

import numpy as np
import numpy.typing as npt

from kvfleet.attachment import AttachedNode
from kvfleet.core.block import KEY_BYTES
from kvfleet.errors import KvFleetError, ManagerAvoidedError
from kvfleet.node.arena import Arena
from kvfleet.node.messages import Miss

__all__ = ["Nearby"]

_log = logging.getLogger(__name__)
_LOG_INTERVAL_S = 30.0


class Nearby:
    """Threads: any.

    Args:
        node: to attach.
        timeout_s: longest wait for that.
    """

    def __init__(self, node: AttachedNode, timeout_s: float) -> None:
        self._node = node
        self._timeout_s = timeout_s
        self._warn_at = 0.0

    def arena(self, timeout_s: float, calls: list[str]) -> tuple[Arena | None, Miss | None]:
        """The arena, attached if it can be within `timeout_s` or the limit; a call for that is noted."""
        if self._node.stale:
            calls.append("attach")
            try:
                self._node.attach(min(timeout_s, self._timeout_s))
            except KvFleetError as error:
                if isinstance(error, ManagerAvoidedError):
                    calls.remove("attach")
                self.warn("this node's arena cannot be used: %s", error)
                return None, Miss.MANAGER_UNAVAILABLE
        return self._node.arena, None

    def now(self) -> Arena | None:
        """The arena, if it is attached. Blocking: never."""
        return None if self._node.stale else self._node.arena

    def absent(self, keys: bytes, shard: int) -> npt.NDArray[np.bool_]:
        """Which records are not in the arena; the others count as used now. Blocking: never."""
        arena = self.now()
        if arena is None:
            return np.full(len(keys) // KEY_BYTES, fill_value=True)
        slots = arena.records.find(keys, shard).slots
        arena.records.touch(slots, time.monotonic_ns())
        missing: npt.NDArray[np.bool_] = slots < 0
        return missing

    def doubt(self) -> None:
        """Blocks that were brought are not in our arena: see `AttachedNode.doubt`."""
        self._node.doubt()

    def warn(self, text: str, error: KvFleetError) -> None:
        """Log what is wrong with this node, once in a while: an engine asks hundreds of times a second."""
        now = time.monotonic()
        if now >= self._warn_at:
            self._warn_at = now + _LOG_INTERVAL_S
            _log.warning(text, error)

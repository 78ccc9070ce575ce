"""A client's hold on its node: the mapped arena, the client's own lock file, the ways to call.

Attaching is one call to the local manager; after it, lookups and reads of local blocks need no other process. The
mapping outlives the manager: while it is away or restarting, what is in the arena is still read.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Protocol

from kvfleet.core.breaker import Breaker
from kvfleet.core.speeds import Speed
from kvfleet.errors import (
    ConfigError,
    DeadlineExceededError,
    KvFleetError,
    ManagerAvoidedError,
    TierUnavailableError,
)
from kvfleet.node.arena import Arena
from kvfleet.node.arenadir import FileLock
from kvfleet.node.messages import (
    Attachment,
    CommitReply,
    CommitRequest,
    HintRequest,
    HoldRequest,
    LoadProgress,
    LoadRequest,
    Located,
    ReserveReply,
    ReserveRequest,
)
from kvfleet.node.tallies import Tally

__all__ = ["AttachedNode", "DirectoryPort", "ManagerPort"]

_log = logging.getLogger(__name__)
_PAUSE_S, _PAUSE_MAX_S = 1.0, 5.0  # until a manager that did not answer is asked again
_CLOSE_TIMEOUT_S = 1.0


class ManagerPort(Protocol):
    """Calls to the node's manager. Every call raises `KvFleetError` kinds only, within its time limit."""

    def attach(self, timeout_s: float) -> Attachment:
        """See `TierManager.attach`."""

    def reserve(self, request: ReserveRequest, timeout_s: float) -> ReserveReply:
        """See `TierManager.reserve`."""

    def commit(self, request: CommitRequest, timeout_s: float) -> CommitReply:
        """See `TierManager.commit`."""

    def load(self, request: LoadRequest) -> Generator[LoadProgress, None, None]:
        """Steps of `TierManager.load`; closing it early stops the manager."""

    def hold(self, request: HoldRequest, timeout_s: float) -> int:
        """See `TierManager.hold`."""

    def release(self, client_id: int, number: int, timeout_s: float) -> None:
        """See `TierManager.release`. Does not wait for the manager."""

    def hint(self, request: HintRequest, timeout_s: float) -> int:
        """See `TierManager.hint`."""


class DirectoryPort(Protocol):
    """Calls to the directory, under the same terms."""

    def locate(self, keys: bytes, shard: int, num_shards: int, timeout_s: float) -> Located:
        """See `Directory.locate`."""


# Clients of one process share a mapping: its page tables take a five-hundredth of an arena's size. A forked child has
# its parent's clients and never uses them; its own ones map the arena anew.
_mappings: weakref.WeakValueDictionary[tuple[int, str, bytes], Arena] = weakref.WeakValueDictionary()
_mapping_lock = threading.Lock()


def _mapped(path: Path, arena_id: bytes) -> tuple[Arena, bool]:
    """An arena as this process has it mapped, and whether that was done now.

    Raises:
        TierError: it is not there, or another one.
    """
    key = (os.getpid(), str(path), arena_id)
    with _mapping_lock:
        arena = _mappings.get(key)
        if arena is not None:
            return arena, False
        arena = _mappings[key] = Arena.attach(path, arena_id)
        return arena, True


def _begin_touching(arena: Arena, stop: threading.Event) -> None:
    """Map all pages of the arena, in the background: first use of a page costs five times its copy."""
    try:
        threading.Thread(target=_touch, args=(arena, stop), name="kvfleet-touch", daemon=True).start()
    except RuntimeError as error:  # no more threads
        _log.info("the arena will be mapped as it is used: %s", error)


def _touch(arena: Arena, stop: threading.Event) -> None:
    try:
        arena.populate(stop)
    except (TierUnavailableError, RuntimeError) as error:  # RuntimeError: it has threads of its own
        _log.info("the arena will be mapped as it is used: %s", error)


class AttachedNode:
    """The arena of this node as one client sees it.

    Threads: any. A new arena (the node was reset) is attached in place of the old one; views of the old one
    stay valid memory.

    Args:
        manager: of the node.
        told: told how fast sources are, as the manager has measured them, when it is attached.
    """

    def __init__(self, manager: ManagerPort, told: Callable[[Mapping[str, Speed]], object] = lambda _: None) -> None:
        self._manager = manager
        self._told = told
        self._lock = threading.Lock()
        self._arena: Arena | None = None
        self._doubted = False
        self._breaker = Breaker(_PAUSE_S, _PAUSE_MAX_S)
        self._closing = threading.Event()
        self._pid = os.getpid()
        self.client_id = secrets.randbits(63) | 1
        self._client_lock: FileLock | None = None
        self.tally = Tally()

    @property
    def forked(self) -> bool:
        """Whether this is a forked child: the mapping, the lock and the threads are its parent's."""
        return os.getpid() != self._pid

    @property
    def arena(self) -> Arena | None:
        """The mapped arena, or None before the first successful `attach`, and in a forked child."""
        return None if self.forked else self._arena

    @property
    def stale(self) -> bool:
        """Whether there is something to attach: nothing is mapped yet, or another arena has taken its place."""
        arena = self.arena
        return arena is None or self._replaced(arena)

    @property
    def suspect(self) -> bool:
        """Whether the manager did not answer when it was last asked to attach."""
        return self._breaker.is_open

    def doubt(self) -> None:
        """Blocks that were brought are not in our arena. If its file is gone too, the node may have one elsewhere."""
        self._doubted = True

    def _replaced(self, arena: Arena) -> bool:
        try:
            return arena.path.stat().st_ino != arena.inode
        except FileNotFoundError:  # as after a shutdown: what is mapped can still be read
            return self._doubted

    def attach(self, timeout_s: float, *, again: bool = False) -> Arena:
        """Map the node's arena, unless it is mapped already.

        Args:
            timeout_s: longest wait for the manager, or for another thread that waits for it.
            again: ask the manager even if an arena is mapped: it may be another one by now.

        Raises:
            ConfigError: the node has no arena, and why.
            ManagerAvoidedError: it was not asked: it did not answer a moment ago, or this client is closed or forked.
            KvFleetError: the manager did not answer.
        """
        if self.forked:
            raise ManagerAvoidedError("dram", "this client was made before a fork: make one in the child")
        deadline = time.monotonic() + timeout_s
        self._take_turn(timeout_s)
        try:
            self._check_open()
            if self._arena is not None and not again and not self._replaced(self._arena):
                return self._arena
            if not self._breaker.allows(time.monotonic()):
                raise ManagerAvoidedError("dram", "the node's manager did not answer a moment ago")
            self._doubted = False
            try:
                attachment = self._manager.attach(max(0.0, deadline - time.monotonic()))
                self._check_open()
                if attachment.problem:
                    raise ConfigError("", attachment.problem)
                arena = self._map(attachment)
                self._told(attachment.speeds)
            except KvFleetError:
                self._breaker.failed(time.monotonic())
                raise
            self._breaker.worked()
            return arena
        finally:
            self._lock.release()

    def _take_turn(self, timeout_s: float) -> None:
        """Wait while another thread attaches, unless one waited for that in vain a moment ago."""
        left = 0.0 if self._breaker.is_open else max(0.0, timeout_s)
        if not self._lock.acquire(timeout=left):
            self._breaker.failed(time.monotonic())
            raise DeadlineExceededError("attach", timeout_s)

    def _check_open(self) -> None:
        if self._closing.is_set():
            self._let_go()
            raise ManagerAvoidedError("dram", "this client is closed")

    def _map(self, attachment: Attachment) -> Arena:
        if self._arena is not None and self._arena.arena_id == attachment.arena_id:
            return self._arena
        arena, new = _mapped(Path(attachment.arena_path), attachment.arena_id)
        lock = FileLock(Path(attachment.clients_dir) / f"{self.client_id:016x}")
        if self._client_lock is not None:
            self._client_lock.release()  # it may be the same file; nothing is reserved in the new arena yet
        if not lock.acquire():
            raise TierUnavailableError("dram", "this client's lock file is held by another process")
        self._arena, self._client_lock = arena, lock
        self.tally.share(lock.path)
        if new:
            _begin_touching(arena, self._closing)
        return arena

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Let go of the arena, for good. Reserved slots go back to the node.

        An attach under way that takes longer than `timeout_s` does it when it ends.
        """
        self._closing.set()
        if self._lock.acquire(timeout=timeout_s):
            self._let_go()
            self._lock.release()

    def _let_go(self) -> None:
        self.tally.keep()
        if self._client_lock is not None:
            self._client_lock.release()
            self._client_lock = None
        self._arena = None  # the mapping ends with its last user

"""Clients' totals and last requests, where the manager of their node reads them without a call.

Each client keeps them in its own lock file beside the arena, mapped into its memory: a count is a store of eight
bytes. Only the client writes; `tallybook` reads.

    header    64 bytes: magic, format
    counts    8 bytes each, little-endian, in the order of `core.totals.NAMES`
    requests  a ring of `REQUESTS` entries, each with a checksum: one that is read while it is written is skipped

The format is a digest of all names: files of another version are not read.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import sys
import threading
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvfleet.core.outcomes import Miss
from kvfleet.core.totals import NAMES

__all__ = ["LABEL_BYTES", "REQUESTS", "Request", "Tally", "pack_counts", "read_counts", "read_note", "read_requests"]

_log = logging.getLogger(__name__)

REQUESTS = 32
"""Requests that a client remembers."""

LABEL_BYTES = 64
"""Of a request's label that are kept: enough for vLLM's."""

REASON_BYTES = 112
"""Of a plan's reason that are kept: enough for the planner's own."""

_MAGIC = b"kvtally1"
_HEADER = struct.Struct("<8sI")
_COUNTS = struct.Struct(f"<{len(NAMES)}Q")
_ENTRY = struct.Struct(f"<QQ 20I BBBB 16s16s {LABEL_BYTES}s {REASON_BYTES}s")
_CHECK = struct.Struct("<I")
_COUNTS_AT = 64
_RING_AT = _COUNTS_AT + (_COUNTS.size + 63) // 64 * 64
_STRIDE = 320
_SIZE = _RING_AT + REQUESTS * _STRIDE
_MISSES = tuple(Miss)
_FORMAT = zlib.crc32(repr((NAMES, _ENTRY.format, REQUESTS)).encode())
_SECONDS_MAX = (2**32 - 1) / 1e6

assert sys.byteorder == "little"
assert _ENTRY.size + _CHECK.size <= _STRIDE


@dataclass(frozen=True, slots=True)
class Request:
    """One request as its client remembers it. Block counts are from the prefix's first block on where not said.

    Attributes:
        asked_ns: when it was looked up, wall time; names the request, also where one client looks up and another loads.
        label: the engine's name for it, cut to 64 bytes, or "".
        block_tokens: tokens in a block.
        block_bytes: bytes in a block, of one shard.
        start_block: blocks before it were not asked for.
        asked_blocks: whole blocks of the prompt.
        hit_blocks: of them, said to be there.
        local, nvme, remote, shared, pending: blocks of the hit by where they were said to be: in the arena of the node,
            on its drives, on other nodes, only in the shared tier, being written.
        missing: why the first block behind the hit is missing, or None.
        lookup_s: how long the lookup took.
        loaded: whether a load of it has ended.
        from_dram, from_nvme, from_peer, from_shared: blocks that came, by source.
        miss: why the first block of the hit that did not come did not, or None.
        load_s: how long the load took.
        planned_blocks: that the plan said to load.
        predicted_load_s: how long it expected the load to take; 0 if it did not know.
        predicted_ready_s: from the lookup's end until the engine has the prompt's KV, as the plan expected; 0 if it
            did not know.
        recompute_s: the same without the cache, as the plan expected; 0 if there was none.
        ready_s: from the lookup on until the engine had it; 0 if it has not said.
        reason: why the plan did not load all first, or "".
        first_key, last_key: of the blocks asked for.
    """

    asked_ns: int
    label: str
    block_tokens: int
    block_bytes: int
    start_block: int
    asked_blocks: int
    hit_blocks: int
    local: int
    remote: int
    shared: int
    pending: int
    missing: Miss | None
    lookup_s: float
    nvme: int = 0
    loaded: bool = False
    from_dram: int = 0
    from_nvme: int = 0
    from_peer: int = 0
    from_shared: int = 0
    miss: Miss | None = None
    load_s: float = 0.0
    planned_blocks: int = 0
    predicted_load_s: float = 0.0
    predicted_ready_s: float = 0.0
    recompute_s: float = 0.0
    ready_s: float = 0.0
    reason: str = ""
    first_key: bytes = b""
    last_key: bytes = b""

    @property
    def came(self) -> int:
        """Blocks that were loaded."""
        return self.from_dram + self.from_nvme + self.from_peer + self.from_shared

    def pack(self) -> bytes:
        """As it is kept, with its checksum."""
        body = _ENTRY.pack(
            self.asked_ns, self.block_bytes, self.block_tokens, self.start_block, self.asked_blocks, self.hit_blocks,
            self.local, self.remote, self.shared, self.pending, self.nvme,
            self.from_dram, self.from_peer, self.from_shared, self.from_nvme,
            _micros(self.lookup_s), _micros(self.load_s), self.planned_blocks, _micros(self.predicted_load_s),
            _micros(self.predicted_ready_s), _micros(self.recompute_s), _micros(self.ready_s),
            self.loaded, _code(self.missing), _code(self.miss), 0,
            self.first_key, self.last_key, self.label.encode(errors="replace")[:LABEL_BYTES],
            self.reason.encode(errors="replace")[:REASON_BYTES],
        )  # fmt: skip
        return body + _CHECK.pack(zlib.crc32(body))

    @classmethod
    def unpack(cls, entry: bytes) -> Request | None:
        """What an entry says; None if there is none, or it was caught half-written."""
        body = entry[: _ENTRY.size]
        if _CHECK.unpack_from(entry, _ENTRY.size)[0] != zlib.crc32(body) or not any(entry[:8]):
            return None
        asked_ns, block_bytes, block_tokens, start, asked, hit, *rest = _ENTRY.unpack(body)
        local, remote, shared, pending, nvme, *rest = rest
        dram, peer, from_shared, from_nvme, lookup_us, load_us, *rest = rest
        planned, *times, loaded, missing, miss, _, first, last, label, reason = rest
        predicted_load_s, predicted_ready_s, recompute_s, ready_s = (time_us / 1e6 for time_us in times)
        return cls(
            asked_ns, _text(label), block_tokens, block_bytes, start, asked, hit,
            local, remote, shared, pending, _miss(missing), lookup_us / 1e6, nvme,
            bool(loaded), dram, from_nvme, peer, from_shared, _miss(miss), load_us / 1e6,
            planned, predicted_load_s, predicted_ready_s, recompute_s, ready_s, _text(reason), first, last,
        )  # fmt: skip


def _micros(seconds: float) -> int:
    return int(min(seconds, _SECONDS_MAX) * 1e6)


def _text(packed: bytes) -> str:
    return packed.rstrip(b"\0").decode(errors="ignore")


def _code(miss: Miss | None) -> int:
    return 0 if miss is None else 1 + _MISSES.index(miss)


def _miss(code: int) -> Miss | None:
    return None if code == 0 else _MISSES[code - 1]


class Tally:
    """One client's counts and requests: in memory of its own until `share` puts them into its lock file.

    Threads: hold `lock` around everything but `lock`, `share` and `keep`.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._memory: bytearray | mmap.mmap = bytearray(_SIZE)
        self._view = memoryview(self._memory)
        self._slots = [0] * REQUESTS  # `asked_ns` of each entry
        self._next = 0
        self.counts = self._view[_COUNTS_AT : _COUNTS_AT + _COUNTS.size].cast("Q")
        _shared.add(self)

    def note(self, request: Request) -> None:
        """Remember a request: in its place if it is there, else in that of the oldest."""
        try:
            slot = self._slots.index(request.asked_ns)
        except ValueError:
            slot = self._next
            self._next = (slot + 1) % REQUESTS
            self._slots[slot] = request.asked_ns
        entry, at = request.pack(), _RING_AT + slot * _STRIDE
        self._view[at : at + len(entry)] = entry

    def share(self, path: Path) -> None:
        """Keep counts and requests in a file from now on. Its lock is held by this client.

        If there is no room for it, they stay where they are, and nobody is told.
        """
        try:
            # Opened anew: a mapping keeps its file open, and with the lock's own the lock would outlive us in a child.
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.posix_fallocate(fd, 0, _SIZE)  # or a full disk would kill this process at the first count
                memory = mmap.mmap(fd, _SIZE)
            finally:
                os.close(fd)
        except OSError as error:
            _log.info("this client's totals are not told: %s", error)
            return
        with self.lock:
            self._move(memory)
            _HEADER.pack_into(memory, 0, _MAGIC, _FORMAT)

    def keep(self) -> None:
        """Go on in memory of our own; what the file says is the last that is told."""
        with self.lock:
            self._move(bytearray(_SIZE))

    def _move(self, memory: bytearray | mmap.mmap) -> None:
        view, old, left = memoryview(memory), self._view, self._memory
        view[_COUNTS_AT:] = old[_COUNTS_AT:]
        self._memory, self._view = memory, view
        self.counts.release()
        self.counts = view[_COUNTS_AT : _COUNTS_AT + _COUNTS.size].cast("Q")
        old.release()
        if isinstance(left, mmap.mmap):
            left.close()


_shared: weakref.WeakSet[Tally] = weakref.WeakSet()


def _keep_in_child() -> None:
    for tally in tuple(_shared):
        tally.lock = threading.Lock()  # whoever had it is not in this process
        tally.keep()


os.register_at_fork(after_in_child=_keep_in_child)


def pack_counts(counts: Sequence[int], note: str) -> bytes:
    """A file of counts and a note, as `read_counts` and `read_note` read it."""
    content = bytearray(_RING_AT)
    _HEADER.pack_into(content, 0, _MAGIC, _FORMAT)
    _COUNTS.pack_into(content, _COUNTS_AT, *counts)
    return bytes(content) + note.encode()


def read_note(path: Path) -> str:
    """The note in a file of `pack_counts`; "" if it is none of this version."""
    try:
        content = path.read_bytes()
    except OSError:
        return ""
    return "" if _counts(content) is None else content[_RING_AT:].decode(errors="replace")


def read_counts(path: Path) -> list[int] | None:
    """A file's counts; None if it has none of this version."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    return _counts(content)


def _counts(content: bytes) -> list[int] | None:
    if len(content) < _RING_AT or _HEADER.unpack_from(content) != (_MAGIC, _FORMAT):
        return None
    return list(_COUNTS.unpack_from(content, _COUNTS_AT))


def read_requests(path: Path) -> list[Request]:
    """The requests in a file, in no order."""
    try:
        content = path.read_bytes()
    except OSError:
        return []
    if _counts(content) is None or len(content) < _SIZE:
        return []
    entries = (content[at : at + _STRIDE] for at in range(_RING_AT, _SIZE, _STRIDE))
    return [request for entry in entries if (request := Request.unpack(entry)) is not None]

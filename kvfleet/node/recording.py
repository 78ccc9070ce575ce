"""What is asked of a node, while somebody records it: clients write it to a file beside the arena, without a call.

Whoever records has the manager put an empty file in the place of the one that clients append to, and reads what that
one has. Clients look for a file twice a second; a request costs them some 20 µs while there is one. Without a new file
for `ALIVE_S` a recording has ended, whatever became of who began it.

    header   32 bytes: magic, who records, when the file was made by the node's monotonic clock
    requests one after the other: length, the client's losses before it, wall time, tokens of prompt and block, bytes of
             a token, hints (the digest of a session or zeros; a turn or 0; whether it is the final one), keys

Keys and sessions are in it as they are: the file is as private as the arena.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvfleet.core.block import KEY_BYTES
from kvfleet.core.hints import NO_HINTS, SESSION_BYTES, Hints
from kvfleet.node.arena import Arena

__all__ = ["ALIVE_S", "FILE_BYTES_MAX", "Asked", "RecordReply", "Recorder", "Recording", "read_asked"]

ALIVE_S = 30.0
FILE_BYTES_MAX = 16 << 20
"""Of what is asked between two reads: a million blocks."""

_FILE = "recording"
_MAGIC = b"kvrecrd3"
_HEADER = struct.Struct("<8s16sQ")
_ASKED = struct.Struct("<IIQIIQ16sI?")
_NO_SESSION = bytes(SESSION_BYTES)
_LOOK_EVERY_S = 0.5
_WRITERS_WAIT_S = 0.1  # for clients that are appending
_POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class Asked:
    """A request.

    Attributes:
        time_ns: wall time.
        prompt_tokens: of its prompt.
        block_tokens: of a block.
        keys: of its whole blocks, packed.
        hints: of it; their priority is not recorded.
        token_bytes: of a token's KV, all shards; 0: not known.
    """

    time_ns: int
    prompt_tokens: int
    block_tokens: int
    keys: bytes
    hints: Hints = NO_HINTS
    token_bytes: int = 0

    def pack(self, lost: int) -> bytes:
        """As it is in the file, with the number that were lost before it."""
        size, known = _ASKED.size + len(self.keys), self.hints
        head = size, lost, self.time_ns, self.prompt_tokens, self.block_tokens, self.token_bytes
        return _ASKED.pack(*head, known.session or _NO_SESSION, known.turn or 0, known.final) + self.keys


@dataclass(frozen=True, slots=True)
class RecordReply:
    """What a node's clients were asked since the last time.

    Attributes:
        packed: as `read_asked` reads it.
        problem: why nothing is recorded, or "".
    """

    packed: bytes = b""
    problem: str = ""


class Recorder:
    """Appends what one client is asked, if somebody records it. Threads: any. A fault of the file is a counted loss.

    Args:
        block_tokens: tokens in a block.
        shard: of the client: the first one notes what all are asked.
        token_bytes: of a token's KV, all shards; 0: not known.
    """

    def __init__(self, block_tokens: int, shard: int = 0, token_bytes: int = 0) -> None:
        self._block_tokens = block_tokens
        self._token_bytes = token_bytes
        self._silent = bool(shard)
        self._look_at = 0.0
        self._lock = threading.Lock()
        self._lost = 0

    def note(
        self, arena: Arena | None, time_ns: int, keys: bytes, prompt_tokens: int = 0, hints: Hints = NO_HINTS
    ) -> None:
        """A request was looked up.

        Args:
            arena: of the node; None if it is not attached: then nothing can be noted.
            time_ns: wall time.
            keys: of its whole blocks, packed.
            prompt_tokens: of its prompt; if it is not known, those of its whole blocks are taken.
            hints: of it; the session as managers know it.
        """
        now = time.monotonic()
        if arena is None or self._silent or now < self._look_at:
            return
        tokens = max(prompt_tokens, len(keys) // KEY_BYTES * self._block_tokens)
        asked = Asked(time_ns, tokens, self._block_tokens, keys, hints, self._token_bytes)
        path = arena.path.parent / _FILE
        with self._lock:
            lost, self._lost = self._lost, 0
        try:
            written = any(_append(path, asked, lost) for _ in range(2))  # a new one may take its place
        except FileNotFoundError:
            self._look_at = now + _LOOK_EVERY_S
            return
        except OSError:
            written = False
        if not written:
            with self._lock:
                self._lost += lost + 1


def _append(path: Path, asked: Asked, lost: int) -> bool:
    """Append to a file. False: it is another one now, or full.

    Raises:
        FileNotFoundError: nothing is recorded.
    """
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        found = os.fstat(fd)
        if not found.st_nlink:
            return False
        if not _alive(os.pread(fd, _HEADER.size, 0), time.monotonic()):
            raise FileNotFoundError
        entry = asked.pack(lost)
        return found.st_size + len(entry) <= FILE_BYTES_MAX and os.write(fd, entry) == len(entry)
    except BlockingIOError:  # it is being read
        return False
    finally:
        os.close(fd)


def _alive(header: bytes, now: float) -> bool:
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        return False
    _, _, made_ns = _HEADER.unpack(header)
    return bool(0 <= now - made_ns / 1e9 < ALIVE_S)


class Recording:
    """The manager's side. Threads: any."""

    def __init__(self, directory: Path) -> None:
        """Begin nothing.

        Args:
            directory: of the arena.
        """
        self._path = directory / _FILE
        self._lock = threading.Lock()

    def turn(self, recorder: bytes, now: float, *, ends: bool) -> RecordReply:
        """What was asked since the last time.

        Args:
            recorder: who records, 16 bytes.
            now: monotonic seconds.
            ends: nothing more is recorded.

        Raises:
            OSError: the file cannot be made or read.

        Blocking: 0.1 s for clients that write, and as long for another turn.
        """
        assert len(recorder) == 16
        with self._lock:
            return self._turn(recorder, now, ends=ends)

    def _turn(self, recorder: bytes, now: float, *, ends: bool) -> RecordReply:
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            file = None
        with file or contextlib.nullcontext():
            header = b"" if file is None else file.read(_HEADER.size)
            if _alive(header, now) and _HEADER.unpack(header)[1] != recorder:
                return RecordReply(problem="somebody else records this fleet")
            if ends:
                self._path.unlink(missing_ok=True)
            else:
                self._renew(recorder, now)
            if file is None or header[8:24] != recorder:
                return RecordReply()
            _wait_for_writers(file.fileno())
            return RecordReply(file.read(2 * FILE_BYTES_MAX))

    def tend(self, now: float) -> None:
        """Remove a file that nobody reads any more; another time if somebody is at it now."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            with self._path.open("rb") as file:
                header = file.read(_HEADER.size)
            if not _alive(header, now):
                self._path.unlink(missing_ok=True)
        except FileNotFoundError:
            return
        finally:
            self._lock.release()

    def _renew(self, recorder: bytes, now: float) -> None:
        partial = self._path.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(_HEADER.pack(_MAGIC, recorder, int(now * 1e9)))
        partial.replace(self._path)


def _wait_for_writers(fd: int) -> None:
    """Give clients that are appending the time for it. One that was stopped meanwhile is not waited for."""
    deadline = time.monotonic() + _WRITERS_WAIT_S
    while time.monotonic() < deadline:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_POLL_S)
        else:
            return


def read_asked(packed: bytes) -> Iterator[tuple[Asked | None, int]]:
    """The requests of a reply, each with the number that were lost before it; None with what was lost at the end."""
    at = 0
    while at < len(packed):
        size, lost, *rest = _ASKED.unpack_from(packed, at) if len(packed) - at >= _ASKED.size else (0, 0)
        if size < _ASKED.size or (size - _ASKED.size) % KEY_BYTES or at + size > len(packed):
            yield None, 1  # its writer was killed; what is behind it cannot be told apart
            return
        time_ns, prompt_tokens, block_tokens, token_bytes, session, turn, final = rest
        hints = Hints(session if session != _NO_SESSION else b"", turn or None, final)
        keys = packed[at + _ASKED.size : at + size]
        yield Asked(time_ns, prompt_tokens, block_tokens, keys, hints, token_bytes), lost
        at += size

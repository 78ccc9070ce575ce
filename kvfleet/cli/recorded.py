"""Recording what is asked of a fleet: from all its nodes into a trace, with ids that tell nothing.

An id, of a block or a session, is a hash with a salt that is drawn for the recording and forgotten: two recordings
cannot be compared, and what a prompt was cannot be tried. Tokens are never seen.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TextIO

from kvfleet import actors
from kvfleet.core.block import KEY_BYTES
from kvfleet.core.directory import NodeId
from kvfleet.errors import ConfigError
from kvfleet.node.recording import Asked, RecordReply, read_asked
from kvfleet.sim.formats import Line, OwnWriter

__all__ = ["FleetRecording", "Told", "TraceBook"]

_TIMEOUT_S = 3.0
_ID_BYTES = 8


@dataclass(slots=True)
class Told:
    """What was recorded so far.

    Attributes:
        requests: that are in the trace.
        blocks: of these.
        num_bytes: of the trace.
        lost: requests that came too fast to be written down, or were only half written.
        other: requests of a model with other blocks than the first one's, in tokens or bytes: a trace has one kind.
        silent: how often each node did not answer: what it was asked meanwhile may be missing.
    """

    requests: int = 0
    blocks: int = 0
    num_bytes: int = 0
    lost: int = 0
    other: int = 0
    silent: dict[NodeId, int] = field(default_factory=dict)


class TraceBook:
    """Writes what was asked as a trace.

    Args:
        file: to write to.
        begun_ns: wall time that times count from.
    """

    def __init__(self, file: TextIO, begun_ns: int) -> None:
        self._file = file
        self._begun_ns = begun_ns
        self._salt = secrets.token_bytes(32)
        self._shape = (0, 0)  # tokens of a block, bytes of a token
        self._writer: OwnWriter | None = None
        self.told = Told()

    def write(self, packed: Iterable[bytes]) -> None:
        """Write what nodes have sent, in the order of times."""
        told, found = self.told, list[Asked]()
        for one in packed:
            for asked, lost in read_asked(one):
                told.lost += lost
                found += [asked] if asked is not None else []
        for asked in sorted(found, key=lambda asked: asked.time_ns):
            self._write(asked)
        self._file.flush()
        told.num_bytes = self._file.tell()

    def _write(self, asked: Asked) -> None:
        if self._writer is None:
            self._shape = asked.block_tokens, asked.token_bytes
            self._writer = OwnWriter(self._file, *self._shape)
        if (asked.block_tokens, asked.token_bytes) != self._shape:
            self.told.other += 1
            return
        time_s = max(0, asked.time_ns - self._begun_ns) / 1e9
        ids = [self._id(asked.keys[at : at + KEY_BYTES]) for at in range(0, len(asked.keys), KEY_BYTES)]
        tokens, hints = max(asked.prompt_tokens, len(ids) * asked.block_tokens), asked.hints
        session = f"{self._id(hints.session):016x}" if hints.session else ""
        self._writer.write(Line(time_s, ids, tokens, 0, session, hints.turn, hints.final))
        self.told.requests += 1
        self.told.blocks += len(ids)

    def _id(self, key: bytes) -> int:
        """Of a block or a session."""
        return int.from_bytes(hashlib.blake2b(key, key=self._salt, digest_size=_ID_BYTES).digest(), "big")


class FleetRecording:
    """A recording of a fleet that runs. Its managers need not be started anew; nodes that come later are in it.

    Args:
        name: of the fleet.
        file: for the trace.
    """

    def __init__(self, name: str, file: TextIO) -> None:
        self._name = name
        self._recorder = secrets.token_bytes(16)
        self._book = TraceBook(file, time.time_ns())

    @property
    def told(self) -> Told:
        """What was recorded so far."""
        return self._book.told

    def turn(self, *, ends: bool = False) -> None:
        """Write down what was asked since the last time. To be called every second or so; at first it begins.

        Args:
            ends: it is the last time.

        Raises:
            ConfigError: somebody else records this fleet, or it cannot be done there.
        """
        calls = {node: m.record.remote(self._recorder, ends=ends) for node, m in actors.managers(self._name).items()}
        answers = actors.collect(calls, _TIMEOUT_S)
        replies: list[RecordReply] = []
        for node in calls:
            reply = answers.get(node)
            if reply is None:
                self.told.silent[node] = self.told.silent.get(node, 0) + 1
            else:
                replies.append(reply)
        self._book.write(reply.packed for reply in replies)
        problem = next((reply.problem for reply in replies if reply.problem), "")
        if problem:
            raise ConfigError("", problem)

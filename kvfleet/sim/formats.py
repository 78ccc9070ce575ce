"""Lines of trace files: what others publish, and what `kvfleet record` writes.

Mooncake (FAST'25, github.com/kvcache-ai/Mooncake), without sessions, 512 tokens a block::

    {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [n, ...]}

Alibaba Bailian (ATC'25, github.com/alibaba-edu/qwen-bailian-usagetraces-anon), 16 tokens a block::

    {"chat_id": n, "parent_chat_id": n, or -1, "timestamp": s, "turn": n, and input_length, output_length, hash_ids}

Ours, a first line and then one a request, with 16 hex digits a whole block, and what is known of the session; the first
line has the bytes of a token's KV, if they are known::

    {"format": "kvfleet-trace-1", "block_tokens": n, "token_bytes": n}
    {"time_s": s, "prompt_tokens": n, "output_tokens": n, "keys": "...", "session": "...", "turn": n, "final": true}
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TextIO

from typing_extensions import override

__all__ = ["OWN", "BadLineError", "Format", "Line", "OwnWriter", "format_of"]

OWN = "kvfleet-trace-1"
MOONCAKE_BLOCK_TOKENS = 512
BAILIAN_BLOCK_TOKENS = 16
_ID_DIGITS = 16
_ID_MAX = 2**64 - 1
_TOKENS_MAX = 2**31 - 1
_TURNS_MAX = 2**31 - 1
_TIME_MAX = 1e15


class BadLineError(ValueError):
    """A line is not what it should be, and why."""


class Line(NamedTuple):
    """A request as a file has it.

    Attributes:
        time_s: when it came.
        ids: of the blocks of its prompt; a partial last one may be among them. From 0 to 2^64 - 1.
        prompt_tokens: of its prompt.
        output_tokens: that were produced, or 0.
        session: of the caller, or "".
        turn: of the session from 1, or None.
        final: it was said that this prefix will not be continued.
    """

    time_s: float
    ids: Sequence[int]
    prompt_tokens: int
    output_tokens: int
    session: str = ""
    turn: int | None = None
    final: bool = False


class Format(ABC):
    """How a file's lines are read.

    Attributes:
        block_tokens: tokens in a block.
        token_bytes: of a token's KV; None: not known.
        headed: the first line is no request.
    """

    headed = False

    def __init__(self, block_tokens: int, token_bytes: int | None = None) -> None:
        self.block_tokens = block_tokens
        self.token_bytes = token_bytes

    @abstractmethod
    def parse(self, fields: Mapping[str, Any]) -> Line:
        """A request.

        Raises:
            BadLineError: it is none.
        """

    def _published(self, fields: Mapping[str, Any], time_unit_s: float) -> Line:
        """The fields that all published traces have."""
        prompt_tokens = _integer(fields, "input_length", 0, _TOKENS_MAX)
        ids = fields.get("hash_ids")
        if not isinstance(ids, list):
            raise BadLineError("hash_ids: a list is expected")
        if any(type(id_) is not int or not 0 <= id_ <= _ID_MAX for id_ in ids):
            raise BadLineError("hash_ids: whole numbers from 0 to 2^64 - 1 are expected")
        self._check(len(ids), prompt_tokens)
        time_s = _seconds(fields, "timestamp") * time_unit_s
        return Line(time_s, ids, prompt_tokens, _integer(fields, "output_length", 0, _TOKENS_MAX))

    def _check(self, ids: int, prompt_tokens: int) -> None:
        if ids > -(-prompt_tokens // self.block_tokens):
            raise BadLineError(
                f"{ids} blocks are too many for {prompt_tokens} tokens, {self.block_tokens} of them in a block"
            )


class Mooncake(Format):
    """Of Mooncake: no sessions."""

    @override
    def parse(self, fields: Mapping[str, Any]) -> Line:
        return self._published(fields, 1e-3)


class Bailian(Format):
    """Of Alibaba Bailian: a request names the one it continues; both are of one session, which the first one names."""

    def __init__(self, block_tokens: int) -> None:
        super().__init__(block_tokens)
        self._sessions: dict[int, str] = {}

    @override
    def parse(self, fields: Mapping[str, Any]) -> Line:
        chat = _integer(fields, "chat_id", 0, _ID_MAX)
        parent = _integer(fields, "parent_chat_id", -1, _ID_MAX)
        # A first part that is not in the file is known by its number all the same.
        session = str(chat) if parent < 0 else self._sessions.get(parent, str(parent))
        self._sessions[chat] = session
        turn = _integer(fields, "turn", 1, _TURNS_MAX) if "turn" in fields else None
        return self._published(fields, 1.0)._replace(session=session, turn=turn)


class Own(Format):
    """Of `kvfleet record`."""

    headed = True

    @override
    def parse(self, fields: Mapping[str, Any]) -> Line:
        prompt_tokens = _integer(fields, "prompt_tokens", 0, _TOKENS_MAX)
        ids = _own_ids(fields.get("keys"))
        self._check(len(ids), prompt_tokens)
        session, final = fields.get("session", ""), fields.get("final", False)
        if not isinstance(session, str) or not isinstance(final, bool):
            raise BadLineError("session is a string, final true or false")
        turn = _integer(fields, "turn", 1, _TURNS_MAX) if "turn" in fields else None
        output_tokens = _integer(fields, "output_tokens", 0, _TOKENS_MAX)
        return Line(_seconds(fields, "time_s"), ids, prompt_tokens, output_tokens, session, turn, final)


def _own_ids(keys: object) -> list[int]:
    """Ids from a string of 16 hex digits each."""
    if not isinstance(keys, str) or len(keys) % _ID_DIGITS:
        raise BadLineError(f"keys: a string of {_ID_DIGITS} hex digits a block is expected")
    try:
        packed = bytes.fromhex(keys)
    except ValueError as error:
        raise BadLineError(f"keys: {error}") from error
    if 2 * len(packed) != len(keys):  # fromhex ignores blanks
        raise BadLineError("keys: hex digits only are expected")
    return [int.from_bytes(packed[at : at + 8], "big") for at in range(0, len(packed), 8)]


class OwnWriter:
    """Writes our own format.

    Args:
        file: to write to; the first line is written at once.
        block_tokens: tokens in a block.
        token_bytes: of a token's KV; 0: not known.
    """

    def __init__(self, file: TextIO, block_tokens: int, token_bytes: int = 0) -> None:
        self._file = file
        known = {"token_bytes": token_bytes} if token_bytes else {}
        file.write(json.dumps({"format": OWN, "block_tokens": block_tokens, **known}) + "\n")

    def write(self, line: Line) -> None:
        """Write a request."""
        fields: dict[str, object] = {
            "time_s": round(line.time_s, 6),
            "prompt_tokens": line.prompt_tokens,
            "output_tokens": line.output_tokens,
            "keys": b"".join(id_.to_bytes(8, "big") for id_ in line.ids).hex(),
        }
        known = {"session": line.session, "turn": line.turn, "final": line.final}
        fields |= {name: value for name, value in known.items() if value}
        self._file.write(json.dumps(fields) + "\n")


def format_of(fields: Mapping[str, Any]) -> Format:
    """What a file is, by its first line.

    Raises:
        BadLineError: it is of no known format.
    """
    if "format" in fields:
        if fields["format"] != OWN:
            raise BadLineError(f"format {fields['format']!r} is not known here: {OWN!r} is")
        token_bytes = _integer(fields, "token_bytes", 1, _TOKENS_MAX) if "token_bytes" in fields else None
        return Own(_integer(fields, "block_tokens", 1, _TOKENS_MAX), token_bytes)
    if "hash_ids" not in fields:
        raise BadLineError("it is of no known trace: Mooncake's and Alibaba Bailian's have hash_ids, ours a format")
    return Bailian(BAILIAN_BLOCK_TOKENS) if "chat_id" in fields else Mooncake(MOONCAKE_BLOCK_TOKENS)


def _integer(fields: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = fields.get(name)
    if type(value) is not int or not least <= value <= most:
        raise BadLineError(f"{name}: a whole number from {least} to {most} is expected, is {_shown(value)}")
    return value


def _seconds(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _TIME_MAX:
        raise BadLineError(f"{name}: a time from 0 on is expected, is {_shown(value)}")
    return float(value)


def _shown(value: object) -> str:
    return "missing" if value is None else f"{value!r:.40}"

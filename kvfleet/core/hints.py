"""What an engine or an application may say about a prefix that it stores."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["NO_HINTS", "SESSION_BYTES", "Hints", "session_digest"]

SESSION_BYTES = 16
_TURN_MAX = 2**31 - 1
_FIELDS = frozenset({"session", "turn", "final", "priority"})


@dataclass(frozen=True, slots=True)
class Hints:
    """Never trusted: a wrong one costs a hit, nothing else.

    Raises:
        ValueError: a field of the wrong kind, or out of its range.

    Attributes:
        session: 16-byte digest of the caller's session id; empty for none. `of` makes it from any id.
        turn: of the session, from 1; None: not said.
        final: this prefix will not be continued.
        priority: -1 low, 0, 1 high.
    """

    session: bytes = b""
    turn: int | None = None
    final: bool = False
    priority: int = 0

    def __post_init__(self) -> None:
        if type(self.session) is not bytes or len(self.session) not in (0, SESSION_BYTES):
            raise ValueError(f"session must be a digest of {SESSION_BYTES} bytes; Hints.of takes any id")
        if self.turn is not None and (type(self.turn) is not int or not 1 <= self.turn <= _TURN_MAX):
            raise ValueError(f"turn must be an integer from 1, is {_shown(self.turn)}")
        if type(self.final) is not bool:
            raise ValueError(f"final must be true or false, is {_shown(self.final)}")
        if type(self.priority) is not int or not -1 <= self.priority <= 1:
            raise ValueError(f"priority must be -1, 0 or 1, is {_shown(self.priority)}")

    @classmethod
    def of(cls, session: str | bytes = "", *, turn: int | None = None, final: bool = False, priority: int = 0) -> Hints:
        """Hints of a session as the application names it.

        Raises:
            ValueError: as the class does.
        """
        return cls(session_digest(session), turn, final, priority)

    @classmethod
    def parse(cls, fields: Mapping[object, object]) -> Hints:
        """Hints as a request brought them, under the names of `of`; other fields are not looked at.

        Raises:
            ValueError: a field of the wrong kind, or out of its range.
        """
        values: dict[str, Any] = {str(name): value for name, value in fields.items() if name in _FIELDS}
        return cls(**values | {"session": session_digest(values.get("session") or "")})

    @property
    def lasting(self) -> bool:
        """Whether there is something in it for blocks that are here already; their turn a policy counts itself."""
        return bool(self.session) or self.final

    def within(self, namespace_id: bytes) -> Hints:
        """The same, with a session that no other namespace has: what one tenant ends is not another's."""
        return replace(self, session=scoped(self.session, namespace_id)) if self.session else self


NO_HINTS = Hints()


def session_digest(session: object) -> bytes:
    """16 bytes in place of a session id, which may be long and may name a person; none for an empty one.

    Raises:
        ValueError: it is neither text nor bytes.
    """
    if not isinstance(session, str | bytes):
        raise ValueError(f"session must be text or bytes, is {_shown(session)}")  # noqa: TRY004  as the other fields
    data = session.encode("utf-8", "surrogatepass") if isinstance(session, str) else session
    return hashlib.sha256(b"kvfleet session" + data).digest()[:SESSION_BYTES] if data else b""


def scoped(session: bytes, namespace_id: bytes) -> bytes:
    """A session's digest as managers know it."""
    return hashlib.sha256(namespace_id + session).digest()[:SESSION_BYTES]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"a {type(value).__name__}"

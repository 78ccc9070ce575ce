"""What a request's `kv_transfer_params` say of its future, for the fleet's `Hints`.

Either as one field, `{"kvfleet": {"session": "chat 7", "turn": 2, "final": false, "priority": 0}}`, or flat, as
`{"kvfleet_session": "chat 7", "kvfleet_turn": 2}`. All fields are optional. Over HTTP they come in the body of a
request, in vLLM's own server and in Ray Serve LLM: `extra_body={"kv_transfer_params": {...}}` with OpenAI's client.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from kvfleet.core.hints import NO_HINTS, Hints

__all__ = ["HINTS", "RequestHints", "flattened"]

HINTS = "kvfleet"
_FLAT = {f"{HINTS}_{name}": name for name in ("session", "turn", "final", "priority")}

_log = logging.getLogger(__name__)


class RequestHints:
    """Reads hints of requests. Wrong ones are ignored, counted, and logged once: anybody may send a request."""

    def __init__(self) -> None:
        self._ignored = 0
        self._logged = False

    def of(self, params: Mapping[str, Any] | None) -> Hints:
        """The hints of a request's `kv_transfer_params`."""
        try:
            fields = flattened(params or {})
            return Hints.parse(fields) if fields else NO_HINTS
        except ValueError as error:
            self._ignored += 1
            if not self._logged:
                self._logged = True
                _log.warning("hints of a request are ignored, and of others that are wrong too: %s", error)
            return NO_HINTS

    def take(self, name: str) -> dict[str, int]:
        """How many were ignored since the last call, under a name; nothing for none."""
        ignored, self._ignored = self._ignored, 0
        return {name: ignored} if ignored else {}


def flattened(params: Mapping[str, Any]) -> dict[object, object]:
    """The fields of `kv_transfer_params` that are for us, by the names of `Hints.of`.

    Raises:
        ValueError: `kvfleet` is no mapping.
    """
    named = params.get(HINTS)
    if named is None:
        named = {}
    if not isinstance(named, Mapping):
        raise ValueError(f"{HINTS} must be a mapping, is a {type(named).__name__}")  # noqa: TRY004  as a field's fault
    return {ours: params[flat] for flat, ours in _FLAT.items() if params.get(flat) is not None} | dict(named)

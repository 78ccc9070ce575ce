"""Faults of ours in vLLM's hooks: counted, logged once in a while, and never vLLM's problem."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar, cast

__all__ = ["Faults", "guarded"]

_log = logging.getLogger(__name__)
_LOG_INTERVAL_S = 30.0

Hook = TypeVar("Hook", bound=Callable[..., Any])


class Faults:
    """Counts faults by where they happened. Threads: any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._log_at = 0.0

    def failed(self, where: str, error: Exception) -> None:
        """Something failed that vLLM must not hear of."""
        with self._lock:
            self._counts[f"errors:{where}"] += 1
            now = time.monotonic()
            quiet, self._log_at = now < self._log_at, max(self._log_at, now + _LOG_INTERVAL_S)
        if not quiet:
            _log.error("%s failed, which costs hits and nothing else", where, exc_info=error)

    def take(self) -> dict[str, int]:
        """Counts since the last call."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return dict(counts)


def guarded(instead: Callable[[], Any]) -> Callable[[Hook], Hook]:
    """Have a hook answer `instead()` when it fails. The hook is a method of an object with `faults: Faults`.

    In vLLM's scheduler an exception ends the engine, and with it all requests.
    """

    def wrap(hook: Hook) -> Hook:
        @functools.wraps(hook)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  any hook of any object
            try:
                return hook(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001  see above
                self.faults.failed(hook.__name__, error)
                return instead()

        return cast("Hook", call)

    return wrap

"""Whether this node's manager lives, told by the file it touches every heartbeat: no call, so nothing to wait for."""

from __future__ import annotations

from pathlib import Path

__all__ = ["Pulse"]


class Pulse:
    """What one process has seen of a manager's sign of life.

    Only changes of the file's time count, against the caller's own clock: clocks that are set do no harm. Threads: any.
    """

    def __init__(self, path: Path, silence_max_s: float) -> None:
        """Watch a file.

        Args:
            path: that the manager touches.
            silence_max_s: without a touch for so long, it is taken for dead or hung.
        """
        assert silence_max_s > 0
        self._path = path
        self._silence_max_s = silence_max_s
        self._seen = 0
        self._seen_at = 0.0

    def beats(self, now: float) -> bool:
        """Whether the file was touched within the limit before `now`, monotonic seconds, as far as was looked.

        True as well if the file is gone: then a call tells.
        """
        try:
            touched = self._path.stat().st_mtime_ns
        except OSError:
            return True
        if touched != self._seen:
            self._seen, self._seen_at = touched, now
        return now - self._seen_at <= self._silence_max_s

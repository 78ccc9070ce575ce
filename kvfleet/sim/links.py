"""What moves bytes, one thing after the other."""

from __future__ import annotations

from kvfleet.core.speeds import Speed

__all__ = ["Link", "Passage", "across"]


class Passage:
    """When bytes that were asked for came.

    Attributes:
        first_s: seconds from the question to the first of them.
        end: when the last came, seconds.
    """

    __slots__ = ("end", "first_s")

    def __init__(self, first_s: float, end: float) -> None:
        self.first_s = first_s
        self.end = end


class Link:
    """Bytes go over it in the order they were asked for, each at its full speed.

    Requests that share a link would in life share its speed: the sum of their times is the same, the first ends
    earlier here.

    Attributes:
        speed: of the link.
        free_at: when all that was asked for so far is through, seconds.
        num_bytes: that went over it.
    """

    def __init__(self, speed: Speed) -> None:
        self.speed = speed
        self.free_at = 0.0
        self.num_bytes = 0

    def take(self, now: float, num_bytes: int) -> Passage:
        """Ask for bytes now."""
        start = max(now, self.free_at)
        self.free_at = start + num_bytes / self.speed.bytes_per_s
        self.num_bytes += num_bytes
        latency_s = self.speed.latency_s
        return Passage(start - now + latency_s, self.free_at + latency_s)

    def give_up(self, now: float, num_bytes: int) -> None:
        """The last bytes that were asked for are not wanted any more."""
        self.num_bytes -= num_bytes
        self.free_at = min(self.free_at, max(now, self.free_at - num_bytes / self.speed.bytes_per_s))

    def queued_bytes(self, now: float) -> int:
        """How much is on its way."""
        return int((self.free_at - now) * self.speed.bytes_per_s) if self.free_at > now else 0


def across(out: Link, into: Link, now: float, num_bytes: int) -> Passage:
    """Bytes from one node to another: both ends must be free."""
    start = max(now, out.free_at, into.free_at)
    end = start + num_bytes / min(out.speed.bytes_per_s, into.speed.bytes_per_s)
    for link in (out, into):
        link.free_at = end
        link.num_bytes += num_bytes
    latency_s = into.speed.latency_s
    return Passage(start - now + latency_s, end + latency_s)

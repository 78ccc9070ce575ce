"""The network of a simulated fleet: messages that come late, in another order, twice, or not at all."""

from __future__ import annotations

import contextvars
import random
from collections.abc import Callable
from dataclasses import dataclass

from kvfleet.testing.loop import VirtualLoop

__all__ = ["Network", "Weather"]

_NOBODY = contextvars.Context()  # of messages under way: they outlive who sent them
_LOCAL_S = 0.0001


@dataclass(frozen=True, slots=True)
class Weather:
    """How bad a network is.

    Attributes:
        delay_s: mean time of a message under way; times differ, so messages overtake each other.
        slow: share of messages that take much longer, up to `slow_s`.
        loss: share of messages that are lost.
        twice: share of repeatable messages that come twice.
        told: share of losses that the sender is told of at once; the others look like an answer that never comes.
        kept: share of messages on a cut link that arrive when it is mended.
    """

    delay_s: float = 0.0005
    slow: float = 0.0
    slow_s: float = 0.0
    loss: float = 0.0
    twice: float = 0.0
    told: float = 0.5
    kept: float = 0.3

    @classmethod
    def drawn(cls, rng: random.Random) -> Weather:
        """From calm to brutal."""
        force = rng.choice((0.0, 0.3, 1.0))
        return cls(
            delay_s=rng.choice((0.0002, 0.001, 0.01)),
            slow=rng.choice((0.0, 0.1, 0.4)) * force,
            slow_s=rng.choice((0.1, 1.0, 8.0)),
            loss=rng.choice((0.0, 0.02, 0.1)) * force,
            twice=rng.choice((0.0, 0.05, 0.5)) * force,
            told=rng.random(),
            kept=rng.random(),
        )


@dataclass(slots=True)
class _Message:
    deliver: Callable[[], None]
    lost: Callable[[], None]


class Network:
    """Carries messages between hosts. Links are cut and slowed both ways."""

    def __init__(self, loop: VirtualLoop, seed: int, weather: Weather) -> None:
        self.weather = weather
        self.loop = loop
        self.random = random.Random(f"network {seed}")
        self.sent = self.lost = 0
        self._cut: dict[frozenset[str], list[_Message]] = {}
        self._slowed: dict[frozenset[str], float] = {}

    def send(
        self, source: str, target: str, deliver: Callable[[], None], lost: Callable[[], None] = lambda: None
    ) -> None:
        """Carry one message.

        Args:
            source: host.
            target: host; the same one is reached always, and soon.
            deliver: called when it arrives.
            lost: called if the sender hears that it will not.
        """
        self.sent += 1
        if source == target:
            self._later(self.random.expovariate(1 / _LOCAL_S), deliver)
            return
        waiting = self._cut.get(frozenset((source, target)))
        if waiting is not None and self.random.random() < self.weather.kept:
            waiting.append(_Message(deliver, lost))
        elif waiting is not None or self.random.random() < self.weather.loss:
            self.lost += 1
            if self.random.random() < self.weather.told:
                self._later(self._delay_s(source, target), lost)
        else:
            self._later(self._delay_s(source, target), deliver)

    def twice(self) -> bool:
        """Whether a repeatable message is to be sent twice."""
        return self.random.random() < self.weather.twice

    def _delay_s(self, source: str, target: str) -> float:
        seconds = self.random.expovariate(1 / self.weather.delay_s)
        if self.random.random() < self.weather.slow:
            seconds += self.random.uniform(0.0, self.weather.slow_s)
        return seconds + self._slowed.get(frozenset((source, target)), 0.0) * self.random.random()

    def _later(self, seconds: float, function: Callable[[], None]) -> None:
        self.loop.call_later(seconds, function, context=_NOBODY)

    # links

    def cut(self, one: str, other: str) -> None:
        """Nothing passes between two hosts."""
        self._cut.setdefault(frozenset((one, other)), [])

    def mend(self, one: str, other: str) -> None:
        """The link works again; some of what was sent meanwhile arrives now, in any order."""
        for message in self._cut.pop(frozenset((one, other)), ()):
            self._later(self._delay_s(one, other), message.deliver)

    def slow(self, one: str, other: str, seconds: float) -> None:
        """Messages between two hosts take up to so much longer; 0 ends it."""
        self._slowed[frozenset((one, other))] = seconds

    def calm(self) -> None:
        """Mend all links; nothing is lost, late or doubled from here on."""
        self.weather = Weather(delay_s=min(self.weather.delay_s, 0.001))
        self._slowed.clear()
        for link in list(self._cut):
            one, other = sorted(link)
            self.mend(one, other)

"""What engines do in a simulated fleet: turns of conversations, looked up, loaded, and stored with what was added."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvfleet.client import Client
from kvfleet.core.block import split
from kvfleet.core.layout import ModelSpec
from kvfleet.errors import DeadlineExceededError
from kvfleet.hits import PrefixHit
from kvfleet.testing.checks import Checks, content
from kvfleet.testing.fleet import LocalClient, LocalFleet
from kvfleet.testing.processes import SimulationError
from kvfleet.testing.talks import Talk

__all__ = ["GRACE_S", "Turns"]

GRACE_S = 0.6  # what a call may take beyond its deadline: an answer's way, twice
_BLOCKS_MAX = 12
_HOLDS = 0.15
_RELEASES = 0.5


class Turns:
    """Turns of all engines of a fleet.

    Attributes:
        talks: that are going on.
        slowness: how often an engine pauses in mid-copy.
        loaded: blocks that loads brought.
    """

    def __init__(self, fleet: LocalFleet, checks: Checks, spec: ModelSpec, rng: random.Random) -> None:
        self._fleet = fleet
        self._checks = checks
        self._spec = spec
        self._random = rng
        self.talks = [Talk(number, number % 3) for number in range(5)]
        self._num_talks = len(self.talks)
        self.slowness = rng.choice((0.0, 0.05, 0.25))
        self.loaded = 0

    def turn(self, owner: LocalClient, talk: Talk, client: Client) -> None:
        """Look a prompt up, load it, store it with what was added."""
        loaded = self._load(owner, client, talk.tokens())
        if talk.num_blocks >= _BLOCKS_MAX:
            self.talks.remove(talk) if talk in self.talks else None
            self._num_talks += 1
            self.talks.append(Talk(self._num_talks, self._num_talks % 3))
            return
        talk.num_blocks += self._random.choice((0, 1, 1, 2, 4))
        tokens, paused = talk.tokens(), [0.0]
        start = self._random.choice((0, loaded))
        began = self._fleet.now
        task = client.store(tokens, self._put(self._spec.keys(tokens), paused), start_block=start)
        if self._random.random() < 0.7:
            limit = self._fleet.config.store_timeout_s + 4.0
            try:
                result = task.wait(2 * limit)
            except DeadlineExceededError:
                if self._fleet.now - began > limit + paused[0]:
                    raise SimulationError("a store does not end") from None
            else:
                self._fleet.note(owner.process.name, "stored", result.stored, result.already, result.reason)

    def _load(self, owner: LocalClient, client: Client, tokens: npt.NDArray[np.uint32]) -> int:
        config, fleet = self._fleet.config, self._fleet
        began = fleet.now
        hit = client.lookup(tokens)
        if fleet.now - began > 2 * config.lookup_timeout_s + GRACE_S:
            raise SimulationError(f"a lookup took {fleet.now - began:.3f} s")
        self._checks.hit(hit)
        if self._random.random() < _HOLDS:
            self._hold(owner, client, hit)
        got: dict[int, npt.NDArray[np.uint8]] = {}
        paused = [0.0]
        timeout_s = self._random.choice((0.05, 1.0, config.load_timeout_s))
        began = fleet.now
        loaded = client.load(hit, self._take(got, paused), timeout_s)
        if fleet.now - began - paused[0] > timeout_s + GRACE_S:
            raise SimulationError(f"a load of {timeout_s} s took {fleet.now - began:.3f} s")
        self._checks.loaded(hit, loaded, got)
        self.loaded += int(loaded) // self._spec.block_tokens
        fleet.note("loaded", int(loaded), "of", hit.num_tokens, loaded.miss)
        return int(loaded) // self._spec.block_tokens

    def _hold(self, owner: LocalClient, client: Client, hit: PrefixHit) -> None:
        """What is held stays, as long as it is held and the manager lives."""
        manager, seconds = owner.node.manager, self._random.choice((0.2, 2.0))
        until = self._fleet.now + seconds
        process = manager.process
        hold = client.hold(hit, seconds)
        keys = split(hit.keys_of(hit.start_block, hit.start_block + hold.num_blocks))
        self._fleet.sleep(self._random.choice((0.0, 0.1, 1.0)))
        if process is not None and manager.process is process and self._fleet.now < until:
            self._checks.held(owner.node, keys)
        if self._random.random() < _RELEASES:
            hold.release()

    def _pause(self, paused: list[float]) -> None:
        """Engines are not always quick."""
        if self._random.random() < self.slowness:
            seconds = self._random.choice((0.01, 0.3, 0.8))
            paused[0] += seconds
            self._fleet.sleep(seconds)

    def _take(self, got: dict[int, npt.NDArray[np.uint8]], paused: list[float]) -> Callable[[int, Any], None]:
        def take(index: int, view: Any) -> None:  # noqa: ANN401
            data = view.reshape(-1).view(np.uint8)
            half = len(data) // 2
            copy = got[index] = np.empty_like(data)
            copy[:half] = data[:half]
            self._pause(paused)
            copy[half:] = data[half:]

        return take

    def _put(self, keys: bytes, paused: list[float]) -> Callable[[int, Any], None]:
        names = split(keys)

        def put(index: int, view: Any) -> None:  # noqa: ANN401
            target = view.reshape(-1).view(np.uint8)
            data, half = content(names[index], len(target)), len(target) // 2
            target[:half] = data[:half]
            self._pause(paused)
            target[half:] = data[half:]

        return put

    def store_once(self, client: Client) -> None:
        """Store a prompt that nobody has."""
        self._num_talks += 1
        tokens = Talk(self._num_talks, 0).tokens() + np.uint32(1 << 30)
        client.store(tokens, self._put(self._spec.keys(tokens), [0.0]))

    def find(self, client: Client, tokens: npt.NDArray[np.uint32]) -> tuple[int, int]:
        """Look a prompt up and load it. Returns how many blocks were found, and came."""
        hit = client.lookup(tokens)
        got: dict[int, npt.NDArray[np.uint8]] = {}
        loaded = client.load(hit, self._take(got, [0.0]))
        self._checks.hit(hit)
        self._checks.loaded(hit, loaded, got)
        return hit.num_blocks, int(loaded) // self._spec.block_tokens

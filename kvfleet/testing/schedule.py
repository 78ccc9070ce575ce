"""A random life of a fleet: engines that store and load, faults, then quiet, and what must hold then."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvfleet.client import Client
from kvfleet.core.block import split
from kvfleet.errors import DeadlineExceededError
from kvfleet.hits import PrefixHit
from kvfleet.storing import StoreTask
from kvfleet.testing.actors import Handle
from kvfleet.testing.blocking import wait
from kvfleet.testing.checks import Checks, content
from kvfleet.testing.faults import Faults
from kvfleet.testing.fleet import LocalClient, LocalFleet
from kvfleet.testing.network import Weather
from kvfleet.testing.processes import Process, SimulationError
from kvfleet.testing.talks import LARGE, SPEC, Talk

__all__ = ["Outcome", "run_schedule"]

_GRACE_S = 0.6  # what a call may take beyond its deadline: an answer's way, twice
_RECOVERS_S = 400.0
_TOLD_S = 20.0  # until the directory knows of an eviction; a call that was lost before may have to run out
_BLOCKS_MAX = 12
_STORY_LINES = 40
_HOLDS = 0.15
_RELEASES = 0.5
_ENDS = 0.2


@dataclass
class Outcome:
    """How a schedule went.

    Attributes:
        digest: of its trace.
        operations: of clients, by name.
        faults: by name.
        loaded: blocks that loads brought.
        recovered_s: virtual seconds from the last fault until all was at rest.
    """

    digest: str = ""
    operations: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    loaded: int = 0
    recovered_s: float = 0.0


class Schedule:
    """One run."""

    def __init__(self, seed: int, num_events: int) -> None:
        self._random = rng = random.Random(f"schedule {seed}")
        self._num_events = num_events
        self.outcome = Outcome()
        settings: dict[str, Any] = {} if rng.random() < 0.8 else {"shared_url": None}
        self.fleet = LocalFleet(seed, rng.choice((2, 3, 3)), weather=Weather.drawn(rng), **settings)
        self.spec = rng.choice((SPEC, LARGE))
        self.checks = Checks(self.fleet, self.spec)
        self._talks = [Talk(number, number % 3) for number in range(5)]
        self._num_talks = len(self._talks)
        self._busy: dict[LocalClient, tuple[str, float, asyncio.Future[None]]] = {}
        self._tasks: list[tuple[StoreTask, float, LocalClient]] = []
        self._slowness = rng.choice((0.0, 0.05, 0.25))
        self._faults = Faults(self.fleet, rng, self.spec)
        self.operator = Process(self.fleet.loop, "operator", self.fleet.directory.host)
        self._gap_s = rng.choice((0.005, 0.03, 0.15))

    def run(self) -> Outcome:
        """All of it.

        Raises:
            SimulationError: a rule was broken.
        """
        with self.fleet:
            self.fleet.run(self._live)
            self.outcome.digest = self.fleet.digest
            self.outcome.faults = self._faults.counts
        return self.outcome

    def _live(self) -> None:
        for node in self.fleet.nodes:
            for _ in range(self._random.choice((1, 2, 3))):
                self.fleet.client(node, self.spec)
        for _ in range(self._num_events):
            self.fleet.sleep(self._random.expovariate(1 / self._gap_s))
            if self._random.random() < self._faults.share:
                self._faults.next()
            else:
                self._operate()
            self._check()
        self.fleet.sleep(4.0)  # what was to be started again is
        self._check()
        self._faults.heal()
        self._rest()

    def _check(self) -> None:
        self.checks.step()
        now = self.fleet.now
        self.checks.totals()
        for client, (name, limit, done) in list(self._busy.items()):
            if done.done():
                del self._busy[client]
                done.result()
            elif now > limit and client.process.alive:
                raise SimulationError(f"{client.process.name}: {name} does not end")
            elif not client.process.alive:
                del self._busy[client]

    # operations

    def _operate(self) -> None:
        idle = [c for node in self.fleet.alive for c in node.clients if c not in self._busy]
        if not idle:
            return
        client = self._random.choice(idle)
        self._begin(client, "turn", self._random.choice(self._talks))

    def _begin(self, client: LocalClient, name: str, talk: Talk) -> asyncio.Future[None]:
        self.outcome.operations[name] = self.outcome.operations.get(name, 0) + 1
        self.fleet.note(client.process.name, name, talk.number, talk.num_blocks)
        config = self.fleet.config
        limit = 2 * config.lookup_timeout_s + config.load_timeout_s + config.store_timeout_s + 10 + 40 * self._slowness
        done = client.start(partial(self._turn, client, talk))
        self._busy[client] = (name, self.fleet.now + limit, done)
        return done

    def _turn(self, owner: LocalClient, talk: Talk, client: Client) -> None:
        """Look a prompt up, load it, store it with what was added."""
        loaded = self._load(owner, client, talk.tokens())
        if talk.num_blocks >= _BLOCKS_MAX:
            self._talks.remove(talk) if talk in self._talks else None
            self._num_talks += 1
            self._talks.append(Talk(self._num_talks, self._num_talks % 3))
            return
        talk.num_blocks += self._random.choice((0, 1, 1, 2, 4))
        tokens, paused = talk.tokens(), [0.0]
        start = self._random.choice((0, loaded))
        began = self.fleet.now
        task = client.store(tokens, self._put(self.spec.keys(tokens), paused), start_block=start)
        if self._random.random() < 0.7:
            limit = self.fleet.config.store_timeout_s + 4.0
            try:
                result = task.wait(2 * limit)
            except DeadlineExceededError:
                if self.fleet.now - began > limit + paused[0]:
                    raise SimulationError("a store does not end") from None
            else:
                self.fleet.note(owner.process.name, "stored", result.stored, result.already, result.reason)

    def _load(self, owner: LocalClient, client: Client, tokens: npt.NDArray[np.uint32]) -> int:
        config, fleet = self.fleet.config, self.fleet
        began = fleet.now
        hit = client.lookup(tokens)
        if fleet.now - began > 2 * config.lookup_timeout_s + _GRACE_S:
            raise SimulationError(f"a lookup took {fleet.now - began:.3f} s")
        self.checks.hit(hit)
        if self._random.random() < _HOLDS:
            self._hold(owner, client, hit)
        got: dict[int, npt.NDArray[np.uint8]] = {}
        paused = [0.0]
        timeout_s = self._random.choice((0.05, 1.0, config.load_timeout_s))
        began = fleet.now
        loaded = client.load(hit, self._take(got, paused), timeout_s)
        if fleet.now - began - paused[0] > timeout_s + _GRACE_S:
            raise SimulationError(f"a load of {timeout_s} s took {fleet.now - began:.3f} s")
        self.checks.loaded(hit, loaded, got)
        self.outcome.loaded += int(loaded) // self.spec.block_tokens
        fleet.note("loaded", int(loaded), "of", hit.num_tokens, loaded.miss)
        return int(loaded) // self.spec.block_tokens

    def _hold(self, owner: LocalClient, client: Client, hit: PrefixHit) -> None:
        """What is held stays, as long as it is held and the manager lives."""
        manager, seconds = owner.node.manager, self._random.choice((0.2, 2.0))
        until = self.fleet.now + seconds
        process = manager.process
        hold = client.hold(hit, seconds)
        keys = split(hit.keys_of(hit.start_block, hit.start_block + hold.num_blocks))
        self.fleet.sleep(self._random.choice((0.0, 0.1, 1.0)))
        if process is not None and manager.process is process and self.fleet.now < until:
            self.checks.held(owner.node, keys)
        if self._random.random() < _RELEASES:
            hold.release()

    def _pause(self, paused: list[float]) -> None:
        """Engines are not always quick."""
        if self._random.random() < self._slowness:
            seconds = self._random.choice((0.01, 0.3, 0.8))
            paused[0] += seconds
            self.fleet.sleep(seconds)

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

    # rest

    def _rest(self) -> None:
        began = self.fleet.now
        if any(name.startswith("manager") for name in self._faults.counts):
            # Slots that a client tries to give back to a manager that is away go back with its next store.
            for client in [client for node in self.fleet.alive for client in node.clients]:
                client.start(self._store_once)
        self._settle(_RECOVERS_S)
        self.outcome.recovered_s = self.fleet.now - began
        self.checks.whole()
        for node in self.fleet.alive:
            client = node.clients[0] if node.clients else self.fleet.client(node, self.spec)
            for talk in self._random.sample(self._talks, 2):
                self._find_all(client, talk)
        self.checks.whole()
        if self._random.random() < _ENDS:
            self._shut_down()

    def _settle(self, timeout_s: float) -> None:
        """Wait until nothing is under way and all is known."""
        until = self.fleet.now + timeout_s
        unrest = ["not looked yet"]
        while unrest:
            if self.fleet.now > until:
                raise SimulationError(f"no rest after {timeout_s} s: {unrest[:5]}")
            self.fleet.sleep(1.0)
            self._check()
            unrest = [name for name, _, _ in self._busy.values()] or self.checks.unrest()

    def _shut_down(self) -> None:
        """In order: nothing is left."""
        for node in self.fleet.alive:
            home = node.tier.home.directory
            answer = self.operator.run(Handle(node.manager).shutdown.remote)
            if not wait(self.fleet.loop, answer.future, 30.0) or home.exists():
                raise SimulationError(f"node {node.number} is not gone after its manager was shut down")

    def _store_once(self, client: Client) -> None:
        self._num_talks += 1
        tokens = Talk(self._num_talks, 0).tokens() + np.uint32(1 << 30)
        client.store(tokens, self._put(self.spec.keys(tokens), [0.0]))

    def _find_all(self, client: LocalClient, talk: Talk) -> None:
        """Each lookup is answered as the directory should, and all of it is loaded."""
        tokens = talk.tokens()
        for _ in range(3):
            self._settle(_TOLD_S)
            keys = split(self.spec.keys(tokens))
            expected = self.checks.expected(keys)
            came = client.start(partial(self._find, tokens=tokens))
            if not wait(
                self.fleet.loop, came, _GRACE_S + self.fleet.config.lookup_timeout_s + self.fleet.config.load_timeout_s
            ):
                raise SimulationError("at rest, a lookup and a load do not end")
            found, loaded = came.result()
            if found == expected and loaded == found:
                return
        if not self.fleet.storage.spoiled:
            raise SimulationError(f"{loaded} of {found} blocks loaded, {expected} are there")

    def _find(self, client: Client, tokens: npt.NDArray[np.uint32]) -> tuple[int, int]:
        hit = client.lookup(tokens)
        got: dict[int, npt.NDArray[np.uint8]] = {}
        loaded = client.load(hit, self._take(got, [0.0]))
        self.checks.hit(hit)
        self.checks.loaded(hit, loaded, got)
        return hit.num_blocks, int(loaded) // self.spec.block_tokens


def run_schedule(seed: int, num_events: int = 40) -> Outcome:
    """Run the schedule of a seed.

    Raises:
        SimulationError: a rule was broken; the message says which, where, and what led to it.
    """
    schedule = Schedule(seed, num_events)
    try:
        return schedule.run()
    except Exception as error:
        story = "\n".join(list(schedule.fleet.trace)[-_STORY_LINES:])
        text = f"{error!r}\nrepeat with: pytest tests/simulation --seed {seed} --schedules 1\n{story}"
        raise SimulationError(text) from error

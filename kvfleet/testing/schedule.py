"""A random life of a fleet: engines that store and load, faults, then quiet, and what must hold then."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvfleet.config import MIB, DriveConfig
from kvfleet.core.block import split
from kvfleet.testing.actors import Handle
from kvfleet.testing.blocking import wait
from kvfleet.testing.checks import Checks
from kvfleet.testing.drives import CAPACITY_BYTES
from kvfleet.testing.faults import Faults
from kvfleet.testing.fleet import LocalClient, LocalFleet
from kvfleet.testing.network import Weather
from kvfleet.testing.processes import Process, SimulationError
from kvfleet.testing.talks import LARGE, SPEC, Talk
from kvfleet.testing.turns import GRACE_S, Turns

__all__ = ["Outcome", "run_schedule"]

_RECOVERS_S = 400.0
_TOLD_S = 80.0  # until a call that was lost before has run out, or the claim of a node that wrote nothing
_STORY_LINES = 40
_ENDS = 0.2
_LIMITED = 0.4
_DRIVES = 0.6


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
        if random.Random(f"limit {seed}").random() < _LIMITED:
            settings["shared_bytes_max"] = MIB
        if random.Random(f"drives {seed}").random() < _DRIVES:
            settings["nvme"] = (DriveConfig(directory="/drive", max_bytes=CAPACITY_BYTES),)
        self.fleet = LocalFleet(seed, rng.choice((2, 3, 3)), weather=Weather.drawn(rng), **settings)
        self.spec = rng.choice((SPEC, LARGE))
        self.checks = Checks(self.fleet, self.spec)
        self._busy: dict[LocalClient, tuple[str, float, asyncio.Future[None]]] = {}
        self._turns = Turns(self.fleet, self.checks, self.spec, rng)
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
            self.outcome.loaded = self._turns.loaded
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
        self._begin(client, "turn", self._random.choice(self._turns.talks))

    def _begin(self, client: LocalClient, name: str, talk: Talk) -> asyncio.Future[None]:
        self.outcome.operations[name] = self.outcome.operations.get(name, 0) + 1
        self.fleet.note(client.process.name, name, talk.number, talk.num_blocks)
        config = self.fleet.config
        limit = (
            2 * config.lookup_timeout_s
            + config.load_timeout_s
            + config.store_timeout_s
            + 10
            + 40 * self._turns.slowness
        )
        done = client.start(partial(self._turns.turn, client, talk))
        self._busy[client] = (name, self.fleet.now + limit, done)
        return done

    # rest

    def _rest(self) -> None:
        began = self.fleet.now
        if any(name.startswith("manager") for name in self._faults.counts):
            # Slots that a client tries to give back to a manager that is away go back with its next store.
            for client in [client for node in self.fleet.alive for client in node.clients]:
                client.start(self._turns.store_once)
        self._settle(_RECOVERS_S)
        self.outcome.recovered_s = self.fleet.now - began
        self.checks.whole()
        for node in self.fleet.alive:
            client = node.clients[0] if node.clients else self.fleet.client(node, self.spec)
            for talk in self._random.sample(self._turns.talks, 2):
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

    def _find_all(self, client: LocalClient, talk: Talk) -> None:
        """Each lookup is answered as the directory should, and all of it is loaded."""
        tokens = talk.tokens()
        for _ in range(3):
            self._settle(_TOLD_S)
            keys = split(self.spec.keys(tokens))
            expected = self.checks.expected(keys)
            came = client.start(partial(self._turns.find, tokens=tokens))
            if not wait(
                self.fleet.loop, came, GRACE_S + self.fleet.config.lookup_timeout_s + self.fleet.config.load_timeout_s
            ):
                raise SimulationError("at rest, a lookup and a load do not end")
            found, loaded = came.result()
            if found == expected and loaded == found:
                return
        if not self.fleet.storage.spoiled and not self.fleet.media.rotten:
            raise SimulationError(f"{loaded} of {found} blocks loaded, {expected} are there")


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

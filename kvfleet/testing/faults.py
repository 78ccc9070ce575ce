"""What goes wrong in a simulated fleet."""

from __future__ import annotations

import random
from collections.abc import Callable

from kvfleet.core.block import KEY_BYTES
from kvfleet.core.layout import ModelSpec
from kvfleet.testing.actors import Handle
from kvfleet.testing.blocking import wait
from kvfleet.testing.fleet import LocalFleet, LocalNode
from kvfleet.testing.processes import Process, SimulationError

__all__ = ["Faults"]


class Faults:
    """Faults of one run: which kinds there are, and how often, is drawn once; then which one comes next.

    Attributes:
        counts: of those that came, by name.
    """

    def __init__(self, fleet: LocalFleet, rng: random.Random, spec: ModelSpec) -> None:
        self.counts: dict[str, int] = {}
        self.fleet = fleet
        self._random = rng
        self._spec = spec
        self._cuts: list[tuple[str, str]] = []
        kinds: list[Callable[[], str | None]] = [
            self._kill_manager, self._kill_manager, self._kill_directory, self._lose_node, self._kill_client,
            self._cut, self._mend,
            self._swizzle, self._slow, self._storage, self._spoil, self._stop, self._drain, self._expire,
        ]  # fmt: skip
        if fleet.config.nvme:
            kinds += [self._drive, self._drive, self._rot]
        self._kinds = [kind for kind in kinds if rng.random() < 0.5]
        self.share = rng.choice((0.0, 0.05, 0.2)) if self._kinds else 0.0

    def next(self) -> None:
        """Something goes wrong."""
        name = self._random.choice(self._kinds)()
        if name is not None:
            self.counts[name] = self.counts.get(name, 0) + 1
            self.fleet.note("fault", name)

    def heal(self) -> None:
        """What is broken works again, and stays so."""
        self.fleet.note("heal")
        self.fleet.network.calm()
        self.fleet.storage.mood = "well"
        self.fleet.media.heal()
        self._start_directory()
        for node in self.fleet.alive:
            self._start_manager(node)
            assert node.manager.process is not None
            node.manager.process.resume()
            if node.tier is not None:
                node.manager.process.run(node.tier.resume)

    def _later(self, seconds: float, function: Callable[..., object], *args: object) -> None:
        self.fleet.loop.call_later(seconds, function, *args)

    def _some_node(self) -> LocalNode:
        return self._random.choice(self.fleet.alive)

    def _kill_manager(self) -> str | None:
        node = self._some_node()
        if node.manager.process is None:
            return None
        self.fleet.kill_manager(node)
        wiped = self._random.random() < 0.15
        if wiped:
            self.fleet.wipe(node)
        self._later(self._random.choice((0.0, 0.2, 2.0)), self._start_manager, node)
        return "manager killed, arena lost" if wiped else "manager killed"

    def _start_manager(self, node: LocalNode) -> None:
        if node.alive and node.manager.process is None:
            self.fleet.start_manager(node)

    def _kill_directory(self) -> str | None:
        if self.fleet.directory.process is None:
            return None
        self.fleet.kill_directory()
        self._later(self._random.choice((0.0, 0.3, 3.0)), self._start_directory)
        return "directory killed"

    def _start_directory(self) -> None:
        if self.fleet.directory.process is None:
            self.fleet.start_directory()

    def _lose_node(self) -> str | None:
        if len(self.fleet.alive) < 2 or len(self.fleet.nodes) > 6:
            return None
        self.fleet.lose(self._some_node(), self._random.choice((0.0, 1.0, 10.0)))
        node = self.fleet.add_node()
        self.fleet.client(node, self._spec)
        return "node lost"

    def _kill_client(self) -> str | None:
        node = self._some_node()
        if not node.clients:
            return None
        self._random.choice(node.clients).kill()
        self.fleet.client(node, self._spec)
        return "client killed"

    def _hosts(self) -> list[str]:
        return [self.fleet.directory.host, *(node.host for node in self.fleet.alive)]

    def _cut(self) -> str | None:
        one, other = self._random.sample(self._hosts(), 2)
        self.fleet.network.cut(one, other)
        self._cuts.append((one, other))
        return "link cut"

    def _mend(self) -> str | None:
        if not self._cuts:
            return None
        self.fleet.network.mend(*self._cuts.pop(self._random.randrange(len(self._cuts))))
        return "link mended"

    def _swizzle(self) -> str | None:
        """Links stop one by one, and come back in another order."""
        hosts = self._hosts()
        links = [(a, b) for i, a in enumerate(hosts) for b in hosts[i + 1 :]]
        for order, act in ((0.0, self.fleet.network.cut), (1.0, self.fleet.network.mend)):
            self._random.shuffle(links)
            for number, link in enumerate(links):
                self._later(order + number * self._random.uniform(0.01, 0.2), act, *link)
        return "links swizzled"

    def _slow(self) -> str | None:
        one, other = self._random.sample(self._hosts(), 2)
        self.fleet.network.slow(one, other, self._random.choice((0.0, 0.2, 3.0)))
        return "link slowed"

    def _storage(self) -> str | None:
        self.fleet.storage.mood = self._random.choice(("well", "slow", "failing", "hanging", "full"))
        return f"storage {self.fleet.storage.mood}"

    def _spoil(self) -> str | None:
        storage = self.fleet.storage
        path = self._random.choice((storage.lose, storage.damage))()
        return None if path is None else "object spoiled"

    def _expire(self) -> str | None:
        return "objects expired" if self.fleet.storage.expire() else None

    def _drive(self) -> str | None:
        """A drive changes: how it answers, and what it takes."""
        medium = self.fleet.media.of(self._some_node().host)
        medium.mood = self._random.choice(("well", "well", "slow", "failing", "hanging"))
        medium.uses_wanted = self._random.choice((0, 0, 1, 2, None))
        return f"drive {medium.mood}"

    def _rot(self) -> str | None:
        return "block rotten" if self.fleet.media.damage(self._some_node().host) else None

    def _drain(self) -> str | None:
        """A node is asked to leave: it does, or it stays after all."""
        node = self._some_node()
        if node.tier is None or self.fleet.config.shared_url is None:
            return None
        operator = Process(self.fleet.loop, "operator", self.fleet.directory.host)
        operator.run(self.fleet.loop.spawn, lambda: self._empty(node))
        return "node drained"

    def _empty(self, node: LocalNode) -> None:
        held = _keys(node)
        process, storage = node.manager.process, self.fleet.storage
        timeout_s, bytes_max = self._random.choice((0.2, 3.0)), self._random.choice((None, 1 << 18))
        answer = Handle(node.manager).drain.remote(timeout_s, bytes_max)
        came = wait(self.fleet.loop, answer.future, 10.0) and answer.future.exception() is None
        if not came or process is None or process is not node.manager.process:
            return
        drained = answer.future.result()
        here = _keys(node)
        there = {path.split("/")[-1].split(".")[0] for path in storage.objects | dict.fromkeys(storage.spoiled)}
        missing = sum(key.hex() not in there for key in held & here)
        self.fleet.note("drained", drained)
        deleted = self.fleet.config.shared_bytes_max is not None  # then some may be, as there are too many
        if missing > drained.left_blocks and not deleted:
            raise SimulationError(f"{missing} blocks of a drained node are not in the shared tier: {drained}")
        if self._random.random() < 0.5:
            process.run(node.tier.resume)

    def _stop(self) -> str | None:
        process = self._some_node().manager.process
        if process is None or process.stopped:
            return None
        process.stop()
        self._later(self._random.choice((0.1, 1.5, 6.0)), process.resume)
        return "manager stopped"


def _keys(node: LocalNode) -> set[bytes]:
    """Of the blocks that a node has, in memory or on its drive."""
    tier = node.tier
    on_drive = () if tier.nvme is None else tier.nvme.records()
    return {record.key for record in tier.dram.placement.records()} | {record[:KEY_BYTES] for record in on_drive}

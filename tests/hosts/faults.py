"""Faults for a fleet on hosts: a script drawn from a seed, and the hand that carries it out."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tests.conftest import MIB
from tests.hosts.agent import Agent
from tests.hosts.asking import actor_processes, live_nodes
from tests.hosts.hosts import Host, Hosts

__all__ = ["WARM_S", "Fault", "Hand", "script"]

WARM_S = 8.0  # without faults, at the start
CALM_S = 12.0  # likewise, at the end
SLOW_BYTES_PER_S = 2 * MIB
RETRY_S = 1.0  # of a fault that found nothing to hurt: all processes of its kind are starting
SPARE_THE_HEAD = {"kill_raylet", "kill_host", "cut_off"}
EXPIRE_EVERY_S = 1.0
EXPIRE_ABOVE = 0.6  # full: objects expire, oldest first, as a bucket's rule does it


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong at a time, on a host, for a while.

    Attributes:
        at_s: since the start.
        kind: name of a method of `Hand`.
        host: index of the host.
        lasts_s: until it is undone; 0 for what nobody undoes.
    """

    at_s: float
    kind: str
    host: int
    lasts_s: float


def script(seed: int, seconds: float, num_hosts: int) -> list[Fault]:
    """Faults from `WARM_S` on until `CALM_S` before the end: each kind comes once before any comes again.

    The head is never killed or cut off for long: that would be the end of the Ray cluster, not of a part of it.
    """
    rng = random.Random(seed)
    stop_s = 20.0 if seconds >= 300 else 6.0
    kinds = {
        "kill_manager": 0.0,
        "kill_directory": 0.0,
        "kill_raylet": 0.0,
        "stop_manager": stop_s,
        "cut": 4.0,
        "slow": 4.0,
        "fill_disk": 5.0,
    }
    if seconds >= 300:
        kinds |= {"kill_host": 0.0, "cut_off": 45.0}
    gap_s = 8.0 if seconds >= 300 else 3.5
    faults: list[Fault] = []
    at_s, round_of = WARM_S, list(kinds)
    rng.shuffle(round_of)
    while True:
        if not round_of:
            round_of = list(kinds)
            rng.shuffle(round_of)
        kind = round_of.pop()
        lasts_s = kinds[kind] * rng.uniform(0.8, 1.0)
        if at_s + lasts_s > seconds - CALM_S:
            return faults
        first = 1 if kind in SPARE_THE_HEAD else 0
        faults.append(Fault(round(at_s, 1), kind, rng.randrange(first, num_hosts), round(lasts_s, 1)))
        at_s += gap_s * rng.uniform(0.7, 1.3)


class Hand:
    """Carries a script out, and does what a cluster's operator does: starts Ray nodes that have ended.

    Attributes:
        started: seconds since the epoch.
        done: faults by kind.
        healed_at: when the last fault was undone, seconds since the epoch.
        log: what was done, with its time.
    """

    def __init__(self, hosts: Hosts, control: Agent, faults: list[Fault]) -> None:
        self._hosts = hosts
        self._control = control
        self._faults = list(faults)
        self._undo: list[tuple[float, str, Callable[[], None]]] = []
        self.started = time.time()
        self._expire_at_s = 0.0
        self.done: Counter[str] = Counter()
        self.node_starts = 0
        self.healed_at = 0.0
        self.log: list[tuple[float, str]] = []

    @property
    def passed_s(self) -> float:
        """Seconds since the start."""
        return time.time() - self.started

    @property
    def finished(self) -> bool:
        """Whether all faults are done and undone, and all Ray nodes run, as Ray sees it too."""
        if self._faults or self._undo or not all(host.up for host in self._hosts.hosts):
            return False
        nodes = self._control.call(live_nodes)
        return {host.address: 1 for host in self._hosts.hosts} == {at: len(ids) for at, ids in nodes.items()}

    def tend(self) -> None:
        """Do what is due. Call it often."""
        passed_s = self.passed_s
        while self._undo and self._undo[0][0] <= passed_s:
            _, what, undo = self._undo.pop(0)
            undo()
            self._note(what)
        while self._faults and self._faults[0].at_s <= passed_s:
            self._do(self._faults.pop(0), passed_s)
        for host in self._hosts.hosts:
            if host.down:
                assert host is not self._hosts.head, host.log.read_text()
                self._hosts.begin_node(host)
                self.node_starts += 1
                self._note(f"start node {host.name}")
        if passed_s > self._expire_at_s:
            self._expire()
            self._expire_at_s = passed_s + EXPIRE_EVERY_S

    def _do(self, fault: Fault, passed_s: float) -> None:
        """Do it, on another host if there is nothing to hurt on that one, or a little later."""
        for host in self._candidates(fault):
            try:
                undo = getattr(self, fault.kind)(host)
            except ProcessLookupError:
                continue
            self.done[fault.kind] += 1
            self._note(f"{fault.kind} {host.name}")
            if undo is not None:
                self._undo.append((passed_s + fault.lasts_s, f"end of {fault.kind} {host.name}", undo))
                self._undo.sort(key=lambda entry: entry[0])
            return
        self._faults.append(replace(fault, at_s=passed_s + RETRY_S))
        self._faults.sort(key=lambda entry: entry.at_s)

    def _candidates(self, fault: Fault) -> list[Host]:
        hosts = self._hosts.hosts
        order = hosts[fault.host :] + hosts[: fault.host]
        return [host for host in order if host is not self._hosts.head or fault.kind not in SPARE_THE_HEAD]

    def _note(self, what: str) -> None:
        self.healed_at = time.time()
        self.log.append((round(self.passed_s, 1), what))

    # the faults: each returns what undoes it

    def kill_manager(self, host: Host) -> None:
        """Ray starts it again."""
        self._hosts.kill(self._manager(host))

    def kill_directory(self, _: Host) -> None:
        """Ray starts it again, empty."""
        process = self._actor(None, "directory")
        places = [host.name for host in self._hosts.hosts if process in host.processes()]
        self._hosts.kill(process)
        self._note(f"the directory was on {''.join(places)}")

    def kill_raylet(self, host: Host) -> None:
        """The host's Ray node ends, and all of the fleet that hangs on it."""
        raylet = host.raylet
        if raylet is None:
            raise ProcessLookupError(host.name)
        self._hosts.kill(raylet)

    def kill_host(self, host: Host) -> None:
        """Everything on it ends at once."""
        self._hosts.kill_host(host)

    def stop_manager(self, host: Host) -> Callable[[], None]:
        """It is there, and does not answer."""
        process = self._manager(host)
        self._hosts.stop(process)
        return partial(self._hosts.go_on, process)

    def cut(self, host: Host) -> Callable[[], None]:
        """No packet comes through."""
        self._hosts.cut(host)
        return partial(self._hosts.heal, host)

    cut_off = cut  # for so long that Ray gives the node up: it ends when it hears of that

    def slow(self, host: Host) -> Callable[[], None]:
        """Few packets come through."""
        self._hosts.slow(host, SLOW_BYTES_PER_S)
        return partial(self._hosts.heal, host)

    def fill_disk(self, _: Host) -> Callable[[], None]:
        """The shared tier has no room left."""
        assert self._hosts.disk is not None
        filler = self._hosts.disk / f"filler-{self.done['fill_disk']}"  # two can overlap
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):  # until there is no room
            while file.write(bytes(MIB)):
                pass
        return filler.unlink

    # helpers

    def _actor(self, host: Host | None, *names: str) -> int:
        """The process of the first of these actors that runs, on a host if one is given."""
        actors = self._control.call(actor_processes)
        running = [actors[name] for name in names if actors.get(name)]
        if host is not None:
            running = [process for process in running if process in host.processes()]
        if not running:
            raise ProcessLookupError(names)
        return running[0]

    def _manager(self, host: Host) -> int:
        nodes = self._control.call(live_nodes).get(host.address, [])
        return self._actor(host, *(f"tier-manager-{node}" for node in nodes))

    def _expire(self) -> None:
        """Remove the oldest objects while the disk is fuller than it may be."""
        disk = self._hosts.disk
        assert disk is not None
        if any(disk.glob("filler-*")):
            return
        objects = sorted(_ages(disk))
        excess = sum(size for _, size, _ in objects) - EXPIRE_ABOVE * self._hosts.disk_bytes
        for _, size, path in objects:
            if excess <= 0:
                return
            path.unlink(missing_ok=True)
            excess -= size


def _ages(disk: Path) -> list[tuple[float, int, Path]]:
    """Time of the last change, size and path of all objects."""
    found = []
    for path in disk.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                state = path.stat()
                found.append((state.st_mtime, state.st_size, path))
    return found

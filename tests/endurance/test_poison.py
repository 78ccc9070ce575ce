"""Poison: what a block holds follows from its key. Whatever happens to media, nodes and calls, no other byte is read.

What was done, and how often, is in the report that `--junitxml` writes.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from kvfleet.client import Client
from kvfleet.config import KIB, MIB, DriveConfig, FleetConfig
from kvfleet.core.layout import ModelSpec
from kvfleet.errors import DeadlineExceededError, TierUnavailableError
from kvfleet.node.arenadir import directory_for
from kvfleet.node.messages import Source
from tests.conftest import wait_for
from tests.endurance.media import FAULTS, Media
from tests.rig import Rig, delayed, failing
from tests.workload import kv, load, model, prompt

OPERATIONS = 100_000  # blocks stored, or asked for
NODES = 2
WORKERS = 2  # of each node
PROMPTS = 80
BLOCKS_MAX = 24
CALLS = ("reserve", "commit", "load", "step", "fetch", "window", "reserve:reply", "commit:reply")


class PoisonRig(Rig):
    """Nodes with two drives each."""

    def __init__(self, root: Path, drives: Path, **settings: Any) -> None:
        self.drives = drives
        for number in range(NODES):
            for drive in self.drives_of(number):
                Path(drive.directory).mkdir(parents=True, mode=0o700)
        super().__init__(root, NODES, nvme=self.drives_of(0), **settings)

    def drives_of(self, number: int) -> tuple[DriveConfig, ...]:
        names = (f"{number}{letter}" for letter in "ab")
        return tuple(
            DriveConfig(directory=str(self.drives / name), max_bytes=9 * MIB, dwpd=1000.0, rated_bytes=1 << 40)
            for name in names
        )

    @override
    def config_of(self, number: int) -> FleetConfig:
        return replace(self.config, nvme=self.drives_of(number))

    def lose(self, number: int) -> None:
        """A node dies with its memory; its drives stay."""
        self.kill(number)
        shutil.rmtree(directory_for(Path(self.config.arena_root), self.config.name, self.node_id(number)))


class Poison:
    """Engines at work, until so many blocks were stored or asked for, and what happens to them meanwhile."""

    def __init__(self, rig: PoisonRig, media: Media, seed: int, spec: ModelSpec) -> None:
        self.rig = rig
        self.spec = spec
        self.shared = rig.drives.with_name("shared")
        self.media = media
        self.seed = seed
        self.chance = random.Random(seed)
        self.operations = 0
        self.came: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.problems: list[BaseException] = []
        self._mutex = threading.Lock()
        self.possible = [
            self.restart_manager, self.lose_node, self.restart_fleet, self.lose_directory, self.lose_objects,
            self.spoil_objects, self.spoil_drives, self.bad_calls,
        ]  # fmt: skip

    def count(self, operations: int, came: dict[str, int]) -> None:
        with self._mutex:
            self.operations += operations
            self.came.update(came)

    def work(self, worker: int) -> None:
        """One engine: loads prompts, looks at every byte, and mostly stores what did not come.

        The ranks of one model want the same prompts, one node's other than another's.
        """
        number_of_engine, shard = divmod(worker, self.spec.layout.num_shards)
        chance = random.Random(f"{self.seed} {number_of_engine}")
        client = self.rig.client(self.spec, number_of_engine % NODES, shard)
        try:
            while self.operations < OPERATIONS and not self.problems:
                number = int(PROMPTS * chance.random() ** 2)
                num_blocks = chance.randint(1, BLOCKS_MAX)
                tokens = prompt(num_blocks, number)
                loaded = load(client, tokens, 5.0)
                self.count(num_blocks, {outcome.value: blocks for outcome, blocks in loaded.counts.items()})
                if loaded < len(tokens) and chance.random() < 0.6:
                    self.count(num_blocks, {"stored": self.store(client, tokens)})
        except BaseException as error:  # noqa: BLE001 - raised again in the test's own thread
            self.problems.append(error)

    def store(self, client: Client, tokens: Any) -> int:
        """Store a prompt, or as much of it as can be. Returns how many blocks were stored."""
        try:
            return client.store(tokens, kv(self.spec, tokens, client.shard)).wait(20).stored
        except DeadlineExceededError:
            return 0

    def run(self) -> None:
        """Have engines at work and things happen, until there were enough operations."""
        threads = [threading.Thread(target=self.work, args=(number,)) for number in range(NODES * WORKERS)]
        for thread in threads:
            thread.start()
        try:
            self.media.well = False
            while any(thread.is_alive() for thread in threads):
                self.happen()
                goal = self.operations + self.chance.randrange(1000, 2500)
                wait_for(
                    lambda goal=goal: self.operations >= min(goal, OPERATIONS) or bool(self.problems),  # type: ignore[misc]
                    "engines are at work", 60,
                )  # fmt: skip
        finally:
            self.media.well = True
            for thread in threads:
                thread.join()
        if self.problems:
            raise self.problems[0]

    def happen(self) -> None:
        """Something happens to the fleet."""
        event = self.chance.choice([*self.possible, self.bad_calls, self.bad_calls])
        self.events[event.__name__] += 1
        event()

    def restart_manager(self) -> None:
        number = self.chance.randrange(NODES)
        self.rig.kill(number)
        self.rig.start(number)

    def lose_node(self) -> None:
        number = self.chance.randrange(NODES)
        self.rig.lose(number)
        self.rig.start(number)

    def restart_fleet(self) -> None:
        for number in range(NODES):
            self.rig.lose(number)
        self.rig.start_directory()
        for number in range(NODES):
            self.rig.start(number)

    def lose_directory(self) -> None:
        self.rig.start_directory()

    def _objects(self) -> list[Path]:
        found = sorted(self.shared.rglob("*.arrow"))
        return self.chance.sample(found, min(len(found), 10))

    def lose_objects(self) -> None:
        for path in self._objects():
            path.unlink(missing_ok=True)

    def spoil_objects(self) -> None:
        for path in self._objects():
            try:
                data = path.read_bytes()
                if data:
                    path.write_bytes(self.media.flipped(data))
            except FileNotFoundError:
                continue

    def spoil_drives(self) -> None:
        drive = self.chance.choice(sorted(self.rig.drives.iterdir()))
        if not (drive / "blocks").exists():
            return  # its node died before it was made
        with (drive / "blocks").open("r+b") as file:
            size = file.seek(0, 2)
            for _ in range(10 if size else 0):
                file.seek(self.chance.randrange(size))
                file.write(b"spoilt")

    def bad_calls(self) -> None:
        number = self.chance.randrange(NODES)
        self.rig.faults = {
            f"{number}.{name}": failing(TierUnavailableError("dram", "away"))
            if self.chance.random() < 0.3
            else delayed(0.01)
            for name in self.chance.sample(CALLS, 3)
        }
        done = self.operations + 300
        wait_for(lambda: self.operations >= min(done, OPERATIONS) or bool(self.problems), "engines are at work", 60)
        self.rig.faults = {}


def bad(rig: PoisonRig, number: int, *, repair: bool) -> set[str]:
    """What the doctor finds to be bad on a node, by the first word of its name."""
    checkup = rig.run(rig.managers[number].doctor(30.0, repair=repair), 60)
    return {check.name.split()[0] for check in checkup.checks if check.state == "bad"}


@pytest.mark.timeout(600)
def test_no_byte_is_wrong(arena_root, tmp_path, monkeypatch, seed, record_testsuite_property):
    media = Media(seed, monkeypatch)
    chance = random.Random(seed)
    settings = {
        "dram_bytes": 2 * MIB,
        "shared_url": f"file://{tmp_path}/shared",
        "shared_bytes_max": 6 * MIB,
        "shared_probe_s": 0.2,
        "manifest_interval_s": 0.5,
        "shared_codec": chance.choice(["raw", "zstd"]),
        "nvme_codec": chance.choice(["raw", "zstd"]),
        "window_bytes_min": 64 * KIB,
        "heartbeat_s": 0.2,
    }
    spec = model(8, num_shards=chance.choice([1, 2]))
    begun = time.monotonic()
    with PoisonRig(arena_root, tmp_path / "drives", **settings) as rig:
        poison = Poison(rig, media, seed, spec)
        poison.run()
        took_s = time.monotonic() - begun
        wait_for(lambda: all(d.works for n in rig.managers for d in rig.status(n).drives), "the drives are open", 90)
        assert not any(bad(rig, number, repair=True) & {"books"} for number in rig.managers)
        assert not any(
            bad(rig, number, repair=False) & {"arena", "blocks", "books", "drive"} for number in rig.managers
        )
        clients = [rig.client(spec, number, spec.layout.num_shards - 1) for number in range(NODES)]
        for number in range(PROMPTS):
            for client in clients:
                load(client, prompt(BLOCKS_MAX, number))
    done = (
        f"{poison.operations} operations, {took_s:.0f} s: {dict(poison.came)} {dict(poison.events)} {dict(media.done)}"
    )
    record_testsuite_property("poison", done)
    assert poison.operations >= OPERATIONS
    assert min(poison.came[source.value] for source in Source) > OPERATIONS // 500, done
    assert min(poison.events[event.__name__] for event in poison.possible) > 0, done
    assert min(media.done[fault] for fault in FAULTS) > 0, done

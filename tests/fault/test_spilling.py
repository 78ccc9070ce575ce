"""Copies from the arena to drives that refuse, fail, hang and lose what they had. No drive is real here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest

from kvfleet.config import KIB, MIB, FleetConfig
from kvfleet.copying import checksum
from kvfleet.core.block import BlockKey, split
from kvfleet.core.placement import LowerTier, NewBlock, Transfer
from kvfleet.errors import CorruptBlockError, TierError, TierFullError, TierUnavailableError
from kvfleet.node import spilling
from kvfleet.node.arena import Arena
from kvfleet.node.dram import DramTier, Incoming
from kvfleet.node.nvme import Stored
from kvfleet.node.records import key_fingerprint
from kvfleet.node.spilling import Spiller
from tests.workload import block, model, namespace, prompt

SPEC = model()
KEYS = split(SPEC.keys(prompt(16)))
NUM_BYTES = 64 * KIB


class Drives:
    """What a `Spiller` sees of the drives."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.opened.set()
        self.kept: dict[tuple[BlockKey, int], tuple[Stored, BlockKey | None, bytes]] = {}
        self.writes: list[BlockKey] = []
        self.errors: list[TierError] = []
        self.takes = True
        self.answers = asyncio.Event()
        self.answers.set()
        self.now = self.most = 0
        self.num_working = 1

    def admits(self, num_bytes: int, uses: int, _expected_uses: float | None = None) -> bool:
        assert num_bytes == NUM_BYTES
        return self.takes or uses > 0

    def find(self, key: BlockKey, shard: int) -> Stored | None:
        return self.kept[key, shard][0] if (key, shard) in self.kept else None

    async def write(
        self, stored: Stored, parent: BlockKey | None, source: Any, itemsize: int, check: Callable[[], bool]
    ) -> bool:
        assert itemsize == SPEC.layout.itemsize
        self.writes.append(stored.key)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(0)
            await self.answers.wait()
            if self.errors:
                raise self.errors.pop(0)
            if check():
                self.kept[stored.key, stored.shard] = (stored, parent, source.tobytes())
            return check()
        finally:
            self.now -= 1


class Setting:
    """An arena with room for 64 blocks, a spiller, and drives."""

    def __init__(self, arena: Arena, directory: Any) -> None:
        self.drives = Drives()
        self.dram = DramTier(arena, directory, lower={"nvme": self.gate}, now=time.monotonic)
        self.spiller = Spiller(self.dram, self.drives, FleetConfig(heartbeat_s=0.01))  # type: ignore[arg-type]
        self.moved = 0
        self.spiller.on_moved = self._count

    def gate(self, num_bytes: int, uses: int, _expected_uses: float | None) -> bool:
        return self.spiller.takes(num_bytes, uses)

    def _count(self) -> None:
        self.moved += 1

    def store(self, *indexes: int) -> None:
        """Commit blocks of the prompt."""
        for index in indexes:
            new = NewBlock(KEYS[index], 0, KEYS[index - 1] if index else None, NUM_BYTES)
            [granted] = self.dram.reserve([Incoming(new, index)], namespace(SPEC), 0).granted
            view = self.dram.view(granted.slot, NUM_BYTES)
            np.copyto(view, block(SPEC, KEYS[index]).reshape(-1).view(np.uint8))
            assert self.dram.commit(granted.slot, granted.generation, checksum(view))
        self.spiller.wake()

    def transfers(self, *indexes: int) -> list[Transfer]:
        """Demotions of blocks, as an admission asks for them."""
        return [self.dram.placement._saves.begin("demote", "nvme", KEYS[index], 0) for index in indexes]

    @property
    def saved(self) -> list[int]:
        return sorted(KEYS.index(key) for key, _ in self.dram.placement.saved_records("nvme"))

    async def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, "it never comes true"
            await asyncio.sleep(0.001)

    async def idle(self) -> None:
        """Nothing waits for a drive, or is on its way."""
        await self.until(lambda: not self.dram.placement.num_unsaved("nvme"))


Scenario = Callable[[Setting], Coroutine[Any, Any, None]]


@pytest.fixture
def play(arena_root: Any) -> Iterator[Callable[[Scenario], None]]:
    """Run a scenario beside the spiller's loop."""
    directory = arena_root / "node"
    arena = Arena.create(directory, 4 * MIB)

    async def run(scenario: Scenario) -> None:
        setting = Setting(arena, directory / "namespaces")
        running = asyncio.create_task(setting.spiller.run())
        try:
            await scenario(setting)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            setting.drives.answers.set()
            await setting.spiller.settle()
        assert setting.dram.placement.audit() == []
        assert setting.dram.placement.in_transfer == 0

    yield lambda scenario: asyncio.run(run(scenario))
    arena.close()


def test_what_is_committed_is_written_with_all_that_is_known_of_it(play):
    async def scenario(setting: Setting) -> None:
        setting.drives.opened.clear()
        setting.store(0, 1, 2)
        await asyncio.sleep(0.03)
        assert setting.drives.writes == []
        setting.drives.opened.set()
        await setting.until(lambda: setting.saved == [0, 1, 2])
        stored, parent, data = setting.drives.kept[KEYS[1], 0]
        expected = block(SPEC, KEYS[1]).tobytes()
        assert (data, parent) == (expected, KEYS[0])
        assert stored == Stored(
            KEYS[1], 0, NUM_BYTES, checksum(np.frombuffer(expected, np.uint8)),
            namespace(SPEC).namespace_id, 1, key_fingerprint(KEYS[0]),
        )  # fmt: skip
        assert setting.drives.kept[KEYS[0], 0][1] is None
        assert setting.moved == 3

    play(scenario)


def test_write_behind_takes_an_eighth_of_the_arena_at_once(play):
    async def scenario(setting: Setting) -> None:
        setting.drives.answers.clear()
        setting.store(*range(16))
        await setting.until(lambda: setting.drives.now == 8)
        await asyncio.sleep(0.03)
        assert (setting.drives.most, setting.dram.placement.num_in_transfer("nvme")) == (8, 8)
        setting.drives.answers.set()
        await setting.until(lambda: setting.saved == list(range(16)))
        assert setting.drives.most == 8

    play(scenario)


def test_what_is_refused_waits_for_its_next_use_or_a_flush(play):
    async def scenario(setting: Setting) -> None:
        setting.drives.takes = False
        setting.store(0, 1, 2)
        await setting.idle()
        assert setting.drives.writes == []
        slot = setting.dram.placement.resident(KEYS[1], 0)
        setting.dram.arena.records.touch(np.array([slot]), time.monotonic_ns())  # as a reader does
        await setting.until(lambda: setting.saved == [1])
        setting.drives.takes = True
        await setting.spiller.flush(5.0)
        assert setting.saved == [0, 1, 2]

    play(scenario)


@pytest.mark.parametrize(
    ("error", "tries"), [(TierUnavailableError("nvme", "EIO"), 2), (TierFullError("nvme", "ENOSPC"), 1)]
)
def test_a_drive_that_failed_is_tried_again_a_full_one_is_not(play, error, tries):
    async def scenario(setting: Setting) -> None:
        setting.drives.errors.append(error)
        setting.store(0)
        await setting.idle()
        assert setting.drives.writes == [KEYS[0]] * tries
        assert setting.saved == [0][: tries - 1]

    play(scenario)


def test_a_copy_that_was_lost_at_once_is_not_counted_on(play):
    async def scenario(setting: Setting) -> None:
        setting.drives.find = lambda *_: None  # type: ignore[method-assign]
        setting.store(0)
        await setting.idle()
        assert (setting.drives.writes, setting.saved) == ([KEYS[0]], [])

    play(scenario)


def test_wrong_bytes_in_dram_are_dropped(play):
    async def scenario(setting: Setting) -> None:
        setting.drives.errors.append(CorruptBlockError("dram", "checksum mismatch"))
        setting.store(0)
        await setting.idle()
        assert setting.dram.placement.records() == []
        assert setting.dram.holdings.audit() == []

    play(scenario)


def test_a_slot_that_was_given_to_another_meanwhile_is_not_believed(play):
    async def scenario(setting: Setting) -> None:
        setting.drives.answers.clear()
        setting.store(0)
        await setting.until(lambda: setting.drives.now == 1)
        setting.dram.drop(KEYS[0])
        setting.store(0)  # the same block, in another slot or the same, of another generation
        setting.drives.answers.set()
        await setting.until(lambda: setting.saved == [0])
        assert setting.drives.writes == [KEYS[0]] * 2

    play(scenario)


def test_a_drive_that_hangs_keeps_nobody_waiting_twice(play, monkeypatch):
    monkeypatch.setattr(spilling, "_DEMOTION_TIMEOUT_S", 0.02)
    lower: LowerTier = "nvme"

    async def scenario(setting: Setting) -> None:
        setting.drives.takes = False
        setting.store(0, 1)
        await setting.idle()
        setting.drives.answers.clear()
        setting.drives.takes = True
        assert setting.spiller.takes(NUM_BYTES, 0)
        await setting.spiller.move(setting.transfers(0, 1))
        assert setting.dram.placement.in_transfer == 0
        assert not setting.spiller.takes(NUM_BYTES, 0)
        assert setting.dram.placement.unsaved(lower) == (2, 2 * NUM_BYTES)
        setting.drives.answers.set()  # what was begun comes to an end: the drives would tell of it
        await setting.until(lambda: len(setting.drives.kept) == 2)
        await setting.until(lambda: setting.spiller.takes(NUM_BYTES, 0))
        assert setting.saved == []

    play(scenario)


def test_demotions_do_not_wait_for_write_behind(play):
    async def scenario(setting: Setting) -> None:
        setting.drives.takes = False
        setting.store(*range(16))
        await setting.idle()
        await setting.spiller.move(setting.transfers(*range(16)))
        assert (setting.saved, setting.drives.most) == (list(range(16)), 16)
        await setting.spiller.move([])

    play(scenario)


def test_no_more_is_demoted_at_once_than_the_drives_queue(play):
    async def scenario(setting: Setting) -> None:
        setting.drives.takes = False
        setting.store(*range(16))
        await setting.idle()
        setting.spiller._demoted_bytes_max = 3 * NUM_BYTES
        await setting.spiller.move(setting.transfers(*range(16)))
        assert (setting.saved, setting.drives.most) == (list(range(16)), 3)

    play(scenario)


def test_a_flush_ends_when_no_drive_takes_more_or_its_time_is_up(play):
    async def scenario(setting: Setting) -> None:
        setting.drives.takes = False
        setting.store(0, 1)
        await setting.spiller.flush(5.0)
        assert setting.saved == []
        setting.drives.takes = True
        setting.drives.answers.clear()
        await setting.spiller.flush(0.05)
        assert (setting.saved, setting.drives.now) == ([], 2)

    play(scenario)

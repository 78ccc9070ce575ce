"""What every tier must hold to when processes die, media fail, bytes change and threads race."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from kvfleet.errors import CorruptBlockError, TierFullError, TierUnavailableError
from kvfleet.node.tier import Tier
from kvfleet.testing.tiersuite import TierSuite, content, record_of

__all__ = ["TierFaults"]

_PATIENCE_S = 60.0
_FAR = 1 << 20  # a number that no other block has


class TierFaults(TierSuite):
    """The part of `TierContract` that is about faults."""

    def test_made_again(self, root: Path) -> None:
        """What a persistent tier held when it was closed is there again."""
        if not self.persistent:
            return
        with self.make(root) as tier:
            records = self.fill(tier, range(4))
            tier.delete(records[:1])
        with self.make(root) as tier:
            assert sorted(tier) == sorted(records[1:])
            for record in records[1:]:
                self.check(tier, record)
            self.check_books(tier, root)

    def test_killed_while_writing(self, root: Path) -> None:
        """After a SIGKILL every block is whole or absent, and none is lost whose write had returned."""
        if not self.persistent:
            return
        with self.make(root):
            pass
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_write_until_killed, args=(type(self), root, theirs))
        process.start()
        theirs.close()
        written: list[bytes] = []
        while len(written) < 10:
            assert ours.poll(_PATIENCE_S), "the other process writes"
            written.append(record_of(ours.recv()))
        process.kill()
        process.join()
        process.close()
        with ours:
            while ours.poll():
                try:
                    written.append(record_of(ours.recv()))
                except EOFError:
                    break
        with self.make(root) as tier:
            there = list(tier)
            assert self.evicts or set(written) <= set(there)
            for record in there:
                self.check(tier, record)
            self.check_books(tier, root)
            self.check(tier, self.fill(tier, range(_FAR, _FAR + 1))[0])

    @pytest.mark.parametrize("damage", ["flipped", "cut", "swapped"])
    def test_damage_is_found_once(self, root: Path, damage: str) -> None:
        """A damaged block is no block: an error that says so, and then a miss; others are not touched by it."""
        if not self.verifies:
            return
        with self.make(root) as tier:
            records = self.fill(tier, range(3))
            damaged = records[2:]  # the last: cutting it off may cut what follows
            if damage == "swapped":
                damaged = records[1:]
                other = self.raw_damage(root, records[1], lambda raw: raw)
                mine = self.raw_damage(root, records[2], lambda raw: other)
                self.raw_damage(root, records[1], lambda raw: mine)
            else:
                self.raw_damage(root, records[2], _flip if damage == "flipped" else lambda raw: raw[: len(raw) // 2])
            for record in damaged:
                with pytest.raises(CorruptBlockError):
                    tier.read(record, np.zeros(tier.block_bytes, np.uint8))
                self.check_missing(tier, record)
            for record in set(records) - set(damaged):
                self.check(tier, record)
            self.check_books(tier, root)
            self.fill(tier, range(3))
            for record in records:
                self.check(tier, record)

    def test_a_failing_medium(self, tier: Tier, root: Path) -> None:
        """Errors are of our kind, nothing is half done, and it goes on when the medium does.

        The block that could not be read may be given up.
        """
        if not self.fails:
            return
        unread, kept = self.fill(tier, range(2))
        target = np.zeros(tier.block_bytes, np.uint8)
        with self.failing(tier):
            with pytest.raises(TierUnavailableError):
                tier.read(unread, target)
            with pytest.raises(TierUnavailableError):
                tier.write(record_of(_FAR), content(record_of(_FAR), tier.block_bytes))
        self.recover(tier)
        self.check(tier, kept)
        self.check_whole(tier, unread)
        self.check_missing(tier, record_of(_FAR))
        self.check_books(tier, root)
        self.check(tier, self.fill(tier, range(_FAR, _FAR + 1))[0])

    def test_threads(self, tier: Tier, root: Path) -> None:
        """Many threads at the same blocks and at others: no block is torn, none is lost."""
        problems: list[BaseException] = []
        work = [threading.Thread(target=self.work, args=(tier, mine, problems)) for mine in range(3)]
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
        assert not problems, problems
        for number in range(3):
            for turn in range(6):
                self.check(tier, record_of(number * 10 + turn))
        self.check_books(tier, root)

    def work(self, tier: Tier, mine: int, problems: list[BaseException]) -> None:
        """What one of the threads does."""
        try:
            for turn in range(6):
                common, own = record_of(1000 + turn % 2), record_of(mine * 10 + turn)
                for record in (common, own):
                    tier.write(record, content(record, tier.block_bytes))
                self.check_whole(tier, common)
                self.check(tier, own)
                tier.delete([common])
        except BaseException as error:  # noqa: BLE001 - told in the test's own thread
            problems.append(error)

    def check_whole(self, tier: Tier, record: bytes) -> None:
        """A block that others may delete is right or not there."""
        target = np.zeros(tier.block_bytes, np.uint8)
        if tier.read(record, target):
            assert np.array_equal(target, content(record, tier.block_bytes))

    def test_nothing_is_left_behind(self, root: Path) -> None:
        """A closed tier has no files open and no threads."""
        with self.make(root) as tier:  # what a process opens once, and keeps
            self.fill(tier, range(1))
        gc.collect()
        before, threads = _open_files(), set(threading.enumerate())
        with self.make(root) as tier:
            self.check_whole(tier, self.fill(tier, range(2))[0])
        for thread in set(threading.enumerate()) - threads:
            thread.join(_PATIENCE_S)
        assert set(threading.enumerate()) <= threads
        gc.collect()  # memory that is mapped stays so as long as something looks at it
        assert _open_files() <= before

    def test_pickling(self, tier: Tier) -> None:
        """It goes to another process, or says that it does not."""
        try:
            pickled = pickle.dumps(tier)
        except (TypeError, pickle.PicklingError):
            return  # it says so
        with pickle.loads(pickled) as copy:  # noqa: S301 - it was made here
            assert list(copy) == list(tier)


def _flip(raw: bytes) -> bytes:
    place = len(raw) // 2
    return raw[:place] + bytes([raw[place] ^ 0x10]) + raw[place + 1 :]


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _write_until_killed(suite: type[TierSuite], root: Path, told: Connection) -> None:
    """The other process of `test_killed_while_writing`."""
    with suite().make(root) as tier:
        number = 0
        while True:
            record = record_of(number)
            try:
                tier.write(record, content(record, tier.block_bytes))
            except TierFullError:
                threading.Event().wait()  # to be killed
            told.send(number)
            number += 1

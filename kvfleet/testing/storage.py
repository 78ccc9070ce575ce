"""A shared tier's storage that can fail, hang, be slow or full, and lose or damage objects."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Literal

from kvfleet.errors import TierFullError, TierUnavailableError
from kvfleet.node.objects import Child
from kvfleet.testing.blocking import pause
from kvfleet.testing.loop import VirtualLoop
from kvfleet.testing.processes import Process, current_process

__all__ = ["Mood", "SimulatedStore", "Storage"]

Mood = Literal["well", "slow", "failing", "hanging", "full"]
_TIER = "shared"
_EXPIRES = 0.3


class Storage:
    """Objects by path, for all nodes.

    Attributes:
        doubtful: paths whose writer may not know that they are there: the storage was not well then.
        spoiled: paths that were lost or damaged.
        missed: paths that were read when there was nothing: the news of that may be overtaken by that of a later write.
    """

    def __init__(self, loop: VirtualLoop, seed: int) -> None:
        self.loop = loop
        self.random = random.Random(f"storage {seed}")
        self.objects: dict[str, bytes] = {}
        self.mood: Mood = "well"
        self.doubtful: set[str] = set()
        self.spoiled: set[str] = set()
        self.missed: set[str] = set()
        self.writers: dict[str, Process | None] = {}

    def known(self, path: str) -> bool:
        """Whether the node that wrote an object last knows that it is there, and has lived to tell."""
        writer = self.writers.get(path)
        return path not in self.doubtful | self.missed and writer is not None and writer.alive

    def write(self, path: str, data: bytes, *, doubtful: bool) -> None:
        """Put an object."""
        self.objects[path] = data
        self.writers[path] = current_process()
        (self.doubtful.add if doubtful else self.doubtful.discard)(path)

    def lose(self) -> str | None:
        """An object vanishes, and nobody is told."""
        path = self._any()
        if path is not None:
            del self.objects[path]
            self.spoiled.add(path)
        return path

    def expire(self) -> int:
        """A rule of the storage deletes a part of all blocks, and nobody is told. Returns how many."""
        blocks = [path for path in sorted(self.objects) if path.endswith(".arrow") and self.random.random() < _EXPIRES]
        for path in blocks:
            del self.objects[path]
            self.spoiled.add(path)
        return len(blocks)

    def damage(self) -> str | None:
        """A byte of an object changes."""
        path = self._any()
        if path is not None:
            data = bytearray(self.objects[path])
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
            self.objects[path] = bytes(data)
            self.spoiled.add(path)
        return path

    def _any(self) -> str | None:
        return self.random.choice(sorted(self.objects)) if self.objects else None

    def take_time(self, timeout_s: float, what: str) -> None:
        """What a request costs.

        Raises:
            TierUnavailableError: the storage does not work now.
        """
        mood = self.mood
        seconds = self.random.expovariate(1 / 0.003)
        if mood == "slow":
            seconds += self.random.expovariate(1 / 0.3)
        if mood == "hanging" or seconds > timeout_s:
            pause(self.loop, timeout_s)
            raise TierUnavailableError(_TIER, f"{what}: no answer in time")
        pause(self.loop, seconds)
        if mood == "failing":
            raise TierUnavailableError(_TIER, f"{what} failed")


class SimulatedStore:
    """In place of `ObjectStore`: one node's way to the storage."""

    leaves_partials = False

    def __init__(self, storage: Storage, url: str, options: Mapping[str, object], timeout_s: float) -> None:
        assert not options
        self.name = url
        self._storage = storage
        self._timeout_s = timeout_s

    def close(self) -> None:
        """Nothing to close."""

    def make_root(self) -> None:
        """Nothing to make."""

    def put(self, path: str, data: bytes, timeout_s: float | None = None) -> None:
        """Write an object. One whose answer does not come may appear all the same."""
        storage, mood = self._storage, self._storage.mood
        try:
            storage.take_time(self._limit(timeout_s), "write")
        except TierUnavailableError:
            if storage.random.random() < 0.3:
                storage.write(path, data, doubtful=True)
            raise
        if storage.mood == "full" and path not in storage.objects:
            raise TierFullError(_TIER, "no space")
        storage.write(path, data, doubtful=mood != "well")
        pause(storage.loop, storage.random.expovariate(1 / 0.001))

    def get(self, path: str, bytes_max: int, timeout_s: float | None = None) -> bytes | None:
        """Read an object."""
        pieces: list[bytes] = []
        return b"".join(pieces) if self.give(path, bytes_max, pieces.append, timeout_s) else None

    def give(self, path: str, bytes_max: int, take: Callable[[bytes], object], timeout_s: float | None = None) -> bool:
        """Read an object, in two pieces."""
        self._storage.take_time(self._limit(timeout_s), "read")
        data = self._storage.objects.get(path)
        if data is None:
            self._storage.missed.add(path)
            return False
        middle = bytes_max // 2
        for piece in (data[:middle], data[middle:bytes_max]):
            if take(piece) is False:
                break
        return True

    def delete(self, path: str, timeout_s: float | None = None) -> None:
        """Delete an object."""
        self._storage.take_time(self._limit(timeout_s), "delete")
        self._storage.objects.pop(path, None)

    def _limit(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)

    def children(self, path: str) -> list[Child]:
        """What is below a path."""
        self._storage.take_time(self._timeout_s, "list")
        prefix = f"{path}/" if path else ""
        sizes: dict[str, tuple[bool, int]] = {}
        for name, data in self._storage.objects.items():
            if name.startswith(prefix):
                first, _, rest = name[len(prefix) :].partition("/")
                sizes[first] = (bool(rest), 0 if rest else len(data))
        return [Child(name, *sizes[name]) for name in sorted(sizes)]

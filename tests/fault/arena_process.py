"""The other processes of the arena's fault tests: `python arena_process.py ROLE ARGUMENT...`.

Each prints one line when it is at work, and goes on until it is killed. Contents are derived from keys.
"""

import hashlib
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from typing_extensions import override

from kvfleet.node.arena import Arena
from kvfleet.node.arenadir import FileLock
from kvfleet.node.records import RecordTable, key_fingerprint

SLOT_BYTES = 32 << 10
RACING_SLOTS, RACING_KEYS = 8, 10
REPOSITORY = Path(__file__).parents[2]


@contextmanager
def running(command: list[object]) -> Iterator[subprocess.Popen[bytes]]:
    """A child process, from the moment it says that it is ready until it is killed at the end of the block."""
    child = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, cwd=REPOSITORY)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        yield child
    finally:
        child.kill()
        child.communicate()


def process(role: str, *arguments: object) -> list[object]:
    """The command that plays a role."""
    return [sys.executable, __file__, role, *arguments]


def key_of(i):
    return hashlib.sha256(i.to_bytes(4, "little")).digest()[:16]


def word_of(key):
    """What every 64-bit word of a key's block is, and its checksum."""
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "little")


def reserve(arena, table, slot, key, client_id=0):
    return table.reserve(
        slot,
        key=key,
        shard=0,
        parent_fingerprint=key_fingerprint(key),
        depth=0,
        namespace=0,
        offset=arena.slots_offset + slot * SLOT_BYTES,
        length=SLOT_BYTES,
        client_id=client_id,
    )


def words(arena, slot):
    return arena.slot_view(arena.slots_offset + slot * SLOT_BYTES, SLOT_BYTES).view(np.uint64)


class LateBump(RecordTable):
    """The mistake: the generation becomes odd only after the slot was written."""

    @override
    def reserve(self, slot, **fields):
        self.fields = fields
        return self.record(slot).generation | 1

    @override
    def commit(self, slot, generation, checksum, now_ns):
        return super().commit(slot, super().reserve(slot, **self.fields), checksum, now_ns)


def ready():
    sys.stdout.write("ready\n")
    sys.stdout.flush()


def rewrite(arena, table, num_slots, num_keys, seed):
    """Evict and rewrite at full speed, oldest slot first."""
    rng = random.Random(seed)
    keys = [key_of(i) for i in range(num_keys)]
    resident = {r.slot: r.key for r in table.live()}
    slot = 0
    while True:
        key = rng.choice(keys)
        if key in resident.values():
            continue
        if rng.random() < 0.1:
            table.free(slot)
            resident.pop(slot, None)
        generation = reserve(arena, table, slot, key)
        words(arena, slot)[:] = word_of(key)
        assert table.commit(slot, generation, word_of(key), time.monotonic_ns())
        resident[slot] = key
        slot = (slot + 1) % num_slots


def race(path, order):
    """Rewrite few slots, so that readers are overtaken often."""
    arena = Arena.attach(Path(path))
    table = arena.records
    if order == "late":
        table.__class__ = LateBump
    ready()
    rewrite(arena, table, RACING_SLOTS, RACING_KEYS, seed=1)


def manage(directory, num_slots, seed):
    """What a manager does: lock, attach or create, recover, check, work."""
    lock = FileLock(Path(directory) / "lock")
    assert lock.acquire(10)
    arena = Arena.attach(Path(directory) / "arena")
    arena.records.recover()
    for record in arena.records.live():
        if not record.committed:
            arena.records.free(record.slot)
    ready()
    rewrite(arena, arena.records, int(num_slots), 2 * int(num_slots), int(seed))


def create(directory, capacity_bytes):
    """Make arenas until killed."""
    ready()
    while True:
        Arena.create(Path(directory), int(capacity_bytes)).close()


def write(directory, arena_id, client_id, slot):
    """A client in mid-copy for ever: holds its lock and writes the slot it was given again and again."""
    lock = FileLock(Path(directory) / "clients" / f"{int(client_id):016x}")
    assert lock.acquire(10)
    arena = Arena.attach(Path(directory) / "arena", bytes.fromhex(arena_id))
    view = words(arena, int(slot))
    view[:] = 1
    ready()
    while True:
        view += 1


if __name__ == "__main__":
    roles: dict[str, Callable[..., None]] = {"race": race, "manage": manage, "create": create, "write": write}
    roles[sys.argv[1]](*sys.argv[2:])

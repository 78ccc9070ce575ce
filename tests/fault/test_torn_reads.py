"""Readers race a writer that evicts and rewrites at full speed: no torn block goes unnoticed.

The second test makes the mistake the protocol exists to avoid, and must see torn blocks: else the first shows nothing.
"""

import random
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest

from kvfleet.config import MIB
from kvfleet.node.arena import Arena
from kvfleet.node.records import ORDERED
from tests.fault.arena_process import RACING_KEYS, SLOT_BYTES, key_of, process, running, word_of

READS = 100_000
BATCH = 5


@contextmanager
def racing_writer(root, order):
    arena = Arena.create(root / "node", 4 * MIB)
    with running(process("race", arena.path, order)) as writer:
        yield arena
        assert writer.poll() is None
    arena.close()


def read(arena, keys, targets):
    """Read a few blocks as a client does: find, copy, unchanged. Returns what was found and which copies count."""
    found = arena.records.find(b"".join(keys))
    for i in np.flatnonzero(found.slots >= 0):
        view = arena.slot_view(int(found.offsets[i]), int(found.lengths[i]))
        np.copyto(targets[i], view.view(np.uint64))
    return found, arena.records.unchanged(found.slots, found.generations)


def race(arena, reads, seed, enough=lambda _: False):
    words = {key_of(i): word_of(key_of(i)) for i in range(RACING_KEYS)}
    targets = np.empty((BATCH, SLOT_BYTES // 8), np.uint64)
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    while seen["copied"] < reads and not enough(seen):
        keys = rng.sample(list(words), BATCH)
        found, good = read(arena, keys, targets)
        seen["copied"] += np.count_nonzero(found.slots >= 0)
        seen["overtaken"] += np.count_nonzero((found.slots >= 0) & ~good)
        for i in np.flatnonzero(good):
            whole = found.checksums[i] == words[keys[i]] and (targets[i] == words[keys[i]]).all()
            seen["whole" if whole else "torn"] += 1
    return seen


@pytest.mark.skipif(not ORDERED, reason="readers verify checksums on this processor")
def test_no_torn_block_goes_unnoticed(arena_root, seed):
    with racing_writer(arena_root, "safe") as arena:
        seen = race(arena, READS, seed)
    assert seen["torn"] == 0, seen
    assert seen["overtaken"] > 0, "reader and writer never met"
    assert seen["whole"] > READS / 10


def test_bumping_the_generation_after_the_write_is_caught(arena_root, seed):
    with racing_writer(arena_root, "late") as arena:
        seen = race(arena, READS, seed, enough=lambda seen: seen["torn"] >= 10)
    assert seen["torn"] > 0, seen

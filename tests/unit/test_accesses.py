"""What readers leave word of, in the order in which placement is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfleet.config import MIB
from kvfleet.core.block import BlockKey
from kvfleet.core.placement import NewBlock
from kvfleet.core.policies import POLICIES
from kvfleet.node.arena import Arena
from kvfleet.node.dram import DramTier, Incoming
from kvfleet.sim.arena import SimArena
from kvfleet.testing.adapters import namespace_for
from kvfleet.testing.policies import block_key

KEYS = [block_key(number) for number in range(1, 6)]


@pytest.fixture
def told() -> list[tuple[BlockKey, float]]:
    """Uses that were told of, with their times."""
    return []


def test_a_node_tells_of_what_was_read_at_once_in_the_order_of_its_prefix(
    arena_root: Path, told: list[tuple[BlockKey, float]]
) -> None:
    home = arena_root / "root" / "node"
    home.mkdir(mode=0o700, parents=True)
    home.parent.chmod(0o700)
    arena = Arena.create(home, 8 * MIB)
    dram = DramTier(arena, home / "namespaces", lower={}, now=lambda: 1.0)
    dram.on_use = lambda key, now: told.append((key, now))
    for depth in (3, 1, 4, 0, 2):  # slots are taken in this order
        block = NewBlock(KEYS[depth], 0, KEYS[depth - 1] if depth else None, MIB)
        [granted] = dram.reserve([Incoming(block, depth)], namespace_for(MIB), 0).granted
        assert dram.commit(granted.slot, granted.generation, 0)
    slots = arena.records.find(b"".join(KEYS), 0).slots
    assert slots.tolist() != sorted(slots.tolist())
    assert arena.records.depths(slots).tolist() == [0, 1, 2, 3, 4]
    arena.records.touch(slots[:2], 3_000_000_000)
    arena.records.touch(slots[2:], 2_000_000_000)
    dram.note_accesses()
    assert told == [(KEYS[2], 2.0), (KEYS[3], 2.0), (KEYS[4], 2.0), (KEYS[0], 3.0), (KEYS[1], 3.0)]
    arena.close()


def test_a_simulated_node_does_so_too(told: list[tuple[BlockKey, float]]) -> None:
    arena = SimArena(8 * MIB, MIB, POLICIES["lru"], {})
    arena.on_use = lambda key, now: told.append((key, now))
    for depth in (3, 1, 4, 0, 2):
        arena.depths[KEYS[depth]] = depth
        assert arena.reserve([NewBlock(KEYS[depth], 0, None, MIB)], 1.0, None).grants
        arena.commit(KEYS[depth], 1.0, brought=False)
    arena.read(KEYS[:2], 3.0)
    arena.read(KEYS[:1:-1], 2.0)
    arena.note_accesses()
    assert told == [(KEYS[2], 2.0), (KEYS[3], 2.0), (KEYS[4], 2.0), (KEYS[0], 3.0), (KEYS[1], 3.0)]

"""Holds: what they keep, how much of it, and every way in which they end."""

from __future__ import annotations

import pytest

from kvfleet.config import MIB
from kvfleet.errors import TierUnavailableError
from kvfleet.node.messages import Miss, Source
from tests.conftest import wait_for
from tests.rig import Rig, failing, hanging
from tests.workload import load, model, prompt, store

SPEC = model()
BLOCK_BYTES = SPEC.layout.block_bytes


def fill(client, num_prompts=8):
    """Store more than an arena of 16 blocks takes."""
    for number in range(num_prompts):
        store(client, prompt(4, 100 + number))


def held_bytes(rig):
    return rig.status(0).held_bytes


def test_held_blocks_stay_until_they_are_released(arena_root):
    with Rig(arena_root, dram_bytes=MIB) as rig:
        client, tokens = rig.client(SPEC), prompt(4)
        store(client, tokens)
        with client.hold(client.lookup(tokens), 20.0) as hold:
            assert (hold.num_blocks, held_bytes(rig)) == (4, 4 * BLOCK_BYTES)
            fill(client)
            assert load(client, tokens).outcomes == (Source.DRAM,) * 4
        assert (hold.num_blocks, held_bytes(rig)) == (0, 0)
        fill(client)
        assert client.lookup(tokens).num_blocks == 0


def test_a_quarter_of_the_arena_can_be_held_in_all(arena_root):
    with Rig(arena_root, dram_bytes=MIB) as rig:
        first, second, tokens = rig.client(SPEC), rig.client(SPEC), prompt(8)
        store(first, tokens)
        store(first, prompt(4, 1))
        with first.hold(first.lookup(tokens), 20.0) as hold:
            assert hold.num_blocks == 4
            with second.hold(second.lookup(tokens), 20.0) as same:
                assert (same.num_blocks, held_bytes(rig)) == (4, MIB // 4)
                with second.hold(second.lookup(prompt(4, 1)), 20.0) as other:
                    assert other.num_blocks == 0
                hold.release()
                assert held_bytes(rig) == MIB // 4
            with second.hold(second.lookup(prompt(4, 1)), 20.0) as other:
                assert other.num_blocks == 4


def test_all_shards_of_a_held_block_count(arena_root):
    spec = model(num_shards=2)
    with Rig(arena_root, dram_bytes=MIB) as rig:
        tokens = prompt(4)
        clients = [rig.client(spec, shard=shard) for shard in (0, 1)]
        for client in clients:
            store(client, tokens)
        holds = [client.hold(client.lookup(tokens), 20.0) for client in clients]
        assert [hold.num_blocks for hold in holds] == [2, 2]
        assert held_bytes(rig) == 4 * spec.layout.block_bytes
        for hold in holds:
            hold.release()


def test_a_hold_ends_after_its_time_unless_it_is_renewed(arena_root):
    with Rig(arena_root, dram_bytes=MIB) as rig:
        client, tokens = rig.client(SPEC), prompt(3)
        store(client, tokens)
        hold = client.hold(client.lookup(tokens), 30.0)
        ((_, held),) = rig.part(0).holds._holds.items()
        assert held.timer.when() <= rig.loop.time() + 30.0
        assert hold.renew(0.05) == 3
        wait_for(lambda: not held_bytes(rig), "its time is up")
        assert hold.renew(20.0) == 3
        store(client, prompt(5))
        longer = client.hold(client.lookup(prompt(5)), 20.0)
        assert (longer.num_blocks, held_bytes(rig)) == (4, 4 * BLOCK_BYTES)
        longer.release()
        assert held_bytes(rig) == 3 * BLOCK_BYTES
        hold.release()
        hold.release()


def test_a_hold_ends_with_its_client(arena_root):
    with Rig(arena_root, dram_bytes=MIB) as rig:
        client, other, tokens = rig.client(SPEC), rig.client(SPEC), prompt(4)
        store(client, tokens)
        client.hold(client.lookup(tokens), 20.0)
        kept = other.hold(other.lookup(prompt(2)), 20.0)
        client.close()
        wait_for(lambda: held_bytes(rig) == 2 * BLOCK_BYTES, "only the other client's hold is left")
        kept.release()


def test_a_hold_ends_with_its_manager_and_costs_a_miss(arena_root):
    with Rig(arena_root, dram_bytes=MIB) as rig:
        client, tokens = rig.client(SPEC), prompt(4)
        store(client, tokens)
        hit = client.lookup(tokens)
        hold = client.hold(hit, 20.0)
        rig.kill(0)
        rig.start(0)
        assert held_bytes(rig) == 0
        fill(client)
        assert client.load(hit, lambda index, view: None).outcomes[0] is Miss.EVICTED
        hold.release()


@pytest.mark.parametrize("fault", [failing(TierUnavailableError("dram", "away")), hanging], ids=["lost", "hanging"])
def test_without_a_manager_nothing_is_held(arena_root, fault):
    with Rig(arena_root, dram_bytes=MIB, lookup_timeout_s=0.2) as rig:
        client, tokens = rig.client(SPEC), prompt(4)
        store(client, tokens)
        rig.faults["0.hold"] = rig.faults["0.release"] = fault
        with client.hold(client.lookup(tokens), 20.0) as hold:
            assert hold.num_blocks == 0


def test_only_what_is_here_is_held_and_only_up_to_the_first_that_is_not(arena_root):
    with Rig(arena_root, 2, dram_bytes=MIB) as rig:
        client, tokens = rig.client(SPEC), prompt(4)
        store(rig.client(SPEC, 1), tokens)
        store(client, prompt(2))
        hit = client.lookup(tokens)
        assert hit.num_blocks == 4
        with client.hold(hit, 20.0) as hold:
            assert hold.num_blocks == 2
        calls = rig.calls["0.hold"]
        with client.hold(client.lookup(prompt(3, 7)), 20.0) as hold:
            assert hold.num_blocks == 0
        assert rig.calls["0.hold"] == calls  # there was nothing to ask for

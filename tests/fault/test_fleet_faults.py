"""A fleet under faults: right bytes or a counted miss, within the deadline, and nothing left over."""

import time

import numpy as np
import pytest

from kvfleet.config import MIB
from kvfleet.node.messages import Miss, Source
from tests.rig import Rig, block, empty, kv, model, prompt

SPEC = model()


def stored(client, tokens, shard=0):
    result = client.store(tokens, kv(client.spec, tokens, shard)).wait(20)
    assert result.dropped == 0
    return result


def loaded(client, tokens, timeout_s=None):
    """Look a prompt up and load what is said to be there; checks every byte of it."""
    hit = client.lookup(tokens)
    target = empty(client.spec, hit.num_blocks)
    got = client.load(hit, target, timeout_s)
    assert len(got.outcomes) == hit.num_blocks
    num_tokens = int(got)
    expected = kv(client.spec, tokens, client.shard)
    assert np.array_equal(target[:, :, :, :num_tokens], expected[:, :, :, :num_tokens])
    return got


def test_local(arena_root):
    with Rig(arena_root) as rig:
        client = rig.client(SPEC)
        tokens = prompt(6)
        print(stored(client, tokens))
        print(loaded(client, tokens), rig.calls)


def test_peer(arena_root):
    with Rig(arena_root, 2) as rig:
        client, other = rig.client(SPEC), rig.client(SPEC, 1)
        tokens = prompt(6)
        print(stored(client, tokens))
        got = loaded(other, tokens)
        print(got, got.outcomes, rig.calls)


def test_passes_through(arena_root):
    with Rig(arena_root, 2) as rig:
        client, other = rig.client(SPEC), rig.client(SPEC, 1)
        rig.run(rig.managers[1].shutdown())
        import dataclasses
        rig.config = dataclasses.replace(rig.config, dram_bytes=MIB)
        rig.start(1)
        tokens = prompt(60)
        print(stored(client, tokens))
        got = loaded(other, tokens, 5)
        print(got, got.outcomes, rig.calls)

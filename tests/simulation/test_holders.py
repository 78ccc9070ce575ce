"""Holders that stall, in virtual time: what they cost is exact."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from kvfleet.core.outcomes import Miss, Source
from kvfleet.testing import LocalFleet
from kvfleet.testing.blocking import wait
from kvfleet.testing.checks import content
from kvfleet.testing.talks import SPEC

NUM_BLOCKS = 4


def prompt(number):
    return np.arange(NUM_BLOCKS * SPEC.block_tokens, dtype=np.uint32) + np.uint32(number << 20)


def store(client, tokens):
    def put(index, view):
        key = SPEC.keys(tokens)[16 * index : 16 * index + 16]
        view.reshape(-1).view(np.uint8)[:] = content(key, SPEC.layout.block_bytes)

    return client.store(tokens, put).wait(5.0)


@pytest.fixture
def fleet():
    with LocalFleet(1, 3, shared_url=None) as fleet:
        yield fleet


def timed_load(fleet, client, tokens, timeout_s=4.0):
    """What a load brought, and its virtual seconds."""

    def load(client):
        hit = client.lookup(tokens)
        began = fleet.now
        loaded = client.load(hit, lambda index, view: None, timeout_s)
        return hit.num_blocks, loaded, fleet.now - began

    future = client.start(load)
    assert wait(fleet.loop, future, 20.0)
    return future.result()


def stored(fleet, node, numbers):
    client = fleet.client(node, SPEC)
    for number in numbers:
        future = client.start(partial(store, tokens=prompt(number)))
        assert wait(fleet.loop, future, 10.0)
        assert future.result().stored == NUM_BLOCKS


def test_a_stopped_holder_costs_one_wait_until_it_answers(fleet):
    def story():
        holder, reader = fleet.nodes[:2]
        stored(fleet, holder, range(3))
        client = fleet.client(reader, SPEC)
        holder.manager.process.stop()
        _, loaded, first_s = timed_load(fleet, client, prompt(0))
        waits = [timed_load(fleet, client, prompt(number)) for number in (0, 1, 2, 1)]
        holder.manager.process.resume()
        fleet.sleep(30.0)
        return loaded, first_s, waits, timed_load(fleet, client, prompt(2))

    loaded, first_s, waits, healed = fleet.run(story)
    assert loaded.miss is Miss.TOO_SLOW
    assert fleet.config.holder_timeout_s <= first_s < fleet.config.holder_timeout_s + 0.1
    assert [(w[1].miss, w[2] < 0.1) for w in waits] == [(Miss.UNREACHABLE, True)] * len(waits)
    assert healed[1].outcomes == (Source.PEER,) * NUM_BLOCKS


def test_another_holder_takes_over_from_a_stopped_one(fleet):
    def story():
        first, second, reader = fleet.nodes
        stored(fleet, first, [0])
        stored(fleet, second, [0])
        client = fleet.client(reader, SPEC)
        first.manager.process.stop()
        result = timed_load(fleet, client, prompt(0))
        first.manager.process.resume()
        return result

    _, loaded, seconds = fleet.run(story)
    assert loaded.outcomes == (Source.PEER,) * NUM_BLOCKS
    assert seconds < fleet.config.holder_timeout_s + 0.1


def test_a_load_ends_at_its_deadline_when_its_own_manager_is_stopped(fleet):
    def story():
        holder, reader = fleet.nodes[:2]
        stored(fleet, holder, [0])
        client = fleet.client(reader, SPEC)
        timed_load(fleet, client, prompt(7))
        reader.manager.process.stop()
        result = timed_load(fleet, client, prompt(0), timeout_s=1.0)
        reader.manager.process.resume()
        return result

    num_blocks, loaded, seconds = fleet.run(story)
    assert num_blocks == NUM_BLOCKS
    assert int(loaded) == 0
    assert seconds < 1.0 + 0.5

"""Stores that do not get through, in virtual time: nothing stays reserved, no transfer stays open."""

from __future__ import annotations

import numpy as np
import pytest

from kvfleet.node.messages import Namespace, ReserveRequest
from kvfleet.testing import LocalFleet
from kvfleet.testing.actors import Handle
from kvfleet.testing.blocking import wait
from kvfleet.testing.processes import Process
from kvfleet.testing.talks import SPEC


def prompt(num_blocks, number=0):
    return np.arange(num_blocks * SPEC.block_tokens, dtype=np.uint32) + np.uint32(number << 20)


def test_slots_of_a_store_that_is_late_go_back():
    with LocalFleet(1, 1, shared_url=None) as fleet:

        def story():
            client = fleet.client(fleet.nodes[0], SPEC)
            late_s = fleet.config.store_timeout_s + 1.0
            future = client.start(lambda c: c.store(prompt(4), lambda index, view: fleet.sleep(late_s)).wait(60.0))
            fleet.sleep(1.0)
            reserved = fleet.nodes[0].tier.dram.num_reserved
            assert wait(fleet.loop, future, 60.0)
            return reserved, future.result(), fleet.nodes[0].tier.dram.num_reserved

        reserved, result, left = fleet.run(story)
    assert (reserved, result.stored, result.reason, left) == (4, 0, "commit_lost", 0)


def test_transfers_that_a_late_reservation_asked_for_end():
    with LocalFleet(1, 1) as fleet:
        fleet.storage.mood = "failing"

        def story():
            node = fleet.nodes[0]
            client = fleet.client(node, SPEC)
            full = fleet.config.dram_bytes // SPEC.layout.block_bytes
            future = client.start(lambda c: c.store(prompt(full), lambda index, view: None).wait(60.0))
            assert wait(fleet.loop, future, 60.0)
            assert future.result().stored == full
            request = ReserveRequest(
                7, 1, Namespace(SPEC.namespace_id, SPEC.layout.to_json()), SPEC.keys(prompt(4, 1)), b"", 0, 0,
                SPEC.layout.block_bytes, timeout_s=0.0,
            )  # fmt: skip
            other = Process(fleet.loop, "other client", node.host)
            answer = other.run(Handle(node.manager).reserve.remote, request)
            assert wait(fleet.loop, answer.future, 1.0)
            fleet.sleep(5.0)
            return answer.future.result().refused, node.tier.dram.placement.in_transfer

        assert fleet.run(story) == (4, 0)


def flushed(mood, comes_back_s=None):
    """What a flush of 4 blocks says that has a minute, while the storage is in some mood, and its virtual seconds."""
    with LocalFleet(1, 1) as fleet:

        def story():
            node = fleet.nodes[0]
            fleet.storage.mood = mood
            future = fleet.client(node, SPEC).start(lambda c: c.store(prompt(4), lambda index, view: None).wait(60.0))
            assert wait(fleet.loop, future, 60.0)
            if comes_back_s is not None:
                fleet.loop.call_later(comes_back_s, setattr, fleet.storage, "mood", "well")
            began, operator = fleet.now, Process(fleet.loop, "operator", node.host)
            answer = operator.run(Handle(node.manager).flush.remote, 60.0)
            assert wait(fleet.loop, answer.future, 70.0)
            return answer.future.result(), fleet.now - began, node.tier.endpoint.recovers_s

        return fleet.run(story)


@pytest.mark.parametrize("mood", ["failing", "hanging", "full"])
def test_a_flush_waits_for_a_tier_that_takes_nothing_as_long_as_one_needs_to_be_found_well(mood):
    left, seconds, recovers_s = flushed(mood)
    assert left == 4
    assert recovers_s < seconds < recovers_s + 5.0 < 30.0


def test_a_flush_goes_on_when_the_tier_comes_back():
    left, seconds, recovers_s = flushed("failing", comes_back_s=8.0)
    assert left == 0
    assert seconds < recovers_s + 8.0

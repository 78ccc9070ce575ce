"""Outcomes on running managers: every block asked for has one, and the managers tell of it without a call."""

from __future__ import annotations

import gc
import os
import random
from pathlib import Path

import pytest

from kvfleet.client import Client
from kvfleet.core.outcomes import Miss, Source
from kvfleet.errors import (
    DirectoryAvoidedError,
    DirectoryUnavailableError,
    ManagerAvoidedError,
    TierUnavailableError,
)
from tests.conftest import wait_for
from tests.rig import Rig, failing, hanging
from tests.workload import empty, kv, load, model, prompt, store

SPEC = model()
BLOCK = SPEC.layout.block_bytes
QUICK = {"lookup_timeout_s": 0.2, "load_timeout_s": 1.0, "store_timeout_s": 1.0, "holder_timeout_s": 0.3}
AWAY = failing(TierUnavailableError("peer", "away"))
FAULTS = {
    "directory.locate": (failing(DirectoryUnavailableError("away")), hanging),
    "0.load": (AWAY, hanging),
    "1.load": (AWAY,),
    "0.step": (AWAY,),
    "0.fetch": (AWAY,),
    "1.window": (AWAY, hanging),
    "0.attach": (AWAY,),
}


def balanced(client: Client) -> int:
    stats = client.stats()
    assert sum(stats.outcomes.values()) == stats.asked_blocks
    assert stats.unclaimed >= 0
    return stats.asked_blocks


def test_any_sequence_of_lookups_loads_and_faults_balances(arena_root, seed):
    randomness = random.Random(seed)
    with Rig(arena_root, 2, dram_bytes=2 << 20, **QUICK) as rig:
        clients = [rig.client(SPEC, number) for number in (0, 1, 0)]
        hits, asked = [], 0
        for _ in range(60):
            client, tokens = randomness.choice(clients), prompt(randomness.randrange(1, 12), randomness.randrange(4))
            act = randomness.choice(["store", "lookup", "lookup", "load", "load", "fault", "mend"])
            if act == "store":
                client.store(tokens, kv(SPEC, tokens)).wait(20)
            elif act == "lookup":
                start = randomness.randrange(2)
                hit = client.lookup_keys(SPEC.keys(tokens), start_block=start, label="r")
                hits.append((client, hit))
                asked += hit.asked_blocks - start
                assert (hit.missing is None) == (hit.num_blocks == hit.asked_blocks)
            elif act == "load" and hits:
                client, hit = hits.pop(randomness.randrange(len(hits)))
                client.load(hit, empty(SPEC, hit.num_blocks), randomness.choice([0.0, 0.3, 1.0]))
            elif act == "fault":
                name = randomness.choice(sorted(FAULTS))
                rig.faults[name] = randomness.choice(FAULTS[name])
            elif act == "mend":
                rig.faults.clear()
            assert sum(map(balanced, clients)) == asked
        rig.faults.clear()
        assert sum(client.stats().unclaimed for client in clients) == sum(
            hit.num_blocks - hit.start_block for _, hit in hits
        )
        told = [rig.status(number).totals for number in (0, 1)]
        attached = [client for client in clients if client.memory is not None]  # a manager sees only those
        assert sum(totals.asked_blocks for totals in told) == sum(map(balanced, attached))
        for totals in told:
            assert sum(totals.outcomes.values()) == totals.asked_blocks


def test_local_looks_are_no_requests_until_they_are_loaded(arena_root):
    with Rig(arena_root) as rig:
        client, tokens = rig.client(SPEC), prompt(4)
        store(client, tokens)
        keys = SPEC.keys(prompt(6))
        hit = client.lookup_local(keys)
        client.absent(keys)
        assert (hit.num_blocks, hit.missing) == (4, Miss.DIRECTORY_UNAVAILABLE)
        assert balanced(client) == 0
        assert client.load(hit, empty(SPEC, 4)) == 64
        assert client.stats().outcomes == {"dram": 4}
        later = client.lookup_keys(keys, counted=False)
        assert balanced(client) == 4
        client.count(later)
        assert (balanced(client), client.stats().unclaimed) == (10, 4)


def test_a_hit_that_another_client_loads_is_counted_once(arena_root):
    with Rig(arena_root) as rig:
        scheduler, worker, tokens = rig.client(SPEC), rig.client(SPEC), prompt(4)
        store(worker, tokens)
        hit = scheduler.lookup(prompt(6), label="chatcmpl-7")
        assert worker.load(hit, empty(SPEC, 4)) == 64
        totals = rig.status(0).totals
        assert (totals.asked_blocks, totals.hit_blocks) == (6, 4)
        assert totals.outcomes == {"dram": 4, hit.missing.value: 2}
        found = rig.run(rig.managers[0].requests("chatcmpl", 9))
        assert {(request.asked_ns, request.label) for request in found} == {(hit.asked_ns, "chatcmpl-7")}
        assert sorted((request.loaded, request.came) for request in found) == [(False, 0), (True, 4)]


@pytest.mark.parametrize("fault", [failing(DirectoryUnavailableError("away")), hanging], ids=["away", "hanging"])
def test_without_the_directory_what_is_missing_says_so(arena_root, fault):
    with Rig(arena_root, **QUICK) as rig:
        client = rig.client(SPEC)
        store(client, prompt(2))
        rig.faults["directory.locate"] = fault
        hit = client.lookup(prompt(5))
        assert (hit.num_blocks, hit.missing) == (2, Miss.DIRECTORY_UNAVAILABLE)
        assert client.stats().outcomes == {"directory_unavailable": 3, "unclaimed": 2}


def synced(rig) -> bool:
    nodes = rig.run(rig.at_directory("status")).stats.nodes
    if rig.directory._directory._spoken._expected is None:  # Ray has not said yet which nodes live
        return False
    return len(nodes) == len(rig.managers) and all(node.synced for node in nodes)


def test_what_was_never_stored_is_never_stored(arena_root, wait_for_condition):
    with Rig(arena_root) as rig:
        client = rig.client(SPEC)
        wait_for_condition(lambda: synced(rig), "the directory has all inventories")
        store(client, prompt(2))
        assert load(client, prompt(5)) == 32
        assert client.stats().outcomes == {"dram": 2, "never_stored": 3}


@pytest.mark.parametrize("reason", ["manager_unavailable", "draining"])
def test_what_was_given_up_is_not_admitted(arena_root, wait_for_condition, reason):
    with Rig(arena_root, 2) as rig:
        client, other, tokens = rig.client(SPEC), rig.client(SPEC, 1), prompt(4)
        wait_for_condition(lambda: synced(rig), "the directory has all inventories")
        client.attach()
        if reason == "draining":
            rig.run(rig.managers[0].drain(1.0, None))
        else:
            rig.faults["0.reserve"] = failing(ManagerAvoidedError("dram", "no sign of life"))
        result = client.store(tokens, kv(SPEC, tokens)).wait(10)
        assert (result.stored, result.dropped, result.published, result.reason) == (0, 4, False, reason)
        assert rig.status(0).totals.dropped_blocks == {reason: 4}
        assert rig.calls["0.commit"] == 0
        if reason == "manager_unavailable":
            assert other.lookup(tokens).missing is Miss.NEVER_STORED
            rig.faults.clear()
            store(client, prompt(2, 1))  # with the next one, the manager hears of it
        wait_for_condition(lambda: other.lookup(tokens).missing is Miss.NOT_ADMITTED, "everyone is told")
        assert client.lookup(tokens).missing is Miss.NOT_ADMITTED


def test_a_call_that_was_not_made_is_not_told_of(arena_root):
    with Rig(arena_root, 2) as rig:
        client, tokens = rig.client(SPEC), prompt(4)
        rig.faults["0.attach"] = failing(TierUnavailableError("dram", "away"))
        assert [client.lookup(tokens).calls for _ in range(2)] == [("attach", "locate"), ("locate",)]
        rig.faults.clear()
        wait_for(lambda: client.lookup(tokens).fault is None, "the manager is asked again")
        store(rig.client(SPEC, 1), tokens)
        hit = client.lookup(tokens)
        rig.faults["directory.locate"] = failing(DirectoryAvoidedError("did not answer a moment ago"))
        rig.faults["0.load"] = failing(ManagerAvoidedError("dram", "no sign of life"))
        made = client.stats().calls
        explanation = client.explain(client.load(hit, empty(SPEC, 4)))
        assert (explanation.lookup_calls, explanation.load_calls) == (("locate",), ())
        assert client.explain(client.lookup(tokens)).lookup_calls == ()
        assert "lookup: " in str(explanation)
        assert str(explanation).endswith("no remote call")
        assert client.stats().calls == made


def test_a_request_is_explained_from_lookup_to_load(arena_root, wait_for_condition):
    with Rig(arena_root, 2) as rig:
        writer, reader, tokens = rig.client(SPEC), rig.client(SPEC, 1), prompt(5)
        wait_for_condition(lambda: synced(rig), "the directory has all inventories")
        store(writer, tokens)
        store(reader, prompt(2))
        hit = reader.lookup(prompt(7), label="r1")
        parts = [(part.start, part.stop, part.outcome) for part in reader.explain(hit).parts]
        assert parts == [(0, 2, None), (2, 5, None), (5, 7, Miss.NEVER_STORED)]
        explanation = reader.explain(reader.load(hit, empty(SPEC, 5)))
        assert [(part.outcome, part.num_bytes) for part in explanation.parts] == [
            (Source.DRAM, 2 * BLOCK),
            (Source.PEER, 3 * BLOCK),
            (Miss.NEVER_STORED, 0),
        ]
        assert (explanation.lookup_calls, explanation.load_calls) == (("locate",), ("load",))
        assert explanation.lookup_s > 0
        assert explanation.load_s > 0
        assert "on node 00000000" in str(explanation)
        (request,) = rig.run(rig.managers[1].requests(SPEC.keys(prompt(1)).hex()[:8], 5))
        assert (request.label, request.from_dram, request.from_peer, request.missing) == (
            "r1", 2, 3, Miss.NEVER_STORED,
        )  # fmt: skip


def test_totals_outlive_clients_and_managers(arena_root, wait_for_condition):
    with Rig(arena_root) as rig:
        client, stayer = rig.client(SPEC), rig.client(SPEC)
        store(client, prompt(4))
        load(client, prompt(4))
        load(stayer, prompt(4))
        told = rig.status(0).totals
        assert (told.lookups, told.loads, told.stored_blocks) == (2, 2, 4)
        assert told.bytes_by_source == {"dram": 8 * BLOCK}
        client.close(5)
        files = list(arena_root.glob("kvfleet-*/*/clients/*"))
        assert len(files) == 2
        for path in files:
            os.utime(path, (0, 0))
        wait_for_condition(lambda: sum(map(Path.exists, files)) == 1, "the file of the closed client is gone")
        assert rig.status(0).totals == told
        rig.kill(0)
        gc.collect()
        load(stayer, prompt(4))  # what is in the arena is read without a manager
        rig.start(0)
        assert rig.status(0).totals.lookups == 3
        assert rig.status(0).totals.bytes_by_source == {"dram": 12 * BLOCK}


def test_drops_are_told_by_reason(arena_root):
    with Rig(arena_root, dram_bytes=1 << 20) as rig:
        client, tokens = rig.client(SPEC), prompt(40)
        client.store(tokens, kv(SPEC, tokens)).wait(10)
        assert rig.status(0).totals.dropped_blocks == {"no_room": 24}

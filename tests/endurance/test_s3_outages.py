"""A node and a real S3 server that goes away and comes back, or loses and damages objects."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvfleet.core.block import split
from kvfleet.core.breaker import ProbedBreaker
from kvfleet.node.messages import Miss, Source
from kvfleet.node.shared import SharedTier
from tests.conftest import wait_for
from tests.rig import Rig
from tests.s3proxy import Fault, Kind, S3Proxy, s3proxy
from tests.seaweed import Seaweed, seaweed
from tests.sharedcalls import fail_each_call, space_of, use_in_all_ways, works
from tests.workload import load, model, prompt, store

SPEC = model(64)
PROBE_S = 0.5
TRIES = 4  # botocore's two, each of which aiohttp may repeat on a fresh connection


@pytest.fixture(scope="module")
def server() -> Iterator[Seaweed]:
    with seaweed() as server:
        yield server


@pytest.fixture
def proxy(server: Seaweed) -> Iterator[S3Proxy]:
    with s3proxy(server.endpoint) as proxy:
        yield proxy


@pytest.fixture
def rig(arena_root, server: Seaweed, proxy: S3Proxy, monkeypatch) -> Iterator[Rig]:
    with node(arena_root, server, proxy, monkeypatch) as rig:
        yield rig


@contextmanager
def node(root: Path, server: Seaweed, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """One node, whose credentials are in its environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.options["secret"])
    options = server.settings | {"endpoint_url": proxy.endpoint}
    url = f"s3://kvfleet/{root.name}"
    with Rig(root, shared_url=url, shared_options=options, shared_probe_s=PROBE_S, shared_timeout_s=3.0) as rig:
        yield rig
        proxy.heal()


def forget(rig: Rig, num_blocks: int, number: int = 0) -> None:
    """Drop what the node has in DRAM of the prompt, saved as it is."""
    assert rig.run(rig.managers[0].flush(20.0)) == 0

    async def drop() -> None:
        for key in split(SPEC.keys(prompt(num_blocks, number))):
            rig.part(0).dram.drop(key)

    rig.run(drop())


@pytest.mark.parametrize("kind", ["busy", "drop"])
def test_an_outage_costs_misses_and_the_breaker_closes_within_two_probes(
    proxy: S3Proxy, rig: Rig, kind: Kind, monkeypatch: pytest.MonkeyPatch
):
    pauses = pauses_between_probes(monkeypatch)
    client, later = rig.client(SPEC), prompt(2, 2)
    store(client, prompt(4))
    store(client, later)
    forget(rig, 4)
    forget(rig, 2, 2)
    with proxy.faulty(Fault(kind)):
        assert load(client, prompt(4)).outcomes[0] is Miss.STORAGE_FAILED
        wait_for(lambda: rig.status(0).avoided == ("shared",), "the breaker is open")
        store(client, prompt(3, 1))  # nobody waits for the tier
        wait_for(lambda: rig.status(0).shared_counts.get("write_outages") == 1, "for writes too")
        # Of blocks that no request under way, which is tried again, is about.
        assert load(client, later).outcomes[0] is Miss.STORAGE_FAILED
        names = [key.hex() for key in split(SPEC.keys(later))]
        asked = [path for method, path in proxy.keys if method == "GET" and any(name in path for name in names)]
        assert not asked, "it was not asked"
        wait_for(lambda: len(pauses) >= 16, "it is probed as seldom as it ever will be")
    proxy.reset_counts()
    wait_for(lambda: rig.status(0).avoided == (), "it is used again")
    assert sum(count for (method, path), count in proxy.keys.items() if path.endswith("/probe")) <= 2 * TRIES
    assert load(client, prompt(4)).outcomes == (Source.SHARED,) * 4
    assert rig.run(rig.managers[0].flush(20.0)) == 0
    assert rig.status(0).saved_blocks == 9
    assert rig.status(0).shared_problem == ""
    assert max(pauses) <= PROBE_S


def pauses_between_probes(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long after the end of each probe without an answer the next one is due, in seconds; filled as they come."""
    pauses = []
    unanswered = ProbedBreaker.unanswered

    def noted(breaker: ProbedBreaker, now: float) -> None:
        unanswered(breaker, now)
        pauses.append(breaker.due - now)

    monkeypatch.setattr(ProbedBreaker, "unanswered", noted)
    return pauses


def test_objects_deleted_behind_our_back_are_counted_misses(proxy: S3Proxy, rig: Rig):
    client = rig.client(SPEC)
    store(client, prompt(4))
    forget(rig, 4)
    with proxy.faulty(Fault("missing", {"GET"}, key=r"\.arrow$")):
        assert load(client, prompt(4)).outcomes[0] is Miss.OBJECT_LOST
    assert rig.status(0).shared_counts["absent"] >= 1
    wait_for(lambda: client.lookup(prompt(4)).num_blocks == 0, "all know that it is gone")
    store(client, prompt(4))
    forget(rig, 4)
    assert load(client, prompt(4)).outcomes == (Source.SHARED,) * 4


@pytest.mark.parametrize("kind", ["flip", "short", "long"])
def test_a_bad_body_is_a_counted_miss_and_the_block_is_stored_anew(proxy: S3Proxy, rig: Rig, kind: Kind):
    client = rig.client(SPEC)
    store(client, prompt(4))
    forget(rig, 4)
    with proxy.faulty(Fault(kind, {"GET"}, key=r"\.arrow$", times=1)):
        assert Miss.CORRUPT in load(client, prompt(4)).outcomes
    assert rig.status(0).shared_counts["corrupt"] == 1
    store(client, prompt(4))
    forget(rig, 4)
    assert load(client, prompt(4)).outcomes == (Source.SHARED,) * 4


def test_a_slow_body_costs_a_counted_miss_and_no_object(proxy: S3Proxy, rig: Rig):
    client = rig.client(SPEC)
    store(client, prompt(4))
    forget(rig, 4)
    with proxy.faulty(Fault("slow", {"GET"}, key=r"\.arrow$", pieces=100, pause_s=0.1)):
        outcomes = load(client, prompt(4)).outcomes
    assert outcomes[0] is Miss.STORAGE_FAILED
    wait_for(lambda: rig.status(0).avoided == (), "it is used again")
    assert load(client, prompt(4)).outcomes == (Source.SHARED,) * 4


def test_a_server_killed_while_it_is_written_costs_misses_and_is_used_again(arena_root, monkeypatch):
    with seaweed() as server, s3proxy(server.endpoint) as proxy, node(arena_root, server, proxy, monkeypatch) as rig:
        kill_and_restart(server, proxy, rig)


def kill_and_restart(server: Seaweed, proxy: S3Proxy, rig: Rig) -> None:
    client = rig.client(SPEC)
    store(client, prompt(4))
    forget(rig, 4)
    done = threading.Event()

    def go_on_storing() -> None:
        number = 1
        while not done.is_set():
            store(client, prompt(8, number))
            number += 1

    thread = threading.Thread(target=go_on_storing)
    thread.start()
    try:
        saved = rig.status(0).saved_blocks
        wait_for(lambda: rig.status(0).saved_blocks > saved + 8, "it is being written")
        server.kill()
        wait_for(lambda: rig.status(0).shared_counts.get("write_outages", 0) == 1, "the breaker is open")
        assert load(rig.client(SPEC), prompt(4)).outcomes[0] is Miss.STORAGE_FAILED
    finally:
        done.set()
        thread.join()
    server.restart()
    proxy.reset_counts()
    wait_for(lambda: rig.status(0).avoided == (), "it is read again")
    assert sum(count for (method, path), count in proxy.keys.items() if path.endswith("/probe")) <= 2 * TRIES
    # A flush gives up when nothing gets through for a few probes: a server that has just started may be slower.
    wait_for(lambda: rig.run(rig.managers[0].flush(60.0), 70.0) == 0, "all is written")
    assert load(rig.client(SPEC), prompt(4)).outcomes == (Source.SHARED,) * 4


# --- every call fails once


@pytest.mark.parametrize("kind", ["busy", "drop", "lose", "torn", "short", "long", "flip"])
def test_every_call_may_fail_once(server: Seaweed, proxy: S3Proxy, kind: Kind):
    """Right bytes or a miss, and afterwards all is well."""
    # The client tries nothing again, but that aiohttp repeats what an old connection has dropped.
    options = server.options | {"endpoint_url": proxy.endpoint, "config_kwargs": {"retries": {"total_max_attempts": 1}}}
    tier = SharedTier(f"s3://kvfleet/{kind}", options, timeout_s=5)

    def life(number: int) -> tuple[int, bool]:
        space = space_of(number)
        with proxy.faulty(Fault(kind, after=number, times=2 if kind in ("drop", "lose") else 1)) as fault:
            failed = use_in_all_ways(tier, space)
        works(tier, space)
        return failed, fault.hits > 0

    fail_each_call(life)
    tier.close()

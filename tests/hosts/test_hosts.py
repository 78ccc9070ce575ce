"""Hosts of their own address, the fleet on them, and what is left of both."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfleet import FleetConfig
from kvfleet.core.outcomes import Miss, Source
from tests.cluster.engine_process import MIB, Answer, Engine, new_seed
from tests.conftest import wait_for
from tests.hosts.agent import Agent
from tests.hosts.asking import actor_processes, live_nodes, status, stop_fleet, store_use
from tests.hosts.hosts import REPOSITORY, Host, Hosts
from tests.hosts.runs import leftovers, sweep

HOLDER_TIMEOUT_S = 3.0
LOAD_TIMEOUT_S = 8.0
GRACE_S = 2.0


def settings(hosts: Hosts) -> FleetConfig:
    return FleetConfig(
        name=secrets.token_hex(4),
        dram_bytes=64 * MIB,
        arena_root=str(hosts.shared_memory),
        holder_timeout_s=HOLDER_TIMEOUT_S,
        load_timeout_s=LOAD_TIMEOUT_S,
    )


def all_nodes(agent: Agent) -> set[str]:
    """Ray node ids of all live nodes."""
    return {node for nodes in agent.call(live_nodes).values() for node in nodes}


def arenas(hosts: Hosts) -> set[str]:
    """Ray node ids of the arenas there are."""
    return {path.name.rpartition("-")[2] for path in hosts.shared_memory.glob("kvfleet-*/*") if path.is_dir()}


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Three hosts; not for tests that end processes."""
    with Hosts(3) as made:
        made.start()
        yield made


@pytest.fixture(scope="module")
def agents(hosts: Hosts) -> Iterator[list[Agent]]:
    """An engine on each host. At the end the fleet is stopped, and nothing of it may be left."""
    fleet = settings(hosts)
    made = [Agent(hosts, host, fleet) for host in hosts.hosts]
    yield made
    for node in made[0].call(status).nodes:
        assert (node.problem, node.audit, node.reserved_blocks) == ("", (), 0)
        assert node.used_bytes == node.blocks * MIB
    assert made[0].call(store_use).spilled_bytes == 0
    assert made[0].call(stop_fleet) == 0
    for agent in made:
        agent.close()
    assert arenas(hosts) == set()


def load(agent: Agent, seed: int, num_blocks: int) -> Answer:
    answer = agent.call(Engine.load, seed, num_blocks)
    assert not answer.wrong, answer
    return answer


def wait_for_blocks(agent: Agent, seed: int, num_blocks: int) -> None:
    """Wait until a load brings everything."""
    what = f"all blocks of prompt {seed} come to host {agent.host.name}"
    wait_for(lambda: load(agent, seed, num_blocks).num_blocks == num_blocks, what, 60.0)


def manager(agents: list[Agent], host: Host) -> int:
    """Process id of a host's manager."""
    (node,) = agents[0].call(live_nodes)[host.address]
    return agents[0].call(actor_processes)[f"tier-manager-{node}"]


def test_blocks_move_between_hosts(hosts, agents):
    seed, before = new_seed(), hosts.sent_bytes(hosts.hosts[1])
    assert agents[1].call(Engine.store, seed, 8).published
    assert load(agents[2], seed, 8).sources == {Source.PEER: 8}
    sent = hosts.sent_bytes(hosts.hosts[1]) - before
    assert 8 * MIB < sent < 10 * MIB
    assert load(agents[2], seed, 8).sources == {Source.DRAM: 8}
    wait_for(lambda: agents[0].call(store_use).used_bytes == 0, "no object is left in an object store")


def test_a_host_without_a_link(hosts, agents):
    """Its blocks are misses by the deadline, others' go on, and when the link is back it is a holder again."""
    seed, other = new_seed(), new_seed()
    cut = hosts.hosts[1]
    agents[1].call(Engine.store, seed, 8)
    agents[0].call(Engine.store, other, 8)
    # Looked up before: the directory may be on any host, this one too.
    hit, other_hit = (agents[2].call(Engine.lookup, number, 8) for number in (seed, other))
    assert (hit.num_blocks, other_hit.num_blocks) == (8, 8)
    hosts.cut(cut)
    try:
        answer = agents[2].call(Engine.load_hit, seed, hit)
        assert (answer.num_blocks, answer.wrong) == (0, ())
        assert answer.outcomes[0] in {Miss.TOO_SLOW, Miss.UNREACHABLE, Miss.DEADLINE}
        assert answer.seconds < LOAD_TIMEOUT_S + GRACE_S
        answer = agents[2].call(Engine.load_hit, other, other_hit)
        assert (answer.sources, answer.wrong) == ({Source.PEER: 8}, ())
        # What the host has itself it goes on serving, without anybody else.
        assert load(agents[1], seed, 8).sources == {Source.DRAM: 8}
    finally:
        hosts.heal(cut)
    wait_for_blocks(agents[2], seed, 8)
    wait_for_blocks(agents[1], other, 8)


def test_a_slow_link(hosts, agents):
    """What comes in time is a hit, the rest a miss."""
    seed = new_seed()
    agents[0].call(Engine.store, seed, 16)
    hosts.slow(hosts.head, 2 * MIB)
    try:
        answer = agents[2].call(Engine.load, seed, 16, 4.0)
        assert answer.wrong == ()
        assert answer.num_blocks < 16
        assert answer.seconds < 4.0 + GRACE_S
    finally:
        hosts.heal(hosts.head)
    wait_for_blocks(agents[2], seed, 16)


def test_a_stopped_holder(hosts, agents):
    """It costs the first request its timeout, later ones nothing, until it answers again."""
    first, second, third = new_seed(), new_seed(), new_seed()
    for seed in (first, second, third):
        agents[1].call(Engine.store, seed, 4)
    hits = {seed: agents[2].call(Engine.lookup, seed, 4) for seed in (first, second)}
    stopped = manager(agents, hosts.hosts[1])
    hosts.stop(stopped)
    try:
        answer = agents[2].call(Engine.load_hit, first, hits[first])
        assert (answer.num_blocks, answer.outcomes[0]) == (0, Miss.TOO_SLOW)
        assert answer.seconds < HOLDER_TIMEOUT_S + GRACE_S
        for seed in (second, first, second):
            answer = agents[2].call(Engine.load_hit, seed, hits[seed])
            assert (answer.num_blocks, answer.outcomes[0]) == (0, Miss.UNREACHABLE)
            assert answer.seconds < HOLDER_TIMEOUT_S
    finally:
        hosts.go_on(stopped)
    for seed in (first, second, third):
        wait_for_blocks(agents[2], seed, 4)


def test_a_host_that_loses_power(hosts):
    """It comes back as a new node, and what it held is removed."""
    with Hosts(2) as own:
        own.start()
        fleet = settings(own)
        agents = [Agent(own, host, fleet) for host in own.hosts]
        seed = new_seed()
        agents[1].call(Engine.store, seed, 4)
        (lost,) = agents[0].call(live_nodes)[own.hosts[1].address]
        assert arenas(own) == all_nodes(agents[0])

        own.kill_host(own.hosts[1])
        wait_for(lambda: lost not in all_nodes(agents[0]), "the node is known to be dead", 60.0)
        wait_for(lambda: agents[0].call(Engine.lookup, seed, 4).num_blocks == 0, "nobody is said to have them", 60.0)

        own.begin_node(own.hosts[1])
        own.wait_for_node(own.hosts[1])
        agents[1].close()
        agents[1] = Agent(own, own.hosts[1], fleet)
        assert arenas(own) == all_nodes(agents[0])
        assert lost not in arenas(own)
        agents[1].call(Engine.store, seed, 4)
        assert load(agents[0], seed, 4).sources == {Source.PEER: 4}
        agents[0].call(stop_fleet)
        for agent in agents:
            agent.close()


BUILD_AND_WAIT = """
import sys, time
from tests.hosts.hosts import Hosts
hosts = Hosts(2, disk_bytes=1 << 20)
hosts.run(hosts.hosts[1], "sleep", "1000")
hosts.slow(hosts.hosts[0], 1 << 20)
print(hosts.run_id, flush=True)
time.sleep(1000)
"""


def test_what_a_killed_run_leaves_is_removed(hosts):
    test = subprocess.Popen((sys.executable, "-c", BUILD_AND_WAIT), cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    with test:
        assert test.stdout is not None
        run = test.stdout.readline().strip()
        sweep()
        assert any("disk" in left for left in leftovers(run)), "a run that lives is left alone"
        test.kill()
    before = leftovers(hosts.run_id)
    assert any(left.isdigit() for left in leftovers(run)), "its processes live on"
    sweep()
    assert leftovers(run) == []
    assert set(before) <= set(leftovers(hosts.run_id))


def test_nothing_is_left_of_hosts():
    checks: list[Callable[[], bool]] = []
    with Hosts(2, disk_bytes=MIB) as made:
        made.run(made.hosts[0], "sleep", "1000")
        assert made.disk is not None
        (made.disk / "file").write_bytes(bytes(1000))
        mounts = Path("/proc/self/mounts")
        checks.append(lambda: made.run_id not in mounts.read_text())
        assert not checks[0]()
    assert leftovers(made.run_id) == []
    assert all(check() for check in checks)

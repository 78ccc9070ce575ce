"""A fleet on three hosts that works while processes, nodes, links and the disk fail: no byte is wrong, nothing hangs,
nothing leaks, and hits come back."""

from __future__ import annotations

import faulthandler
import secrets
import sys
from collections import Counter
from dataclasses import dataclass

from kvfleet import FleetConfig
from tests.conftest import MIB, wait_for
from tests.hosts.agent import Agent
from tests.hosts.asking import (
    StoreUse,
    actor_processes,
    bring,
    live_nodes,
    put,
    start_managers,
    status,
    stop_fleet,
    store_use,
)
from tests.hosts.crew import BUCKET_S, Crew, curve, recovery_s
from tests.hosts.faults import WARM_S, Hand, script
from tests.hosts.hosts import Hosts
from tests.hosts.runs import descriptors, threads
from tests.hosts.worker import BLOCK_BYTES, LOAD_TIMEOUT_S, LOOKUP_TIMEOUT_S

ARENA_BYTES = 10 * MIB  # less than what the workers use at a time: blocks are evicted all the while
DISK_BYTES = 48 * MIB
FRESH = 950_000  # prompts that no worker uses
FRESH_BLOCKS = 8

# A manager's threads and files are its pools, the connections of Ray to its peers and clients, and its clients'
# lock files: how many of those there are just then depends on who has called whom. A leak per fault or per
# operation would be far above this: there are tens of faults and thousands of operations.
THREADS_MORE = 24
DESCRIPTORS_MORE = 40


@dataclass(frozen=True)
class Use:
    """What a manager uses."""

    threads: int
    descriptors: int


def settings(hosts: Hosts) -> FleetConfig:
    return FleetConfig(
        name=secrets.token_hex(4),
        dram_bytes=ARENA_BYTES,
        arena_root=str(hosts.shared_memory),
        shared_url=f"file://{hosts.disk}",
        lookup_timeout_s=LOOKUP_TIMEOUT_S,
        load_timeout_s=LOAD_TIMEOUT_S,
        store_timeout_s=5.0,
        holder_timeout_s=1.0,
        shared_timeout_s=2.0,
        window_bytes_min=MIB,
        window_bytes_max=4 * MIB,
    )


def uses(hosts: Hosts, control: Agent) -> dict[str, Use]:
    """What the managers of all hosts use, by host."""
    nodes, actors = control.call(live_nodes), control.call(actor_processes)
    found = {}
    for host in hosts.hosts:
        (node,) = nodes[host.address]
        process = actors[f"tier-manager-{node}"]
        found[host.name] = Use(threads(process), descriptors(process))
    return found


def arenas(hosts: Hosts) -> set[str]:
    """Ray node ids of the arenas there are."""
    return {path.name.rpartition("-")[2] for path in hosts.shared_memory.glob("kvfleet-*/*") if path.is_dir()}


def findings(control: Agent, num_nodes: int) -> list[str]:
    """What is wrong in the managers' books, or left of what was under way."""
    answer = control.call(status)
    found = [f"{node} does not answer" for node in answer.silent]
    if len(answer.nodes) != num_nodes:
        found.append(f"{len(answer.nodes)} nodes answer")
    for node in answer.nodes:
        if node.problem or node.audit or node.reserved_blocks or node.used_bytes != node.blocks * BLOCK_BYTES:
            found.append(str(node))
        assert node.used_bytes <= node.capacity_bytes
    return found


def check_at_rest(hosts: Hosts, control: Agent, before: dict[str, Use]) -> None:
    """Nothing of what was under way is left anywhere."""
    wait_for(lambda: not findings(control, len(hosts.hosts)), "the books of all managers are in order", 60.0)
    wait_for(lambda: control.call(store_use) == StoreUse(0, 0), "no object is left in an object store", 30.0)
    spilled = [path for host in hosts.hosts for path in host.temp_dir.rglob("*spilled*/*")]
    assert not spilled

    def near() -> bool:
        return all(
            use.threads <= before[name].threads + THREADS_MORE
            and use.descriptors <= before[name].descriptors + DESCRIPTORS_MORE
            for name, use in uses(hosts, control).items()
        )

    wait_for(near, f"managers use what they used before, {before}", 30.0)


def check_exchange(agents: list[Agent]) -> None:
    """What any host stores now, every other one finds and loads."""
    for number, writer in enumerate(agents, FRESH):
        writer.call(put, number, FRESH_BLOCKS)
        for reader in agents:
            if reader is not writer:
                outcomes = reader.call(bring, number, FRESH_BLOCKS)
                assert outcomes in ({"peer": FRESH_BLOCKS}, {"shared": FRESH_BLOCKS}), outcomes


def check_reaped(hosts: Hosts, control: Agent) -> None:
    """A manager that starts removes what dead nodes of its host left."""
    nodes = control.call(live_nodes)
    (node,) = nodes[hosts.head.address]
    process = control.call(actor_processes)[f"tier-manager-{node}"]
    hosts.kill(process)
    wait_for(lambda: not findings(control, len(hosts.hosts)), "the manager is back", 60.0)
    assert arenas(hosts) == {node for (node,) in nodes.values()}


def work_and_hurt(crew: Crew, hand: Hand, seconds: float) -> None:
    """Let the script run to its end, and then until all hosts serve again."""

    def tend() -> None:
        hand.tend()
        crew.tend()

    def over():
        tend()
        return hand.passed_s > seconds and hand.finished

    def recovered():
        tend()
        return crew.all_work(hand.healed_at)

    wait_for(over, "all faults are done and undone", seconds + 300.0)
    wait_for(recovered, "every worker finds, loads and stores again after the last fault", 120.0)


def check_records(crew: Crew) -> None:
    """No wrong byte, no error, no operation that took too long, no worker that fell; every block has its outcome."""
    for member in crew.members:
        bad = [record for record in member.records() if record.wrong or record.late or record.kind == "failed"]
        assert not bad, f"{member.name}: {bad}\n{member.log.read_text()[-8000:]}"
        uneven = [r for r in member.records() if r.kind == "totals" and r.asked != sum(r.outcomes.values())]
        assert not uneven, f"{member.name}: {uneven}"
        assert member.records()[-1].kind == "end", f"{member.name}: {member.log.read_text()[-8000:]}"
    assert not crew.fallen


def test_a_fleet_under_faults(seed, seconds, capsys):
    faulthandler.cancel_dump_traceback_later()  # it takes longer than other tests may
    with Hosts(3, disk_bytes=DISK_BYTES) as hosts:
        hosts.start()
        fleet = settings(hosts)
        control = Agent(hosts, hosts.head, fleet)
        control.call(start_managers)
        crew = Crew(hosts, fleet.name, seed, per_host=2)
        crew.tend()
        wait_for(lambda: crew.all_work(0.0), "all workers find, load and store", 120.0)
        before = uses(hosts, control)
        hand = Hand(hosts, control, script(seed, seconds, len(hosts.hosts)))
        try:
            work_and_hurt(crew, hand, seconds)
        finally:
            crew.stop()
            with capsys.disabled():
                sys.stdout.write(summary(crew, hand))
        check_records(crew)

        agents = [control, *(Agent(hosts, host, fleet) for host in hosts.hosts[1:])]
        check_exchange(agents)
        check_at_rest(hosts, control, before)
        with capsys.disabled():
            sys.stdout.write(f"managers: {before} before, {uses(hosts, control)} after\n")
        check_reaped(hosts, control)
        assert control.call(stop_fleet) == 0
        assert arenas(hosts) == set()
        for agent in agents:
            agent.close()


def summary(crew: Crew, hand: Hand) -> str:
    """What was done, what went wrong, and how hits fared."""
    everything = crew.records()
    lines = [f"\n{hand.passed_s:.0f} s; faults {dict(hand.done)}"]
    lines.append(f"Ray nodes started again {hand.node_starts}, workers {sum(m.starts - 1 for m in crew.members)}")
    for kind in ("lookup", "load", "store"):
        some = [record for record in everything if record.kind == kind]
        outcomes: Counter[str] = Counter()
        for record in some:
            outcomes.update(record.outcomes)
        took = sorted(record.seconds for record in some) or [0.0]
        lines.append(
            f"{kind}: {len(some)} of {sum(r.asked for r in some)} blocks, p50 {took[len(took) // 2]:.3f} s, "
            f"p99 {took[len(took) * 99 // 100]:.3f} s, longest {took[-1]:.3f} s; {dict(outcomes)}"
        )
    late = [record for record in everything if record.late]
    wrong = sum(record.wrong for record in everything)
    failed = [record for record in everything if record.kind == "failed"]
    lines.append(f"wrong blocks {wrong}, late {late}, failed {failed}")
    shares = " ".join(f"{share:.2f}({lookups})" for lookups, share in curve(everything, hand.started))
    lines.append(f"hit share (lookups) per {BUCKET_S:.0f} s, faults from {WARM_S:.0f} s on: {shares}")
    lines += [f"  {at_s:6.1f} s {what}" for at_s, what in hand.log]
    lines.append(f"all workers hit again {recovery_s(crew, hand.healed_at):.1f} s after the last fault")
    return "\n".join([*lines, ""])

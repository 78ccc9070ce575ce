"""The directory against plain sets, over a network that loses, repeats and delays what nodes say."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvfleet.core import rows
from kvfleet.core.directory import Applied, Delta, Digest, Directory, InventoryPage, NodeId, Run
from kvfleet.core.outcomes import Miss

NODES = [NodeId(letter * 32) for letter in "abc"]
KEYS = [bytes([number % 3, number]) * 8 for number in range(9)]
RECORDS = [key + bytes([shard, 0]) for key in KEYS for shard in (0, 1)]
some_records = st.sets(st.sampled_from(RECORDS), max_size=8)


@dataclass
class Manager:
    """A node as it is, and what it has yet to tell."""

    epoch: int = 1
    seq: int = 0
    held: set[bytes] = field(default_factory=set)
    told: set[bytes] = field(default_factory=set)


@dataclass
class Belief:
    """What the directory should believe of a node."""

    epoch: int
    seq: int = 0
    synced: bool = False
    held: frozenset[bytes] = frozenset()
    half: tuple[int, int, frozenset[bytes]] | None = None  # seq, next page, records


class DirectoryMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Directory(1000)
        self.expected = set(NODES)
        self.directory.expect(frozenset(self.expected))
        self.managers = {node: Manager() for node in NODES}
        self.believed: dict[NodeId, Belief] = {}
        self.left: dict[NodeId, int] = {}
        self.shared: set[bytes] = set()
        self.heard_of: set[bytes] = set()
        self.refused: set[bytes] = set()
        self.said: list[Delta | InventoryPage] = []

    # --- what a directory should do, in plain words

    def hear(self, node: NodeId, epoch: int) -> Belief | None:
        belief = self.believed.get(node)
        if belief is None:
            if epoch < self.left.get(node, 0):
                return None
            belief = self.believed[node] = Belief(epoch)
        if epoch > belief.epoch:
            belief.epoch, belief.seq, belief.synced, belief.half = epoch, 0, False, None
        return belief if epoch == belief.epoch else None

    def expect_delta(self, delta: Delta) -> Applied:
        belief = self.hear(delta.node, delta.epoch)
        if belief is None:
            return Applied.STALE_EPOCH
        if belief.synced and delta.seq <= belief.seq:
            return Applied.OK
        self.shared -= set(unpack(delta.shared_removed))
        self.shared |= set(unpack(delta.shared_added))
        self.heard_of |= set(unpack(delta.shared_added))
        if not belief.synced or delta.seq != belief.seq + 1:
            belief.synced = False
            return Applied.NEED_INVENTORY
        belief.seq = delta.seq
        belief.held = (belief.held - set(unpack(delta.removed))) | set(unpack(delta.added))
        self.heard_of |= set(unpack(delta.added))
        self.refused |= set(unpack(delta.not_admitted))
        belief.synced = delta.digest is None or delta.digest == digest(belief.held)
        return Applied.OK if belief.synced else Applied.NEED_INVENTORY

    def expect_page(self, page: InventoryPage) -> Applied:
        belief = self.hear(page.node, page.epoch)
        if belief is None:
            return Applied.STALE_EPOCH
        if belief.synced and page.seq < belief.seq:
            return Applied.OK
        if page.page == 0:
            belief.half = (page.seq, 0, frozenset())
        if belief.half is None or belief.half[:2] != (page.seq, page.page):
            belief.half = None
            return Applied.NEED_INVENTORY
        self.heard_of |= set(unpack(page.records))
        belief.half = (page.seq, page.page + 1, belief.half[2] | set(unpack(page.records)))
        if page.last:
            belief.held, belief.seq, belief.synced, belief.half = belief.half[2], page.seq, True, None
        return Applied.OK

    def deliver(self, message: Delta | InventoryPage) -> None:
        if isinstance(message, Delta):
            assert self.directory.apply(message) is self.expect_delta(message)
        else:
            assert self.directory.inventory(message) is self.expect_page(message)
        self.said = [*self.said[-20:], message]

    # --- what happens

    @rule(
        node=st.sampled_from(NODES), added=some_records, removed=some_records, refused=some_records,
        lost=st.booleans(), drift=st.booleans(),
    )  # fmt: skip
    def change(
        self, node: NodeId, added: set[bytes], removed: set[bytes], refused: set[bytes], lost: bool, drift: bool
    ) -> None:
        manager = self.managers[node]
        manager.held = (manager.held - removed) | added
        manager.seq += 1
        untold = manager.held - (set(sorted(manager.held)[:1]) if drift else set())
        delta = Delta(
            node,
            manager.epoch,
            manager.seq,
            added=b"".join(sorted(untold - manager.told)),
            removed=b"".join(sorted(manager.told - untold)),
            digest=digest(frozenset(manager.held)),
            not_admitted=b"".join(sorted(refused)),
        )
        manager.told = set(untold)
        if not lost:
            self.deliver(delta)

    @rule(node=st.sampled_from(NODES), added=some_records, removed=some_records)
    def shared_changes(self, node: NodeId, added: set[bytes], removed: set[bytes]) -> None:
        manager = self.managers[node]
        manager.seq += 1
        self.deliver(
            Delta(
                node,
                manager.epoch,
                manager.seq,
                shared_added=b"".join(sorted(added)),
                shared_removed=b"".join(sorted(removed)),
            )
        )

    @rule(node=st.sampled_from(NODES), num_pages=st.integers(1, 3), sent=st.integers(1, 3))
    def resync(self, node: NodeId, num_pages: int, sent: int) -> None:
        manager = self.managers[node]
        held = sorted(manager.held)
        manager.told = set(held)
        for page in range(min(num_pages, sent)):
            records = b"".join(held[page::num_pages])
            self.deliver(InventoryPage(node, manager.epoch, manager.seq, page, page == num_pages - 1, records))

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def repeat(self, data: Any) -> None:
        self.deliver(data.draw(st.sampled_from(self.said)))

    @rule(node=st.sampled_from(NODES), keeps=st.booleans())
    def restart(self, node: NodeId, keeps: bool) -> None:
        manager = self.managers[node]
        manager.epoch, manager.seq = manager.epoch + 1, 0
        manager.held = manager.held if keeps else set()
        manager.told = set()

    @rule(node=st.sampled_from(NODES))
    def die(self, node: NodeId) -> None:
        self.directory.drop_node(node)
        self.expected.discard(node)
        belief = self.believed.pop(node, None)
        if belief is not None:
            self.left[node] = belief.epoch

    # --- what always holds

    @invariant()
    def locates_what_it_believes(self) -> None:
        for shard in (0, 1):
            for start in (0, 4):
                keys = KEYS[start:]
                runs = self.directory.locate(b"".join(keys), shard, 2)
                assert runs == sorted(runs, key=lambda run: run.start)
                assert flat(runs) == self.expect_holders(keys, shard)
                assert all(one.nodes != two.nodes or one.shared != two.shared for one, two in pairwise(runs))

    def expect_holders(self, keys: list[bytes], shard: int) -> list[tuple[set[NodeId], bool]]:
        expected = []
        for key in keys:
            record, other = key + bytes([shard, 0]), key + bytes([1 - shard, 0])
            holders = {node for node, belief in self.believed.items() if record in belief.held}
            elsewhere = other in self.shared or any(other in belief.held for belief in self.believed.values())
            if not elsewhere or not (holders or record in self.shared):
                break
            expected.append((holders, record in self.shared))
        return expected

    @invariant()
    def says_why_only_if_it_knows(self) -> None:
        visible = self.visible()
        for key in KEYS:
            missing = {key + bytes([shard, 0]) for shard in (0, 1)} - visible
            if missing:
                why = self.directory.why(key, 2)
                reasons = {
                    Miss.EVICTED: self.heard_of,
                    Miss.HOLDER_LOST: self.heard_of,
                    Miss.NOT_ADMITTED: self.refused,
                }
                if why is Miss.NEVER_STORED:
                    assert self.believed.keys() >= self.expected
                    assert all(belief.synced for belief in self.believed.values())
                    assert not missing & (self.heard_of | self.refused - visible)
                else:
                    assert why is Miss.UNKNOWN or missing & reasons[why]

    def visible(self) -> set[bytes]:
        return self.shared.union(*(belief.held for belief in self.believed.values()))

    @invariant()
    def counts_what_it_believes(self) -> None:
        stats = self.directory.stats()
        known = {node: (b.epoch, b.seq, len(b.held), b.synced) for node, b in self.believed.items()}
        assert {node.node: (node.epoch, node.seq, node.records, node.synced) for node in stats.nodes} == known
        assert stats.shared == len(self.shared)
        assert stats.refused == 0
        assert stats.rows >= len(self.visible())


def unpack(packed: bytes) -> list[bytes]:
    return [packed[at : at + 18] for at in range(0, len(packed), 18)]


def digest(held: frozenset[bytes]) -> Digest:
    xor = 0
    for record in held:
        xor ^= int.from_bytes(record, "big")
    return Digest(len(held), xor.to_bytes(18, "big"))


def flat(runs: list[Run]) -> list[tuple[set[NodeId], bool]]:
    return [(set(run.nodes), run.shared) for run in runs for _ in range(run.start, run.stop)]


@pytest.mark.parametrize("sweep_rows", [1, 20_000])
def test_directory(sweep_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether rows are cleaned out at once or one part a call."""
    monkeypatch.setattr(rows, "SWEEP_ROWS", sweep_rows)
    run_state_machine_as_test(
        DirectoryMachine, settings=settings(max_examples=40, stateful_step_count=40, deadline=None)
    )

"""Which node holds which block: a cache of the nodes' own inventories.

What it says is a hint, checked at the holder; losing it costs a resync. Nodes tell their changes as `Delta`s,
numbered without gaps within an epoch; whenever a number, an epoch or a digest does not fit, the answer asks for
the whole inventory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvfleet.core.block import KEY_BYTES
from kvfleet.core.census import DirectoryStats, NodeStats
from kvfleet.core.inventory import RECORD_BYTES, Applied, Delta, Digest, InventoryPage, NodeId, split_records
from kvfleet.core.outcomes import Miss
from kvfleet.core.rows import SHARED, NodeRows, Rows, some_bits, split_bits
from kvfleet.core.spoken import Spoken

__all__ = [
    "RECORD_BYTES",
    "Applied",
    "Delta",
    "Digest",
    "Directory",
    "DirectoryStats",
    "InventoryPage",
    "NodeId",
    "NodeStats",
    "Run",
    "split_records",
]

_EPOCHS_MAX = 4096  # dropped nodes whose last epoch is still known
_NAMED_MAX = 32  # holders of one block: a block that a thousand nodes have would make an answer of 60 KB
_NEXT = 7  # from where holders are named, in bits, from one answer to the next


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks with the same holders.

    Attributes:
        start: index of the first block.
        stop: index after the last one.
        nodes: holders of the record asked for, in no order of preference; of very many, some, each time others.
        shared: a copy is in the shared tier.
    """

    start: int
    stop: int
    nodes: tuple[NodeId, ...]
    shared: bool


@dataclass(slots=True)
class _Node:
    """What is known of a node, and the half inventory it is sending."""

    epoch: int
    seq: int = 0
    synced: bool = False
    held: NodeRows | None = None
    arriving: NodeRows | None = None
    arriving_seq: int = 0
    next_page: int = 0


class Directory:
    """key → holders, for all nodes of a fleet.

    Threads: none of its own; calls must not overlap.
    """

    def __init__(self, keys_max: int) -> None:
        """Start empty, for at most `keys_max` records."""
        assert keys_max > 0, "a directory holds something"
        self._rows = Rows(keys_max)
        self._nodes: dict[NodeId, _Node] = {}
        self._by_bit: dict[int, NodeId] = {}
        self._left: dict[NodeId, int] = {}  # last epochs of nodes that were dropped
        self._spoken = Spoken()
        self._named_from = 0

    def apply(self, delta: Delta) -> Applied:
        """Take in a node's changes.

        Shared flags belong to no node: they count even where the rest has to wait for an inventory. A delta that
        was applied before is OK and changes nothing.
        """
        node = self._hear(delta.node, delta.epoch)
        if node is None:
            return Applied.STALE_EPOCH
        if node.synced and delta.seq <= node.seq:
            return Applied.OK
        self._look_for_a_past(delta)
        self._rows.remove(delta.shared_lost, SHARED, Miss.OBJECT_LOST)
        self._rows.remove(delta.shared_removed, SHARED)
        self._rows.add(delta.shared_added, SHARED)
        held = node.held
        if not node.synced or held is None or delta.seq != node.seq + 1:
            self._mark(delta.node, node, synced=False)
            return Applied.NEED_INVENTORY
        node.seq = delta.seq
        held.note(self._rows.remove(delta.removed, held.bit), -1)
        self._add(delta.added, held)
        self._rows.not_admitted(delta.not_admitted)
        if delta.digest is not None:
            synced = not held.differs(delta.digest) and (held.complete or not self._rows.roomy)
            self._mark(delta.node, node, synced=synced)
        self._rows.sweep()
        return Applied.OK if node.synced else Applied.NEED_INVENTORY

    def inventory(self, page: InventoryPage) -> Applied:
        """Take in a page of all a node holds; what was known of it stays in effect until the last page.

        A page out of order, or after the start of a newer inventory, makes the half one void: NEED_INVENTORY.
        """
        node = self._hear(page.node, page.epoch)
        if node is None:
            return Applied.STALE_EPOCH
        if node.synced and page.seq < node.seq:
            return Applied.OK  # shows a state older than what is known
        if page.page == 0:
            self._void(node, Miss.UNKNOWN)
            node.arriving, node.arriving_seq = NodeRows(self._rows.new_bit(), page.epoch), page.seq
            node.next_page = 0
        if node.arriving is None or (page.page, page.seq) != (node.next_page, node.arriving_seq):
            self._void(node, Miss.UNKNOWN)
            return Applied.NEED_INVENTORY
        node.next_page += 1
        self._add(page.records, node.arriving)
        if page.last:
            self._take_effect(page.node, node, node.arriving)
        self._rows.sweep()
        return Applied.OK

    def drop_node(self, node_id: NodeId) -> None:
        """Forget what a dead node held; an unknown one is fine. If it lives after all, an inventory brings it back."""
        self._spoken.gone(node_id)
        node = self._nodes.pop(node_id, None)
        if node is None:
            return
        self._void(node, Miss.HOLDER_LOST)
        self._retire(node, Miss.HOLDER_LOST)
        self._left.pop(node_id, None)
        self._left[node_id] = node.epoch
        if len(self._left) > _EPOCHS_MAX:
            del self._left[next(iter(self._left))]

    def expect(self, nodes: frozenset[NodeId]) -> None:
        """Name the nodes that may hold something, whether they have spoken or not; in place of those named before."""
        self._spoken.expect(nodes)

    def locate(self, keys: bytes, shard: int, num_shards: int) -> list[Run]:
        """Where the blocks of a prefix are, up to the first that nobody has whole.

        Args:
            keys: packed, 16 bytes each.
            shard: whose holders are wanted.
            num_shards: of a whole block; the other shards may be anywhere.

        Returns:
            Consecutive runs from index 0 on.
        """
        assert len(keys) % KEY_BYTES == 0, "packed keys are 16 bytes each"
        assert 0 <= shard < num_shards, "shard is one of num_shards"
        visible = self._rows.visible
        suffix = shard.to_bytes(2, "little")
        others = [other.to_bytes(2, "little") for other in range(num_shards) if other != shard]
        starts: list[tuple[int, int]] = []
        previous = stop = 0
        for stop, at in enumerate(range(0, len(keys), KEY_BYTES)):
            key = keys[at : at + KEY_BYTES]
            part = self._rows.part(key)
            bits = part.get(key + suffix, 0) & visible
            if not bits or (others and not all(part.get(key + other, 0) & visible for other in others)):
                break
            if bits != previous:
                starts.append((stop, bits))
                previous = bits
        else:
            stop = len(keys) // KEY_BYTES
        return self._runs(starts, stop)

    def why(self, key: bytes, num_shards: int) -> Miss:
        """Why nobody has a block whole, of which `locate` found that.

        NEVER_STORED is said only while it is certain: all nodes that are expected to, and all others that have spoken,
        have told what they hold, and nothing was forgotten. Before it is known who is expected it is not.
        """
        for shard in range(num_shards):
            reason = self._rows.why(key + shard.to_bytes(2, "little"))
            if reason is not None:
                return reason
        told = self._spoken.all_told and self._rows.departures.complete
        return Miss.NEVER_STORED if told else Miss.UNKNOWN

    def shared_among(self, records: bytes) -> bytes:
        """Those of some packed records of which the shared tier has a copy, in the same order."""
        return b"".join(r for r in split_records(records) if self._rows.part(r).get(r, 0) & SHARED)

    def holders(self, record: bytes) -> tuple[NodeId, ...]:
        """The nodes that hold a packed record."""
        bits = self._rows.part(record).get(record, 0) & self._rows.visible & ~SHARED
        return tuple(self._by_bit[bit] for bit in split_bits(bits))

    def tables(self) -> Sequence[Mapping[bytes, int]]:
        """The rows, to be measured: tables of record → bits."""
        return self._rows.tables()

    def stats(self) -> DirectoryStats:
        """Sizes, for metrics and `status`."""
        nodes = tuple(
            NodeStats(name, node.epoch, node.seq, node.held.count if node.held else 0, node.synced)
            for name, node in self._nodes.items()
        )
        rows = self._rows
        departed = len(rows.departures)
        return DirectoryStats(nodes, rows.count, rows.shared, rows.refused, rows.rows_max, departed)

    def _runs(self, starts: list[tuple[int, int]], stop: int) -> list[Run]:
        """Runs from where each starts and its bits."""
        names: dict[int, tuple[NodeId, ...]] = {}
        self._named_from += _NEXT
        for _, bits in starts:
            if bits not in names:
                names[bits] = tuple(
                    self._by_bit[bit] for bit in some_bits(bits & ~SHARED, self._named_from, _NAMED_MAX)
                )
        return [
            Run(start, end, names[bits], bool(bits & SHARED))
            for (start, bits), (end, _) in pairwise([*starts, (stop, 0)])
        ]

    def _mark(self, node_id: NodeId, node: _Node, *, synced: bool) -> None:
        """Note whether all is known that a node holds."""
        node.synced = synced
        self._spoken.told(node_id, everything=synced)

    def _hear(self, node_id: NodeId, epoch: int) -> _Node | None:
        """The sender's state, made if new; None if a later epoch has spoken.

        A newer epoch needs an inventory. Until it has come the old holdings stay as hints: a node's memory
        outlives its manager.
        """
        node = self._nodes.get(node_id)
        if node is None:
            if epoch < self._left.get(node_id, epoch):
                return None
            node = self._nodes[node_id] = _Node(epoch)
            self._spoken.told(node_id, everything=False)
        if epoch > node.epoch:
            self._void(node, Miss.UNKNOWN)
            node.epoch, node.seq = epoch, 0
            self._mark(node_id, node, synced=False)
        return node if epoch == node.epoch else None

    def _add(self, records: bytes, held: NodeRows) -> None:
        gained, all_of_them = self._rows.add(records, held.bit)
        held.note(gained, 1)
        held.complete = held.complete and all_of_them

    def _take_effect(self, node_id: NodeId, node: _Node, arrived: NodeRows) -> None:
        if node.held is None:
            self._rows.departures.complete &= not arrived.count  # they were stored before this directory looked
        else:
            self._retire(node, Miss.EVICTED if node.held.epoch == arrived.epoch else Miss.HOLDER_LOST)
        node.held, node.arriving = arrived, None
        node.seq = node.arriving_seq
        self._mark(node_id, node, synced=True)
        self._rows.visible |= arrived.bit
        self._by_bit[arrived.bit] = node_id

    def _look_for_a_past(self, delta: Delta) -> None:
        """Note when the shared tier has what no node has told of: it was stored before this directory began."""
        departures = self._rows.departures
        if departures.complete and delta.shared_added:
            strangers = {r for r in split_records(delta.shared_added) if r not in self._rows.part(r)}
            departures.complete = strangers <= set(split_records(delta.added))

    def _void(self, node: _Node, why: Miss) -> None:
        """Forget a half inventory."""
        if node.arriving is not None:
            self._rows.retire(node.arriving.bit, why)
            node.arriving = None

    def _retire(self, node: _Node, why: Miss) -> None:
        """Forget the holdings in effect."""
        if node.held is not None:
            self._rows.retire(node.held.bit, why)
            del self._by_bit[node.held.bit]
            node.held = None

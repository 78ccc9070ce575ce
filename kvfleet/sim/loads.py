"""One load, as a manager does it: what is here, from the drives, from other nodes, from the shared tier."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvfleet.core.block import BlockKey
from kvfleet.core.directory import NodeId, Run
from kvfleet.core.outcomes import Miss, Outcome, Source
from kvfleet.core.placement import NewBlock
from kvfleet.core.planner import PEER, Leg, Planner
from kvfleet.sim.arena import SHARD
from kvfleet.sim.links import Link, Passage, across
from kvfleet.sim.node import SimNode
from kvfleet.sim.shared import SimShared

__all__ = ["Around", "Loaded", "load"]

_ARENA_PART = 4  # a load may hold a quarter of the arena, as in `kvfleet.node.landing`


@dataclass(frozen=True, slots=True)
class Around:
    """Where a node loads from.

    Attributes:
        node: that loads.
        peers: all nodes, by id.
        shared: the shared tier, or None.
        planner: is told how long it took.
    """

    node: SimNode
    peers: Mapping[NodeId, SimNode]
    shared: SimShared | None
    planner: Planner


@dataclass(slots=True)
class Loaded:
    """How a load went.

    Attributes:
        end: when it ended, seconds.
        outcomes: of its blocks, in order; only the last may be a miss.
        fetches: calls to other nodes.
        asked: whether the manager was asked: not all was in the arena.
    """

    end: float
    outcomes: list[Outcome] = field(default_factory=list)
    fetches: int = 0
    asked: bool = False

    @property
    def num_blocks(self) -> int:
        """Blocks that came."""
        return len(self.outcomes) - (bool(self.outcomes) and isinstance(self.outcomes[-1], Miss))


def load(around: Around, keys: Sequence[BlockKey], leg: Leg, runs: Sequence[Run], now: float) -> Loaded:
    """Bring the blocks of a leg, first blocks first, as long as they come in time.

    Args:
        around: of the node.
        keys: of the whole prefix.
        leg: which of them, and how long they may take.
        runs: what the directory said of those that are not here.
        now: seconds.
    """
    one = _Load(around, keys, leg, runs, now)
    while len(one.loaded.outcomes) < leg.num_blocks:
        miss = one.bring()
        if miss is not None:
            one.loaded.outcomes.append(miss)
            break
    one.let_go(0)
    return one.loaded


class _Load:
    """One load under way."""

    def __init__(self, around: Around, keys: Sequence[BlockKey], leg: Leg, runs: Sequence[Run], now: float) -> None:
        self._around = around
        self._node = around.node
        self._keys = keys
        self._leg = leg
        self._runs = runs
        self._begun = now
        self._size = around.node.arena.block_bytes
        self._held: deque[BlockKey] = deque()
        self._held_max = max(1, around.node.arena.capacity_bytes // _ARENA_PART // self._size)
        self.loaded = Loaded(now)

    @property
    def _index(self) -> int:
        """The next block."""
        return self._leg.start + len(self.loaded.outcomes)

    def bring(self) -> Miss | None:
        """Bring the next blocks, those that come the same way; why the first that did not come did not, or None."""
        node, index = self._node, self._index
        key = self._keys[index]
        if node.arena.has(key):
            return self._from_arena(index)
        self.loaded.asked = True
        if node.drive is not None and node.drive.has(key):
            return self._from_drive(index)
        run = next((run for run in self._runs if run.start <= index < run.stop), None)
        if run is None:
            return Miss.EVICTED
        stop = self._while(index, run.stop, lambda other: not node.stores(other))
        peers = self._around.peers
        name = next((name for name in node.holders.order(run.nodes) if peers[name].stores(key)), None)
        if name is not None:
            return self._from_peer(peers[name], index, stop, saved=run.shared)
        if run.shared and node.objects is not None:
            return self._from_shared(node.objects, index, stop)
        return Miss.EVICTED

    def _while(self, index: int, stop: int, test: Callable[[BlockKey], bool]) -> int:
        """The end of the blocks from `index` on that pass a test."""
        stop = min(stop, self._leg.stop)
        return next((i for i in range(index, stop) if not test(self._keys[i])), stop)

    def _from_arena(self, index: int) -> Miss | None:
        node = self._node
        stop = self._while(index, self._leg.stop, node.arena.has)
        begun, num_bytes = self.loaded.end, (stop - index) * self._size
        self.loaded.end += node.memory.seconds(num_bytes)
        keys = self._keys[index:stop]
        if self.loaded.asked:
            for key in keys:
                node.arena.placement.hold(key)
                self._came(key, Source.DRAM)
        else:
            node.arena.read(keys, self.loaded.end)
            self.loaded.outcomes += [Source.DRAM] * len(keys)
        self._around.planner.observe("dram", num_bytes, self.loaded.end - begun)
        return None

    def _from_drive(self, index: int) -> Miss | None:
        node, drive = self._node, self._node.drive
        assert drive is not None
        stop = self._while(index, self._leg.stop, lambda key: drive.has(key) and not node.arena.has(key))
        passage = drive.read.take(self.loaded.end, (stop - index) * self._size)
        for key in self._arriving(stop, passage, "nvme", drive.read):
            if not drive.has(key):
                return Miss.EVICTED
            if not self._land(key):
                return Miss.NO_ROOM
            drive.touch(key, self.loaded.end)
            node.arena.placement.saved(key, SHARD, "nvme")
            self._came(key, Source.NVME)
        return self._late(stop)

    def _from_peer(self, peer: SimNode, index: int, stop: int, *, saved: bool) -> Miss | None:
        node = self._node
        stop = self._while(index, stop, peer.stores)
        self.loaded.fetches += 1
        cold = [key for key in self._keys[index:stop] if not peer.arena.has(key)]
        num_bytes = (stop - index) * self._size
        passage = across(peer.out, node.into, self.loaded.end, num_bytes)
        if cold and peer.drive is not None:
            read = peer.drive.read.take(self.loaded.end, len(cold) * self._size)
            passage = Passage(passage.first_s + read.first_s, max(passage.end, read.end))
        for key in self._arriving(stop, passage, PEER + peer.node_id, node.into):
            at = self._index
            if not peer.serve(key, self._keys[at - 1] if at else None, at, self.loaded.end):
                return None  # the next holder
            if not self._land(key):
                return Miss.NO_ROOM
            if saved:
                node.arena.placement.saved(key, SHARD, "shared")
            self._came(key, Source.PEER)
        return self._late(stop)

    def _from_shared(self, objects: Link, index: int, stop: int) -> Miss | None:
        shared = self._around.shared
        assert shared is not None
        passage = objects.take(self.loaded.end, (stop - index) * self._size)
        for key in self._arriving(stop, passage, "shared", objects):
            at = self._index
            if not self._land(key):
                return Miss.NO_ROOM
            self._node.arena.placement.saved(key, SHARD, "shared")
            shared.used(NewBlock(key, SHARD, self._keys[at - 1] if at else None, self._size), at, self.loaded.end)
            self._came(key, Source.SHARED)
        return self._late(stop)

    # blocks on their way

    def _arriving(self, stop: int, passage: Passage, source: str, link: Link) -> Iterator[BlockKey]:
        """Yield the blocks from the next one up to `stop` as they arrive, as long as the load keeps its pace."""
        begun, first = self.loaded.end, self._index
        first_at = begun + passage.first_s
        step_s = (passage.end - first_at) / (stop - first)
        for number, key in enumerate(self._keys[first:stop]):
            at = first_at + (number + 1) * step_s
            latest = self._begun + self._leg.grace_s + self._leg.pace_s * len(self.loaded.outcomes)
            if at > latest:
                self.loaded.end = max(begun, latest)
                link.give_up(self.loaded.end, (stop - first - number) * self._size)
                break
            self.loaded.end = at
            yield key
        came = self._index - first
        first_s = passage.first_s if came else None
        self._around.planner.observe(source, came * self._size, self.loaded.end - begun, first_s)

    def _late(self, stop: int) -> Miss | None:
        """Why blocks up to `stop` did not all arrive; None if they did."""
        return None if self._index == stop else Miss.SLOWER_THAN_COMPUTE

    def _land(self, key: BlockKey) -> bool:
        """Put a block that arrived into the arena. False: there is no room."""
        at = self._index
        block = NewBlock(key, SHARD, self._keys[at - 1] if at else None, self._size)
        return self._node.bring(block, at, self.loaded.end)

    def _came(self, key: BlockKey, source: Source) -> None:
        """The client copies a block, which is held."""
        self._node.arena.read((key,), self.loaded.end)
        self.loaded.outcomes.append(source)
        self._held.append(key)
        self.let_go(self._held_max)

    def let_go(self, stay: int) -> None:
        """End the holds on what the client has copied, but for the last few."""
        while len(self._held) > stay:
            self._node.arena.placement.release(self._held.popleft())

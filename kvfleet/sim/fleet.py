"""A fleet under a trace of requests: event by event, in simulated time.

What decides is production code: placement and policies of each node, the directory, the holders' order, the write
budget of drives, the catalog of a shared tier with a limit, and the planner. What takes time is modelled:

- A request goes to a node by the router. Its prefix is looked up and planned, and loaded at once: over links that serve
  one request after the other (`sim.links`).
- Then it waits for the node's engine, which computes one prompt at a time, in the order in which they are ready, at a
  speed that falls with the context. Time to first token (TTFT) is from arrival to the end of this.
- At its end all whole blocks are stored, told to the directory, and written behind to drives and shared tier. That is
  there at once; only drives' queues and budgets are counted.

Not modelled: decoding, which in life shares the engine; the KV of produced tokens, as traces have none; an engine's own
cache in device memory; faults; blocks that are found while they are still being written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from kvfleet.core.block import BlockKey
from kvfleet.core.directory import Delta, Directory, InventoryPage, NodeId, Run
from kvfleet.core.hints import NO_HINTS, Hints
from kvfleet.core.inventory import record_id
from kvfleet.core.outcomes import Miss, Outcome
from kvfleet.core.placement import NewBlock
from kvfleet.core.planner import PEER, Leg, Piece
from kvfleet.sim.arena import SHARD
from kvfleet.sim.config import SimConfig
from kvfleet.sim.engine import SimEngine
from kvfleet.sim.loads import Around, load
from kvfleet.sim.node import SimNode
from kvfleet.sim.router import router_of
from kvfleet.sim.shared import SimShared
from kvfleet.sim.tally import Tally
from kvfleet.sim.trace import Request

__all__ = ["SimFleet", "key_of"]

_KEYS_MAX = 1 << 40
_KEY_MIX = 0x9E3779B97F4A7C15F39CC0605CEDC835
_KEY_MASK = (1 << 128) - 1


def key_of(block: int) -> BlockKey:
    """A key for a block id of a trace: 16 bytes that differ where ids do, and look like hashes."""
    return BlockKey((block * _KEY_MIX & _KEY_MASK).to_bytes(16, "little"))


@dataclass(slots=True)
class _Prompt:
    """A request on its way.

    Attributes:
        num_found: blocks that the lookup found.
        outcomes: of those that were to be loaded, up to one that did not come.
        missing: why the block behind those that were found is missing.
        tail: to be loaded while blocks before it are computed, or None.
        num_first: blocks that were loaded before anything was computed.
    """

    request: Request
    number: int
    keys: list[BlockKey]
    runs: list[Run]
    num_found: int
    missing: Miss | None
    outcomes: list[Outcome]
    num_loaded: int = 0
    tail: Leg | None = None
    num_first: int = 0


@dataclass(slots=True)
class _Hit:
    """What a lookup found: see `kvfleet.looking`."""

    pieces: list[Piece]
    runs: list[Run]
    missing: Miss | None
    asked: bool

    @property
    def num_blocks(self) -> int:
        """Blocks that are said to be somewhere."""
        return self.pieces[-1].stop if self.pieces else 0


class SimFleet:
    """A simulated fleet.

    Threads: none.

    Args:
        config: what it is made of.
        block_tokens: tokens in a block of the trace.
        key: makes keys of the trace's block ids.

    Attributes:
        tally: what happened.
        nodes: of the fleet.
        directory: the production code.
        shared: the shared tier, or None.
        on_answer: called with each request, its node's number and what became of its first blocks.
    """

    def __init__(self, config: SimConfig, block_tokens: int, *, key: Callable[[int], BlockKey] = key_of) -> None:
        self.config = config
        self.tally = Tally()
        self.directory = Directory(_KEYS_MAX)
        self.shared = None if config.shared is None else SimShared(self.directory, config.shared_bytes_max)
        self.nodes = [SimNode(number, config, self.shared) for number in range(config.num_nodes)]
        self.on_answer: Callable[[Request, int, list[Outcome]], None] = lambda _request, _node, _outcomes: None
        self._key = key
        self._block_tokens = block_tokens
        peers = {node.node_id: node for node in self.nodes}
        self._engines = [SimEngine(config, block_tokens) for _ in self.nodes]
        self._around = [
            Around(node, peers, self.shared, engine.planner)
            for node, engine in zip(self.nodes, self._engines, strict=True)
        ]
        self._router = router_of(config.router, config.num_nodes)
        self._events: list[tuple[float, int, Callable[[_Prompt, float], None], _Prompt]] = []
        self._serial = 0
        self._seqs = dict.fromkeys(peers, 0)
        self._now = 0.0
        self.directory.expect(frozenset(peers))
        for name in peers:
            self.directory.inventory(InventoryPage(name, 1, 0, 0, True, b""))

    def run(self, requests: Iterable[Request]) -> None:
        """Serve requests, in the order of their times, to the last."""
        for request in requests:
            self._until(request.time_s)
            self._now = max(self._now, request.time_s)
            self._arrive(request, self._now)
        self._until(float("inf"))

    def _until(self, end: float) -> None:
        """Do what is due."""
        while self._events and self._events[0][0] <= end:
            self._now, _, step, prompt = heappop(self._events)
            step(prompt, self._now)

    def _at(self, time: float, step: Callable[[_Prompt, float], None], prompt: _Prompt) -> None:
        self._serial += 1
        heappush(self._events, (time, self._serial, step, prompt))

    # a request

    def _arrive(self, request: Request, now: float) -> None:
        """A request comes: look up, plan, load."""
        keys = [self._key(block) for block in request.keys]
        number = self._router.choose(keys, lambda node: self._engines[node].busy_s(now))
        engine = self._engines[number]
        hit = self._lookup(self.nodes[number], keys)
        head, tail = engine.plan(hit.pieces, request.prompt_tokens, now)
        prompt = _Prompt(request, number, keys, hit.runs, hit.num_blocks, hit.missing, [], tail=tail)
        if hit.asked:
            now += self.config.network.latency_s
        self._at(self._load(prompt, head, now), self._ready, prompt)
        look = engine.due()
        if look is not None:
            self._look(number, keys, look, hit.runs, now)

    def _look(self, number: int, keys: list[BlockKey], leg: Leg, runs: Sequence[Run], now: float) -> None:
        """Load blocks that nobody waits for, to learn how fast their source is."""
        loaded = load(self._around[number], keys, leg, runs, now)
        self.tally.calls["look"] += 1
        self.tally.looks.update(loaded.outcomes)

    def _lookup(self, node: SimNode, keys: list[BlockKey]) -> _Hit:
        """What is at the node, and what the directory says of the rest."""
        pieces: list[Piece] = []
        head = 0
        while head < len(keys) and (source := node.source(keys[head])) is not None:
            start = head
            head = next((i for i in range(start, len(keys)) if node.source(keys[i]) != source), len(keys))
            pieces.append(Piece(start, head, (source,)))
        if head == len(keys):
            return _Hit(pieces, [], None, asked=False)
        self.tally.calls["locate"] += 1
        runs = [
            Run(run.start + head, run.stop + head, run.nodes, run.shared)
            for run in self.directory.locate(b"".join(keys[head:]), SHARD, 1)
        ]
        for run in runs:
            sources = [PEER + name for name in run.nodes if name != node.node_id]
            here = ["dram"] if node.node_id in run.nodes else []
            pieces.append(Piece(run.start, run.stop, (*here, *sources, *(["shared"] if run.shared else []))))
        found = pieces[-1].stop if pieces else 0
        return _Hit(pieces, runs, None if found == len(keys) else self.directory.why(keys[found], 1), asked=True)

    def _load(self, prompt: _Prompt, leg: Leg, now: float) -> float:
        """Load blocks of a prompt; the directory hears of what that moved. Returns when it ends."""
        node = self.nodes[prompt.number]
        loaded = load(self._around[prompt.number], prompt.keys, leg, prompt.runs, now)
        prompt.outcomes += loaded.outcomes
        prompt.num_loaded += loaded.num_blocks
        if loaded.asked:
            self.tally.calls["load"] += 1
            self.tally.calls["fetch"] += loaded.fetches
            self._tell(node)
            if loaded.fetches:
                for name in {name for run in prompt.runs for name in run.nodes}:
                    self._tell(self.nodes[int(name, 16)])
        return loaded.end

    def _ready(self, prompt: _Prompt, now: float) -> None:
        """What is loaded first is there: wait for the engine, and compute."""
        engine, request, tail = self._engines[prompt.number], prompt.request, prompt.tail
        prefill, tokens = self.config.engine.prefill, self._block_tokens
        start = max(now, engine.free_at)
        end = start
        prompt.num_first = prompt.num_loaded
        context = first = prompt.num_loaded * tokens
        if tail is not None and prompt.num_loaded <= tail.start:
            between = (tail.start - prompt.num_loaded) * tokens
            end = start + prefill.seconds(context, between)
            self.tally.prefill_s += end - start
            end = max(end, self._load(prompt, tail, start))
            context = tail.start * tokens + (prompt.num_loaded * tokens - first)
        rest = max(1, request.prompt_tokens - context)
        seconds = prefill.seconds(request.prompt_tokens - rest, rest)
        self.tally.prefill_s += seconds
        engine.free_at = end + seconds
        self._at(engine.free_at, self._computed, prompt)

    def _computed(self, prompt: _Prompt, now: float) -> None:
        """The prompt is computed: store it."""
        node, request, tally = self.nodes[prompt.number], prompt.request, self.tally
        tally.requests += 1
        tally.prompt_tokens += request.prompt_tokens
        tally.loaded_tokens += prompt.num_loaded * self._block_tokens
        tally.ttft_s.append(now - request.time_s)
        tally.recompute_s += self.config.engine.prefill.seconds(0, request.prompt_tokens)
        tally.first_s, tally.last_s = min(tally.first_s, request.time_s), now
        tally.count(prompt.outcomes, prompt.num_found, len(prompt.keys), prompt.missing)
        self.on_answer(request, prompt.number, prompt.outcomes)
        size, keys, first = self.config.block_bytes, prompt.keys, prompt.num_first
        blocks = [NewBlock(keys[i], SHARD, keys[i - 1] if i else None, size) for i in range(first, len(keys))]
        done = node.store(blocks, first, now, self._hints(request))
        tally.stored += done.stored
        tally.calls["reserve or commit"] += done.calls
        if not done.stored:
            node.arena.note_accesses()  # without a commit, what a load brought is written at the next heartbeat
        node.save(now)
        self._tell(node, b"".join(record_id(key, SHARD) for key in done.refused))

    def _hints(self, request: Request) -> Hints:
        """What the engine says with a store."""
        return Hints.of(request.session, turn=request.turn, final=request.final) if self.config.hints else NO_HINTS

    def _tell(self, node: SimNode, refused: bytes = b"") -> None:
        """Tell the directory what changed at a node, and have the keeper of the catalog look."""
        added, removed = node.take_changes()
        saved: list[bytes] = []
        if self.shared is not None:
            saved, self.shared.added = self.shared.added, []
        if added or removed or saved or refused:
            self.tally.calls["delta"] += 1
            seq = self._seqs[node.node_id] = self._seqs[node.node_id] + 1
            delta = Delta(
                node.node_id, 1, seq, added, removed, shared_added=b"".join(saved), not_admitted=refused
            )  # fmt: skip
            self.directory.apply(delta)
        if self.shared is not None:
            self._trim(self.shared, node.node_id)

    def _trim(self, shared: SimShared, keeper: NodeId) -> None:
        """Have objects go that are too many."""
        doomed = shared.trim()
        if not doomed:
            return
        for key in doomed:
            for name in self.directory.holders(record_id(key, SHARD)):
                self.nodes[int(name, 16)].arena.placement.lost(key, SHARD, "shared", again=False)
        seq = self._seqs[keeper] = self._seqs[keeper] + 1
        gone = b"".join(record_id(key, SHARD) for key in doomed)
        self.directory.apply(Delta(keeper, 1, seq, shared_removed=gone))

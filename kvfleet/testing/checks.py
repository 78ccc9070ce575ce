"""What must hold in a simulated fleet, after every step and at rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvfleet.core.block import KEY_BYTES, BlockKey
from kvfleet.core.directory import RECORD_BYTES, Applied
from kvfleet.core.inventory import record_id
from kvfleet.core.layout import ModelSpec
from kvfleet.hits import Loaded, PrefixHit
from kvfleet.node.messages import Miss, Source
from kvfleet.testing.fleet import LocalFleet, LocalNode
from kvfleet.testing.processes import SimulationError

__all__ = ["Checks", "content"]

_PATTERN = np.arange(1 << 17, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
_SPIN = 16


def content(key: bytes, num_bytes: int) -> npt.NDArray[np.uint8]:
    """What the block of a key holds: each key's bytes differ from every other's in every word."""
    words: npt.NDArray[np.uint64] = _PATTERN[: num_bytes // 8] ^ np.uint64(int.from_bytes(key[:8], "little"))
    return words.view(np.uint8)


class Checks:
    """The rules, for one fleet that holds blocks of one model with one shard."""

    def __init__(self, fleet: LocalFleet, spec: ModelSpec) -> None:
        self._fleet = fleet
        self._spec = spec
        self._checksums: dict[bytes, int] = {}
        self._seen: dict[int, dict[int, int]] = {}
        self._steps = 0
        fleet.on_served.append(self._watch_directory)

    def _fail(self, what: str) -> None:
        raise SimulationError(what)

    # blocks

    def checksum(self, key: bytes) -> int:
        """Of a block's right bytes."""
        found = self._checksums.get(key)
        if found is None:
            found = self._checksums[key] = xxhash.xxh3_64_intdigest(content(key, self._spec.layout.block_bytes).data)
        return found

    def hit(self, hit: PrefixHit) -> None:
        """A lookup's answer has no hole, and somebody is said to have each block."""
        stop = hit.start_block
        for run in hit.runs:
            if run.start != stop or run.stop <= run.start:
                self._fail(f"a hit with a hole: {hit.runs}")
            if not (run.local or run.nvme or run.pending or run.nodes or run.shared):
                self._fail(f"nobody has blocks {run.start} to {run.stop} of a hit")
            stop = run.stop
        if stop != hit.num_blocks:
            self._fail(f"a hit of {hit.num_blocks} blocks whose runs end at {stop}")

    def loaded(self, hit: PrefixHit, loaded: Loaded, got: dict[int, npt.NDArray[np.uint8]]) -> None:
        """A load brings right bytes, up to the first block that does not come."""
        came = int(loaded) // self._spec.block_tokens
        outcomes = loaded.outcomes
        if len(outcomes) != hit.num_blocks - hit.start_block:
            self._fail(f"{hit.num_blocks - hit.start_block} blocks asked for, {len(outcomes)} outcomes")
        right = all(isinstance(o, Source) for o in outcomes[:came])
        right = right and all(isinstance(o, Miss) for o in outcomes[came:])
        if not right:
            self._fail(f"a load goes on behind a miss: {outcomes}")
        for index in range(hit.start_block, hit.start_block + came):
            key = hit.keys_of(index, index + 1)
            if index not in got or not np.array_equal(got[index], content(key, self._spec.layout.block_bytes)):
                self._fail(f"wrong bytes of block {index}, {key.hex()}, from {outcomes[index - hit.start_block]}")

    def held(self, node: LocalNode, keys: list[BlockKey]) -> None:
        """What a client holds is there."""
        for number, key in enumerate(keys):
            if node.tier.dram.placement.resident(key, 0) is None:
                self._fail(f"block {number} of {len(keys)} held on node {node.number} is gone")

    def totals(self) -> None:
        """Every block that a client asked for has one outcome."""
        for node in self._fleet.alive:
            for client in node.clients:
                stats = client.client.stats()
                if stats.asked_blocks != sum(stats.outcomes.values()):
                    self._fail(f"{client.process.name} asked for {stats.asked_blocks} blocks: {stats.outcomes}")

    # nodes

    def step(self) -> None:
        """Cheap, after every event: new records, room, books."""
        self._steps += 1
        for node in self._fleet.nodes:
            if node.tier is not None:
                self._records(node, everything=self._steps % _SPIN == 0)
                self._books(node)

    def _records(self, node: LocalNode, *, everything: bool) -> None:
        """No visible record holds other bytes than its key's."""
        dram = node.tier.dram
        seen = self._seen.setdefault(node.number, {})
        for record in dram.arena.records.live():
            if not record.committed or (seen.get(record.slot) == record.generation and not everything):
                continue
            seen[record.slot] = record.generation
            view = dram.arena.slot_view(record.offset, record.length)
            found = xxhash.xxh3_64_intdigest(view.data)
            if found != self.checksum(record.key) or found != record.checksum:
                self._fail(f"node {node.number}, slot {record.slot}: visible with other bytes than its key's")

    def _books(self, node: LocalNode) -> None:
        tier = node.tier
        placement, capacity = tier.dram.placement, tier.dram.arena.capacity_bytes
        if placement.used_bytes > capacity:
            self._fail(f"node {node.number} uses {placement.used_bytes} of {capacity} bytes")
        if self._steps % _SPIN == 0 and (findings := [*placement.audit(), *tier.dram.holdings.audit(), *_drives(tier)]):
            self._fail(f"node {node.number}: {findings}")
        streams = [stream for stream in node.manager.streams if stream.source.alive]
        flying, budget = sum(stream.flying_bytes for stream in streams), tier.server._budget.capacity_bytes
        if flying > budget:
            self._fail(f"node {node.number} has {flying} bytes in flight, {budget} are allowed")

    # the directory

    def _watch_directory(self, service: Any, method: str, args: tuple[Any, ...]) -> Callable[[Any], None]:  # noqa: ANN401
        """A message of an old life changes nothing."""
        if method not in ("apply", "inventory"):
            return lambda _: None
        message = args[0]
        before = service._directory.stats()
        current = next((node.epoch for node in before.nodes if node.node == message.node), message.epoch)

        def see(result: Any) -> None:  # noqa: ANN401
            answer = getattr(result, "applied", result)
            if message.epoch < current and (answer is not Applied.STALE_EPOCH or service._directory.stats() != before):
                self._fail(f"a message of epoch {message.epoch} counted, though {current} has spoken: {answer}")

        return see

    # at rest

    def unrest(self) -> list[str]:
        """What is still under way or not known to all. Nothing, some time after the last fault."""
        fleet = self._fleet
        found = [f"node {node.number} has no arena" for node in fleet.alive if node.tier is None]
        if fleet.directory.instance is None:
            found.append("no directory")
        if found:
            return found
        for node in fleet.alive:
            found += [f"node {node.number}: {what}" for what in _busy(node)]
            avoided = node.tier.peers.holders.avoided & {other.node_id for other in fleet.alive}
            found += [f"node {node.number} still avoids {other}" for other in avoided]
            endpoint = node.tier.endpoint
            if endpoint is not None and not (endpoint.allows("read") and endpoint.allows("write")):
                found.append(f"node {node.number} still avoids the shared tier: {endpoint.problem}")
            if node.tier.saver.num_unsaved and not node.tier.draining:
                found.append(f"node {node.number}: {node.tier.saver.num_unsaved} blocks are not saved")
        return found or [*self._rows(), *self._flags()]

    def _rows(self) -> Iterator[str]:
        """The directory has what the nodes have, and nothing else."""
        directory = self._fleet.directory.instance._directory
        known = {node.node: node for node in directory.stats().nodes}
        alive = {node.node_id: node for node in self._fleet.alive}
        if known.keys() != alive.keys():
            yield f"the directory knows {sorted(known)}"
            return
        holders: dict[bytes, set[str]] = {}
        for node_id, node in alive.items():
            records = node.tier.dram.holdings.records()
            if not known[node_id].synced or known[node_id].records != len(records):
                yield f"node {node.number} has {len(records)} records, the directory says {known[node_id]}"
            for record in records:
                holders.setdefault(record[:KEY_BYTES], set()).add(node_id)
        for key in self._checksums.keys() | holders.keys():
            runs = directory.locate(key, 0, 1)
            said = set(runs[0].nodes) if runs else set()
            if said != holders.get(key, set()):
                yield f"block {key.hex()}: held by {holders.get(key)}, the directory says {said}"

    def _flags(self) -> Iterator[str]:
        """What is said to be in the shared tier is there, and the other way round."""
        storage, directory = self._fleet.storage, self._fleet.directory.instance._directory
        blocks = [path for path in storage.objects if path.endswith(".arrow")]
        paths = {path: bytes.fromhex(path.split("/")[-1].split(".")[0]) for path in blocks}
        spoiled = {path.split("/")[-1].split(".")[0] for path in storage.spoiled}
        forgotten = any(path.startswith("manifests/") for path in storage.spoiled)  # and what it said with it
        there = set(paths.values())
        for key in self._checksums:
            said = bool(directory.shared_among(key + bytes(RECORD_BYTES - len(key))))
            if said and key not in there and key.hex() not in spoiled:
                yield f"object {key.hex()} is said to be there"
        for path, key in paths.items():
            known = bool(directory.shared_among(key + bytes(RECORD_BYTES - len(key))))
            if not known and not forgotten and storage.known(path):
                yield f"object {key.hex()} is not known to be there"
        limit = self._fleet.config.shared_bytes_max
        used_bytes = sum(len(storage.objects[path]) for path in blocks if storage.known(path))
        if limit is not None and used_bytes > limit and not forgotten:
            yield f"{used_bytes} bytes of objects are known, {limit} are allowed"

    def whole(self) -> None:
        """Everything, once: bytes of all visible records, the arena against the books."""
        for node in self._fleet.alive:
            self._records(node, everything=True)
            placement = node.tier.dram.placement
            slots = {record.slot for record in node.tier.dram.arena.records.live() if record.committed}
            if slots != {record.slot for record in placement.records()} or placement.audit():
                self._fail(f"node {node.number}: the arena and the books differ")

    def expected(self, keys: list[BlockKey]) -> int:
        """How many blocks of a prefix the directory should find."""
        held = {record[:KEY_BYTES] for node in self._fleet.alive for record in node.tier.dram.holdings.records()}
        directory = self._fleet.directory.instance._directory
        for number, key in enumerate(keys):
            if key not in held and not directory.shared_among(key + bytes(RECORD_BYTES - len(key))):
                return number
        return len(keys)


def _drives(tier: Any) -> Iterator[str]:  # noqa: ANN401
    """What is wrong with what is said of a node's drives."""
    if tier.nvme is None:
        return
    yield from tier.nvme.audit()
    there = set(tier.nvme.records())
    for key, shard in tier.dram.placement.saved_records("nvme"):
        if record_id(key, shard) not in there:
            yield f"{key.hex()}: said to be on a drive"
    table = {record_id(record.key, record.shard) for record in tier.dram.arena.drive_records.live()}
    if table != there:
        yield f"{len(table)} blocks are in the table of the drives, which have {len(there)}"


def _busy(node: LocalNode) -> Iterator[str]:
    """What a node at rest must not have."""
    tier = node.tier
    placement = tier.dram.placement
    if placement._holds:
        yield f"{len(placement._holds)} blocks held"
    if tier.dram.num_reserved or len(placement.slots()) != len(placement.records()):
        invisible = len(placement.slots()) - len(placement.records())
        yield f"{tier.dram.num_reserved} slots reserved, {invisible} not visible"
    if placement.in_transfer:
        yield f"{placement.in_transfer} transfers"
    if tier.nvme is not None and not tier.nvme.is_open:
        yield "its drive is away"
    if tier.loader.flights:
        yield f"{len(tier.loader.flights)} flights"
    for name, budget in (("out", tier.server._budget), ("in", getattr(tier, "peers", tier.loader).transport._budget)):
        if budget.taken_bytes:
            yield f"{budget.taken_bytes} bytes of the way {name} taken"

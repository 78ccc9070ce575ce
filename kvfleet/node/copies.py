"""Where a block is on a node and in the shared tier, each copy read and verified."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvfleet.config import FleetConfig
from kvfleet.core.block import BlockKey
from kvfleet.errors import KvFleetError
from kvfleet.node.inspectarena import check_blocks
from kvfleet.node.inspecting import BLOCK_BYTES_MAX, inspect_bytes
from kvfleet.node.landing import settle
from kvfleet.node.objects import ObjectStore

if TYPE_CHECKING:
    from kvfleet.node.node import Node
    from kvfleet.node.nvme import NvmeTier

__all__ = ["Copy", "copies_here", "copies_shared"]

_OBJECT = re.compile(r"([0-9a-f]{32})\.([0-9]+)-of-[0-9]+\.arrow")
_SHARDS_MAX = 1024  # ranks of a block that are looked for on drives


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a block's shard.

    Attributes:
        node_id: Ray's, of the node that has it; "" for the shared tier.
        tier: `dram`, `nvme` or `shared`.
        shard: of the block.
        num_bytes: of the shard; of the object, in the shared tier.
        checksum: xxh3-64, 16 digits; "" if it is not known.
        problem: why it is not sound, or "".
    """

    node_id: str
    tier: str
    shard: int
    num_bytes: int
    checksum: str
    problem: str


async def copies_here(node: Node, key: BlockKey) -> list[Copy]:
    """Read the copies that a node has in its memory and on its drives. None is dropped, good or bad."""
    found = await settle(None, lambda: _in_arena(node, key))
    if node.nvme is not None:
        for shard in range(_SHARDS_MAX):
            found += await _on_drives(node.home.node_id, node.nvme, key, shard)
    return found


def _in_arena(node: Node, key: BlockKey) -> list[Copy]:
    arena = node.home.arena
    records = [record for record in arena.records.live() if record.key == key]
    bad = check_blocks(arena, [record for record in records if record.committed])[1]
    problems = dict.fromkeys((record.slot for record in bad), "its bytes do not have their checksum")
    return [
        Copy(
            node.home.node_id, "dram", record.shard, record.length,
            f"{record.checksum:016x}" if record.committed else "",
            problems.get(record.slot, "" if record.committed else "being written"),
        )
        for record in records
    ]  # fmt: skip


async def _on_drives(node_id: str, nvme: NvmeTier, key: BlockKey, shard: int) -> list[Copy]:
    stored = nvme.find(key, shard)
    if stored is None:
        return []
    try:
        problem = await nvme.problem_of(key, shard)
    except KvFleetError as error:
        problem = str(error)
    return [Copy(node_id, "nvme", shard, stored.num_bytes, f"{stored.checksum:016x}", problem)]


async def copies_shared(config: FleetConfig, key: BlockKey) -> list[Copy]:
    """Read the objects of a block, in whichever namespace: one listing a namespace finds them.

    Raises:
        TierError: the storage does not answer.
    """
    return await settle(None, lambda: _asked(config, key))


def _asked(config: FleetConfig, key: BlockKey) -> list[Copy]:
    assert config.shared_url is not None
    objects = ObjectStore(config.shared_url, config.shared_options, config.shared_timeout_s)
    try:
        return _in_storage(objects, key)
    finally:
        objects.close()


def _in_storage(objects: ObjectStore, key: BlockKey) -> list[Copy]:
    digits = key.hex()
    copies = []
    for namespace in objects.children(""):
        folder = f"{namespace.name}/{digits[:2]}"
        for child in objects.children(folder) if namespace.is_directory else ():
            found = _OBJECT.fullmatch(child.name)
            if found is not None and found[1] == digits:
                data = objects.get(f"{folder}/{child.name}", BLOCK_BYTES_MAX)
                copies.append(_object(data, f"{folder}/{child.name}", int(found[2])))
    return copies


def _object(data: bytes | None, path: str, shard: int) -> Copy:
    if data is None:
        return Copy("", "shared", shard, 0, "", "it went while it was looked at")
    findings = inspect_bytes(data, path)
    checksum = dict(findings.facts).get("checksum", "").removeprefix("xxh3-64:")
    return Copy("", "shared", shard, len(data), checksum, "; ".join(findings.problems))

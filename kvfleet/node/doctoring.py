"""Looks a live node over: what it says of its blocks against what the media hold, and the machine it runs on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvfleet.core.block import BlockKey
from kvfleet.core.inventory import record_id
from kvfleet.explain import show_bytes
from kvfleet.node.drivechecks import check_drives
from kvfleet.node.hostchecks import Check, check_host
from kvfleet.node.inspectarena import check_blocks
from kvfleet.node.landing import settle
from kvfleet.node.sharedcheck import check_shared

if TYPE_CHECKING:
    from kvfleet.node.dram import DramTier
    from kvfleet.node.node import Node
    from kvfleet.node.publishing import DirectoryLink

__all__ = ["Checkup", "check_node", "index_findings"]


@dataclass(frozen=True, slots=True)
class Checkup:
    """A node, looked over.

    Attributes:
        node_id: Ray's.
        checks: what was looked at.
        wall_s: what the node's clock said when it began, seconds since 1970.
    """

    node_id: str
    checks: tuple[Check, ...]
    wall_s: float


async def check_node(node: Node, link: DirectoryLink, seconds: float, *, repair: bool) -> Checkup:
    """Look a node over, while it goes on with its work.

    Args:
        node: to be looked at.
        link: to the directory.
        seconds: longest time for reading the arena, and for the shared tier; what is not read by then is told.
        repair: drop damaged blocks, and bring the books of the drives and the shared tier in line with the media.
    """
    wall_s = time.time()
    checks = [check async for check in _checks(node, link, seconds, repair=repair)]
    return Checkup(node.home.node_id, tuple(checks), wall_s)


async def _checks(node: Node, link: DirectoryLink, seconds: float, *, repair: bool) -> AsyncIterator[Check]:
    for check in await settle(None, lambda: list(check_host(node.config, node.home.arena.capacity_bytes))):
        yield check
    yield _arena_file(node)
    findings = [*node.audit(), *node.dram.holdings.audit(), *index_findings(node.dram), *_drive_findings(node)]
    agreed = f"records, slots and holdings agree on {len(node.dram.placement.records()):,} blocks"
    yield Check("books", "bad" if findings else "ok", "; ".join(findings[:5]) or agreed)
    yield await _blocks(node, seconds, repair=repair)
    for check in await check_drives(node, repair=repair):
        yield check
    for check in await check_shared(node, link, seconds, repair=repair):
        yield check


def _arena_file(node: Node) -> Check:
    """Engines that start now must find the arena that the manager has."""
    arena = node.home.arena
    try:
        same = Path(arena.path).stat().st_ino == arena.inode
    except OSError as error:
        return Check("arena", "bad", f"{arena.path}: {error.strerror}; `kvfleet down` and `up` make it anew")
    if not same:
        return Check("arena", "bad", f"{arena.path} is another file than the manager's")
    return Check("arena", "ok", f"{arena.path}, {show_bytes(arena.capacity_bytes)}")


def index_findings(dram: DramTier) -> list[str]:
    """Where the record table, which engines read, and the placement, which decides, do not say the same."""
    table = {(BlockKey(r.key), r.shard): r.slot for r in dram.arena.records.live() if r.committed}
    books = {(held.key, held.shard): held.slot for held in dram.placement.records()}
    names = [f"{key.hex()}.{shard}" for key, shard in table.keys() ^ books.keys()]
    names += [
        f"{key.hex()}.{shard}" for key, shard in table.keys() & books.keys() if table[key, shard] != books[key, shard]
    ]
    return [f"{name}: records and placement differ" for name in names]


def _drive_findings(node: Node) -> list[str]:
    """Where the table of the drives, which engines read, says more than there is on them."""
    nvme, table = node.nvme, node.home.arena.drive_records
    if nvme is None or table is None:
        return []
    told = {record_id(record.key, record.shard) for record in table.live() if record.committed}
    return [f"{record.hex()}: told to engines, but on no drive" for record in told.difference(nvme.records())]


async def _blocks(node: Node, seconds: float, *, repair: bool) -> Check:
    """Read the arena's blocks."""
    arena, clock = node.home.arena, asyncio.get_running_loop().time
    deadline = clock() + seconds
    records = [record for record in arena.records.live() if record.committed]
    num_bytes, bad = await settle(None, lambda: check_blocks(arena, records, lambda: clock() > deadline))
    total = sum(record.length for record in records)
    read = "all" if num_bytes == total else f"{show_bytes(num_bytes)} of {show_bytes(total)}"
    if not bad:
        sound = f"{read} read, each has its checksum" if records else "it holds none"
        return Check("blocks", "ok", sound)
    names = ", ".join(f"{record.key.hex()}.{record.shard}" for record in bad[:3])
    text = f"{read} read, {len(bad)} damaged: {names}{', ...' if len(bad) > 3 else ''}"
    if not repair:
        return Check("blocks", "bad", f"{text}; --repair drops them")
    for record in bad:
        if arena.records.record(record.slot).generation == record.generation:
            node.dram.drop(BlockKey(record.key))
    return Check("blocks", "note", f"{text}; dropped")

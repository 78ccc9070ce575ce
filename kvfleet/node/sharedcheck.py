"""Compares what the shared tier has with what the directory and this node say it has, as far as there is time."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kvfleet.core.block import BlockKey
from kvfleet.core.inventory import record_id
from kvfleet.core.objectrows import SharedObject
from kvfleet.errors import KvFleetError
from kvfleet.explain import show_count
from kvfleet.node.hostchecks import Check
from kvfleet.node.inspecting import BLOCK_BYTES_MAX, inspect_bytes
from kvfleet.node.landing import settle
from kvfleet.node.namespaces import layout_of
from kvfleet.node.objects import ObjectStore
from kvfleet.node.shared import SharedTier

if TYPE_CHECKING:
    from kvfleet.node.node import Node
    from kvfleet.node.publishing import DirectoryLink

__all__ = ["check_shared"]

_LISTED_MAX = 16  # objects that the directory is asked for
_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_OBJECT = re.compile(r"([0-9a-f]{32})\.([0-9]+)-of-([0-9]+)\.arrow")
_NAME = "shared tier"


@dataclass(frozen=True, slots=True)
class _Object:
    path: str
    key: BlockKey
    shard: int
    num_shards: int
    num_bytes: int = 0


@dataclass(slots=True)
class _Sample:
    """What came of reading some objects."""

    sound: int = 0
    foreign: int = 0
    absent: list[_Object] = field(default_factory=list)
    damaged: list[_Object] = field(default_factory=list)

    @property
    def num_read(self) -> int:
        """Objects that were asked for."""
        return self.sound + self.foreign + len(self.absent) + len(self.damaged)


async def check_shared(node: Node, link: DirectoryLink, seconds: float, *, repair: bool) -> list[Check]:
    """Read the objects that this node says are there, and ask the directory for some that are there.

    Args:
        node: whose shared tier it is.
        link: to the directory.
        seconds: no object is begun after that.
        repair: delete damaged objects, write again what this node has of them, tell the directory.
    """
    config = node.config
    if config.shared_url is None:
        return []
    try:
        objects = await settle(None, lambda: ObjectStore(config.shared_url or "", config.shared_options, 15.0))
        try:
            said = await _said(node, objects, seconds, repair=repair)
            checks = [said, await _there(node, link, objects, repair=repair)]
        finally:
            await settle(None, objects.close)
    except KvFleetError as error:
        return [Check(_NAME, "bad", str(error))]
    if node.endpoint is not None and node.endpoint.problem:
        checks.append(Check(_NAME, "bad", node.endpoint.problem))
    return checks


async def _said(node: Node, objects: ObjectStore, seconds: float, *, repair: bool) -> Check:
    """Read what this node thinks is there, in no order."""
    known = _known(node)
    random.shuffle(known)
    found = await settle(None, lambda: _read(objects, known, seconds, node.config.load_inflight_max))
    if not known:
        return Check(_NAME, "ok", "no block in this node's memory has a copy there")
    every = "all" if found.num_read == len(known) else f"{found.num_read:,} of"
    text = f"{every} {show_count(len(known), 'copy', 'copies')} of blocks in this node's memory read"
    if not found.absent and not found.damaged:
        foreign = f"; {found.foreign:,} of another version or codec, not judged" if found.foreign else ""
        return Check(_NAME, "ok", f"{text}, no damage found{foreign}")
    text = f"{text}, {_tell(found)}"
    if not repair:
        return Check(_NAME, "bad", f"{text}; loads mend what they meet, --repair what it reads")
    for one in found.damaged:
        await settle(None, partial(objects.delete, one.path))
    for one in found.absent + found.damaged:
        record = record_id(one.key, one.shard)
        node.publisher.lost(record)
        if node.endpoint is not None:
            node.endpoint.lost(record)
    return Check(_NAME, "note", f"{text}; the directory was told, and they are written again")


def _tell(found: _Sample) -> str:
    """How many copies are not as they should be, in words."""
    counts = {"gone": len(found.absent), "damaged": len(found.damaged)}
    return " and ".join(f"{count} {'is' if count == 1 else 'are'} {what}" for what, count in counts.items() if count)


def _known(node: Node) -> list[_Object]:
    """What this node has a copy of in the shared tier, as it thinks, in no order."""
    saved = set(node.dram.placement.saved_records("shared"))
    known = []
    for record in node.home.arena.records.live():
        if record.committed and (record.key, record.shard) in saved:
            namespace = node.dram.namespaces[record.namespace]
            num_shards = layout_of(namespace).num_shards
            path = SharedTier.path(namespace.namespace_id, BlockKey(record.key), record.shard, num_shards)
            known.append(_Object(path, BlockKey(record.key), record.shard, num_shards))
    return known


def _read(objects: ObjectStore, known: Sequence[_Object], seconds: float, at_once: int) -> _Sample:
    """Read objects, several at once, until all are read or the time is up.

    Raises:
        TierUnavailableError: the storage did not answer.
    """
    deadline = time.monotonic() + seconds

    def state(one: _Object) -> str:
        if time.monotonic() > deadline:
            return "not read"
        data = objects.get(one.path, BLOCK_BYTES_MAX)
        if data is None:
            return "absent"
        findings = inspect_bytes(data, one.path)
        return "sound" if findings.sound else "foreign" if findings.foreign else "damaged"

    with ThreadPoolExecutor(at_once, "kvfleet-doctor") as pool:
        states = list(pool.map(state, known))
    by_state = {
        name: [one for one, found in zip(known, states, strict=True) if found == name] for name in ("absent", "damaged")
    }
    return _Sample(states.count("sound"), states.count("foreign"), by_state["absent"], by_state["damaged"])


async def _there(node: Node, link: DirectoryLink, objects: ObjectStore, *, repair: bool) -> Check:
    """Ask the directory for a sample of what is there."""
    listed = await settle(None, lambda: _listed(objects))
    unknown = []
    for one in listed:
        located = await link.locate(one.key, one.shard, one.num_shards, node.config.lookup_timeout_s)
        if not located.runs:
            unknown.append(one)
    if not listed:
        return Check("directory", "ok", "answers; no object of the shared tier was found to ask it for")
    if not unknown:
        asked = show_count(len(listed), "object")
        return Check("directory", "ok", f"knows {asked} of the shared tier, taken at random: all it was asked for")
    text = f"of {len(listed)} objects, taken at random, {len(unknown)} are not known to it: lookups do not find them"
    if not repair:
        return Check("directory", "note", text)
    for one in unknown:
        namespace_id = bytes.fromhex(one.path.partition("/")[0])
        size = one.num_bytes, 0, 0  # where in its prefix it is, who uses it says
        node.publisher.stored(SharedObject(namespace_id, one.key, one.shard, one.num_shards, *size))
    return Check("directory", "note", f"{text}; it was told of these")


def _listed(objects: ObjectStore) -> list[_Object]:
    """Some objects of one folder of each of a few namespaces."""
    namespaces = [c.name for c in objects.children("") if c.is_directory and _NAMESPACE.fullmatch(c.name)]
    listed: list[_Object] = []
    for namespace in random.sample(namespaces, min(4, len(namespaces))):
        folders = [child.name for child in objects.children(namespace) if child.is_directory]
        if folders:
            folder = f"{namespace}/{random.choice(folders)}"
            for child in objects.children(folder)[:_LISTED_MAX]:
                found = _OBJECT.fullmatch(child.name)
                if found is not None and child.num_bytes:
                    key = BlockKey(bytes.fromhex(found[1]))
                    shards = int(found[2]), int(found[3])
                    listed.append(_Object(f"{folder}/{child.name}", key, *shards, child.num_bytes))
    return listed[:_LISTED_MAX]

"""What a directory or a part of a bucket is, where it is more than one thing: said, not read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from kvfleet.core.layout import BlockLayout
from kvfleet.errors import ConfigError
from kvfleet.explain import show_bytes, show_count
from kvfleet.node.arena import ARENA_FILE
from kvfleet.node.arenadir import CLIENTS_DIR, LOCK_FILE, NODE_FILE, FileLock
from kvfleet.node.findings import Findings
from kvfleet.node.manifestlist import CURRENT, FOLDER
from kvfleet.node.objects import Child

__all__ = ["BLOCK_NAME", "NAMESPACE", "folder_of_shared", "inspect_beside_arena", "inspect_homes", "layout_words"]

NAMESPACE = re.compile(r"[0-9a-f]{32}")
BLOCK_NAME = re.compile(r"([0-9a-f]{32})\.([0-9]+)-of-([0-9]+)\.arrow")

_NAMESPACES = "namespaces"
_DIGITS = re.compile(r"[0-9a-f]{2}")
_ROLES = {
    LOCK_FILE: "the lock that its manager holds",
    NODE_FILE: "which node it is of",
    "epoch": "how often its manager was started",
    "departed": "what clients that are gone have counted",
    "draining": "a sign that its node is draining",
    _NAMESPACES: "what its blocks are of",
    CLIENTS_DIR: "the locks and counts of its clients",
}


def folder_of_shared(url: str, children: Sequence[Child]) -> Findings:
    """What part of a shared tier has these children.

    Raises:
        ConfigError: none has, or there are none.
    """
    folders = {child.name for child in children if child.is_directory}
    files = {child.name for child in children if not child.is_directory}
    namespaces = sum(map(bool, map(NAMESPACE.fullmatch, folders)))
    manifests = sum(name.endswith(".parquet") for name in files)
    in_use = PurePosixPath(CURRENT).name in files
    if namespaces or FOLDER in folders:
        return _part(
            "a shared tier",
            namespaces=f"{namespaces:,}, each the blocks of one model and tenant",
            manifests="yes" if FOLDER in folders else "none",
        )
    if in_use or manifests:
        list_of_them = "there" if in_use else "gone: they are not in use"
        return _part("the manifests of a shared tier", manifests=f"{manifests:,}", list=list_of_them)
    if NAMESPACE.fullmatch(PurePosixPath(url).name) and any(map(_DIGITS.fullmatch, folders)):
        count = sum(map(bool, map(_DIGITS.fullmatch, folders)))
        return _part("the blocks of one model and tenant", folders=f"{count:,} of 256, by the first digits of keys")
    sizes = [child.num_bytes for child in children if BLOCK_NAME.fullmatch(child.name)]
    if sizes:
        return _part("some of the blocks of a shared tier", objects=f"{len(sizes):,}, {sum(sizes):,} bytes")
    raise ConfigError("", f"{url}: " + ("nothing of kvfleet's is below it" if children else "nothing there"))


def _part(kind: str, **facts: str) -> Findings:
    return Findings(
        kind, tuple(facts.items()), checked="what is in it was not read: give an object, or a key", whole=False
    )


def inspect_homes(path: Path) -> Findings | None:
    """What the directory of a machine's arenas, or the one above it, has; None if it is another directory."""
    for home in (path, path / f"kvfleet-{os.geteuid()}"):
        arenas = sorted(home.glob(f"*/{ARENA_FILE}")) if home.is_dir() else []
        if arenas or (home.name == f"kvfleet-{os.geteuid()}" and home.is_dir()):
            facts = tuple(("arena", f"{home.name}/{arena.parent.name}, {_use_of(arena)}") for arena in arenas)
            kind = f"a directory with the arenas of {show_count(len(arenas), 'node')}"
            return Findings(kind, facts, checked="they were not read: give one of them", whole=False)
    return None


def _use_of(arena: Path) -> str:
    held = FileLock.held(arena.with_name(LOCK_FILE))
    return f"{show_bytes(arena.stat().st_size)}, in use by {'a' if held else 'no'} manager"


def inspect_beside_arena(path: Path) -> Findings | None:
    """What a file or directory beside a node's arena is; None if it is elsewhere."""
    for part in (path, path.parent):
        if part.name in _ROLES and (part.parent / ARENA_FILE).exists():
            kind = f"a part of a node's arena directory: {_ROLES[part.name]}"
            return Findings(kind, tuple(_facts(path)), checked="nothing of it has a checksum", whole=False)
    return None


def _facts(path: Path) -> Iterator[tuple[str, str]]:
    """What the JSON files there say."""
    if path.is_dir():
        yield "files", f"{sum(1 for _ in path.iterdir()):,}"
        return
    if path.suffix != ".json":
        return
    try:
        fields = json.loads(path.read_text())
        for name, value in sorted(fields.items()):
            yield name, layout_words(value) if name == "layout" else str(value)
    except (ValueError, AttributeError):
        yield "content", "damaged: it is no JSON object"


def layout_words(layout_json: str) -> str:
    """A layout in words."""
    try:
        layout = BlockLayout.from_json(layout_json)
    except (ValueError, TypeError, KeyError):
        return f"unknown: {layout_json[:60]}"
    shape = "x".join(map(str, layout.shape))
    return f"{layout.dtype} {shape}, {layout.block_tokens} tokens, {layout.inner_order} order"

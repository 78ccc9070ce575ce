"""What an arena holds and whether it is sound, also while it is in use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvfleet.copying import checksum
from kvfleet.errors import TierUnavailableError
from kvfleet.node.arena import ARENA_FILE, Arena
from kvfleet.node.arenadir import LOCK_FILE, FileLock
from kvfleet.node.findings import Findings, some
from kvfleet.node.records import Record

__all__ = ["check_blocks", "inspect_arena"]


def check_blocks(
    arena: Arena, records: list[Record], stop: Callable[[], bool] = lambda: False
) -> tuple[int, list[Record]]:
    """Read the blocks of committed records.

    Args:
        arena: it may be in use: what is evicted meanwhile is passed over.
        records: of it.
        stop: asked before each block, whether to leave off.

    Returns:
        How many bytes were read, and the records of those blocks that do not have their checksum.

    Blocking: at some GB/s.
    """
    num_bytes, bad = 0, []
    end = arena.slots_offset + arena.capacity_bytes
    for record in records:
        if stop():
            break
        inside = arena.slots_offset <= record.offset <= record.offset + record.length <= end
        found = checksum(arena.slot_view(record.offset, record.length)) if inside else None
        if arena.records.record(record.slot).generation != record.generation:
            continue  # it went
        num_bytes += record.length
        if found != record.checksum:
            bad.append(record)
    return num_bytes, bad


def inspect_arena(path: Path) -> Findings:
    """Read all blocks of an arena.

    Args:
        path: of the file, or of the directory it is in.
    """
    path = path / ARENA_FILE if path.is_dir() else path
    kind = "a node's arena"
    try:
        arena = Arena.attach(path)
    except TierUnavailableError as error:
        return Findings(kind, problems=(error.detail.removeprefix(f"{path}: "),))
    try:
        held = FileLock.held(path.with_name(LOCK_FILE))
        records = arena.records.live()
        committed = [record for record in records if record.committed]
        num_bytes, bad = check_blocks(arena, committed)
        facts = (
            ("arena", arena.arena_id.hex()),
            ("in use", "by a manager" if held else "by no manager"),
            ("capacity", f"{arena.capacity_bytes:,} bytes in units of {arena.unit_bytes:,}"),
            ("blocks", f"{len(committed):,}, {num_bytes:,} bytes"),
            ("being written", f"{len(records) - len(committed):,}"),
            ("records", f"{arena.records.num_records:,}"),
        )
        problems = [f"{record.key.hex()}.{record.shard}: its bytes do not have their checksum" for record in bad]
        return Findings(kind, facts, some(problems), "all blocks were read")
    finally:
        arena.close()

"""What a drive of the NVMe tier holds and whether it is sound, while no manager has it open."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import numpy as np

from kvfleet.core.writebudget import BudgetState
from kvfleet.errors import CorruptBlockError, LayoutMismatchError, TierError
from kvfleet.node.arenadir import LOCK_FILE, FileLock
from kvfleet.node.codecs import codec_numbered
from kvfleet.node.driveentry import Entry
from kvfleet.node.drivefile import drive_errors
from kvfleet.node.driveformat import read_format
from kvfleet.node.findings import Findings, some

__all__ = ["drive_of", "inspect_drive"]

_FORMAT_FILE = "format.json"
_KIND = "a drive of the NVMe tier"


def drive_of(path: Path) -> Path | None:
    """The drive that a directory is, or that a file in it belongs to."""
    for directory in (path, path.parent, path.parent.parent):
        if (directory / _FORMAT_FILE).is_file() and (directory / "index").is_dir():
            return directory
    return None


def inspect_drive(directory: Path) -> Findings:
    """Read all blocks of a drive, and nothing but its format if a manager has it open.

    Blocking: as long as it takes to read all of it.
    """
    try:
        form = read_format(directory, 0)
        facts = [("drive", form.drive_id), ("format", f"{form.format}, units of {form.unit_bytes:,} bytes")]
        lock = FileLock(directory / LOCK_FILE)
        if not (directory / LOCK_FILE).exists() or not lock.acquire(0.0):
            facts.append(("in use", "by a manager"))
            return Findings(_KIND, tuple(facts), checked="its blocks were not read: `kvfleet doctor` does", whole=False)
        try:
            return _read(directory, facts)
        finally:
            lock.release()
    except TierError as error:
        return Findings(_KIND, problems=(error.detail.replace(f"{directory}: ", "").replace(f"{directory}/", ""),))


def _read(directory: Path, facts: list[tuple[str, str]]) -> Findings:
    problems: list[str] = []
    entries: list[Entry] = []
    with drive_errors(directory, "read the index"), _index(directory / "index") as (rows, budget):
        for record, value in rows:
            entry = Entry.unpack(record, value)
            if entry is None:
                problems.append(f"{record.hex()}: its entry in the index is damaged")
            else:
                entries.append(entry)
    entries.sort(key=lambda entry: entry.offset)
    with drive_errors(directory, "read the blocks"), (directory / "blocks").open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        end = 0
        for entry in entries:
            problem = _problem(file.fileno(), entry, end, size)
            if problem:
                problems.append(f"{entry.key.hex()}.{entry.shard}: {problem}")
            end = max(end, entry.offset + entry.slot_bytes)
    codecs = sorted({entry.codec for entry in entries})
    facts += [
        ("in use", "by no manager"),
        ("blocks", f"{len(entries):,}, {sum(entry.num_bytes for entry in entries):,} bytes"),
        ("slots", f"{sum(entry.slot_bytes for entry in entries):,} of {size:,} bytes"),
        ("codecs", ", ".join(map(_codec_name, codecs)) or "none"),
        ("namespaces", f"{len({entry.namespace_id for entry in entries}):,}"),
        ("written", _written(budget, problems)),
    ]
    return Findings(_KIND, tuple(facts), some(problems), "all blocks were read")


@contextmanager
def _index(directory: Path) -> Iterator[tuple[list[tuple[bytes, bytes]], bytes | None]]:
    """All entries of an index, and what it keeps of the write budget. Nothing is written, not even a lock."""
    with (directory / "data.mdb").open("rb", buffering=0) as file:  # mapping what cannot be read would end the process
        while file.read(1 << 20):
            pass
    with lmdb.open(os.fspath(directory), max_dbs=3, readonly=True, lock=False) as env:
        blocks, notes = env.open_db(b"blocks", create=False), env.open_db(b"notes", create=False)
        with env.begin() as txn:
            rows = [(bytes(key), bytes(value)) for key, value in txn.cursor(blocks)]
            budget = txn.get(b"budget", db=notes)
        yield rows, None if budget is None else bytes(budget)


def _problem(fd: int, entry: Entry, free_from: int, size: int) -> str:
    """Why a block cannot be read, or ""."""
    if entry.offset < free_from:
        return "its slot is another's too"
    if not 0 < entry.coded_bytes <= entry.slot_bytes or entry.offset + entry.coded_bytes > size:
        return "its slot is beyond the end of the file, or too small"
    coded = os.pread(fd, entry.coded_bytes, entry.offset)
    target = np.empty(entry.num_bytes, np.uint8)
    try:
        found = codec_numbered(entry.codec).decode(coded, target, entry.itemsize)
    except (CorruptBlockError, LayoutMismatchError) as error:
        return str(error)
    return "" if found == entry.checksum else "its bytes do not have their checksum"


def _codec_name(number: int) -> str:
    try:
        return codec_numbered(number).name
    except LayoutMismatchError:
        return f"number {number}, which is not known here"


def _written(budget: bytes | None, problems: list[str]) -> str:
    """What is known of all that was ever written to the drive."""
    if budget is None:
        return "not known"
    try:
        return f"{BudgetState.from_json(budget.decode()).total_bytes:,} bytes since its first use"
    except ValueError as error:
        problems.append(f"what it keeps of its write budget is damaged: {error}")
        return "not known"

"""Reading all of a drive, to see whether it holds what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from kvfleet.core.block import KEY_BYTES, BlockKey
from kvfleet.errors import CorruptBlockError, TierUnavailableError
from kvfleet.node.drive import Drive, pages
from kvfleet.node.drivecalls import DriveCalls
from kvfleet.node.driveentry import Entry
from kvfleet.node.drivestatus import DriveReport

__all__ = ["examine", "problem_of"]

_ENTRIES_AT_ONCE = 16_384  # read from an index in one call


async def examine(
    drive: Drive, calls: DriveCalls, forget: Callable[[BlockKey], bool] | None, unreadable: set[bytes]
) -> DriveReport:
    """Compare books, index and slots of a drive that is in use, reading one block at a time.

    Args:
        drive: to look at.
        calls: to it.
        forget: drops a block; None to repair nothing.
        unreadable: gets the record whose slot could not be read.

    Raises:
        TierUnavailableError: the drive failed.
    """
    corrupt: list[Entry] = []
    num_blocks = num_bytes = 0
    for entry in list(drive.books.entries.values()):
        if drive.books.entries.get(entry.record) is entry:
            num_blocks += 1
            num_bytes += entry.coded_bytes
            try:
                problem = await problem_of(drive, calls, entry)
            except TierUnavailableError:
                unreadable.add(entry.record)
                raise
            if problem:
                corrupt.append(entry)
    unknown, unspoken, others = await _differences(drive, calls)
    findings = [
        *drive.books.audit(),
        *(f"{record.hex()}: in the index, but not in the books" for record in unknown),
        *(f"{record.hex()}: in the books, but not in the index" for record in unspoken),
        *(f"{record.hex()}: in the index with another place" for record in others),
    ]
    repaired = 0
    if forget is not None:
        drive.books.deleted.update(unknown)
        bad = {BlockKey(entry.key) for entry in corrupt} | {
            BlockKey(record[:KEY_BYTES]) for record in unspoken + others
        }
        repaired = len(unknown) + sum(forget(key) for key in bad)
    names = tuple(entry.record.hex() for entry in corrupt)
    return DriveReport(str(drive.directory), "", num_blocks, num_bytes, names, tuple(findings), repaired)


async def problem_of(drive: Drive, calls: DriveCalls, entry: Entry) -> str:
    """Why a slot does not hold its block; "" if it does, or if the block went meanwhile. Nothing is dropped.

    Raises:
        TierUnavailableError: the drive failed.
    """
    key = BlockKey(entry.key)
    drive.books.placement.hold(key)
    try:
        await calls.read(lambda: drive.read(entry, pages(entry.num_bytes)))
    except CorruptBlockError as error:
        return str(error) if drive.books.entries.get(entry.record) is entry else ""
    finally:
        drive.books.placement.release(key)
    return ""


async def _differences(drive: Drive, calls: DriveCalls) -> tuple[list[bytes], list[bytes], list[bytes]]:
    """Records that are only in the index, only in the books, and in both with different places.

    Blocks come and go meanwhile: what changed in the books is not looked at.
    """
    before = dict(drive.books.entries)
    going = set(drive.books.deleted)
    entries, indexed = drive.indexed(), dict[bytes, Entry | None]()
    # Not all in one call, that a large drive is not taken for one that hangs.
    while some := await calls.look(lambda: list(islice(entries, _ENTRIES_AT_ONCE))):
        indexed.update(some)
    after, going = drive.books.entries, going | drive.books.deleted
    known = before.keys() | after.keys() | going
    unknown = [record for record in indexed if record not in known and not _pending(drive, record)]
    still = {record: entry for record, entry in before.items() if after.get(record) is entry}
    unspoken = [record for record in still if record not in indexed]
    others = [record for record, entry in still.items() if not _same(indexed.get(record, entry), entry)]
    return unknown, unspoken, others


def _pending(drive: Drive, record: bytes) -> bool:
    key, shard = BlockKey(record[:KEY_BYTES]), int.from_bytes(record[KEY_BYTES:], "little")
    return drive.books.placement.pending(key, shard)


def _same(indexed: Entry | None, entry: Entry) -> bool:
    return indexed is not None and (indexed.offset, indexed.checksum) == (entry.offset, entry.checksum)

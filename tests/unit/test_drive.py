"""A drive's files: its directory, its index, its slots, and what a smaller cap does to them."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import lmdb
import numpy as np
import pytest
import xxhash

from kvfleet.config import KIB, MIB, DriveConfig
from kvfleet.core.block import BlockKey
from kvfleet.core.placement import NewBlock
from kvfleet.core.slabs import SlabMap
from kvfleet.core.writebudget import BudgetState, Moment
from kvfleet.errors import ConfigError, CorruptBlockError, TierFullError, TierUnavailableError
from kvfleet.node.drive import Drive, Opening, pages
from kvfleet.node.driveentry import Entry
from kvfleet.node.drivefile import DriveFile
from kvfleet.node.driveformat import cap_of, plan_drive
from kvfleet.node.driveindex import BATCH_MAX, DriveIndex, index_bytes, is_damage
from kvfleet.node.driveshrink import eviction_order
from tests.drives import CAP, NAMESPACE, block_of, disk_bytes, key_of


def record_of(number: int, shard: int = 0) -> bytes:
    return key_of(number) + shard.to_bytes(2, "little")


def entry_of(number: int, offset: int, num_bytes: int, **fields: int) -> Entry:
    slot_bytes = SlabMap.slot_size(num_bytes)
    entry = Entry(record_of(number), offset, num_bytes, num_bytes, slot_bytes, 0, NAMESPACE, 0, 0, 0, 1, 0)
    return replace(entry, **fields)  # type: ignore[arg-type]


def open_drive(directory: Path, max_bytes: int = CAP, **fields: object) -> Drive:
    config = DriveConfig(directory=str(directory), max_bytes=max_bytes)
    return Drive.open(Opening(config, Moment("boot", 1.0, 1.0), **fields))  # type: ignore[arg-type]


def store(drive: Drive, number: int, num_bytes: int, last_access: int = 0) -> bool:
    """Store a block, if there is room without an eviction."""
    block = NewBlock(key_of(number), 0, None, SlabMap.slot_size(num_bytes))
    if drive.books.slabs.used_bytes + block.num_bytes > drive.books.slabs.capacity_bytes:
        return False
    admission = drive.books.placement.admit([block], last_access / 1e9)
    if admission.evicted or not admission.grants:
        drive.books.gone(admission.evicted)
        for _ in admission.grants:
            drive.books.placement.abort(block.key, 0)
        return False
    offset = drive.books.slabs.offset(admission.grants[0].slot)
    data = block_of(number, num_bytes)
    drive.write(offset, data)
    checksum = xxhash.xxh3_64_intdigest(data.data)
    entry = entry_of(number, offset, num_bytes, checksum=checksum, last_access=last_access)
    drive.apply([entry], units=drive.books.table_changes)
    drive.books.table_changes.clear()
    drive.books.stored(entry)
    return True


def fill(drive: Drive, num_bytes: int) -> list[int]:
    """Store blocks, each used later than the one before, until the drive is full."""
    number = 0
    while len(drive.books.entries) < drive.books.slabs.capacity_bytes // SlabMap.slot_size(num_bytes):
        if not store(drive, number, num_bytes, 1000 + number):
            break
        number += 1
    return list(range(number))


def check(drive: Drive, expected: Sequence[int], num_bytes: int) -> None:
    """The drive has these blocks, whole, and its books are right."""
    check_sizes(drive, dict.fromkeys(expected, num_bytes))


def check_sizes(drive: Drive, expected: dict[int, int]) -> None:
    assert drive.books.entries.keys() == {record_of(number) for number in expected}
    for number, num_bytes in expected.items():
        target = pages(num_bytes)
        drive.read(drive.books.entries[record_of(number)], target)
        assert (target == block_of(number, num_bytes)).all()
    assert drive.books.slabs.used_bytes == sum(map(SlabMap.slot_size, expected.values()))
    assert drive.books.audit() == []
    assert {record for record, _ in drive._index.entries()} - drive.books.deleted == drive.books.entries.keys()


def fail_with(number: int) -> Callable[..., NoReturn]:
    def fail(*args: object, **kwargs: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.fixture
def directory(arena_root: Path) -> Path:
    path = arena_root / "drive"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def drive(directory: Path) -> Iterator[Drive]:
    drive = open_drive(directory)
    yield drive
    drive.close()


# --- the data file


def test_all_of_it_is_allocated_at_once(drive: Drive, directory: Path) -> None:
    assert (directory / "blocks").stat().st_blocks * 512 == drive.books.slabs.capacity_bytes
    assert disk_bytes(directory) <= CAP
    check(drive, [], 1)
    assert (drive.num_dropped, drive.num_evicted, drive.remarks) == (0, 0, [])


def test_a_disk_without_the_room_gives_a_smaller_drive_that_says_so(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = os.posix_fallocate

    def limited(fd: int, offset: int, length: int) -> None:
        if offset + length > 9 * MIB:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(fd, offset, length)

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", limited)
        drive = open_drive(directory)
    assert 4 * MIB <= drive.books.slabs.capacity_bytes <= 9 * MIB
    assert "the disk has room for" in drive.remarks[0]
    numbers = fill(drive, 500 * KIB)
    drive.close()
    again = open_drive(directory)
    assert again.remarks == []
    check(again, numbers, 500 * KIB)
    again.close()


def test_no_room_for_anything_is_a_full_tier(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fail_with(errno.ENOSPC))
        with pytest.raises(TierFullError, match="No space left"):
            open_drive(directory)
    open_drive(directory).close()


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_filesystem_that_takes_no_room_in_advance(
    directory: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    allocate = os.posix_fallocate

    def index_only(fd: int, offset: int, length: int) -> None:
        if Path(f"/proc/self/fd/{fd}").readlink().name == "blocks":
            raise OSError(number, os.strerror(number))
        allocate(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", index_only)
    drive = open_drive(directory)
    assert (directory / "blocks").stat().st_blocks == 0
    check(drive, fill(drive, 500 * KIB), 500 * KIB)
    drive.close()


def refuse_if(direct: bool) -> None:
    if direct:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


@pytest.mark.parametrize("where", ["open", "transfer"])
def test_a_filesystem_without_direct_io_is_used_through_the_page_cache(
    directory: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    opened, preadv, pwritev = os.open, os.preadv, os.pwritev

    def open_(path: Path, flags: int, *args: int, **kwargs: int) -> int:
        refuse_if(bool(flags & os.O_DIRECT))
        return opened(path, flags, *args, **kwargs)

    def read(fd: int, pieces: list[memoryview], offset: int) -> int:
        refuse_if(is_direct(fd))
        return preadv(fd, pieces, offset)

    def write(fd: int, pieces: list[memoryview], offset: int) -> int:
        refuse_if(is_direct(fd))
        return pwritev(fd, pieces, offset)

    if where == "open":
        monkeypatch.setattr(os, "open", open_)
    else:
        monkeypatch.setattr(os, "preadv", read)
        monkeypatch.setattr(os, "pwritev", write)
    drive = open_drive(directory)
    store(drive, 1, 100_000)
    drive.flush()
    assert not drive.direct
    check(drive, [1], 100_000)
    drive.close()


def test_transfers_may_be_short(drive: Drive, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    preadv, pwritev = os.preadv, os.pwritev

    def less(pieces: list[memoryview]) -> list[memoryview]:
        return [pieces[0][: 4096 * rng.randint(1, 30)]] if len(pieces[0]) > 4096 else pieces

    monkeypatch.setattr(os, "preadv", lambda fd, pieces, offset: preadv(fd, less(pieces), offset))
    monkeypatch.setattr(os, "pwritev", lambda fd, pieces, offset: pwritev(fd, less(pieces), offset))
    store(drive, 1, MIB + 5)
    check(drive, [1], MIB + 5)


def test_a_data_file_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "blocks").symlink_to("/etc/passwd")
    with pytest.raises(TierUnavailableError, match="open: Too many levels"):
        DriveFile(tmp_path / "blocks")


# --- what is found at the start


def test_blocks_come_back_whatever_their_size(drive: Drive, directory: Path) -> None:
    sizes = dict(enumerate([1, 4095, 4096, 4097, 100_000, MIB + 5]))
    for number, num_bytes in sizes.items():
        assert store(drive, number, num_bytes)
    check_sizes(drive, sizes)
    drive.close()
    again = open_drive(directory)
    check_sizes(again, sizes)
    assert again.drive_id == drive.drive_id
    again.close()


def test_a_file_that_was_cut_is_made_whole_again_without_the_blocks(drive: Drive, directory: Path) -> None:
    numbers = fill(drive, MIB)
    drive.close()
    os.truncate(directory / "blocks", 4 * MIB)
    again = open_drive(directory)
    assert again.books.slabs.capacity_bytes == drive.books.slabs.capacity_bytes
    there = []
    for number in numbers:
        try:
            again.read(again.books.entries[record_of(number)], pages(MIB))
            there.append(number)
        except CorruptBlockError:
            pass
    assert len(there) == 4
    again.close()


def change_index(directory: Path, record: bytes, value: bytes) -> None:
    with (
        lmdb.open(str(directory / "index"), max_dbs=3) as env,
        env.begin(write=True, db=env.open_db(b"blocks")) as txn,
    ):
        txn.put(record, value)


def test_damaged_entries_are_dropped_and_their_slots_are_free(drive: Drive, directory: Path) -> None:
    for number in range(4):
        store(drive, number, 8192)
    entries = [drive.books.entries[record_of(number)] for number in range(4)]
    drive.close()
    good = entries[0].pack()
    change_index(directory, record_of(0), good[:5] + bytes([good[5] ^ 1]) + good[6:])  # a flipped bit
    change_index(directory, record_of(1), good)  # another's
    change_index(directory, record_of(9), replace(entries[2], record=record_of(9)).pack())  # one slot, two
    change_index(directory, record_of(8), replace(entries[3], record=record_of(8), offset=4097).pack())
    again = open_drive(directory)
    assert again.num_dropped == 4
    assert again.books.entries.keys() - {record_of(9), record_of(2)} == {record_of(3)}
    assert again.books.slabs.used_bytes == 2 * 8192
    assert again.books.audit() == []
    again.apply(delete=list(again.books.deleted))
    again.close()
    clean = open_drive(directory)
    assert clean.num_dropped == 0
    clean.close()


def test_on_one_of_several_drives_a_parent_may_be_on_another(drive: Drive, directory: Path) -> None:
    store(drive, 1, 4096)
    drive.apply([entry_of(2, 1 << 40, 4096)])
    entry = drive.books.entries[record_of(1)]
    drive.apply([replace(entry, parent_fingerprint=77, depth=3)], [entry.record])
    drive.close()
    for alone, parent in ((True, BlockKey((77).to_bytes(4, "little") + bytes(12))), (False, None)):
        again = open_drive(directory, alone=alone)
        assert again.books.placement.parent(key_of(1)) == parent
        again.close()


# --- the directory


def test_a_second_process_is_refused(drive: Drive, directory: Path) -> None:
    with pytest.raises(TierUnavailableError, match="another process has this drive open"):
        open_drive(directory)
    drive.close()
    open_drive(directory).close()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": 2}, "made by a newer kvfleet: format 2, this one reads 1"),
        ({"format": 0}, "made by an older kvfleet: format 0, this one reads 1"),
        ({"format": "x"}, "damaged"),
        ({"unit_bytes": 3}, "damaged"),
        ({"unit_bytes": None}, "damaged"),
    ],
)
def test_another_format_is_refused_and_left_alone(
    drive: Drive, directory: Path, fields: dict[str, object], message: str
) -> None:
    store(drive, 1, 4096)
    drive.close()
    path = directory / "format.json"
    good = path.read_text()
    path.write_text(json.dumps({**json.loads(good), **fields}))
    with pytest.raises(TierUnavailableError, match=message):
        open_drive(directory)
    path.write_text(good)
    again = open_drive(directory)
    check(again, [1], 4096)
    again.close()


@pytest.mark.parametrize("damage", [b"\xff\xfe\x00", b'{"format": 1e999}', b"[" * 100_000])
def test_a_damaged_format_is_refused_and_left_alone(drive: Drive, directory: Path, damage: bytes) -> None:
    drive.close()
    path = directory / "format.json"
    path.write_bytes(damage)
    with pytest.raises(TierUnavailableError, match="damaged"):
        open_drive(directory)
    assert path.read_bytes() == damage


@pytest.mark.parametrize("table", [b"blocks", b"units"])
def test_rows_of_an_index_that_cannot_be_are_damage(drive: Drive, directory: Path, table: bytes) -> None:
    store(drive, 1, 4096)
    drive.close()
    with (
        lmdb.open(str(directory / "index"), max_dbs=3, map_size=16 * MIB) as env,
        env.begin(env.open_db(table), write=True) as txn,
    ):
        txn.put(b"odd", b"")
    with pytest.raises(TierUnavailableError, match="that cannot be") as refused:
        open_drive(directory)
    assert is_damage(refused.value)


def test_an_index_that_leads_back_to_what_was_read_is_damage(drive: Drive, directory: Path) -> None:
    drive.close()
    index = DriveIndex(directory / "index", 4096)
    index.apply([entry_of(number, number * 4096, 4096) for number in range(200)])
    records = [record for record, _ in index.entries()]
    index.close()
    data = directory / "index" / "data.mdb"
    data.write_bytes(data.read_bytes().replace(records[-1], bytes(18)))
    with pytest.raises(TierUnavailableError, match="that cannot be") as refused:
        open_drive(directory)
    assert is_damage(refused.value)


def test_only_the_same_drive_comes_back(drive: Drive, directory: Path, arena_root: Path) -> None:
    drive.close()
    open_drive(directory, drive_id=drive.drive_id).close()
    with pytest.raises(TierUnavailableError, match="another drive is here now"):
        open_drive(directory, drive_id="0" * 32)
    empty = arena_root / "empty"
    empty.mkdir(mode=0o700)
    with pytest.raises(TierUnavailableError, match="an empty directory is there"):
        open_drive(empty, drive_id=drive.drive_id)
    assert list(empty.iterdir()) == []


def test_a_directory_with_other_things_is_refused(directory: Path) -> None:
    (directory / "thesis.tex").write_text("years of work")
    with pytest.raises(TierUnavailableError, match=r"not empty: thesis\.tex"):
        open_drive(directory)
    assert [path.name for path in directory.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_a_directory_that_others_can_write_to_is_refused(directory: Path, mode: int) -> None:
    directory.chmod(mode)
    with pytest.raises(TierUnavailableError, match="may write there"):
        open_drive(directory)


def test_files_are_private(drive: Drive, directory: Path) -> None:
    modes = {path.name: path.stat().st_mode & 0o777 for path in directory.rglob("*") if path.is_file()}
    assert modes == dict.fromkeys(["format.json", "lock", "blocks", "data.mdb", "lock.mdb"], 0o600)


def test_closing_twice_is_fine(drive: Drive) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    drive.close()
    drive.close()
    assert len(list(Path("/proc/self/fd").iterdir())) < before


# --- the cap


@pytest.mark.parametrize("max_bytes", [1, MIB, index_bytes(4096) + MIB])
def test_too_small_a_cap_is_a_wrong_setting(directory: Path, max_bytes: int) -> None:
    with pytest.raises(ConfigError, match="max_bytes"):
        open_drive(directory, max_bytes)


@pytest.mark.parametrize("max_bytes", [16 * MIB, 100 * MIB, 10**9, 10**12, 30 * 10**12, 10**15])
def test_plans_fit_their_cap(max_bytes: int) -> None:
    plan = plan_drive(max_bytes)
    data_bytes = plan.num_units * plan.unit_bytes
    assert data_bytes + index_bytes(plan.records_max) + 32 * plan.records_max < max_bytes
    assert data_bytes > 0.5 * max_bytes
    assert max_bytes < 10**9 or data_bytes > 0.98 * max_bytes
    assert plan.num_units <= 4096


def test_without_a_cap_it_takes_most_of_what_is_free_and_stays_as_it_is(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def free(blocks: int) -> None:
        found = os.statvfs(directory)
        fields = [*found[:4], blocks * MIB // found.f_frsize, *found[5:]]
        monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))

    free(100)
    assert cap_of(directory) == 90 * MIB
    drive = Drive.open(Opening(DriveConfig(directory=str(directory)), Moment("boot", 1.0, 1.0)))
    drive.close()
    own = disk_bytes(directory)
    assert 80 * MIB < own <= 90 * MIB
    for blocks in (9, 12):  # others have taken or freed a little
        free(blocks)
        assert abs(cap_of(directory) - own) < MIB
    free(0)
    assert cap_of(directory) < own
    free(100)
    assert cap_of(directory) > 2 * own * 0.9


def test_a_smaller_cap_evicts_what_was_used_last_longest_ago(drive: Drive, directory: Path) -> None:
    numbers = fill(drive, 300 * KIB)
    drive.touch({record_of(0): 10_000})
    drive.close()
    cap = 12 * MIB
    again = open_drive(directory, cap)
    left = [number for number in numbers if record_of(number) in again.books.entries]
    assert left == [0, *numbers[-len(left) + 1 :]]
    assert again.num_evicted == len(numbers) - len(left) > 0
    assert again.books.slabs.used_bytes > 0.8 * again.books.slabs.capacity_bytes
    assert disk_bytes(directory) <= cap
    check(again, left, 300 * KIB)
    again.close()


@pytest.mark.parametrize("num_bytes", [5000, 300_000, MIB + 1])
def test_smaller_caps_step_by_step(directory: Path, num_bytes: int, seed: int) -> None:
    rng = random.Random(seed)
    drive = open_drive(directory)
    numbers = fill(drive, num_bytes) if num_bytes > 5000 else [n for n in range(300) if store(drive, n, num_bytes)]
    uses = {record_of(number): rng.randrange(1 << 40, 1 << 41) for number in numbers}
    drive.touch(uses)
    order = sorted(numbers, key=lambda number: uses[record_of(number)])
    cap = CAP
    while True:
        drive.close()
        cap -= 3 * MIB
        try:
            drive = open_drive(directory, cap)
        except ConfigError:
            break
        left = [number for number in order if record_of(number) in drive.books.entries]
        assert left == order[len(order) - len(left) :]
        check(drive, left, num_bytes)
        assert disk_bytes(directory) <= cap
    assert cap < 8 * MIB


def test_what_is_written_to_open_a_drive_counts_for_its_budget(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = open_drive(directory)
    index_bytes_at_first = (directory / "index" / "data.mdb").stat().st_size
    assert drive.budget.total_bytes >= index_bytes_at_first - 64 * KIB
    numbers = fill(drive, 300 * KIB)
    before = drive.budget.total_bytes
    state = drive.budget.state(Moment("boot", 1.0, 1.0), closing=True)
    drive.apply(budget=state)
    drive.close()
    copied: list[int] = []
    write = DriveFile.write

    def counted(file: DriveFile, offset: int, data: np.ndarray) -> None:
        copied.append(len(data))
        write(file, offset, data)

    monkeypatch.setattr(DriveFile, "write", counted)
    again = open_drive(directory, 12 * MIB)
    assert 0 < len(copied) < len(numbers)
    assert again.budget.total_bytes == before + sum(copied)
    assert BudgetState.from_json((again._index.note("budget") or b"").decode()).total_bytes >= before + sum(copied)
    again.close()


def test_a_smaller_cap_with_many_sizes(directory: Path, seed: int) -> None:
    rng = random.Random(seed)
    drive = open_drive(directory, 24 * MIB)
    held = {}
    for number in range(200):
        num_bytes = rng.choice([50_000, 300_000, MIB])
        if not store(drive, number, num_bytes, rng.randrange(1000)):
            break
        held[number] = num_bytes
    drive.close()
    again = open_drive(directory, 16 * MIB)
    left = {number: size for number, size in held.items() if record_of(number) in again.books.entries}
    assert len(left) < len(held)
    assert again.books.slabs.used_bytes > again.books.slabs.capacity_bytes / 2
    check_sizes(again, left)
    assert disk_bytes(directory) <= 16 * MIB
    again.close()


def test_a_larger_cap_keeps_all(drive: Drive, directory: Path) -> None:
    numbers = fill(drive, 300 * KIB)
    drive.close()
    again = open_drive(directory, 2 * CAP)
    check(again, numbers, 300 * KIB)
    assert again.books.slabs.capacity_bytes > 2 * drive.books.slabs.capacity_bytes
    again.close()


def chain(*uses: int) -> list[Entry]:
    """Blocks of one prefix, with their last accesses."""
    entries: list[Entry] = []
    for depth, use in enumerate(uses):
        above = int.from_bytes(entries[-1].record[:4], "little") if entries else 0
        number = 100 * uses[0] + depth
        entries.append(entry_of(number, 0, 4096, parent_fingerprint=above, depth=depth, last_access=use))
    return entries


def test_no_block_goes_before_those_that_build_on_it() -> None:
    old, used_at_its_end = chain(3, 2, 2), chain(1, 1, 9)
    assert eviction_order([*old, *used_at_its_end]) == [[entry] for entry in [*old[::-1], *used_at_its_end[::-1]]]
    orphan = chain(5, 1)[1]
    assert eviction_order([*old, orphan])[0] == [orphan]


def test_shards_go_together() -> None:
    (first,) = chain(1)
    second = replace(first, record=first.record[:16] + b"\1\0", last_access=5)
    (other,) = chain(3)
    assert eviction_order([first, other, second]) == [[other], [first, second]]


# --- the index


@pytest.fixture
def index(arena_root: Path) -> Iterator[DriveIndex]:
    index = DriveIndex(arena_root / "index", 2000)
    yield index
    index.close()


def entry(number: int, offset: int = 0) -> Entry:
    return entry_of(number, offset, 4096, checksum=number, last_access=number)


def found(index: DriveIndex, number: int) -> Entry | None:
    return dict(index.entries()).get(record_of(number))


def test_an_index_never_outgrows_its_map(index: DriveIndex, arena_root: Path, seed: int) -> None:
    rng = random.Random(seed)
    held: set[int] = set()
    for _ in range(60):
        delete = rng.sample(sorted(held), min(len(held), rng.choice([0, 1, 128, 256])))
        absent = [number for number in rng.sample(range(100_000), 256) if number not in held]
        put = absent[: min(BATCH_MAX - len(delete), 2000 - len(held) + len(delete))]
        done, gone = index.apply([entry(number) for number in put], [record_of(number) for number in delete])
        assert all(done)
        assert None not in gone
        held = held.difference(delete).union(put)
        assert index.num_entries == len(held) <= 2000
    assert {at.checksum for _, at in index.entries() if at is not None} == held
    assert (arena_root / "index" / "data.mdb").stat().st_size == index_bytes(2000)


def test_a_transaction_is_all_or_nothing(index: DriveIndex) -> None:
    index.apply([entry(1)], units={0: 7}, notes={"budget": b"one"})
    with pytest.raises(TierFullError, match="MAP_FULL"):
        index.apply([entry(2)], [record_of(1)], units={0: 8}, notes={"budget": bytes(10 * MIB)})
    assert found(index, 1) == entry(1)
    assert found(index, 2) is None
    assert index.units(3) == [7, 0, 0]
    assert index.note("budget") == b"one"
    assert index.note("other") is None
    index.apply(units={0: 0, 2: 9})
    assert index.units(3) == [0, 0, 9]


def test_an_entry_is_replaced_by_deleting_it_in_the_same_transaction(index: DriveIndex) -> None:
    index.apply([entry(1)])
    assert index.apply([entry(1, 4096)]) == ([False], [])
    assert index.apply([entry(1, 4096)], [record_of(1)]) == ([True], [entry(1)])
    assert found(index, 1) == entry(1, 4096)


def test_last_accesses_do_not_go_back(index: DriveIndex) -> None:
    index.apply([entry(5), entry(6)])
    index.touch({record_of(5): 9, record_of(6): 3, record_of(7): 9, **{record_of(n): n for n in range(10, 600)}})
    uses = [at and at.last_access for at in (found(index, 5), found(index, 6), found(index, 7))]
    assert uses == [9, 6, None]


def test_entries_come_in_order_while_others_come_and_go(index: DriveIndex) -> None:
    for start in range(0, 2000, 250):
        index.apply([entry(number) for number in range(start, start + 250)])
    seen: list[bytes] = []
    for record, _ in index.entries():
        if len(seen) == 10:
            index.apply(delete=[record_of(number) for number in range(1000, 1250)])
        seen.append(record)
    assert seen == sorted(set(seen))
    assert {record_of(number) for number in (*range(1000), *range(1250, 2000))} <= set(seen)


def test_an_index_shrinks(index: DriveIndex, arena_root: Path) -> None:
    for start in range(0, 2000, 250):
        index.apply([entry(number) for number in range(start, start + 250)], units={start: start + 1})
    for start in range(0, 1750, 250):
        index.apply(delete=[record_of(number) for number in range(start, start + 250)])
    index.shrink(500)
    assert {at.checksum for _, at in index.entries() if at is not None} == set(range(1750, 2000))
    assert index.units(2000)[250] == 251
    assert (arena_root / "index" / "data.mdb").stat().st_size == index_bytes(500)
    index.apply([entry(1)])
    assert sorted(path.name for path in (arena_root / "index").iterdir()) == ["data.mdb", "lock.mdb"]


def test_a_transaction_costs_no_more_than_it_says(index: DriveIndex, arena_root: Path, seed: int) -> None:
    rng, data = random.Random(seed), arena_root / "index" / "data.mdb"
    numbers = list(range(2000))
    rng.shuffle(numbers)
    for start in range(0, 2000, 100):
        before = np.frombuffer(data.read_bytes(), np.uint8).reshape(-1, 4096)
        cost = index.cost(100, 1)
        index.apply([entry(number) for number in numbers[start : start + 100]], units={start: start + 1})
        after = np.frombuffer(data.read_bytes(), np.uint8).reshape(-1, 4096)
        assert 4096 * (before != after).any(axis=1).sum() <= max(cost, index.cost(100, 1))


def test_damage_of_an_index_is_told_from_other_failures(
    index: DriveIndex, arena_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.close()
    (arena_root / "index" / "data.mdb").write_bytes(bytes(8192))
    with pytest.raises(TierUnavailableError, match="not an LMDB file") as damage:
        DriveIndex(arena_root / "index", 2000)
    assert is_damage(damage.value)
    monkeypatch.setattr(os, "posix_fallocate", fail_with(errno.EIO))
    with pytest.raises(TierUnavailableError, match="Input/output error") as failure:
        DriveIndex(arena_root / "index", 2000)
    assert not is_damage(failure.value)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENODEV])
def test_an_index_that_cannot_be_read_is_no_reason_to_die(
    index: DriveIndex, arena_root: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """LMDB reads by mapping: a page that cannot be read would be the end of the process. All is read before."""
    index.apply([entry(1)])
    index.close()
    monkeypatch.setattr("kvfleet.node.driveindex.read_through", fail_with(number))
    with pytest.raises(TierUnavailableError, match=os.strerror(number)):
        DriveIndex(arena_root / "index", 2000)
    monkeypatch.undo()
    again = DriveIndex(arena_root / "index", 2000)
    assert found(again, 1) == entry(1)
    again.close()

"""The NVMe tier, in virtual time, on real files."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvfleet.config import KIB, MIB, DriveConfig, FleetConfig
from kvfleet.core.slabs import SlabMap
from kvfleet.errors import CorruptBlockError, TierFullError, TierUnavailableError
from kvfleet.node.drive import pages
from kvfleet.node.driveindex import DriveIndex
from kvfleet.node.drivewriter import _BATCHES
from kvfleet.node.nvme import NvmeTier
from kvfleet.testing.blocking import pause
from kvfleet.testing.loop import VirtualLoop
from tests.drives import (
    CAP,
    SIZE,
    Rig,
    attempt,
    block_of,
    disk_bytes,
    drive_directories,
    key_of,
    play,
    running,
    settings,
    stored_of,
)


def loop_of_test() -> VirtualLoop:
    loop = asyncio.get_event_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


def broken(number: int):
    def call(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return call


def entry_on(rig, number, drive=0):
    entry = rig.tier._bays[drive].entry(key_of(number) + b"\0\0")
    assert entry is not None
    return entry


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_blocks_come_back_also_after_a_restart(tmp_path: Path, codec: str) -> None:
    sizes = [1, 4095, 4096, 4097, 100_000, MIB + 5]

    async def work() -> None:
        config = settings(drive_directories(tmp_path, 2), nvme_codec=codec)
        async with running(config) as rig:
            assert rig.told == {}
            assert not await rig.read(0)
            assert await asyncio.gather(*(rig.write(n, size) for n, size in enumerate(sizes))) == [True] * len(sizes)
            assert [await rig.read(n, size) for n, size in enumerate(sizes)] == [True] * len(sizes)
            rig.check_books()
            told = dict(rig.told)
            assert told[key_of(2), 0] == stored_of(2, 4096) == rig.tier.find(key_of(2), 0)
        async with running(config) as rig:
            assert rig.told == told
            assert [await rig.read(n, size) for n, size in enumerate(sizes)] == [True] * len(sizes)
            assert not await rig.read(2, 4095)  # another length: not the block that is meant
            assert [status.counts.read_blocks for status in rig.tier.status()] == [3, 3]

    play(work)


def test_the_medium_has_the_bytes_once_a_block_is_stored(arena_root: Path) -> None:
    (directory,) = drive_directories(arena_root)

    async def work() -> None:
        async with running(settings([directory])) as rig:
            assert await rig.write(7, 10_000)
            entry = entry_on(rig, 7)
            raw = (directory / "blocks").read_bytes()[entry.offset :][:12_288]
            assert raw == block_of(7, 10_000).tobytes() + bytes(2288)
            assert dict(rig.tier._bays[0].at_work.drive.indexed()) == {entry.record: entry}

    play(work)


def test_a_full_drive_makes_room_and_never_takes_more_than_its_cap(arena_root: Path) -> None:
    (directory,) = drive_directories(arena_root)

    async def work() -> None:
        async with running(settings([directory])) as rig:
            for start in range(0, 120, 20):
                assert all(await rig.write_all(range(start, start + 20)))
                assert disk_bytes(directory) <= CAP
            there = await rig.check(range(120))
            assert set(range(100, 120)) <= there <= set(range(60, 120))  # the oldest went
            (status,) = rig.tier.status()
            assert status.used_bytes == len(there) * 204 * KIB > 0.9 * status.capacity_bytes
            assert status.counts.evicted_blocks == 120 - len(there)

    play(work)


def test_what_was_used_stays_and_children_go_before_their_parents(arena_root: Path) -> None:
    async def work() -> None:
        config = settings(drive_directories(arena_root))
        async with running(config) as rig:
            await rig.write(0)
            for depth in range(1, 10):
                await rig.write(depth, parent=depth - 1, depth=depth)
            await rig.write_all(range(100, 120))
            rig.tier.touch(key_of(9), asyncio.get_running_loop().time() + 1)
        async with running(config) as rig:  # last uses outlive a restart
            await rig.write_all(range(200, 230))
            assert len(await rig.check(range(100, 120))) < 20
            assert await rig.check(range(10)) == set(range(10))
            await rig.write_all(range(300, 345))
            left = await rig.check(range(10))
            assert 0 < len(left) < 10
            assert left == set(range(len(left)))  # what is left of a prefix is its beginning

    play(work)


def test_a_larger_block_than_the_drive_is_no_block_for_it(arena_root: Path) -> None:
    async def work() -> None:
        async with running(settings(drive_directories(arena_root))) as rig:
            assert not rig.tier.admits(CAP, 5)
            assert not await rig.write(1, CAP)
            assert await rig.write(2, 5 * MIB)
            assert await rig.check([1, 2], 5 * MIB) == {2}

    play(work)


def test_one_write_of_a_record_at_a_time(arena_root: Path) -> None:
    async def work() -> None:
        async with running(settings(drive_directories(arena_root, 3))) as rig:
            assert await asyncio.gather(*(rig.write(1) for _ in range(5))) == [True] * 5
            assert await rig.write(1)
            assert sum(status.counts.written_blocks for status in rig.tier.status()) == 1

    play(work)


def test_a_run_of_blocks_keeps_all_drives_busy_and_shards_of_a_block_stay_together(arena_root: Path) -> None:
    async def work() -> None:
        async with running(settings(drive_directories(arena_root, 3))) as rig:
            await rig.write_all(range(30))
            assert [status.counts.written_blocks for status in rig.tier.status()] == [10, 10, 10]
            for shard in range(4):
                await rig.tier.write(stored_of(50, shard=shard), None, block_of(50), 1, lambda: True)
            assert sorted(status.counts.written_blocks for status in rig.tier.status()) == [10, 10, 14]
            rig.tier.drop(key_of(50))
            assert {key_of(50)}.isdisjoint(key for key, _ in rig.told)
            rig.check_books()

    play(work)


def test_a_slot_that_was_given_to_another_block_meanwhile_is_not_stored(arena_root: Path) -> None:
    async def work() -> None:
        async with running(settings(drive_directories(arena_root))) as rig:
            checks = iter([True, False])
            assert not await rig.tier.write(stored_of(1), None, block_of(1), 1, lambda: next(checks))
            assert not await rig.tier.write(stored_of(2), None, block_of(2), 1, lambda: False)
            assert (rig.told, rig.tier.status()[0].used_bytes) == ({}, 0)
            assert rig.tier.status()[0].counts.dropped_writes == 2
            rig.check_books()

    play(work)


def test_coded_bytes_are_those_that_were_hashed(arena_root: Path) -> None:
    async def work() -> None:
        async with running(settings(drive_directories(arena_root), nvme_codec="zstd")) as rig:
            with pytest.raises(CorruptBlockError, match=r"dram: .* checksum mismatch"):
                await rig.tier.write(stored_of(1), None, block_of(2), 1, lambda: True)
            assert not await rig.tier.write(stored_of(1), None, block_of(2), 1, lambda: False)
            assert await rig.write(3, 256 * KIB)
            entry = entry_on(rig, 3)
            assert entry.coded_bytes <= entry.slot_bytes < entry.num_bytes == 256 * KIB
            assert await rig.check([1, 3], 256 * KIB) == {3}

    play(work)


def test_shards_of_a_block_have_slots_of_one_size_however_small_they_are_coded(arena_root: Path) -> None:
    def shard_of(number: int) -> np.ndarray:
        block = block_of(1)
        block[: 20_000 * (3 - number)] = np.frombuffer(
            np.random.default_rng(number + 9).bytes(20_000 * (3 - number)), "u1"
        )
        return block

    async def work() -> None:
        async with running(settings(drive_directories(arena_root), nvme_codec="zstd")) as rig:
            for shards in (range(2), range(2, 4)):
                blocks = {shard: shard_of(shard) for shard in shards}
                sums = {shard: xxhash.xxh3_64_intdigest(block.data) for shard, block in blocks.items()}
                stored = {shard: replace(stored_of(1, shard=shard), checksum=sums[shard]) for shard in shards}
                writes = [rig.tier.write(stored[n], None, blocks[n], 1, lambda: True) for n in shards]
                assert await asyncio.gather(*writes) == [True, True]
            for shard in range(4):
                target = pages(SIZE)
                await rig.tier.read(key_of(1), shard, target, 1)
                assert (target == shard_of(shard)).all()
            rig.check_books()

    play(work)


@pytest.mark.parametrize("random_bytes", [SIZE // 2, SIZE])
def test_a_shard_that_is_coded_larger_than_those_before_it_moves_them_to_larger_slots(
    arena_root: Path, random_bytes: int
) -> None:
    blocks = [block_of(1), block_of(2), block_of(3), block_of(4)]
    blocks[2][:random_bytes] = np.frombuffer(np.random.default_rng(1).bytes(random_bytes), "u1")
    config = settings(drive_directories(arena_root), nvme_codec="zstd")

    async def write(rig: Rig, shard: int) -> None:
        stored = replace(stored_of(1, shard=shard), checksum=xxhash.xxh3_64_intdigest(blocks[shard].data))
        assert await rig.tier.write(stored, None, blocks[shard], 1, lambda: True)

    async def check(rig: Rig) -> None:
        for shard, block in enumerate(blocks):
            target = pages(SIZE)
            await rig.tier.read(key_of(1), shard, target, 1)
            assert (target == block).all()

    async def work() -> None:
        async with running(config) as rig:
            for shard in range(4):  # one batch each
                await write(rig, shard)
            await check(rig)
            rig.check_books()
            entries = [rig.tier._bays[0].entry(key_of(1) + bytes([shard, 0])) for shard in range(4)]
            assert {entry.slot_bytes for entry in entries if entry is not None} == {SlabMap.slot_size(SIZE)}
            codecs = [entry.codec for entry in entries if entry is not None]
            assert codecs == [0, 0, int(random_bytes < SIZE), 1]
        async with running(config) as rig:
            await check(rig)
            rig.check_books()

    play(work)


def test_shards_that_come_together_get_slots_for_the_largest_of_them(arena_root: Path) -> None:
    async def work() -> None:
        async with running(settings(drive_directories(arena_root), nvme_codec="zstd")) as rig:
            blocks = [block_of(1), block_of(1)]
            blocks[1][:] = np.frombuffer(np.random.default_rng(1).bytes(SIZE), "u1")
            stored = [
                replace(stored_of(1, shard=shard), checksum=xxhash.xxh3_64_intdigest(block.data))
                for shard, block in enumerate(blocks)
            ]
            writes = [rig.tier.write(one, None, block, 1, lambda: True) for one, block in zip(stored, blocks)]  # noqa: B905
            assert await asyncio.gather(*writes) == [True, True]
            entries = [rig.tier._bays[0].entry(key_of(1) + bytes([shard, 0])) for shard in range(2)]
            assert [entry is not None and entry.codec for entry in entries] == [1, 0]  # what does not shrink is raw
            for shard, block in enumerate(blocks):
                target = pages(SIZE)
                await rig.tier.read(key_of(1), shard, target, 1)
                assert (target == block).all()

    play(work)


def test_what_is_dropped_is_gone_for_good(arena_root: Path) -> None:
    async def work() -> None:
        config = settings(drive_directories(arena_root))
        async with running(config) as rig:
            await rig.write_all(range(4))
            rig.tier.drop(key_of(1))
            rig.tier.drop(key_of(9))
            assert await rig.check(range(4)) == {0, 2, 3}
        async with running(config) as rig:
            assert await rig.check(range(4)) == {0, 2, 3}
            assert await rig.write(1)

    play(work)


def test_what_is_dropped_while_its_drive_is_out_goes_when_it_is_back(arena_root: Path) -> None:
    (directory,) = drive_directories(arena_root)

    async def work() -> None:
        async with running(settings([directory])) as rig:
            await rig.write_all(range(4))
            away = directory.rename(arena_root / "away")
            await asyncio.sleep(10)
            assert rig.tier._bays[0].at_work is None
            rig.tier.drop(key_of(1))
            away.rename(directory)
            await asyncio.sleep(61)
            assert await rig.check(range(4)) == {0, 2, 3}

    play(work)


def test_a_drive_can_be_told_what_to_drop_before_it_was_ever_open(arena_root: Path) -> None:
    (directory,) = drive_directories(arena_root)

    async def work() -> None:
        async with running(settings([directory])) as rig:
            await rig.write_all(range(2))
        away = directory.rename(arena_root / "away")
        async with running(settings([directory])) as rig:
            for number in range(1, 5000):
                rig.tier.drop(key_of(number))
            rig.tier.drop(key_of(1))
            assert len(rig.tier._bays[0]._unwanted) < 5000
            away.rename(directory)
            await asyncio.sleep(61)
            assert await rig.check(range(2)) == {0}

    play(work)


# --- damage


def test_damage_is_found_once_and_then_a_miss(arena_root: Path) -> None:
    (directory,) = drive_directories(arena_root)

    async def work() -> None:
        async with running(settings([directory])) as rig:
            await rig.write_all([0, 1])
            with (directory / "blocks").open("r+b") as file:
                file.seek(entry_on(rig, 0).offset + SIZE - 1)
                file.write(b"\xff\xfe")
            with pytest.raises(CorruptBlockError, match="checksum mismatch"):
                await rig.read(0)
            assert await rig.check([0, 1]) == {1}
            assert rig.tier.status()[0].counts.corrupt_blocks == 1
            assert await rig.write(0)
            assert await rig.check([0, 1]) == {0, 1}

    play(work)


def test_swapped_blocks_and_a_file_that_was_cut_short_are_damage(arena_root: Path) -> None:
    (directory,) = drive_directories(arena_root)

    async def work() -> None:
        async with running(settings([directory])) as rig:
            await rig.write_all(range(4), 4096)
            first, second = entry_on(rig, 0).offset, entry_on(rig, 1).offset
            raw = bytearray((directory / "blocks").read_bytes())
            raw[first : first + 4096], raw[second : second + 4096] = raw[second : second + 4096], raw[first:][:4096]
            (directory / "blocks").write_bytes(raw)
            for number in range(2):
                with pytest.raises(CorruptBlockError):
                    await rig.read(number, 4096)
            os.truncate(directory / "blocks", entry_on(rig, 3).offset)
            with pytest.raises(CorruptBlockError, match="0 of 4096 bytes"):
                await rig.read(3, 4096)
            assert await rig.check(range(4), 4096) == {2}

    play(work)


def test_doctor_reads_all_and_repairs_when_told_so(arena_root: Path) -> None:
    (directory,) = drive_directories(arena_root)

    async def work() -> None:
        async with running(settings([directory])) as rig:
            await rig.write_all(range(5))
            (report,) = await rig.tier.doctor(repair=False)
            assert (report.blocks, report.num_bytes, report.corrupt, report.findings) == (5, 5 * SIZE, (), ())
            with (directory / "blocks").open("r+b") as file:
                file.seek(entry_on(rig, 2).offset)
                file.write(b"wrong")
            drive = rig.tier._bays[0].at_work.drive
            stray, moved = entry_on(rig, 3), entry_on(rig, 4)
            drive.apply([replace(stray, record=key_of(77) + b"\0\0")], [moved.record])
            drive.apply([replace(moved, offset=stray.offset)])
            for repair in (False, True):
                (report,) = await rig.tier.doctor(repair=repair)
                assert report.corrupt == (entry_on(rig, 2).record.hex() if not repair else report.corrupt[0],)
                assert [line.split(": ")[1] for line in report.findings] == [
                    "in the index, but not in the books",
                    "in the index with another place",
                ]
            assert report.repaired == 3
            assert await rig.check(range(5)) == {0, 1, 3}
            await rig.write(6)
            (report,) = await rig.tier.doctor(repair=False)
            assert (report.blocks, report.corrupt, report.findings, report.problem) == (4, (), (), "")

    play(work)


# --- drives that fail


@pytest.mark.parametrize("number", [errno.EIO, errno.ENODEV])
def test_a_drive_that_cannot_be_read_is_out_and_comes_back(
    arena_root: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    async def work() -> None:
        async with running(settings(drive_directories(arena_root, 2))) as rig:
            await rig.write_all(range(10))
            lost = {n for n in range(10) if rig.tier._bays[0].entry(key_of(n) + b"\0\0")}
            victim, preadv = min(lost), os.preadv
            fd = rig.tier._bays[0].at_work.drive._file._fd
            with monkeypatch.context() as patch:
                patch.setattr(os, "preadv", lambda *args: broken(number)() if args[0] == fd else preadv(*args))
                patch.setattr(os, "posix_fallocate", broken(number))
                with pytest.raises(TierUnavailableError, match=f"read: {os.strerror(number)}"):
                    await rig.read(victim)
                assert await attempt(rig.read(victim)) is None
                await asyncio.sleep(0.5)
                assert not rig.tier.status()[0].works
                assert f"read: {os.strerror(number)}" in rig.tier.status()[0].problem
                assert {key for key, _ in rig.told} == {key_of(n) for n in range(10) if n not in lost}
                assert await rig.write(victim)  # to the other drive
            await asyncio.sleep(2)
            assert rig.tier.status()[0].works
            assert await rig.check(range(10)) == set(range(10))
            assert rig.tier._bays[0].entry(key_of(victim) + b"\0\0") is None  # not twice

    play(work)


def test_a_block_whose_slot_cannot_be_read_goes_and_the_drive_heals(
    arena_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with running(settings(drive_directories(arena_root))) as rig:
            await rig.write_all(range(5))
            bad, preadv = entry_on(rig, 3).offset, os.preadv

            def read(fd: int, pieces: list[memoryview], offset: int) -> int:
                return broken(errno.EIO)() if offset == bad else preadv(fd, pieces, offset)

            monkeypatch.setattr(os, "preadv", read)
            assert await attempt(rig.read(3)) is None
            await asyncio.sleep(5)
            assert await rig.check(range(5)) == {0, 1, 2, 4}

    play(work)


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS])
@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
def test_a_drive_that_cannot_be_written_is_out(
    arena_root: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    async def work() -> None:
        async with running(settings(drive_directories(arena_root))) as rig:
            await rig.write(0)
            with monkeypatch.context() as patch:
                patch.setattr(os, call, broken(number))
                results = await asyncio.gather(*(attempt(rig.write(n)) for n in range(1, 9)))
                assert results == [None] * 8
                assert rig.told == {} or not rig.tier.status()[0].works
            await asyncio.sleep(5)
            assert await rig.check(range(9)) == {0}
            assert await rig.write(1)

    play(work)


def test_a_full_filesystem_is_a_full_tier(arena_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with running(settings(drive_directories(arena_root))) as rig:
            await rig.write(0)
            with monkeypatch.context() as patch:
                patch.setattr(os, "pwritev", broken(errno.ENOSPC))
                assert await attempt(rig.write(1)) is None
                assert not rig.tier.admits(SIZE, 9)
                assert not await rig.write(1)
                assert rig.tier.status()[0].works
                assert await rig.check([0, 1]) == {0}
            await asyncio.sleep(31)
            assert await rig.write(1)
            assert await rig.check([0, 1]) == {0, 1}

    play(work)


def test_an_index_without_room_is_a_full_tier_and_is_left_alone(
    arena_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def full(*args, **kwargs):
        calls.append(args)
        raise TierFullError("nvme", "the index is full")

    async def work() -> None:
        async with running(settings(drive_directories(arena_root))) as rig:
            await rig.write_all(range(4))
            with monkeypatch.context() as patch:
                patch.setattr(DriveIndex, "apply", full)
                rig.tier.drop(key_of(0))  # the index has to be told
                await asyncio.sleep(20)
                assert len(calls) <= _BATCHES
                assert not await rig.write(5)
                assert await rig.check(range(6)) == {1, 2, 3}
            await asyncio.sleep(20)
            assert await rig.write(5)
            assert rig.tier._bays[0].at_work.drive.books.deleted == set()
            assert await rig.check(range(6)) == {1, 2, 3, 5}

    play(work)


def test_an_index_that_fails_takes_the_drive_out_and_no_block_is_half_there(
    arena_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = DriveIndex.apply

    def after(self, *args, **kwargs):
        apply(self, *args, **kwargs)
        raise TierUnavailableError("nvme", "the index failed")

    async def work() -> None:
        async with running(settings(drive_directories(arena_root))) as rig:
            await rig.write_all(range(40))
            with monkeypatch.context() as patch:
                patch.setattr(DriveIndex, "apply", after)
                assert await asyncio.gather(*(attempt(rig.write(n)) for n in range(40, 60))) == [None] * 20
            await asyncio.sleep(2)
            there = await rig.check(range(60))
            assert len(there) < 40  # those for which room was made are gone
            assert all(await rig.write_all(range(60, 70)))
            await rig.check(range(70))

    play(work)


@pytest.mark.parametrize("damage", ["no index", "wrong pages"])
def test_a_damaged_index_is_made_anew_and_that_is_said(arena_root: Path, seed: int, damage: str) -> None:
    (directory,) = drive_directories(arena_root)
    data = directory / "index" / "data.mdb"

    async def work() -> None:
        async with running(settings([directory])) as rig:
            await rig.write_all(range(20))
        raw = bytearray(data.read_bytes())
        pages_used = [at for at in range(8192, len(raw), 4096) if any(raw[at : at + 4096])]
        wrong = np.random.default_rng(seed)
        for at in [0, 4096] if damage == "no index" else pages_used:
            raw[at : at + 4096] = wrong.bytes(4096)
        data.write_bytes(raw)
        async with running(settings([directory])) as rig:
            await asyncio.sleep(2)
            (status,) = rig.tier.status()
            assert status.works
            assert "its index was damaged and was made anew, empty" in status.problem
            assert await rig.check(range(20)) == set()
            assert all(await rig.write_all(range(20)))
        async with running(settings([directory])) as rig:
            assert rig.tier.status()[0].problem == ""
            assert await rig.check(range(20)) == set(range(20))

    play(work)


def test_a_missing_directory_is_a_problem_until_it_is_there(arena_root: Path) -> None:
    (directory,) = drive_directories(arena_root)
    directory.rmdir()

    async def work() -> None:
        async with running(settings([directory])) as rig:
            assert "No such file" in rig.tier.status()[0].problem
            assert not await rig.write(1)
            assert not directory.exists()
            directory.mkdir(mode=0o700)
            await asyncio.sleep(60)
            assert await rig.write(1)

    play(work)


def test_a_drive_that_vanishes_is_out_and_nothing_is_written_in_its_place(arena_root: Path) -> None:
    (directory,) = drive_directories(arena_root)
    away = arena_root / "away"

    async def work() -> None:
        async with running(settings([directory])) as rig:
            await rig.write_all(range(3))
            directory.rename(away)
            directory.mkdir(mode=0o700)  # what was below the mount
            await asyncio.sleep(3)
            assert rig.told == {}
            assert not await rig.write(4)
            assert list(directory.iterdir()) == []
            assert "an empty directory is there" in rig.tier.status()[0].problem
            directory.rmdir()
            await asyncio.sleep(61)
            assert "No such file" in rig.tier.status()[0].problem
            other = arena_root / "other"
            other.mkdir(mode=0o700)
            async with running(settings([other])):
                pass
            other.rename(directory)
            await asyncio.sleep(61)
            assert "another drive is here now" in rig.tier.status()[0].problem
            shutil.rmtree(directory)
            away.rename(directory)
            await asyncio.sleep(61)
            assert await rig.check(range(3)) == {0, 1, 2}

    play(work)


def test_a_data_file_that_was_deleted_is_noticed(arena_root: Path) -> None:
    (directory,) = drive_directories(arena_root)

    async def work() -> None:
        async with running(settings([directory])) as rig:
            await rig.write_all(range(3))
            (directory / "blocks").unlink()
            await asyncio.sleep(61)
            assert "data file was gone" in rig.tier.status()[0].problem
            assert rig.told == {}
            await rig.write_all(range(3, 6))
            assert await rig.check(range(6)) == {3, 4, 5}
            assert (directory / "blocks").stat().st_size > 0

    play(work)


def test_a_drive_that_hangs_lets_go_of_all_it_can(arena_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        async with running(settings(drive_directories(arena_root), nvme_inflight_max=2)) as rig:
            await rig.write_all(range(8))
            with monkeypatch.context() as patch:
                hung = []

                def hang(*args):
                    hung.append(args)
                    pause(loop_of_test(), 100)
                    return broken(errno.EIO)()

                patch.setattr(os, "preadv", hang)
                begun = loop.time()
                reads = [asyncio.ensure_future(attempt(rig.read(number))) for number in range(8)]
                done, pending = await asyncio.wait(reads, timeout=8)
                assert (len(done), len(pending), len(hung)) == (6, 2, 2)  # no more threads than may be
                assert {read.result() for read in done} == {None}
                assert rig.told == {}
                assert "no answer" in rig.tier.status()[0].problem
                assert not await rig.write(9)
                await asyncio.wait(pending)
                assert loop.time() - begun > 99
            await asyncio.sleep(2)
            assert rig.tier.status()[0].works
            assert len(await rig.check(range(8))) >= 6

    play(work)


def test_a_drive_that_hangs_as_it_is_looked_over_is_told_so(arena_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        async with running(settings(drive_directories(arena_root))) as rig:
            await rig.write_all(range(3))
            with monkeypatch.context() as patch:
                patch.setattr(os, "preadv", lambda *_: pause(loop_of_test(), 1000))
                begun = loop.time()
                (report,) = await rig.tier.doctor(repair=False)
                assert loop.time() - begun < 30
                assert "no answer" in report.problem
                await asyncio.sleep(1000)
            await asyncio.sleep(61)
            assert (await rig.tier.doctor(repair=False))[0].blocks == 3

    play(work)


def test_a_drive_that_takes_long_to_open_says_so(arena_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        monkeypatch.setattr("kvfleet.node.drive.check_directory", lambda _: pause(loop_of_test(), 1000))
        tier = NvmeTier((DriveConfig(directory=str(arena_root)),), FleetConfig())
        run = asyncio.ensure_future(tier.run())
        await tier.opened.wait()
        (status,) = tier.status()
        assert (status.works, status.tried, status.problem) == (False, False, "not open yet, since 30 s")
        await tier.close()
        run.cancel()

    play(work)


def test_closing_does_not_wait_for_a_drive_that_hangs(arena_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        async with running(settings(drive_directories(arena_root))) as rig:
            await rig.write(0)
            monkeypatch.setattr(os, "preadv", lambda *_: pause(loop_of_test(), 1000))
            read = asyncio.ensure_future(attempt(rig.read(0)))
            await asyncio.sleep(1)
            begun = loop.time()
            await rig.tier.close()
            assert loop.time() - begun < 30
            read.cancel()

    play(work)


def test_a_drive_that_fails_as_its_tier_is_closed_is_not_opened_again(
    arena_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        config = settings(drive_directories(arena_root))
        rig = Rig(config, lambda key, present: None)
        run = asyncio.ensure_future(rig.tier.run())
        await rig.tier.opened.wait()

        async def fail() -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(rig.tier._bays[0], "_end", fail)
        await rig.tier.close()
        assert isinstance((await asyncio.gather(run, return_exceptions=True))[0], RuntimeError)
        await rig.tier.run()  # as whoever looks after it does when it fails
        assert len(rig.tier._runs) == 3
        assert all(run.done() for run in rig.tier._runs)
        await rig.tier._bays[0]._close()

    play(work)


def test_a_slow_drive_gets_no_writes_until_it_is_fast_again(arena_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        pwritev, slow = os.pwritev, [True]
        async with running(settings(drive_directories(arena_root, 3), max_bytes=40 * MIB)) as rig:
            slow_fd = rig.tier._bays[1].at_work.drive._file._fd
            size = 64 * KIB

            def write(fd: int, pieces: list[memoryview], offset: int) -> int:
                pause(loop_of_test(), 0.5 if fd == slow_fd and slow[0] else 0.001)
                return pwritev(fd, pieces, offset)

            monkeypatch.setattr(os, "pwritev", write)
            await rig.write_all(range(90), size)
            await asyncio.sleep(2)
            assert [status.slow for status in rig.tier.status()] == [False, True, False]
            before = rig.tier.status()[1].counts.written_blocks
            await rig.write_all(range(100, 130), size)
            assert rig.tier.status()[1].counts.written_blocks == before
            assert await rig.check(range(130), size) == {*range(90), *range(100, 130)}  # it is still read
            await asyncio.sleep(20)
            await rig.write_all(range(200, 230), size)
            await asyncio.sleep(2)
            assert rig.tier.status()[1].counts.written_blocks == before + 1  # one probe
            assert rig.tier.status()[1].slow
            slow[0] = False
            await asyncio.sleep(100)
            await rig.write_all(range(230, 260), size)
            await asyncio.sleep(2)
            assert not rig.tier.status()[1].slow
            await rig.write_all(range(300, 330), size)
            assert rig.tier.status()[1].counts.written_blocks >= before + 10

    play(work)


def test_a_second_tier_on_the_same_directory_is_refused_and_takes_over_when_it_is_free(arena_root: Path) -> None:
    async def work() -> None:
        config = settings(drive_directories(arena_root))
        async with running(config) as first:
            await first.write(1)
            async with running(config) as second:
                assert "another process has this drive open" in second.tier.status()[0].problem
                assert not await second.write(2)
                await first.tier.close()
                await asyncio.sleep(10)
                assert await second.check([1, 2]) == {1}

    play(work)


# --- the queue and the budget


def test_stores_beyond_the_queue_are_not_taken(arena_root: Path) -> None:
    async def work() -> None:
        config = settings(drive_directories(arena_root), nvme_queue_bytes_max=5 * SIZE)
        async with running(config) as rig:
            writes = [asyncio.ensure_future(rig.write(number)) for number in range(8)]
            await asyncio.sleep(0)
            assert not rig.tier.admits(SIZE, 9)
            assert await asyncio.gather(*writes) == [True] * 5 + [False] * 3
            assert rig.tier.admits(SIZE, 0)
            assert rig.tier.status()[0].queued_bytes == 0

    play(work)


def test_as_the_days_budget_is_spent_admission_tightens_and_then_stores_stop(arena_root: Path) -> None:
    async def work() -> None:
        config = settings(drive_directories(arena_root), rated_bytes=10 * MIB, dwpd=2.0, heartbeat_s=600.0)
        async with running(config) as rig:
            taken = {0: 0, 1: 0, 2: 0}
            number = 0
            while any(rig.tier.admits(SIZE, uses) for uses in taken):
                for uses in taken:
                    taken[uses] += rig.tier.admits(SIZE, uses)
                assert await rig.write(number) in {True, False}
                number += 1
                if not rig.tier.status()[0].counts.written_blocks >= number:
                    break
            assert taken[0] < taken[1] < taken[2]
            (status,) = rig.tier.status()
            assert 0.9 * status.day_bytes < status.today_bytes <= status.day_bytes == 20 * MIB
            assert not await rig.write(1000)
            there = await rig.check(range(number))  # loads go on
            assert there
        async with running(config) as rig:  # it outlives a restart
            assert status.today_bytes <= rig.tier.status()[0].today_bytes < status.today_bytes + MIB
            assert not await rig.write(1000)
            await asyncio.sleep(86_400)
            assert rig.tier.status()[0].pressure == 0
            assert await rig.write(1000)
            assert rig.tier.status()[0].life_days < 5 * 365

    play(work)


def test_no_less_is_on_disk_of_the_budget_than_was_written(arena_root: Path) -> None:
    """Also for a process that dies at any moment: what is saved is ahead of what is written."""
    (directory,) = drive_directories(arena_root)
    written: list[int] = []

    async def work() -> None:
        async with running(settings([directory], rated_bytes=100 * MIB)) as rig:
            drive = rig.tier._bays[0].at_work.drive
            write = drive.write

            def counted(offset: int, data: np.ndarray) -> None:
                written.append(len(data))
                note = drive._index.note("budget")
                assert note is not None
                assert f'"total_bytes": {0}' not in note.decode()
                saved = int(note.decode().split('"total_bytes": ')[1].split(",")[0])
                assert saved >= sum(written)
                write(offset, data)

            drive.write = counted
            for start in range(0, 60, 6):
                await rig.write_all(range(start, start + 6))

    play(work)
    assert len(written) == 60


def test_a_tier_without_drives_takes_nothing() -> None:
    async def work() -> None:
        async with running(settings([])) as rig:
            assert not rig.tier.admits(1, 9)
            assert not await rig.write(1)
            assert rig.tier.find(key_of(1), 0) is None
            assert rig.tier.status() == ()
            rig.tier.touch(key_of(1), 0.0)
            rig.tier.drop(key_of(1))

    play(work)


def test_wrong_use_is_a_bug(arena_root: Path) -> None:
    async def work() -> None:
        async with running(settings(drive_directories(arena_root))) as rig:
            await rig.write(1, 8192)
            with pytest.raises(AssertionError, match="begins on a page"):
                await rig.tier.read(key_of(1), 0, pages(8193)[1:], 1)
            assert await rig.check([1], 8192) == {1}

    play(work)


def test_drives_can_be_opened_one_after_the_other_in_one_process(arena_root: Path) -> None:
    async def work() -> None:
        config = settings(drive_directories(arena_root))
        for number in range(3):
            async with running(config) as rig:
                assert await rig.write(number)
                assert await rig.check(range(number + 1)) == set(range(number + 1))

    asyncio.run(work())


def test_a_bug_in_one_drive_leaves_the_books_of_the_others_right(
    arena_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with running(settings(drive_directories(arena_root, 2))) as rig:
            await rig.write_all(range(8))
            assert all(status.used_bytes for status in rig.tier.status())
            with monkeypatch.context() as patch:
                patch.setattr(rig.tier._bays[0].at_work._watch, "_tick_s", None)
                await asyncio.sleep(5)
            assert rig.told == {}
            assert [rig.tier.find(key_of(number), 0) for number in range(8)] == [None] * 8
            again = asyncio.ensure_future(rig.tier.run())
            await asyncio.sleep(5)
            assert len(rig.told) == 8
            assert len(await rig.check(range(8))) == 8
            assert rig.tier.audit() == []
            await rig.tier.close()
            await asyncio.gather(again, return_exceptions=True)

    play(work)

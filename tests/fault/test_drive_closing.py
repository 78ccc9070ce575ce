"""Drives are closed whenever their node stops: whoever opens them next is not refused."""

from __future__ import annotations

import asyncio
import errno
import os
import random

import pytest

from kvfleet.config import MIB, DriveConfig, FleetConfig
from kvfleet.copying import checksum
from kvfleet.errors import TierError
from kvfleet.node.drive import pages
from kvfleet.node.nvme import NvmeTier, Stored
from kvfleet.testing.adapters import split_record
from kvfleet.testing.tiersuite import content, record_of

NUM_BYTES = 16384
BLOCKS = 4


async def _write(nvme, number):
    key, shard = split_record(record_of(number))
    source = pages(NUM_BYTES)
    source[:] = content(record_of(number), NUM_BYTES)
    stored = Stored(key, shard, NUM_BYTES, checksum(source), bytes(16), 0, 0)
    assert await nvme.write(stored, None, source, 1, lambda: True)


async def _read(nvme, number):
    try:
        await nvme.read(*split_record(record_of(number)), pages(NUM_BYTES), 1)
    except TierError:
        return


@pytest.mark.parametrize("failing", [False, True])
def test_a_tier_that_is_cancelled_lets_go_of_its_drives(tmp_path, monkeypatch, seed, failing):
    chance, preadv, broken = random.Random(seed), os.preadv, False

    def read(*arguments):
        if broken:
            raise OSError(errno.EIO, "medium")
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", read)
    drives = tuple(DriveConfig(directory=str(tmp_path / name), max_bytes=9 * MIB, dwpd=1000.0) for name in "ab")
    for drive in drives:
        (tmp_path / drive.directory).mkdir(mode=0o700)
    config = FleetConfig(nvme=drives, heartbeat_s=0.05)

    async def life():
        nonlocal broken
        nvme = NvmeTier(drives, config)
        run = asyncio.create_task(nvme.run())
        await nvme.opened.wait()
        assert [status.problem for status in nvme.status()] == ["", ""]
        for number in range(BLOCKS):
            await _write(nvme, number)
        broken = failing
        reads = [asyncio.create_task(_read(nvme, number)) for number in range(BLOCKS)]
        await asyncio.sleep(chance.choice([0, 0, 0.0002, 0.001, 0.003, 0.02]))
        broken = False
        for task in (run, *reads):
            task.cancel()
        await asyncio.wait({run, *reads})
        await nvme.close()

    for _ in range(12):
        asyncio.run(life())

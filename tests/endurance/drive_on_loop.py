"""The other process of `test_drive_medium.py`: `unshare --mount python drive_on_loop.py SCENE DIRECTORY`.

A drive on a filesystem on a loop device on a file. What is mounted goes with the process's mount namespace, and the
loop device with the mount.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
import subprocess
import sys
from pathlib import Path

from kvfleet.config import MIB
from kvfleet.errors import CorruptBlockError, TierUnavailableError
from tests.drives import key_of, play, running, settings

_IMAGE_BYTES = 64 * MIB
_CAP = 40 * MIB
_SIZE = 500_000
_BLOCKS = range(50)
_EXT4_IOC_SHUTDOWN = 0x8004587D
_NO_LOG_FLUSH = struct.pack("I", 2)


def run(*command: object) -> str:
    return subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


class Medium:
    def __init__(self, directory: Path) -> None:
        run("mount", "--make-rprivate", "/")
        self.image = directory / "image"
        self.mount_point = directory / "mount"
        self.drive = self.mount_point / "drive"
        self.image.write_bytes(b"")
        os.truncate(self.image, _IMAGE_BYTES)
        run("mkfs.ext4", "-q", "-F", "-b", "4096", "-O", "^has_journal", self.image)
        self.mount_point.mkdir()
        self.mount()
        self.drive.mkdir(mode=0o700)

    def mount(self) -> None:
        device = run("losetup", "--find", "--show", self.image)
        try:
            run("mount", "-t", "ext4", device, self.mount_point)
        finally:
            run("losetup", "--detach", device)  # once it is not mounted any more

    def unmount(self) -> None:
        run("umount", self.mount_point)

    def shut_down(self) -> None:
        """From here on the filesystem answers EIO, as if its device were gone."""
        fd = os.open(self.mount_point, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _EXT4_IOC_SHUTDOWN, _NO_LOG_FLUSH)
        finally:
            os.close(fd)


async def look(rig) -> tuple[set[int], set[int]]:
    """Which blocks are there, all right; and which could not be read, the drive having failed each time."""
    there, failed = set(), set()
    for number in _BLOCKS:
        for _ in range(3):
            try:
                if await rig.read(number, _SIZE):
                    there.add(number)
                break
            except TierUnavailableError:
                failed.add(number)
                await asyncio.sleep(100)  # until the drive was tried again
            except CorruptBlockError:
                failed.add(number)
                break
    return there, failed


async def truncated(medium: Medium) -> None:
    """The end of the medium cannot be read."""
    async with running(settings([medium.drive], max_bytes=_CAP, heartbeat_s=20.0)) as rig:
        assert all([await rig.write(number, _SIZE) for number in _BLOCKS])
        os.truncate(medium.image, first_byte(medium.drive / "blocks") + 12 * MIB)
        there, failed = await look(rig)
        assert there, "what is before the end can be read"
        assert failed, "what is behind it cannot"
        assert there | failed == set(_BLOCKS)
        assert rig.tier.status()[0].works, rig.tier.status()[0].problem
        assert await rig.check(_BLOCKS, _SIZE) == there
        assert {key for key, _ in rig.told} == {key_of(number) for number in there}


def first_byte(path: Path) -> int:
    """Where a file begins on its device."""
    lines = [line.split(":") for line in run("filefrag", "-b4096", "-v", path).splitlines() if ".." in line]
    return 4096 * int(lines[0][2].split("..")[0])


async def index_lost(medium: Medium) -> None:
    """The index cannot be read: the process lives, the drive is out."""
    config = settings([medium.drive], max_bytes=_CAP, heartbeat_s=20.0)
    async with running(config) as rig:
        assert all([await rig.write(number, _SIZE) for number in _BLOCKS])
    start = first_byte(medium.drive / "index" / "data.mdb")
    medium.unmount()
    medium.mount()  # nothing of it is in memory
    os.truncate(medium.image, start + MIB)
    async with running(config) as rig:
        (status,) = rig.tier.status()
        assert not status.works
        assert "Input/output error" in status.problem, status.problem
        assert not await rig.write(1, _SIZE)


async def gone_and_back(medium: Medium) -> None:
    """The device goes in the middle of reads and writes, and comes back."""
    async with running(settings([medium.drive], max_bytes=_CAP, heartbeat_s=20.0)) as rig:
        assert all([await rig.write(number, _SIZE) for number in _BLOCKS])
        work = [asyncio.ensure_future(rig.write(number, _SIZE)) for number in range(100, 110)]
        work += [asyncio.ensure_future(rig.read(number, _SIZE)) for number in _BLOCKS]
        await asyncio.sleep(0)
        medium.shut_down()
        results = await asyncio.gather(*work, return_exceptions=True)
        assert any(isinstance(result, TierUnavailableError) for result in results), results
        assert {type(result) for result in results} <= {bool, TierUnavailableError}, results
        await asyncio.sleep(200)
        (status,) = rig.tier.status()
        assert not status.works
        assert rig.told == {}
        medium.unmount()
        await asyncio.sleep(100)
        assert "No such file" in rig.tier.status()[0].problem
        medium.mount()
        await asyncio.sleep(100)
        assert rig.tier.status()[0].works, rig.tier.status()[0].problem
        there, failed = await look(rig)
        assert not failed
        assert len(there) > 35
        assert await rig.write(200, _SIZE)


if __name__ == "__main__":
    scene, where = sys.argv[1:]
    medium = Medium(Path(where))
    play(lambda: {"truncated": truncated, "index_lost": index_lost, "gone_and_back": gone_and_back}[scene](medium))

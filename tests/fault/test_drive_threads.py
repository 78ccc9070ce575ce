"""A drive with its threads, and users of it at the same time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

from kvfleet.errors import TierError
from tests.drives import drive_directories, key_of, running, settings


def test_real_threads_never_see_torn_blocks(tmp_path: Path, wait_for_condition: Callable[..., None]) -> None:
    async def work() -> None:
        async with running(settings(drive_directories(tmp_path, 2), nvme_codec="raw")) as rig:

            async def user(first: int) -> None:
                for step in range(15):
                    number = (first * 7 + step * 3) % 90
                    try:
                        if not await rig.read(number):
                            await rig.write(number)
                        elif step % 5 == 0:
                            rig.tier.drop(key_of(number))
                    except TierError as error:
                        raise AssertionError(error) from error

            await asyncio.gather(*(user(first) for first in range(6)))
            await rig.check(range(90))

    threads = threading.active_count()
    asyncio.run(work())
    wait_for_condition(lambda: threading.active_count() <= threads, "the drives' threads have ended")
    links = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert not [link for link in links if link.exists() and tmp_path in link.resolve().parents]

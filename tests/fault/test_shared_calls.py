"""Each call of the shared tier to a cluster filesystem fails once: a block is right or missing, the tier goes on."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem

from kvfleet.node.shared import SharedTier
from tests.sharedcalls import fail_each_call, space_of, use_in_all_ways, works

CALLS = ["isdir", "makedirs", "pipe_file", "_open", "rm_file", "ls"]


class Faults:
    """Fails call number `at` to the filesystem.

    Args:
        how: the error's number; "torn" does half of a write, or all of another call, and then fails; "short" reads half
            of a file and says nothing.
    """

    def __init__(self, patch: pytest.MonkeyPatch, how: int | str) -> None:
        self.how = how
        self.calls, self.at = 0, -1
        self.number = how if isinstance(how, int) else errno.EIO
        patch.setattr(LocalFileOpener, "read", self.reading(), raising=False)
        if how != "short":
            patch.setattr(os, "replace", self.failing(os.replace))
            for name in CALLS:
                patch.setattr(LocalFileSystem, name, self.failing(getattr(LocalFileSystem, name)))

    def due(self) -> bool:
        self.calls += 1
        return self.calls - 1 == self.at

    def failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args, **kwargs):
            if not self.due():
                return call(*args, **kwargs)
            if self.how == "torn":
                *others, last = args
                call(*others, last[: len(last) // 2] if isinstance(last, bytes) else last, **kwargs)
            raise OSError(self.number, os.strerror(self.number))

        return wrapped

    def reading(self) -> Callable[[LocalFileOpener, int], bytes]:
        def wrapped(file: LocalFileOpener, size: int) -> bytes:
            data: bytes = file.f.read(size)
            if not self.due():
                return data
            if self.how == "short":
                return data[: len(data) // 2]
            raise OSError(self.number, os.strerror(self.number))

        return wrapped


@pytest.mark.parametrize("how", [errno.EIO, errno.ENOSPC, "torn", "short"])
def test_each_call_may_fail_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: int | str) -> None:
    faults = Faults(monkeypatch, how)
    root = tmp_path / "kv"
    tier = SharedTier(f"file://{root}", {}, timeout_s=30)
    tier.check()

    def life(number: int) -> tuple[int, bool]:
        space = space_of(number)
        faults.calls, faults.at = 0, number
        failed = use_in_all_ways(tier, space)
        reached, faults.at = faults.calls > number, -1
        works(tier, space)
        return failed, reached

    fail_each_call(life)
    tier.close()
    assert not [path for path in root.rglob("*") if path.is_file() and path.suffix != ".arrow"], "nothing is left over"

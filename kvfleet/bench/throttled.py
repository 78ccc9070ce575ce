"""A directory that is read as slowly as one says, to stand for a far storage."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem
from typing_extensions import override

__all__ = ["ThrottledFileSystem", "set_speed", "throttled_options"]


class ThrottledFileSystem(AsyncFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Reads of whole files wait for their turn on a line of some bandwidth, and for a latency. Writes do not.

    Args:
        speed_file: holds both, in seconds and bytes a second; read anew for each file.
        **options: of an fsspec filesystem.
    """

    protocol = ("kvfleet-throttled",)

    def __init__(self, speed_file: str = "", **options: Any) -> None:  # noqa: ANN401
        super().__init__(**options)
        self._files = LocalFileSystem(auto_mkdir=True)
        self._speed_file = speed_file
        self._free_at = 0.0

    @override
    def __eq__(self, other: object) -> bool:  # also in another process: the settings of a fleet are compared
        return isinstance(other, ThrottledFileSystem) and other._speed_file == self._speed_file

    @override
    def __hash__(self) -> int:
        return hash(self._speed_file)

    def _speed(self) -> tuple[float, float]:
        latency_s, bytes_per_s = map(float, Path(self._speed_file).read_text().split())
        return latency_s, bytes_per_s

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:  # noqa: ANN401
        data: bytes = self._files.cat_file(path, start=start, end=end, **options)
        latency_s, bytes_per_s = self._speed()
        now = time.monotonic()
        self._free_at = max(now, self._free_at) + len(data) / bytes_per_s
        await asyncio.sleep(latency_s + self._free_at - now)
        return data

    async def _pipe_file(self, path: str, value: bytes, **options: Any) -> None:  # noqa: ANN401
        self._files.pipe_file(path, value, **options)

    async def _rm_file(self, path: str, **_: object) -> None:
        self._files.rm_file(path)

    async def _ls(self, path: str, detail: bool = True, **_: object) -> Any:  # noqa: ANN401
        return self._files.ls(path, detail=detail)

    async def _info(self, path: str, **_: object) -> Any:  # noqa: ANN401
        return self._files.info(path)


def throttled_options(directory: Path, speed_file: Path) -> dict[str, object]:
    """The `shared_options` that go with a `shared_url` of `dir:///` and a name below `directory`."""
    return {"path": str(directory), "fs": ThrottledFileSystem(speed_file=str(speed_file))}


def set_speed(speed_file: Path, latency_s: float, bytes_per_s: float) -> None:
    """How fast files are from now on."""
    partial = speed_file.with_suffix(".partial")
    partial.write_text(f"{latency_s} {bytes_per_s}")
    partial.replace(speed_file)

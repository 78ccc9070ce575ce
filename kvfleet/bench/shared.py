"""Writing blocks to the shared tier and reading them, beside its client library used bare."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvfleet.bench.cputime import CpuTimes
from kvfleet.bench.report import Row, Run, measure
from kvfleet.bench.workload import spec_of
from kvfleet.core.block import BlockKey
from kvfleet.node import s3
from kvfleet.node.codecs import Codec
from kvfleet.node.messages import Namespace
from kvfleet.node.shared import SharedTier

__all__ = ["MEASURES", "Site", "open_site", "rows"]

MEASURES = (
    "write: `SharedTier.write` of blocks of random bytes, framing and checksums included; read: `SharedTier.read` into "
    "other memory, verified; in {concurrency} threads. Floor: the same client library, set up alike, putting and "
    "getting as many objects of as many bytes in as many threads; loop: as many at once in its event loop, "
    "without a thread. CPU s/GB of this process, the storage not included: {cpu}."
)

_SEED = 20250101
_TIMEOUT_S = 60.0
_WARMUPS = 1

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Site:
    """Where it is measured: a folder of its own below a URL.

    Attributes:
        tier: as nodes use it.
        bare: the same storage by the client library alone.
        concurrency: requests at once.
        cpu: what each case costs this process.
    """

    tier: SharedTier
    bare: _Bare
    concurrency: int
    threads: ThreadPoolExecutor
    cpu: CpuTimes = field(default_factory=lambda: CpuTimes(_WARMUPS))


class _Bare:
    """A filesystem of fsspec, set up as the tier's, used without it."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self._is_s3 = url.partition("://")[0] in s3.SCHEMES
        given: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
        self._fs, self._root = url_to_fs(url, **(s3.tuned(given, _TIMEOUT_S) if self._is_s3 else given))
        if not self._fs.async_impl:
            self._fs.makedirs(self._root, exist_ok=True)

    def _path(self, number: int) -> str:
        return f"{self._root}/bare-{number}"

    @property
    def has_loop(self) -> bool:
        """Whether the library works in an event loop of its own."""
        return bool(self._fs.async_impl)

    def put(self, number: int, data: bytes) -> Any:  # noqa: ANN401  a coroutine or nothing, as the filesystem has it
        """Write an object."""
        if self._is_s3:
            return self._fs._pipe_file(self._path(number), s3.Body(data), chunksize=s3.PUT_BYTES_MAX)
        return (self._fs._pipe_file if self._fs.async_impl else self._fs.pipe_file)(self._path(number), data)

    def get(self, number: int, num_bytes: int) -> Any:  # noqa: ANN401
        """Read an object in one request."""
        return (self._fs._cat_file if self._fs.async_impl else self._fs.cat_file)(self._path(number), end=num_bytes)

    def run(self, calls: Sequence[Callable[[], Any]], threads: ThreadPoolExecutor) -> None:
        """Make calls in threads, as the library's methods that wait do."""
        from fsspec.asyn import get_loop, sync

        if self.has_loop:
            list(threads.map(lambda call: sync(get_loop(), call, timeout=_TIMEOUT_S), calls))
        else:
            list(threads.map(lambda call: call(), calls))

    def run_in_loop(self, calls: Sequence[Callable[[], Any]], concurrency: int) -> None:
        """Make calls in the library's event loop, so many at once."""
        from fsspec.asyn import get_loop, sync

        async def all_of_them() -> None:
            places = asyncio.Semaphore(concurrency)

            async def one(call: Callable[[], Any]) -> None:
                async with places:
                    await call()

            await asyncio.gather(*map(one, calls))

        sync(get_loop(), all_of_them)

    def close(self) -> None:
        """Delete all below the root, the tier's objects too, and the connections."""
        if self._fs.async_impl:
            from fsspec.asyn import get_loop, sync

            for path in self._fs.find(self._root):  # one by one: not all servers delete many at once
                sync(get_loop(), self._fs._rm_file, path)
        else:
            self._fs.rm(self._root, recursive=True)
        if self._is_s3:
            s3.close(self._fs, _TIMEOUT_S)


@contextmanager
def open_site(url: str, concurrency: int, codec: Codec) -> Iterator[Site]:
    """Use a storage, in a folder that is gone afterwards. Starts nothing.

    Raises:
        KvFleetError: it does not work.
    """
    folder = f"{url.rstrip('/')}/bench-{os.getpid()}"
    tier = SharedTier(folder, {}, _TIMEOUT_S, codec)
    try:
        tier.check()
        with ThreadPoolExecutor(concurrency, "kvfleet-bench") as threads:
            bare = _Bare(folder)
            try:
                yield Site(tier, bare, concurrency, threads)
            finally:
                bare.close()
    finally:
        tier.close()


def rows(site: Site, block_tokens: int, num_blocks: int, repeats: int) -> list[Row]:
    """Measure one size, both ways."""
    layout = spec_of(block_tokens).layout
    space = Namespace(bytes(16), layout.to_json())
    random = np.random.default_rng(_SEED)
    blocks = [np.frombuffer(random.bytes(layout.block_bytes), np.uint8) for _ in range(num_blocks)]
    sums = [xxhash.xxh3_64_intdigest(block.data) for block in blocks]
    keys = [BlockKey(xxhash.xxh3_128_digest(number.to_bytes(8, "little"))) for number in range(num_blocks)]
    targets = [np.zeros(layout.block_bytes, np.uint8) for _ in range(num_blocks)]

    def write(number: int) -> int:
        return site.tier.write(space, 1, keys[number], 0, blocks[number], sums[number])

    def read(number: int) -> None:
        assert site.tier.read(space, 1, keys[number], 0, targets[number]) == sums[number]

    def tier(name: str, call: Callable[[int], object]) -> Run:
        return lambda: site.cpu.timed(name, moved, lambda: list(site.threads.map(call, range(num_blocks))))

    def bare(name: str, calls: Sequence[Callable[[], Any]]) -> Run:
        return lambda: site.cpu.timed(name, moved, lambda: site.bare.run(calls, site.threads))

    def loop(name: str, calls: Sequence[Callable[[], Any]]) -> dict[str, Run]:
        run = partial(site.bare.run_in_loop, calls, site.concurrency)
        return {name: lambda: site.cpu.timed(name, moved, run)} if site.bare.has_loop else {}

    # As long as the tier's: one that is a little shorter may be one piece less in the storage.
    object_bytes = write(0)
    puts = [partial(site.bare.put, number, random.bytes(object_bytes)) for number in range(num_blocks)]
    gets = [partial(site.bare.get, number, object_bytes) for number in range(num_blocks)]
    moved = num_blocks * layout.block_bytes
    found: list[Row] = []
    for cases in (
        {"bare put": bare("bare put", puts), "write": tier("write", write), **loop("loop put", puts)},
        {"bare get": bare("bare get", gets), "read": tier("read", read), **loop("loop get", gets)},
    ):
        found += measure(
            cases,
            block_bytes=layout.block_bytes,
            num_blocks=num_blocks,
            moves=True,
            repeats=repeats,
            warmups=_WARMUPS,
        )
    return found

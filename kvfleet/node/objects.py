"""Whole objects behind any fsspec URL, every call with a time limit.

fsspec's filesystems differ in what they promise; this module makes them alike for what the shared tier needs: put an
object whole or not at all, get one in a single request, delete one, name the children of a directory.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from typing_extensions import override

from kvfleet.errors import ConfigError, TierFullError, TierUnavailableError
from kvfleet.node import s3
from kvfleet.node.child import Child, child_of
from kvfleet.node.threads import TimedThreads

__all__ = ["Child", "ObjectStore"]

_TIER = "shared"
_HANGING_CALLS_MAX = 32
_PARTIAL = ".partial"
_PARTIAL_AGE_MAX_S = 3600.0
_SECRET = re.compile(r"key|secret|token|password|credential", re.IGNORECASE)
_TIMEOUTS = (TimeoutError, asyncio.TimeoutError, FutureTimeoutError)


class ObjectStore:
    """Objects named by paths below one URL.

    Asynchronous filesystems (s3fs, gcsfs, adlfs) run on fsspec's own event loop, where a call that runs out of time is
    cancelled. Synchronous ones run in daemon threads: a call that hangs in the kernel is abandoned there, and at most
    `_HANGING_CALLS_MAX` may hang before others fail at once. No buffer of the caller is touched after a call returns.

    Blocking: every method, up to `timeout_s`.
    Threads: every method may be called from any thread but that of fsspec's event loop.

    Attributes:
        name: the URL without user and password; for messages.
    """

    def __init__(self, url: str, options: Mapping[str, object], timeout_s: float) -> None:
        """Open the filesystem. Nothing is asked of the server yet.

        Args:
            url: any fsspec URL.
            options: given to the filesystem; for S3 they go before the tuned settings here.
            timeout_s: longest wait of each call.

        Raises:
            ConfigError: unknown scheme, missing package, or a URL that names no bucket or directory.
        """
        self.name = re.sub(r"//[^/]*@", "//", url).rstrip("/")
        self._timeout_s = timeout_s
        self._secrets = tuple(_secrets(options))
        self._threads = TimedThreads(_HANGING_CALLS_MAX)
        self._is_s3 = url.partition("://")[0] in s3.SCHEMES
        self._fs, self._root = self._open(url, options)
        self._is_async: bool = self._fs.async_impl
        self._rename = _rename_of(self._fs)

    def _open(self, url: str, options: Mapping[str, object]) -> tuple[Any, str]:
        import fsspec

        given: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False, **options}
        try:
            fs, root = fsspec.core.url_to_fs(url, **(s3.tuned(given, self._timeout_s) if self._is_s3 else given))
        except Exception as error:
            raise ConfigError("shared_url", f"{self.name}: {self._text(error)}") from error
        if self._is_s3:
            fs.retries = 1  # botocore retries already; the two would multiply
        root = root.rstrip("/")
        if not root and not url.startswith("memory:"):
            raise ConfigError("shared_url", f"{self.name} names no bucket or directory")
        return fs, root

    def close(self) -> None:
        """Close connections; calls in flight may fail. Twice is fine; other calls are bugs from here on."""
        fs, self._fs = self._fs, None
        if self._is_s3 and fs is not None:
            with suppress(*_TIMEOUTS):
                s3.close(fs, self._timeout_s)

    @property
    def leaves_partials(self) -> bool:
        """Whether a writer that dies may leave a half-written file, which only a listing finds."""
        return self._rename is not None

    @override
    def __reduce__(self) -> str:
        raise TypeError("an object store may hold credentials and does not leave its process; send the URL instead")

    def make_root(self) -> None:
        """Make the directory of the URL, where directories are a thing. Buckets are not made.

        Raises:
            TierError: it cannot be made.
        """
        if self._rename is not None:
            with self._mapped("make the directory"):
                self._call("makedirs", self._root, exist_ok=True)

    def put(self, path: str, data: bytes, timeout_s: float | None = None) -> None:
        """Write an object whole, or not at all. The last of several writers wins.

        Raises:
            TierFullError: no space.
            TierUnavailableError: anything else. After a time-out the object may still appear.
        """
        target, limit = f"{self._root}/{path}", self._limit(timeout_s)
        with self._mapped("write"):
            if self._rename is not None:
                self._threads.run(partial(self._put_by_rename, self._rename, target, data), limit)
            elif self._is_s3:
                self._call("pipe_file", target, s3.Body(data), timeout_s=limit, chunksize=s3.PUT_BYTES_MAX)
            else:
                self._call("pipe_file", target, data, timeout_s=limit)

    def _put_by_rename(self, rename: Callable[[str, str], object], target: str, data: bytes) -> None:
        temporary = f"{target}.{uuid.uuid4().hex}{_PARTIAL}"
        fs = self._fs
        try:
            try:
                fs.pipe_file(temporary, data)
            except FileNotFoundError:
                if not fs.isdir(self._root):  # an unmounted share must not fill the disk below it
                    raise
                fs.makedirs(target.rpartition("/")[0], exist_ok=True)
                fs.pipe_file(temporary, data)
            # Not synced: a file torn by a crash of its server fails its checksum and is a miss.
            rename(temporary, target)
        except BaseException:
            with suppress(Exception):  # what stays is swept by a listing
                fs.rm_file(temporary)
            raise

    def get(self, path: str, bytes_max: int, timeout_s: float | None = None) -> bytes | None:
        """Return the first `bytes_max` bytes of an object in one request, or None if there is none.

        A directory in an object's place reads as an empty object.

        Raises:
            TierUnavailableError: the answer is not known.
        """
        pieces: list[bytes] = []
        return b"".join(pieces) if self.give(path, bytes_max, pieces.append, timeout_s) else None

    def give(self, path: str, bytes_max: int, take: Callable[[bytes], object], timeout_s: float | None = None) -> bool:
        """Give `take` what `get` returns, in pieces as they arrive, until it returns False; or return False.

        It may be called in another thread, and even after a time-out; it must not block or raise. Raises as `get`.
        """
        target, limit = f"{self._root}/{path}", self._limit(timeout_s)
        with self._mapped("read"):
            try:
                if self._is_s3:
                    self._on_loop(s3.get, limit, self._fs, target, bytes_max, take)
                elif self._rename is not None:
                    take(self._threads.run(partial(self._read_file, target, bytes_max), limit))
                else:
                    take(self._call("cat_file", target, timeout_s=limit, end=bytes_max))
            except FileNotFoundError as error:
                if self._is_rooted(error):
                    return False
                raise
            except OSError as error:
                if not isinstance(error, IsADirectoryError) and s3.error_code(error) != "InvalidRange":
                    raise
        return True

    def _read_file(self, target: str, bytes_max: int) -> bytes:
        with self._fs.open(target, "rb") as file:
            return bytes(file.read(bytes_max))

    def delete(self, path: str, timeout_s: float | None = None) -> None:
        """Delete an object; one that is not there is deleted already.

        Raises:
            TierUnavailableError: it may still be there.
        """
        with self._mapped("delete"):
            try:
                self._call("rm_file", f"{self._root}/{path}", timeout_s=self._limit(timeout_s))
            except FileNotFoundError as error:
                if not self._is_rooted(error):
                    raise

    def children(self, path: str) -> list[Child]:
        """Return what is directly below a path, sorted by name; nothing if there is no such path.

        Half-written files are left out, and deleted when their writer must be long dead.

        Raises:
            TierUnavailableError: the answer is not known.
        """
        with self._mapped("list"):
            try:
                infos = self._call("ls", f"{self._root}/{path}".rstrip("/"), detail=True)
            except FileNotFoundError as error:
                if self._is_rooted(error):
                    return []
                raise
        children = []
        for info in infos:
            name = info["name"].rstrip("/").rpartition("/")[2]
            if self._rename is not None and name.endswith(_PARTIAL):
                self._sweep(info)
            else:
                children.append(child_of(name, info))
        return sorted(children, key=lambda child: child.name)

    def _sweep(self, info: Mapping[str, Any]) -> None:
        modified = info.get("mtime")
        if isinstance(modified, float) and time.time() - modified > _PARTIAL_AGE_MAX_S:
            with self._mapped("delete"), suppress(FileNotFoundError):
                self._call("rm_file", info["name"])

    def _limit(self, timeout_s: float | None) -> float:
        """The seconds a call may take of those that its caller has, if that says so."""
        return self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)

    def _call(self, method: str, *args: object, timeout_s: float | None = None, **kwargs: object) -> Any:  # noqa: ANN401
        """Call a method of the filesystem; raises what it raises, or TimeoutError."""
        limit = self._timeout_s if timeout_s is None else timeout_s
        if self._is_async:
            return self._on_loop(getattr(self._fs, f"_{method}"), limit, *args, **kwargs)
        return self._threads.run(partial(getattr(self._fs, method), *args, **kwargs), limit)

    @staticmethod
    def _on_loop(function: Callable[..., Any], limit: float, *args: object, **kwargs: object) -> Any:  # noqa: ANN401
        from fsspec.asyn import get_loop, sync

        if limit <= 0:  # to `sync`, for ever
            raise TimeoutError
        return sync(get_loop(), function, *args, timeout=limit, **kwargs)

    @contextmanager
    def _mapped(self, what: str) -> Iterator[None]:
        """Turn what filesystems raise into a TierError: foreign errors end here."""
        assert self._fs is not None, "the store is closed"
        try:
            yield
        except _TIMEOUTS as error:
            raise TierUnavailableError(_TIER, f"{self.name}: {what}: no answer in time") from error
        except Exception as error:  # each backend has errors of its own
            message = f"{self.name}: {what} failed: {self._text(error)}"
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise (TierFullError if full else TierUnavailableError)(_TIER, message) from error

    def _is_rooted(self, error: FileNotFoundError) -> bool:
        """Whether only the object is missing, not the bucket or the whole directory."""
        if self._rename is not None:
            with suppress(*_TIMEOUTS):
                return bool(self._threads.run(partial(self._fs.isdir, self._root), self._timeout_s))
            return False
        return s3.error_code(error) != "NoSuchBucket"

    def _text(self, error: Exception) -> str:
        """What an error says, without credentials."""
        text = f"{type(error).__name__}: {error}"
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def _rename_of(fs: Any) -> Callable[[str, str], object] | None:  # noqa: ANN401 - fsspec is untyped
    """How to replace one file by another, or None where an object is put whole or not at all."""
    from fsspec.implementations.local import LocalFileSystem
    from fsspec.implementations.memory import MemoryFileSystem

    if isinstance(fs, LocalFileSystem):
        return os.replace
    if fs.async_impl or isinstance(fs, MemoryFileSystem):
        return None
    return fs.mv  # type: ignore[no-any-return]


def _secrets(options: Mapping[str, object]) -> Iterator[str]:
    """The values of options that look secret, at any depth."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _secrets(value)
        elif isinstance(value, str) and value and _SECRET.search(name):
            yield value

"""The shared tier: one immutable object a block shard, found by its name, below any fsspec URL.

    <url>/<namespace_id>/<first two digits of the key>/<key>.<shard>-of-<num_shards>.arrow

Any number of nodes may write the same object at once. A reader sees it whole, verified, or not at all.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from kvfleet.core.block import BlockKey
from kvfleet.core.objectrows import SharedObject
from kvfleet.errors import CorruptBlockError, TierError, TierUnavailableError
from kvfleet.node.blockfile import BlockHeader, encode
from kvfleet.node.blockstream import BlockStream
from kvfleet.node.codecs import RAW, Codec
from kvfleet.node.messages import Namespace
from kvfleet.node.objects import Child, ObjectStore

__all__ = ["SharedTier"]

_TIER = "shared"
_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_OBJECT = re.compile(r"([0-9a-f]{32})\.([0-9]{1,5})-of-([0-9]{1,5})\.arrow")
_FOLDERS = [f"{first:02x}" for first in range(256)]
_LISTING_CALLS = 8  # at once

Bytes = npt.NDArray[np.uint8]


class SharedTier:
    """Blocks in shared storage.

    Blocking: every method; each request to the storage takes at most `timeout_s`.
    Threads: every method may be called from any thread but that of fsspec's event loop.
    """

    def __init__(self, url: str, options: Mapping[str, object], timeout_s: float, codec: Codec = RAW) -> None:
        """Open the filesystem. Nothing is asked of the server yet.

        Args:
            url: any fsspec URL.
            options: given to the filesystem; may hold credentials.
            timeout_s: longest wait of each request.
            codec: of the blocks that are written. All that are known are read.

        Raises:
            ConfigError: unknown scheme, missing package, or a URL that names no bucket or directory.
        """
        self._objects = ObjectStore(url, options, timeout_s)
        self._codec = codec
        self._probe_path = f"probe-{uuid.uuid4().hex}"

    def close(self) -> None:
        """Close connections; calls in flight may fail. Twice is fine; other calls are bugs from here on."""
        self._objects.close()

    @property
    def objects(self) -> ObjectStore:
        """The storage, for what else is kept in it."""
        return self._objects

    @override
    def __repr__(self) -> str:
        return f"SharedTier({self._objects.name!r})"

    def check(self, timeout_s: float | None = None) -> None:
        """Make the directory, if it is one, and write, read and delete a small object, each within `timeout_s`.

        Raises:
            TierError: what does not work.
        """
        path, data = self._probe_path, b"kvfleet"  # one, however often it cannot be deleted
        self._objects.make_root()
        self._objects.put(path, data, timeout_s)
        found = self._objects.get(path, len(data) + 1, timeout_s)
        self._objects.delete(path, timeout_s)
        if found != data:
            raise TierUnavailableError(_TIER, f"{self._objects.name}: an object was not read as it was written")
        try:
            self._objects.get(path, 1, timeout_s)
        except TierUnavailableError as error:
            advice = "; S3 refuses to say that an object is missing without the permission s3:ListBucket"
            raise TierUnavailableError(_TIER, f"{error.detail}{advice}") from error

    def probe_reads(self, timeout_s: float) -> None:
        """Have an answer from the storage: ask for an object that is not there.

        Raises:
            TierUnavailableError: there was none.
        """
        self._objects.get("probe", 1, timeout_s)

    def probe_writes(self, timeout_s: float) -> None:
        """Write a small object and delete it. A directory that is gone is not made again.

        Raises:
            TierError: what does not work.
        """
        self._objects.put(self._probe_path, b"kvfleet", timeout_s)
        self._objects.delete(self._probe_path, timeout_s)

    @staticmethod
    def path(namespace_id: bytes, key: BlockKey, shard: int, num_shards: int) -> str:
        """The name of a block shard's object, below the URL."""
        assert 0 <= shard < num_shards
        digits = key.hex()
        return f"{namespace_id.hex()}/{digits[:2]}/{digits}.{shard}-of-{num_shards}.arrow"

    def write(
        self, namespace: Namespace, num_shards: int, key: BlockKey, shard: int, data: Bytes, checksum: int
    ) -> int:
        """Write a block shard, replacing an equal one.

        Args:
            namespace: of the block.
            num_shards: of the block.
            key: of the block.
            shard: of the block.
            data: `(num_bytes,)`, uint8, contiguous. Copied first and not looked at again.
            checksum: xxh3-64 of `data`.

        Returns:
            The size of the object in bytes.

        Raises:
            CorruptBlockError: `data` does not have its checksum; nothing was written.
            TierFullError: no space; the tier is unchanged.
            TierUnavailableError: anything else. After a time-out the object may still appear, whole.
        """
        header = _header(namespace, num_shards, key, shard, data)
        encoded = encode(header, data, checksum, self._codec)
        self._objects.put(self.path(namespace.namespace_id, key, shard, num_shards), encoded)
        return len(encoded)

    def read(
        self,
        namespace: Namespace,
        num_shards: int,
        key: BlockKey,
        shard: int,
        target: Bytes,
        *,
        timeout_s: float | None = None,
    ) -> int | None:
        """Fill `target` with a block shard and return its xxh3-64, or return None if there is no such object.

        `target` is written before the block is verified, in other threads too, and never after a return. What is in
        it is the block if a checksum is returned, what was in it before if None is, and anything after an error.

        Args:
            namespace: of the block.
            num_shards: of the block.
            key: of the block.
            shard: of the block.
            target: `(num_bytes,)`, uint8, contiguous.
            timeout_s: remaining seconds of the caller, if less than the tier's own limit.

        Raises:
            CorruptBlockError: the object was not the block. It was deleted, or the message says why it was not.
            LayoutMismatchError: it is a block of that key, in another layout. It is left as it is.
            TierUnavailableError: whether there is such an object is not known.
        """
        header = _header(namespace, num_shards, key, shard, target)
        path = self.path(namespace.namespace_id, key, shard, num_shards)
        stream = BlockStream(header, target)
        try:
            if not self._objects.give(path, stream.bytes_max, stream.take, timeout_s):
                return None
        finally:
            stream.close()
        try:
            return stream.finish()
        except CorruptBlockError as corrupt:
            try:
                self._objects.delete(path, timeout_s)
            except TierError as error:
                raise CorruptBlockError(_TIER, f"{corrupt.detail}; it could not be deleted: {error}") from corrupt
            raise

    def delete(self, namespace_id: bytes, num_shards: int, key: BlockKey, shard: int) -> None:
        """Delete a block shard; one that is not there is deleted already.

        Raises:
            TierUnavailableError: it may still be there.
        """
        self._objects.delete(self.path(namespace_id, key, shard, num_shards))

    def list(self, records_max: int, namespaces: Iterable[bytes] | None = None) -> Iterator[bytes]:
        """Yield the block shards that are there, in pages of packed 18-byte record ids.

        A page is one folder, about a 256th of a namespace. What does not have the name of a block is passed over. On
        directories, files left half-written by dead nodes are deleted on the way.

        Args:
            records_max: records yielded at most.
            namespaces: 16-byte ids of those to list; None lists all.

        Raises:
            TierUnavailableError: the listing cannot go on; the pages before are right.
        """
        for page in self.list_objects(records_max, namespaces):
            yield b"".join(thing.record for thing, _ in page)

    def list_objects(
        self, objects_max: int, namespaces: Iterable[bytes] | None = None
    ) -> Iterator[Sequence[tuple[SharedObject, int]]]:
        """The same, with what names and sizes tell: not where in its prefix a block is.

        With each comes when it was written, in ms since 1970; 0 if that is not known.
        """
        ids = self._namespaces() if namespaces is None else [namespace.hex() for namespace in namespaces]
        left = objects_max
        with ThreadPoolExecutor(_LISTING_CALLS, "kvfleet-listing") as pool:
            for page in self._pages(ids, pool):
                if left <= 0:
                    return
                yield page[:left]
                left -= len(page)

    def _namespaces(self) -> Iterator[str]:
        for child in self._objects.children(""):
            if child.is_directory and _NAMESPACE.fullmatch(child.name):
                yield child.name

    def _pages(
        self, namespaces: Iterable[str], pool: ThreadPoolExecutor
    ) -> Iterator[Sequence[tuple[SharedObject, int]]]:
        for namespace in namespaces:
            there = {child.name for child in self._objects.children(namespace)}
            folders = [f"{namespace}/{name}" for name in _FOLDERS if name in there]
            for first in range(0, len(folders), _LISTING_CALLS):
                batch = folders[first : first + _LISTING_CALLS]
                for folder, children in zip(batch, pool.map(self._objects.children, batch), strict=True):
                    found = ((_object(bytes.fromhex(namespace), child, folder[-2:]), child) for child in children)
                    page = [(thing, child.modified_ms) for thing, child in found if thing is not None]
                    if page:
                        yield page


def _header(namespace: Namespace, num_shards: int, key: BlockKey, shard: int, data: Bytes) -> BlockHeader:
    assert data.dtype == np.uint8
    assert data.ndim == 1
    return BlockHeader(
        namespace_id=namespace.namespace_id,
        layout_json=namespace.layout_json,
        key=key,
        shard=shard,
        num_shards=num_shards,
        num_bytes=len(data),
    )


def _object(namespace_id: bytes, child: Child, folder: str) -> SharedObject | None:
    """What an object's name says, or None if it is not a block's."""
    match = _OBJECT.fullmatch(child.name)
    if match is None or child.is_directory or not child.num_bytes or not child.name.startswith(folder):
        return None
    shard, num_shards = int(match.group(2)), int(match.group(3))
    # A name is a block's only as `SharedTier.path` writes it: no leading zeros.
    if not child.name.endswith(f".{shard}-of-{num_shards}.arrow") or not shard < num_shards <= 1 << 16:
        return None
    return SharedObject(namespace_id, bytes.fromhex(match.group(1)), shard, num_shards, child.num_bytes, 0, 0)

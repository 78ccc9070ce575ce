"""What a file, a directory or an object is, and whether it is sound. Nothing is changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from types import MappingProxyType

from kvfleet.core.layout import BlockLayout
from kvfleet.errors import ConfigError, CorruptBlockError, LayoutMismatchError
from kvfleet.node.blockfile import BlockHeader, decode, read_header
from kvfleet.node.findings import Findings
from kvfleet.node.inspectfolder import BLOCK_NAME, NAMESPACE, folder_of_shared, layout_words
from kvfleet.node.manifestfile import Manifest, Unreadable
from kvfleet.node.manifestlist import CURRENT, Current
from kvfleet.node.objects import Child, ObjectStore

__all__ = ["BLOCK_BYTES_MAX", "inspect_bytes", "inspect_url"]

BLOCK_BYTES_MAX = (1 << 32) + (1 << 16)  # of an object: the largest block with its frame
_TIMEOUT_S = 60.0
_ARROW = b"\xff\xff\xff\xff"
_PARQUET = b"PAR1"
_NO_OPTIONS: Mapping[str, object] = MappingProxyType({})


def inspect_bytes(data: bytes, path: str) -> Findings:
    """What a file or object of the shared tier is.

    Args:
        data: all of it.
        path: its name, of which the end says what it should be.

    Raises:
        ConfigError: it is nothing of kvfleet's.
    """
    name = PurePosixPath(path).name
    if path.endswith(CURRENT):
        return _current(data)
    if data.startswith(_ARROW) or name.endswith(".arrow"):
        return _block(data, path)
    if data.startswith(_PARQUET) or name.endswith(".parquet"):
        return _manifest(data)
    raise ConfigError("", f"{path}: {len(data)} bytes that are nothing of kvfleet's")


def _block(data: bytes, path: str) -> Findings:
    kind = "a block's object"
    try:
        header, checksum = read_header(data)
    except CorruptBlockError as error:
        return Findings(kind, problems=(error.detail,))
    except LayoutMismatchError as error:
        return Findings("a block's object of another version", problems=(str(error),), foreign=True)
    facts = (
        ("key", header.key.hex()),
        ("shard", f"{header.shard} of {header.num_shards}"),
        ("namespace", header.namespace_id.hex()),
        ("layout", layout_words(header.layout_json)),
        ("bytes", f"{header.num_bytes:,}, as {header.codec} {header.coded_bytes:,}, in an object of {len(data):,}"),
        ("checksum", f"xxh3-64:{checksum:016x}"),
        ("version", str(header.version)),
    )
    foreign = False
    try:
        if BlockLayout.from_json(header.layout_json).block_bytes != header.num_bytes:
            raise ValueError("blocks of another length")
        decode(data, header)
        problems = _misnamed(header, path)
    except CorruptBlockError as error:
        problems = (error.detail,)
    except LayoutMismatchError as error:
        problems, foreign = (f"it cannot be checked here: {error}",), True
    except (ValueError, TypeError, KeyError) as error:
        problems = (f"its layout is not that of the block: {error}",)
    return Findings(kind, facts, problems, "all bytes have their checksum", foreign=foreign)


def _misnamed(header: BlockHeader, path: str) -> tuple[str, ...]:
    """Whether a name that looks like a block's is another block's."""
    found = BLOCK_NAME.fullmatch(PurePosixPath(path).name)
    if found is None:
        return ()
    named, here = found.groups(), (header.key.hex(), str(header.shard), str(header.num_shards))
    folder = PurePosixPath(path).parent.parent.name
    if named != here or (NAMESPACE.fullmatch(folder) and folder != header.namespace_id.hex()):
        return (f"it is another block than its name says: {here[0]}.{here[1]}-of-{here[2]}",)
    return ()


def _manifest(data: bytes) -> Findings:
    kind = "a manifest of the shared tier"
    stored = gone = num_bytes = 0
    try:
        manifest = Manifest(data)
        for rows in manifest.rows():
            there = rows["bytes"] > 0
            stored += int(there.sum())
            gone += int((~there).sum())
            num_bytes += int(rows["bytes"].sum())
    except Unreadable as error:
        return Findings(kind, problems=(str(error.args[1]) or error.reason.value,))
    about = manifest.about
    facts = (
        ("holds", "a snapshot, or a part of one" if about.snapshot else "what came and went"),
        ("blocks", f"{stored:,} stored, {num_bytes:,} bytes; {gone:,} deleted"),
        ("replaces", f"{len(about.replaces)} files before it"),
    )
    return Findings(kind, facts, checked="all pages have their checksum")


class _OneObject:
    """An object store with one object, for those who read from one."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def get(self, path: str, bytes_max: int) -> bytes:
        return self._data[:bytes_max]

    def put(self, path: str, data: bytes) -> None:
        raise AssertionError("nothing is written")

    def delete(self, path: str) -> None:
        raise AssertionError("nothing is deleted")

    def children(self, path: str) -> list[Child]:
        raise AssertionError("nothing is listed")


def _current(data: bytes) -> Findings:
    kind = "the list of manifests of the shared tier"
    try:
        current = Current.read(_OneObject(data))
    except Unreadable as error:
        return Findings(kind, problems=(str(error.args[1]) or error.reason.value,))
    assert current is not None
    facts = (
        ("epoch", f"{current.epoch}, writer {current.writer}"),
        ("files", f"{len(current.snapshot)} of a snapshot, {len(current.deltas)} after it"),
        ("rows", f"{sum(file.num_rows for file in current.files):,}"),
        ("orphans", str(len(current.orphans))),
    )
    return Findings(kind, facts, checked="it has its checksum; the files it names were not read")


def inspect_url(url: str, options: Mapping[str, object] = _NO_OPTIONS) -> Findings:
    """What an object, or what is below a URL, is. Credentials are those of the environment.

    Args:
        url: any that fsspec knows.
        options: for its filesystem.

    Raises:
        ConfigError: nothing is there, or nothing of kvfleet's; or the URL is no good.
        TierUnavailableError: the storage does not answer.

    Blocking: up to a minute a request.
    """
    base, _, name = url.rstrip("/").rpartition("/")
    if base.endswith((":/", ":")):  # a bucket: there is nothing above it
        store = ObjectStore(url, options, _TIMEOUT_S)
        name = ""
    else:
        store = ObjectStore(base, options, _TIMEOUT_S)
    try:
        data = store.get(name, BLOCK_BYTES_MAX) if name else None
        children = [] if data else store.children(name)
        if data or (data is not None and not children):
            findings = inspect_bytes(data, url)
            return replace(findings, facts=(*findings.facts, ("object", store.name + "/" + name)))
        return folder_of_shared(url, children)
    finally:
        store.close()

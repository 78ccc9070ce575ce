"""One manifest of the shared tier as a Parquet file: rows of blocks that came or went, for any tool to read.

    namespace_id  fixed 16 bytes          key         fixed 16 bytes
    shard         uint16                  num_shards  uint32
    bytes         uint64                  stored_at   timestamp in ms, UTC
    last_used     timestamp in ms, UTC    depth       uint32
    parent        uint32                  deleting    uint8

`bytes` is the size of the object; 0 says that the object is gone, `deleting` 1 that it is about to. Later rows of a
record overrule earlier ones. What the file is stands in its metadata: format, and for the last part of a snapshot which
files before it replaces.

Reading believes nothing: sizes are compared with limits before anything is made of them, pages have checksums, and what
cannot be read is told by a reason, as it is a hint lost, no error.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from kvfleet.core.objectrows import NUM_SHARDS_MAX, ROW
from kvfleet.core.objectrows import ObjectRows as Rows

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "FILE_BYTES_MAX",
    "FILE_ROWS_MAX",
    "About",
    "Manifest",
    "ManifestMaker",
    "Skip",
    "Unreadable",
]

FILE_ROWS_MAX = 1 << 20
FILE_BYTES_MAX = 64 << 20

_FORMAT = 1
_GROUP_ROWS = 1 << 16
_GROUP_BYTES_MAX = 2 * _GROUP_ROWS * ROW.itemsize
_THRIFT_MAX = 1 << 20
_METADATA = b"kvfleet.manifest"


class Skip(str, Enum):
    """Why a file, or the rest of one, was passed over."""

    ABSENT = "absent"
    DAMAGED = "damaged"
    FOREIGN = "foreign"
    NEWER = "newer"
    TOO_BIG = "too big"


class Unreadable(Exception):  # noqa: N818 - it is caught where files are read, and becomes a count
    """A file cannot be read, and why."""

    def __init__(self, reason: Skip, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class About:
    """What a file is.

    Attributes:
        snapshot: whether it is a part of one; a delta otherwise.
        parts: names of all files of the snapshot that this file completes; empty in other files.
        replaces: names of the files whose rows are all in that snapshot.
    """

    snapshot: bool = False
    parts: tuple[str, ...] = ()
    replaces: tuple[str, ...] = ()


def _schema(metadata: dict[bytes, bytes] | None = None) -> pa.Schema:
    import pyarrow as pa

    name, time = pa.binary(16), pa.timestamp("ms", "UTC")
    types = (name, name, pa.uint16(), pa.uint32(), pa.uint64(), time, time, pa.uint32(), pa.uint32(), pa.uint8())
    names = ROW.names or ()
    fields = [pa.field(name, type_, nullable=False) for name, type_ in zip(names, types, strict=True)]
    return pa.schema(fields, metadata)


class ManifestMaker:
    """Makes one file out of rows given bit by bit, in memory: about 40 bytes a row."""

    def __init__(self) -> None:
        import pyarrow.parquet as pq

        self.num_rows = 0
        self._sink = io.BytesIO()
        self._waiting: list[Rows] = []
        self._writer: Any = pq.ParquetWriter(
            self._sink,
            _schema(),
            compression="zstd",
            use_dictionary=["namespace_id", "shard", "num_shards", "bytes", "depth", "deleting"],
            write_statistics=False,
            write_page_checksum=True,
            store_schema=False,
        )

    def write(self, rows: Rows) -> None:
        """Add rows. No more than `FILE_ROWS_MAX` in all."""
        self.num_rows += len(rows)
        assert self.num_rows <= FILE_ROWS_MAX
        self._waiting.append(rows)
        if sum(map(len, self._waiting)) >= _GROUP_ROWS:
            self._write_groups(_GROUP_ROWS)

    def _write_groups(self, rows_min: int) -> None:
        rows = np.concatenate(self._waiting)
        stop = len(rows) if rows_min == 0 else len(rows) - len(rows) % rows_min
        for first in range(0, stop, _GROUP_ROWS):
            self._writer.write_table(_table(rows[first : min(stop, first + _GROUP_ROWS)]))
        self._waiting = [rows[stop:]] if stop < len(rows) else []

    def finish(self, about: About) -> bytes:
        """Return the file."""
        if self._waiting:
            self._write_groups(0)
        fields = {"format": _FORMAT, **asdict(about)}
        self._writer.add_key_value_metadata({_METADATA: json.dumps(fields).encode()})
        self._writer.close()
        return self._sink.getvalue()


def _table(rows: Rows) -> pa.Table:
    import pyarrow as pa

    schema = _schema()
    columns = []
    for field in schema:
        column = np.ascontiguousarray(rows[field.name])
        columns.append(pa.Array.from_buffers(field.type, len(rows), [None, pa.py_buffer(column.view(np.uint8))]))
    return pa.Table.from_arrays(columns, schema=schema)


class Manifest:
    """A file that was read.

    Attributes:
        about: what it says of itself.
        num_rows: in it.
    """

    def __init__(self, data: bytes) -> None:
        """Read what the file says it is.

        Raises:
            Unreadable: it is no manifest, or not one of this format, or it is damaged.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        if len(data) > FILE_BYTES_MAX:
            raise Unreadable(Skip.TOO_BIG, f"{len(data)} bytes")
        try:
            self._file: Any = pq.ParquetFile(
                pa.BufferReader(data),
                page_checksum_verification=True,
                thrift_string_size_limit=_THRIFT_MAX,
                thrift_container_size_limit=_THRIFT_MAX,
            )
            metadata = self._file.metadata
            about = json.loads((metadata.metadata or {}).get(_METADATA, b"null"))
        except (pa.ArrowException, OSError, ValueError, RecursionError) as error:
            raise Unreadable(Skip.DAMAGED, f"no sound Parquet file: {_first_line(error)}") from error
        self.about = _about(about)
        if not self._file.schema_arrow.equals(_schema()):
            raise Unreadable(Skip.FOREIGN, "it has other columns")
        self.num_rows: int = metadata.num_rows
        groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
        if self.num_rows > FILE_ROWS_MAX or any(
            group.num_rows > _GROUP_ROWS or group.total_byte_size > _GROUP_BYTES_MAX for group in groups
        ):
            raise Unreadable(Skip.TOO_BIG, f"{self.num_rows} rows in {len(groups)} groups")

    def rows(self) -> Iterator[Rows]:
        """Yield the rows in pages, in order.

        Raises:
            Unreadable: damage was met; the pages before are sound.
        """
        import pyarrow as pa

        for group in range(self._file.metadata.num_row_groups):
            try:
                table = self._file.read_row_group(group, use_threads=False)
                rows = _rows(table)
            except (pa.ArrowException, OSError, ValueError) as error:
                raise Unreadable(Skip.DAMAGED, f"a damaged page: {_first_line(error)}") from error
            if (rows["shard"] >= rows["num_shards"]).any() or (rows["num_shards"] > NUM_SHARDS_MAX).any():
                raise Unreadable(Skip.DAMAGED, "no such shards")
            yield rows


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


def _about(about: object) -> About:
    if not isinstance(about, dict) or not isinstance(about.get("format"), int):
        raise Unreadable(Skip.FOREIGN, "a Parquet file of something else")
    if about["format"] != _FORMAT:
        raise Unreadable(Skip.NEWER, f"format {about['format']}")
    parts, replaces = about.get("parts"), about.get("replaces")
    for names in (parts, replaces):
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise Unreadable(Skip.DAMAGED, "its metadata name no files")
    return About(bool(about.get("snapshot")), tuple(parts or ()), tuple(replaces or ()))


def _rows(table: pa.Table) -> Rows:
    rows = np.empty(table.num_rows, ROW)
    for name in ROW.names or ():
        column = table[name].combine_chunks()
        if len(column) != len(rows) or column.null_count:
            raise ValueError(f"column {name} has holes")
        dtype = ROW[name]
        start = column.offset * dtype.itemsize
        stop = start + len(rows) * dtype.itemsize
        rows[name] = np.frombuffer(memoryview(column.buffers()[1])[start:stop], dtype) if len(rows) else []
    return rows

"""`manifests/CURRENT`: the names of the files that together tell what the shared tier holds.

    {"format": 1, "epoch": 3, "writer": "9f..", "seq": 12, "snapshot": [...], "deltas": [...], "orphans": [...]}
    <xxh3-64 of the line above, 16 digits>

Files are `[name, bytes, rows, xxh3-64 of the file]`. Orphans are names that may be there and hold nothing new.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import xxhash

from kvfleet.node.manifestfile import Skip, Unreadable
from kvfleet.node.objects import Child

__all__ = ["CURRENT", "FOLDER", "Current", "ManifestFile", "Objects", "epoch_and_seq", "file_name", "file_of"]

FOLDER = "manifests"
CURRENT = f"{FOLDER}/CURRENT"
EPOCH_MAX = 10**10 - 1

_FORMAT = 1
_BYTES_MAX = 1 << 20
_FILES_MAX = 4096
_NAME = re.compile(r"([0-9]{10})-([0-9]{10})\.parquet")
_DIGEST = re.compile(r"[0-9a-f]{16}")


class Objects(Protocol):
    """What manifests need of an object store."""

    def put(self, path: str, data: bytes) -> None:
        """Write an object whole, or not at all."""

    def get(self, path: str, bytes_max: int) -> bytes | None:
        """Return the first bytes of an object, or None if there is none."""

    def delete(self, path: str) -> None:
        """Delete an object."""

    def children(self, path: str) -> list[Child]:
        """Return what is directly below a path."""


def file_name(epoch: int, seq: int) -> str:
    """The name of a file in the folder of manifests. Names sort as their files were written."""
    assert 0 < epoch <= EPOCH_MAX
    assert 0 < seq <= EPOCH_MAX
    return f"{epoch:010d}-{seq:010d}.parquet"


def epoch_and_seq(name: str) -> tuple[int, int] | None:
    """What a file's name says, or None if it is not a manifest's."""
    match = _NAME.fullmatch(name)
    return (int(match.group(1)), int(match.group(2))) if match else None


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """A file as it was written.

    Attributes:
        name: in the folder of manifests.
        num_bytes: of it.
        num_rows: in it.
        digest: xxh3-64 of it, 16 digits; empty where it is not known.
    """

    name: str
    num_bytes: int
    num_rows: int
    digest: str

    def __post_init__(self) -> None:
        if _NAME.fullmatch(self.name) is None or self.num_bytes < 0 or self.num_rows < 0:
            raise ValueError(f"no manifest: {self}")
        if self.digest and _DIGEST.fullmatch(self.digest) is None:
            raise ValueError(f"no digest: {self}")

    def is_of(self, data: bytes) -> bool:
        """Whether these are the bytes that were written, as far as is known."""
        return not self.digest or (len(data) == self.num_bytes and _digest(data) == self.digest)


def file_of(name: str, data: bytes, num_rows: int) -> ManifestFile:
    """What is to be remembered of a file that is written."""
    return ManifestFile(name, len(data), num_rows, _digest(data))


@dataclass(frozen=True, slots=True)
class Current:
    """What `CURRENT` says.

    Attributes:
        epoch: of the writer. A writer of a lower one has been replaced.
        writer: 16 digits, drawn by the writer.
        seq: of the last file of this epoch; 0 before the first. Files with the next numbers may be there already.
        snapshot: the files with all that was there when they were written.
        deltas: what came and went after that, in order.
        orphans: names of files that hold nothing else, to be deleted some time.
    """

    epoch: int
    writer: str
    seq: int
    snapshot: tuple[ManifestFile, ...] = ()
    deltas: tuple[ManifestFile, ...] = ()
    orphans: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[ManifestFile, ...]:
        """All files, in the order in which they are read."""
        return self.snapshot + self.deltas

    def encode(self) -> bytes:
        """The object."""
        assert len(self.files) + len(self.orphans) <= _FILES_MAX
        lists = {name: [list(asdict(file).values()) for file in getattr(self, name)] for name in ("snapshot", "deltas")}
        line = json.dumps({"format": _FORMAT, **asdict(self), **lists}).encode()
        return line + b"\n" + _digest(line).encode() + b"\n"

    @classmethod
    def read(cls, objects: Objects) -> Current | None:
        """Ask for the object; None if there is none.

        Raises:
            Unreadable: it is not as it was written, or of a newer format.
            TierUnavailableError: the answer is not known.
        """
        data = objects.get(CURRENT, _BYTES_MAX + 1)
        if data is None:
            return None
        line, _, digest = data.partition(b"\n")
        if len(data) > _BYTES_MAX or digest != _digest(line).encode() + b"\n":
            raise Unreadable(Skip.DAMAGED, f"{CURRENT} of {len(data)} bytes")
        try:
            fields = json.loads(line)
            newer = fields["format"] != _FORMAT
            current = None if newer else cls._of(fields)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise Unreadable(Skip.FOREIGN, f"{CURRENT} does not say what it should: {error}") from error
        if current is None:
            raise Unreadable(Skip.NEWER, f"{CURRENT} has format {fields['format']}, this is {_FORMAT}")
        return current

    @classmethod
    def _of(cls, fields: dict[str, Any]) -> Current:
        snapshot, deltas = (tuple(ManifestFile(*file) for file in fields[name]) for name in ("snapshot", "deltas"))
        orphans = tuple(fields["orphans"])
        epoch, seq = int(fields["epoch"]), int(fields["seq"])
        if not 0 < epoch <= EPOCH_MAX or not 0 <= seq <= EPOCH_MAX or not all(map(_NAME.fullmatch, orphans)):
            raise ValueError("no epoch, or other names")
        return cls(epoch, str(fields["writer"]), seq, snapshot, deltas, orphans)


def _digest(data: bytes) -> str:
    return f"{xxhash.xxh3_64_intdigest(data):016x}"

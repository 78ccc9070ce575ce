"""The layout of an arena file: header, slab table, record table, record table of the drives, slots."""

from __future__ import annotations

import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from kvfleet.config import KIB, MIB
from kvfleet.errors import TierUnavailableError
from kvfleet.node.records import table_bytes

__all__ = ["Geometry", "read_header"]

_MAGIC = b"kvarena\n"
_FORMAT = 2
_HEADER = struct.Struct("<8sQ16sQQQQ")  # magic, format, arena id, capacity, unit, records, drive records
_PAGE = 4 * KIB
_BYTES_PER_RECORD = 64 * KIB  # the smallest block for which there are records enough to fill the arena
_RECORDS_MIN = 1024
_UNITS = 256
_UNIT_MIN, _UNIT_MAX = MIB, 64 * MIB
_TIER = "dram"


def _round_up(num_bytes: int, step: int) -> int:
    return -(-num_bytes // step) * step


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where the parts of an arena file are, all in bytes.

    Attributes:
        capacity_bytes: of the slot area, a multiple of `unit_bytes`.
        unit_bytes: what slabs are made of.
        num_records: slots the arena can have at most.
        num_drive_records: blocks that the table of the node's drives has room for; 0 if the node has none.
    """

    capacity_bytes: int
    unit_bytes: int
    num_records: int
    num_drive_records: int = 0

    @classmethod
    def plan(cls, capacity_bytes: int, num_records: int | None = None, num_drive_records: int = 0) -> Geometry:
        """Geometry for at most `capacity_bytes`: about 256 units, of 1 to 64 MiB."""
        assert capacity_bytes >= _UNIT_MIN
        power_of_two: int = 1 << (capacity_bytes // _UNITS - 1).bit_length()
        unit = min(max(power_of_two, _UNIT_MIN), _UNIT_MAX)
        records = num_records or max(_RECORDS_MIN, capacity_bytes // _BYTES_PER_RECORD)
        return cls(capacity_bytes // unit * unit, unit, records, num_drive_records)

    @property
    def num_units(self) -> int:
        """Units in the slot area."""
        return self.capacity_bytes // self.unit_bytes

    @property
    def slab_offset(self) -> int:
        """Start of the slab table, one 64-bit word per unit."""
        return _PAGE

    @property
    def records_offset(self) -> int:
        """Start of the record table."""
        return self.slab_offset + _round_up(self.num_units * 8, 64)

    @property
    def drive_records_offset(self) -> int:
        """Start of the record table of the drives, page-aligned."""
        return _round_up(self.records_offset + table_bytes(self.num_records), _PAGE)

    @property
    def slots_offset(self) -> int:
        """Start of the slot area, page-aligned."""
        drives = table_bytes(self.num_drive_records) if self.num_drive_records else 0
        return _round_up(self.drive_records_offset + drives, _PAGE)

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return self.slots_offset + self.capacity_bytes

    def header(self, arena_id: bytes) -> bytes:
        """The first bytes of the file."""
        assert len(arena_id) == 16
        return _HEADER.pack(
            _MAGIC, _FORMAT, arena_id, self.capacity_bytes, self.unit_bytes, self.num_records, self.num_drive_records
        )


def read_header(path: Path, fd: int) -> tuple[bytes, Geometry]:
    """Arena id and geometry of an open arena file.

    Args:
        path: for the messages.
        fd: the file.

    Raises:
        TierUnavailableError: not a regular file of this user with mode 0600, not an arena, of another format, or
            damaged.
    """
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise TierUnavailableError(_TIER, f"{path}: not a private file of this user")
    header = os.pread(fd, _HEADER.size, 0)
    if len(header) < _HEADER.size:
        raise TierUnavailableError(_TIER, f"{path}: not an arena")
    magic, version, arena_id, capacity, unit, num_records, num_drive_records = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise TierUnavailableError(_TIER, f"{path}: not an arena")
    if version != _FORMAT:
        raise TierUnavailableError(_TIER, f"{path}: arena format {version}, this is format {_FORMAT}")
    sane = _UNIT_MIN <= unit <= _UNIT_MAX and capacity % unit == 0 < capacity
    if not (sane and 0 < num_records < 1 << 31 and num_drive_records < 1 << 31):
        raise TierUnavailableError(_TIER, f"{path}: damaged header")
    geometry = Geometry(capacity, unit, num_records, num_drive_records)
    if found.st_size != geometry.file_bytes:
        raise TierUnavailableError(_TIER, f"{path}: {found.st_size} bytes, expected {geometry.file_bytes}")
    return arena_id, geometry

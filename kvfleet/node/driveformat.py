"""What a drive's directory has to be, and how its bytes are divided."""

from __future__ import annotations

import json
import os
import stat
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from kvfleet.config import KIB, MIB
from kvfleet.errors import ConfigError, TierUnavailableError
from kvfleet.node.arenadir import LOCK_FILE
from kvfleet.node.drivefile import TIER, drive_errors
from kvfleet.node.driveindex import index_bytes

__all__ = [
    "DATA_FILE",
    "FORMAT_VERSION",
    "INDEX",
    "Format",
    "Plan",
    "cap_of",
    "check_directory",
    "plan_drive",
    "read_format",
]

FORMAT_VERSION = 1
DATA_FILE = "blocks"
INDEX = "index"

_FORMAT_FILE = "format.json"
_PARTIAL = "format.json.partial"
_MAY_BE_THERE = {LOCK_FILE, _PARTIAL, "lost+found"}
_BYTES_PER_RECORD = MIB  # the smallest block for which there are records enough to fill the drive
_RECORDS_MIN = 4096
_RECORDS_MAX = 2 << 20  # each takes about 2 KiB of the manager's memory
_UNITS = 4096  # a drive is made with at most so many, so that it can be given 16 times as much later
_UNIT_MIN = MIB
_UNITS_MAX = 0xFFFF  # of a slab map
# What the filesystem keeps of where the data file is: an extent for each slot at worst.
_TABLES_PER_RECORD = 32
_TABLES_FIXED = 256 * KIB
_CAP_PART = 0.9
_CAP_KEPT = (0.85, 0.95)


@dataclass(frozen=True, slots=True)
class Format:
    """What `format.json` says.

    Attributes:
        drive_id: 32 hexadecimal digits.
        unit_bytes: what slabs are made of.
        format: version of all that is in the directory.
    """

    drive_id: str
    unit_bytes: int
    format: int = FORMAT_VERSION


@dataclass(frozen=True, slots=True)
class Plan:
    """How a drive's bytes are divided.

    Attributes:
        records_max: most entries.
        unit_bytes: what slabs are made of.
        num_units: that the data file may have at most.
    """

    records_max: int
    unit_bytes: int
    num_units: int


def cap_of(directory: Path) -> int:
    """What a drive may take that was given no cap: nine tenths of what is free or its own already.

    As long as that changes little, it is what the drive takes now: it is not made smaller for every file of others.

    Raises:
        TierUnavailableError: the drive failed.
    """
    with drive_errors(directory, "measure"):
        found = os.statvfs(directory)
        own = sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())
    room = found.f_bavail * found.f_frsize + own
    return own if _CAP_KEPT[0] * room <= own <= _CAP_KEPT[1] * room else int(_CAP_PART * room)


def plan_drive(max_bytes: int, unit_bytes: int | None = None) -> Plan:
    """Divide a drive; `unit_bytes` is that of one that was made already.

    Raises:
        ConfigError: nothing is left for blocks.
    """
    records = min(_RECORDS_MAX, max(_RECORDS_MIN, max_bytes // _BYTES_PER_RECORD))
    data_bytes = max_bytes - index_bytes(records) - _TABLES_FIXED - _TABLES_PER_RECORD * records
    unit = unit_bytes or max(_UNIT_MIN, 1 << max(0, data_bytes // _UNITS - 1).bit_length())
    if data_bytes < unit:
        needed = max_bytes - data_bytes + unit
        raise ConfigError("max_bytes", f"a drive needs {needed:,} bytes at least, may take {max_bytes:,}")
    return Plan(records, unit, min(data_bytes // unit, _UNITS_MAX))


def check_directory(directory: Path) -> bool:
    """Refuse a directory that is no place for a drive. It is left as it is.

    Returns:
        Whether no drive is there yet.

    Raises:
        TierUnavailableError: it is missing, not this user's, others may write there, or it holds other things.
    """
    with drive_errors(directory, "open the drive"):
        found = directory.stat()
        if not stat.S_ISDIR(found.st_mode):
            raise TierUnavailableError(TIER, f"{directory}: not a directory")
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            whose = f"it is user {found.st_uid}'s, mode {stat.S_IMODE(found.st_mode):o}"
            raise TierUnavailableError(
                TIER, f"{directory}: only user {os.geteuid()} may write there (755), but {whose}"
            )
        names = {path.name for path in directory.iterdir()}
    strange = sorted(names - _MAY_BE_THERE)
    if _FORMAT_FILE not in names and strange:
        raise TierUnavailableError(TIER, f"{directory}: no drive of kvfleet, and not empty: {', '.join(strange[:3])}")
    return _FORMAT_FILE not in names


def read_format(directory: Path, max_bytes: int) -> Format:
    """What a drive is; one that is new is planned and written down.

    Raises:
        ConfigError: nothing would be left for blocks of a new drive.
        TierUnavailableError: it is of another version, or damaged. It is left as it is.
    """
    path = directory / _FORMAT_FILE
    with drive_errors(directory, "read the format"):
        if not path.exists():
            form = Format(uuid.uuid4().hex, plan_drive(max_bytes).unit_bytes)
            _write(directory, json.dumps(asdict(form)))
            return form
        text = path.read_bytes()
    try:
        fields = json.loads(text)
        version = int(fields["format"])
        if version == FORMAT_VERSION:
            form = Format(str(fields["drive_id"]), int(fields["unit_bytes"]))
            if form.unit_bytes < _UNIT_MIN or form.unit_bytes & (form.unit_bytes - 1):
                raise ValueError(f"unit_bytes is {form.unit_bytes}")
            return form
    except (KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise TierUnavailableError(TIER, f"{path}: damaged: it does not say what it should: {error}") from error
    age = "a newer" if version > FORMAT_VERSION else "an older"
    raise TierUnavailableError(
        TIER,
        f"{directory}: made by {age} kvfleet: format {version}, this one reads {FORMAT_VERSION}. Empty it to use it",
    )


def _write(directory: Path, text: str) -> None:
    """Write the format, whole or not at all."""
    partial = directory / _PARTIAL
    partial.unlink(missing_ok=True)
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, text.encode())
        os.fsync(fd)
    finally:
        os.close(fd)
    partial.replace(directory / _FORMAT_FILE)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

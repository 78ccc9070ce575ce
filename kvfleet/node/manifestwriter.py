"""Writes the manifests of the shared tier: deltas, now and then one in place of many, or a snapshot in place of all.

Every step leaves a set that can be read. A delta is put, then named in `CURRENT`; one that was put only is found, as
its number is the next. A snapshot is put in parts, then `CURRENT` names it and nothing else; the files that it replaces
are deleted by the next one, so that who has just read their names still finds them.

There is one writer, which is elected elsewhere. Should there be two for a while, because one was thought dead, the
older stops at its next append, where it finds a higher epoch in `CURRENT`. What it may have put there at the last
moment is put right by the next append of the newer; no conditional requests are needed.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from kvfleet.core.objectrows import ROW, record_ids
from kvfleet.core.objectrows import ObjectRows as Rows
from kvfleet.errors import StaleEpochError, TierError, TierUnavailableError
from kvfleet.node.manifestfile import FILE_ROWS_MAX, About, ManifestMaker, Skip, Unreadable
from kvfleet.node.manifestlist import CURRENT, FOLDER, Current, ManifestFile, Objects, epoch_and_seq, file_name, file_of
from kvfleet.node.manifests import ManifestReader

__all__ = ["APPEND_ROWS_MAX", "ManifestWriter"]

_log = logging.getLogger(__name__)

APPEND_ROWS_MAX = 1 << 16
DELTAS_MAX = 32
DELTA_ROWS_MAX = 1 << 18
FOLD_ROWS = 4  # deltas with less than a quarter of the snapshot's rows become one delta: the snapshot is not read
PART_ROWS_MAX = FILE_ROWS_MAX
_FOLDED_ROWS_MAX = 4 * DELTA_ROWS_MAX
_ORPHANS_MAX = 1024
_TIER = "shared"
_ID_BYTES = 18


class ManifestWriter:
    """The one writer of a tier's manifests.

    Blocking: every method, for some requests to the storage; the one that compacts reads and writes all files.
    Threads: one at a time.

    Memory: while it compacts, one file of the snapshot read and one written (about 50 MiB with a million rows each),
    and about 250 bytes for each row of deltas, of which there are some 300,000.

    Attributes:
        skipped: how many files were passed over when read, by reason. Their blocks are not known any more.
        epoch: of this writer.
    """

    def __init__(self, objects: Objects, rows_max: int, epoch_min: int = 1) -> None:
        """Take over from the writer before: from here on it is fenced off.

        Args:
            objects: the tier's.
            rows_max: rows that a snapshot has at most; the rest is dropped.
            epoch_min: the lowest epoch to take; one higher than the last writer's is taken in any case.

        Raises:
            TierUnavailableError: the storage does not answer, or has manifests of a newer format.
        """
        self._objects = objects
        self._rows_max = rows_max
        self._doubted: set[str] = set()
        self._reader = reader = ManifestReader(objects)
        self.skipped: Counter[Skip] = reader.skipped
        try:
            found = reader.find() or Current(0, "", 0)
        except Unreadable as error:
            raise TierUnavailableError(_TIER, str(error)) from error
        unnamed = [(file, manifest.about.snapshot) for file, manifest in (reader.unnamed(found) if found.epoch else ())]
        self.epoch = max(epoch_min, found.epoch + 1)
        self._current = Current(
            self.epoch,
            secrets.token_bytes(8).hex(),
            0,
            found.snapshot,
            (*found.deltas, *(file for file, snapshot in unnamed if not snapshot)),
            (*found.orphans, *(file.name for file, snapshot in unnamed if snapshot))[-_ORPHANS_MAX:],
        )
        self._told = False
        self._tell()

    def append(self, rows: Rows) -> None:
        """Tell of blocks that came, or went: with 0 bytes. If it fails, the same rows may be appended again.

        Args:
            rows: shape (num_rows,), dtype ROW, at most `APPEND_ROWS_MAX`.

        Raises:
            StaleEpochError: there is a newer writer; nothing was written.
            TierUnavailableError: some or all of it is not written, or not yet named.
        """
        assert rows.dtype == ROW
        assert 0 < len(rows) <= APPEND_ROWS_MAX
        assert (rows["shard"] < rows["num_shards"]).all()
        self._fence()
        if self.is_crowded:
            self._make_room()
        maker = ManifestMaker()
        maker.write(rows)
        file = self._put(maker, About())
        self._current = replace(self._current, deltas=(*self._current.deltas, file))
        self._tell()

    @property
    def has_snapshot(self) -> bool:
        """Whether there was ever one: until then nobody has said what was there before the first append."""
        return bool(self._current.snapshot)

    @property
    def is_crowded(self) -> bool:
        """Whether the next append compacts first."""
        deltas = self._current.deltas
        return len(deltas) >= DELTAS_MAX or sum(file.num_rows for file in deltas) > DELTA_ROWS_MAX

    def compact(self, *, doubting: bool = True) -> None:
        """Replace all files by a snapshot.

        Args:
            doubting: try again another time what cannot be read now. Without it, that is given up.

        Raises:
            StaleEpochError: there is a newer writer; nothing was written.
            TierUnavailableError: the old files still count.
        """
        self._fence()
        self._compact(doubting=doubting)

    def _fence(self) -> None:
        """Read what `CURRENT` says now, and stop if it is another's."""
        try:
            found = Current.read(self._objects)
        except Unreadable as error:
            if error.reason is Skip.NEWER:
                raise TierUnavailableError(_TIER, str(error)) from error
            self.skipped[error.reason] += 1
            found = None
        if found is not None and found.epoch >= self.epoch and found.writer != self._current.writer:
            raise StaleEpochError(FOLDER, self.epoch, found.epoch)
        self._told = found == self._current

    def _tell(self) -> None:
        self._told = False
        self._objects.put(CURRENT, self._current.encode())
        self._told = True

    def _put(self, maker: ManifestMaker, about: About) -> ManifestFile:
        """Put a file under the next number, which is not used again whatever happens."""
        seq = self._current.seq + 1
        name, data = file_name(self.epoch, seq), maker.finish(about)
        self._current = replace(self._current, seq=seq)
        try:
            self._objects.put(f"{FOLDER}/{name}", data)
        except TierError:
            self._orphan([name])  # it may be there, or come yet
            raise
        return file_of(name, data, maker.num_rows)

    def _orphan(self, names: list[str]) -> None:
        self._current = replace(self._current, orphans=(*self._current.orphans, *names)[-_ORPHANS_MAX:])

    def _make_room(self) -> None:
        """Have fewer deltas, by as little work as does it."""
        num_old, num_new = (
            sum(file.num_rows for file in files) for files in (self._current.snapshot, self._current.deltas)
        )
        if num_new * FOLD_ROWS <= num_old and num_new <= DELTA_ROWS_MAX:
            self._fold()
        else:
            self._compact()

    def _fold(self) -> None:
        """Replace the deltas by one; they are deleted the next time."""
        if not self._told:
            self._tell()
        old = self._current
        undeleted = self._delete(old.orphans)
        maker = ManifestMaker()
        maker.write(self._last_changes())
        file = self._put(maker, About())
        orphans = (*undeleted, *(replaced.name for replaced in old.deltas))
        self._current = replace(self._current, deltas=(file,), orphans=orphans[-_ORPHANS_MAX:])
        self._tell()

    def _compact(self, *, doubting: bool = True) -> None:
        if not doubting:
            self._doubted |= {file.name for file in self._current.files}
        if not self._told:  # what is deleted now must not be named there
            self._tell()
        old = self._current
        undeleted = self._delete_replaced()
        parts: list[ManifestFile] = []
        maker, left = ManifestMaker(), self._rows_max
        try:
            for page in self._merged():
                if maker.num_rows and maker.num_rows + len(page) > PART_ROWS_MAX:
                    parts.append(self._put(maker, About(snapshot=True)))
                    maker = ManifestMaker()
                maker.write(page[:left])
                left -= min(left, len(page))
            names = (*(file.name for file in parts), file_name(self.epoch, self._current.seq + 1))
            replaced = (*undeleted, *old.orphans, *(file.name for file in old.files))
            parts.append(self._put(maker, About(True, names, replaced[-_ORPHANS_MAX:])))
            self._fence()  # again: all that was read and written took its time
        except TierError:
            self._orphan([file.name for file in parts])
            raise
        self._current = replace(self._current, snapshot=tuple(parts), deltas=(), orphans=())
        self._doubted.clear()
        self._tell()
        _log.info("manifests: %d files became %d", len(old.files), len(parts))

    def _delete_replaced(self) -> list[str]:
        """Delete the files that the last snapshot has replaced, and return the names of those that could not be."""
        names: tuple[str, ...] = ()
        for file in self._current.snapshot[-1:]:
            snapshot = self._reader.open(file)
            names = snapshot.about.replaces if snapshot else ()
        return self._delete(names)

    def _delete(self, names: tuple[str, ...]) -> list[str]:
        """Delete files that are not named any more, and return the names of those that could not be."""
        named = {file.name for file in self._current.files}
        undeleted = []
        for name in names:
            if name in named or epoch_and_seq(name) is None:
                continue
            try:
                self._objects.delete(f"{FOLDER}/{name}")
            except TierError as error:
                _log.info("manifest %s not deleted, later again: %s", name, error)
                undeleted.append(name)
        return undeleted

    def _merged(self) -> Iterator[Rows]:
        """Yield what is there after all changes, in pages: first what the snapshot has, then what came after it."""
        changes = self._last_changes()
        ids = record_ids(changes)
        last = {ids[first : first + _ID_BYTES] for first in range(0, len(ids), _ID_BYTES)}
        for file in self._current.snapshot:
            for rows in self._rows(file):
                ids = record_ids(rows)
                firsts = range(0, len(ids), _ID_BYTES)
                same = (ids[first : first + _ID_BYTES] not in last for first in firsts)
                yield rows[np.fromiter(same, np.bool_, len(rows))]
        changes = changes[changes["bytes"] > 0]
        for first in range(0, len(changes), APPEND_ROWS_MAX):
            yield changes[first : first + APPEND_ROWS_MAX]

    def _rows(self, file: ManifestFile) -> Iterator[Rows]:
        """Yield the rows of a file. Only what cannot be read twice is given up: the snapshot will take its place."""
        skipped = self.skipped.total()
        yield from self._reader.rows(file)
        if self.skipped.total() > skipped and file.name not in self._doubted:
            self._doubted.add(file.name)
            raise TierUnavailableError(_TIER, f"manifest {file.name} cannot be read, so it is not replaced yet")

    def _last_changes(self) -> Rows:
        """The last row of each record in the deltas."""
        changes = self._changes()
        ids = record_ids(changes)
        last = {ids[first : first + _ID_BYTES]: first // _ID_BYTES for first in range(0, len(ids), _ID_BYTES)}
        return changes[np.fromiter(last.values(), np.int64, len(last))]

    def _changes(self) -> Rows:
        """The rows of all deltas, in order; of the newest, if there are too many."""
        pages: list[Rows] = [np.empty(0, ROW)]
        left = _FOLDED_ROWS_MAX
        for file in reversed(self._current.deltas):
            if file.num_rows > left:
                self.skipped[Skip.TOO_BIG] += 1
                continue
            of_file = list(self._rows(file))
            left -= sum(map(len, of_file))
            pages += reversed(of_file)
        return np.concatenate(pages[::-1])

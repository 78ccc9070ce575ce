"""What the shared tier holds, told to a fleet that has just started, without listing it.

    <url>/manifests/<epoch>-<seq>.parquet    rows of blocks that came or went (`manifestfile`)
    <url>/manifests/CURRENT                  which of them count (`manifestlist`)

One manager writes (`manifestwriter`), all may read. Files are never written again once they are there; `CURRENT` is.
What manifests tell are hints: a block that has gone since costs a miss, one not told of is not found until it is stored
again or the tier is listed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

from kvfleet.core.objectrows import ObjectRows as Rows
from kvfleet.node.manifestfile import FILE_BYTES_MAX, About, Manifest, Skip, Unreadable
from kvfleet.node.manifestlist import FOLDER, Current, ManifestFile, Objects, epoch_and_seq, file_name

__all__ = ["ManifestReader"]

_log = logging.getLogger(__name__)

_ATTEMPTS = 3  # to read a set that is being compacted
_GAP = 2  # so many numbers without a file are the end: the number of one whose write failed is not used again
_UNNAMED_MAX = 64
_READS = 2  # of a file that is not as it was written: it may have been damaged on the way
_LISTED_MAX = 2048


class ManifestReader:
    """Reads manifests.

    Blocking: every method, for a request to the storage a file and three or four more.

    Attributes:
        skipped: how many files, or rests of files, were passed over, by reason.
        files: how many were opened.
        num_rows: that were told.
        listed: whether the folder had to be listed, as nothing usable said what is in it.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self.skipped: Counter[Skip] = Counter()
        self.files = 0
        self.num_rows = 0
        self.listed = False

    def read(self) -> Iterator[Rows]:
        """Yield what came and went, in order, in pages of at most 65,536 rows. One file at a time is in memory.

        Raises:
            TierUnavailableError: the storage does not answer; the pages before are right.
        """
        try:
            current = self.find()
            for _ in range(_ATTEMPTS):
                if current is None:
                    return
                absent = self.skipped[Skip.ABSENT]
                for file in current.files:
                    yield from self.rows(file)
                newer = self.find() if self.skipped[Skip.ABSENT] > absent else current
                if newer == current:
                    break
                current = newer  # what was missing has been compacted meanwhile; to be told twice does no harm
        except Unreadable:  # counted
            return
        assert current is not None
        for file, manifest in self.unnamed(current):
            if not manifest.about.snapshot:
                yield from self.rows(file, manifest)

    def find(self) -> Current | None:
        """Return which files count: what `CURRENT` says, or else what a listing of the folder shows; None if nothing.

        Raises:
            Unreadable: `CURRENT` is of a newer format.
            TierUnavailableError: the answer is not known.
        """
        try:
            current = Current.read(self._objects)
        except Unreadable as error:
            self._skip(error)
            if error.reason is Skip.NEWER:
                raise
            current = None
        return self._listing() if current is None else current

    def rows(self, file: ManifestFile, manifest: Manifest | None = None) -> Iterator[Rows]:
        """Yield the rows of a file, which may be open already, as far as it can be read."""
        manifest = manifest or self.open(file)
        if manifest is None:
            return
        try:
            for rows in manifest.rows():
                self.num_rows += len(rows)
                yield rows
        except Unreadable as error:
            self._skip(error, file.name)

    def open(self, file: ManifestFile) -> Manifest | None:
        """Return a file, or None and count why not."""
        try:
            return self._load(file)
        except Unreadable as error:
            self._skip(error, file.name)
            return None

    def _load(self, file: ManifestFile) -> Manifest:
        for _ in range(_READS):
            data = self._objects.get(f"{FOLDER}/{file.name}", FILE_BYTES_MAX + 1)
            if data is None:
                raise Unreadable(Skip.ABSENT, "no such object")
            if file.is_of(data):
                manifest = Manifest(data)
                self.files += 1
                return manifest
        raise Unreadable(Skip.DAMAGED, "it is not as it was written")

    def _skip(self, error: Unreadable, name: str = "CURRENT") -> None:
        self.skipped[error.reason] += 1
        _log.warning("manifest %s skipped: %s", name, error)

    def unnamed(self, current: Current) -> Iterator[tuple[ManifestFile, Manifest]]:
        """Yield the files that follow the last one named: their writer died, or is about to name them.

        A part of a snapshot among them holds nothing new, as long as `CURRENT` does not name it.
        """
        missing = 0
        for seq in range(current.seq + 1, current.seq + 1 + _UNNAMED_MAX):
            name = file_name(current.epoch, seq)
            try:
                manifest = self._load(ManifestFile(name, 0, 0, ""))
            except Unreadable as error:
                if error.reason is not Skip.ABSENT:
                    self._skip(error, name)
                    continue
                missing += 1
                if missing == _GAP:
                    return
            else:
                missing = 0
                yield ManifestFile(name, 0, manifest.num_rows, ""), manifest

    def _listing(self) -> Current | None:
        """What `CURRENT` would say, made of the files that are there."""
        names = self._names()
        if not names:
            return None
        files: dict[str, ManifestFile] = {}
        abouts: dict[str, About] = {}
        for name in names:
            manifest = self.open(ManifestFile(name, 0, 0, ""))
            if manifest is not None:
                files[name] = ManifestFile(name, 0, manifest.num_rows, "")
                abouts[name] = manifest.about
        whole = [about for about in abouts.values() if about.parts and files.keys() >= set(about.parts)]
        last = whole[-1] if whole else About()
        orphans = {name for name, about in abouts.items() if about.snapshot} | set(last.replaces)
        orphans -= set(last.parts)
        deltas = [file for name, file in files.items() if name not in orphans and name not in last.parts]
        epoch, seq = epoch_and_seq(names[-1]) or (0, 0)
        snapshot = tuple(files[name] for name in last.parts)
        return Current(epoch, "", seq, snapshot, tuple(deltas), tuple(sorted(orphans & files.keys())))

    def _names(self) -> list[str]:
        """The names of the newest files that are there, as they were written."""
        self.listed = True
        children = self._objects.children(FOLDER)
        names = sorted(child.name for child in children if epoch_and_seq(child.name) and not child.is_directory)
        self.skipped[Skip.FOREIGN] += sum(child.name != "CURRENT" for child in children) - len(names)
        self.skipped[Skip.TOO_BIG] += len(names[:-_LISTED_MAX])
        return names[-_LISTED_MAX:]

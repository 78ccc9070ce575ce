"""The manifests' writer dies, or a request of it fails, at each of its calls."""

from __future__ import annotations

import random

import pytest

from kvfleet.core.objectrows import record_ids
from kvfleet.errors import TierUnavailableError
from kvfleet.node import manifestwriter
from kvfleet.node.manifestfile import Manifest
from kvfleet.node.manifestlist import CURRENT, FOLDER, Current
from kvfleet.node.manifestwriter import ManifestWriter
from tests.manifest_store import MANY, CrashError, Store, files, rows_of, told


def scenario(store: Store, acknowledged: set[int], rng: random.Random) -> None:
    """Two writers, one after the other, append and remove; numbers that are certain are in `acknowledged`."""
    for _ in range(2):
        writer = ManifestWriter(store, MANY)
        for _ in range(3):
            number = rng.randrange(5)
            gone = number in acknowledged
            acknowledged.discard(number)
            writer.append(rows_of(number, gone=gone))
            if not gone:
                acknowledged.add(number)
        writer.compact()


NUMBERS = {record_ids(rows_of(number)): number for number in range(40)}


def numbers_told(store: Store) -> set[int]:
    return {NUMBERS[record] for record in told(store.other_way())}


@pytest.mark.parametrize("fold_rows", [0, 4])
@pytest.mark.parametrize("when", ["before", "after", "torn"])
def test_a_crash_at_any_call_leaves_a_set_that_can_be_read(when: str, fold_rows: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(manifestwriter, "FOLD_ROWS", fold_rows)
    monkeypatch.setattr(manifestwriter, "DELTAS_MAX", 2)
    monkeypatch.setattr(manifestwriter, "PART_ROWS_MAX", 2)
    crashed_at = 0
    while True:
        crashed_at += 1
        store, acknowledged = Store(), set[int]()

        def die(number: int, at: int = crashed_at, store: Store = store) -> None:
            if number == at:
                if when == "torn" and store.calls[-1][0] == "put" and store.calls[-1][1] != CURRENT:
                    path = store.calls[-1][1]
                    store.objects[path] = store.objects[path][:100]
                raise CrashError

        setattr(store, "before" if when == "before" else "after", die)
        try:
            scenario(store, acknowledged, random.Random(7))
            break
        except CrashError:
            pass
        store.before = store.after = lambda _: None
        found = numbers_told(store)
        assert acknowledged <= found, crashed_at
        assert len(found - acknowledged) <= 1, crashed_at  # the one in doubt
        # The next writer goes on, and in the end nothing is left lying about.
        store.calls.clear()
        writer = ManifestWriter(store, MANY)
        writer.append(rows_of(30))
        assert numbers_told(store) == found | {30}
        for _ in range(2):
            writer.compact()
        assert numbers_told(store) == found | {30}
        current = Current.read(store)
        assert current is not None
        kept = {file.name for file in current.files}
        snapshot = Manifest(store.objects[f"{FOLDER}/{current.snapshot[-1].name}"])
        # A file that was torn, or whose number nobody knew, may stay: it is as small as a delta.
        assert len(files(store) - kept - set(snapshot.about.replaces)) <= (1 if when == "torn" else 0), crashed_at
    assert crashed_at > 40


@pytest.mark.parametrize("fold_rows", [0, 4])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_failed_call_is_made_good_by_the_next(when: str, fold_rows: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(manifestwriter, "FOLD_ROWS", fold_rows)
    monkeypatch.setattr(manifestwriter, "DELTAS_MAX", 2)
    monkeypatch.setattr(manifestwriter, "PART_ROWS_MAX", 3)
    fired = [0]
    while fired:
        failed_at = fired.pop() + 1
        store = Store()
        writer = ManifestWriter(store, MANY)

        def fail(number: int, at: int = failed_at + len(store.calls)) -> None:
            if number == at:
                fired.append(failed_at)  # noqa: B023 - read in this round
                raise TierUnavailableError("shared", "no answer")

        setattr(store, when, fail)
        for number in range(6):
            try:
                writer.append(rows_of(number))
            except TierUnavailableError:
                writer.append(rows_of(number))
            assert numbers_told(store) == set(range(number + 1)), failed_at
    assert failed_at > 30

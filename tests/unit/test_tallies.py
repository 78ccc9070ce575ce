"""Clients' totals and last requests in files that others read."""

from __future__ import annotations

import os
import struct
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from kvfleet.core.outcomes import Miss, Source
from kvfleet.core.totals import BYTES_OF, INDEX, NAMES, OUTCOME, Totals, dropped_index
from kvfleet.node import tallies
from kvfleet.node.tallies import REQUESTS, Request, Tally, pack_counts, read_counts, read_requests
from kvfleet.node.tallybook import TallyBook

REQUEST = Request(
    asked_ns=1_700_000_000_000_000_000,
    label="chatcmpl-1",
    block_tokens=16,
    block_bytes=65536,
    start_block=1,
    asked_blocks=9,
    hit_blocks=8,
    local=3,
    remote=2,
    shared=1,
    pending=1,
    nvme=7,
    missing=Miss.EVICTED,
    lookup_s=0.000125,
    loaded=True,
    from_dram=3,
    from_peer=2,
    from_shared=0,
    from_nvme=5,
    miss=Miss.TOO_SLOW,
    load_s=1.5,
    planned_blocks=6,
    predicted_load_s=0.25,
    predicted_ready_s=2.5,
    recompute_s=4.0,
    ready_s=3.0,
    reason="loading from shared takes 80 ms, computing 60 ms",
    first_key=bytes(range(16)),
    last_key=bytes(range(16, 32)),
)


@pytest.fixture
def book(tmp_path: Path) -> TallyBook:
    (tmp_path / "clients").mkdir()
    return TallyBook(tmp_path / "clients", tmp_path / "departed")


def client(book: TallyBook, name: str, **counts: int) -> Tally:
    path = book._clients / name
    path.touch()
    tally = Tally()
    for count, number in counts.items():
        tally.counts[INDEX[count]] += number
    tally.share(path)
    return tally


def test_what_was_counted_before_the_file_was_there_is_in_it(book):
    tally = client(book, "1", lookups=2, asked=7)
    tally.counts[INDEX["lookups"]] += 1
    counts = read_counts(book._clients / "1")
    assert counts is not None
    assert {name: counts[index] for name, index in INDEX.items() if counts[index]} == {"lookups": 3, "asked": 7}
    tally.keep()
    tally.counts[INDEX["lookups"]] += 1
    assert tally.counts[INDEX["lookups"]] == 4
    assert read_counts(book._clients / "1") == counts  # what was told last


@pytest.mark.parametrize("request_", [REQUEST, replace(REQUEST, missing=None, miss=None, loaded=False, label="")])
def test_a_request_survives_its_file(book, request_):
    tally = client(book, "1")
    tally.note(request_)
    assert read_requests(book._clients / "1") == [request_]


def test_every_reason_survives_its_file():
    for miss in Miss:
        entry = replace(REQUEST, missing=miss, miss=miss).pack()
        assert Request.unpack(entry) == replace(REQUEST, missing=miss, miss=miss)


def test_long_labels_and_times_are_cut():
    found = Request.unpack(replace(REQUEST, label="é" * 40, lookup_s=1e9).pack())
    assert found is not None
    assert (found.label, found.lookup_s) == ("é" * 32, (2**32 - 1) / 1e6)
    found = Request.unpack(replace(REQUEST, label="no text: \ud800").pack())
    assert found is not None
    assert found.label == "no text: ?"


def test_the_last_requests_are_remembered_each_once(book):
    tally = client(book, "1")
    for number in range(1, REQUESTS + 4):
        tally.note(replace(REQUEST, asked_ns=number, loaded=False))
        tally.note(replace(REQUEST, asked_ns=number))
    found = sorted(read_requests(book._clients / "1"), key=lambda request: request.asked_ns)
    assert found == [replace(REQUEST, asked_ns=number) for number in range(4, REQUESTS + 4)]


def test_a_half_written_request_is_skipped(book):
    tally = client(book, "1")
    tally.note(REQUEST)
    tally.note(replace(REQUEST, asked_ns=2))
    with (book._clients / "1").open("r+b") as file:
        file.seek(tallies._RING_AT + 24)
        file.write(b"\xff")
    assert read_requests(book._clients / "1") == [replace(REQUEST, asked_ns=2)]


@pytest.mark.parametrize("content", [b"", b"x", bytes(20_000), struct.pack("<8sI", b"kvtally1", 0) + bytes(20_000)])
def test_files_of_others_are_not_read(book, content):
    (book._clients / "1").write_bytes(content)
    assert read_counts(book._clients / "1") is None
    assert read_requests(book._clients / "1") == []
    assert book.totals() == Totals()


def test_a_book_adds_up_those_that_are_there_and_those_that_are_gone(book, tmp_path):
    one, two = client(book, "1", lookups=1, asked=5), client(book, "2", lookups=2, asked=3)
    book.depart(book._clients / "1")
    (book._clients / "1").unlink()
    assert (book.totals().lookups, book.totals().asked_blocks) == (3, 8)
    heir = TallyBook(book._clients, tmp_path / "departed")  # after a restart of the manager
    assert heir.totals() == book.totals()
    totals = heir.totals()
    heir.depart(book._clients / "2")
    (book._clients / "2").unlink()
    assert heir.totals() == totals == TallyBook(book._clients, tmp_path / "departed").totals()
    del one, two


def test_a_manager_killed_while_a_client_departs_counts_it_once(book, tmp_path):
    tallies = client(book, "1", lookups=1), client(book, "2", lookups=2)
    book.depart(book._clients / "1")  # and killed before its file is removed
    for each in (book, TallyBook(book._clients, tmp_path / "departed")):
        assert each.totals().lookups == 3
        each.depart(book._clients / "1")
        assert each.totals().lookups == 3
    (book._clients / "1").unlink()
    heir = TallyBook(book._clients, tmp_path / "departed")
    heir.depart(book._clients / "2")
    assert heir.totals().lookups == 3 == TallyBook(book._clients, tmp_path / "departed").totals().lookups
    del tallies


def test_a_book_without_its_directory_is_empty(tmp_path):
    book = TallyBook(tmp_path / "nowhere", tmp_path / "departed")
    assert (book.totals(), book.requests("", 5)) == (Totals(), [])


def test_a_sum_that_cannot_be_kept_is_still_told(book, tmp_path):
    tally = client(book, "1", lookups=1)
    (tmp_path / "departed.partial").mkdir()
    book.depart(book._clients / "1")
    (book._clients / "1").unlink()
    assert book.totals().lookups == 1
    del tally


def test_requests_are_found_by_label_or_key_the_newest_first(book):
    one, two = client(book, "1"), client(book, "2")
    for number in range(1, 5):
        one.note(replace(REQUEST, asked_ns=number, label=f"cmpl-{number}"))
        two.note(replace(REQUEST, asked_ns=10 + number, label="", first_key=bytes([number]) * 16))
    assert [request.asked_ns for request in book.requests("", 6)] == [14, 13, 12, 11, 4, 3]
    assert [request.asked_ns for request in book.requests("cmpl", 9)] == [4, 3, 2, 1]
    assert [request.asked_ns for request in book.requests("0303", 9)] == [13]
    assert [request.asked_ns for request in book.requests("101112", 1)] == [14]  # the last key of all
    one.note(replace(REQUEST, asked_ns=20, label="l" * 80))
    assert [request.asked_ns for request in book.requests("l" * 80, 1)] == [20]
    assert book.requests("nothing", 9) == []


def test_a_full_disk_leaves_counts_where_they_are(book, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    tally = client(book, "1", lookups=1)
    tally.counts[INDEX["lookups"]] += 1
    assert tally.counts[INDEX["lookups"]] == 2
    assert book.totals() == Totals()


def test_a_forked_child_counts_for_itself(book):
    tally = client(book, "1", lookups=1)
    with tally.lock:  # which the child cannot wait for
        pid = os.fork()
        if pid == 0:
            with tally.lock:
                tally.counts[INDEX["lookups"]] += 10
                os._exit(tally.counts[INDEX["lookups"]])
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 11
    assert tally.counts[INDEX["lookups"]] == 1
    assert book.totals().lookups == 1


def test_no_file_stays_open(book):
    before = {path.name for path in Path("/proc/self/fd").iterdir()}
    tally = client(book, "1", lookups=1)
    tally.share(book._clients / "1")
    tally.keep()
    assert {path.name for path in Path("/proc/self/fd").iterdir()} == before


def test_counts_are_read_while_they_are_written(book):
    tally, stop = client(book, "1"), threading.Event()

    def count() -> None:
        while not stop.is_set():
            with tally.lock:
                tally.counts[INDEX["lookups"]] += 2**20 + 1
                tally.note(replace(REQUEST, asked_ns=tally.counts[INDEX["lookups"]]))

    thread = threading.Thread(target=count)
    thread.start()
    try:
        last = 0
        for _ in range(300):
            now = book.totals().lookups
            assert now >= last
            assert now % (2**20 + 1) == 0
            assert {replace(r, asked_ns=1) for r in book.requests("", REQUESTS)} <= {replace(REQUEST, asked_ns=1)}
            last = now
    finally:
        stop.set()
        thread.join()


def test_totals_add_up():
    counts = list(range(len(NAMES)))
    totals = Totals.of(counts)
    assert totals.counts() == counts
    assert sum(totals.outcomes.values()) == totals.asked_blocks
    assert Totals.sum([totals, totals]).counts() == [2 * n for n in counts]
    assert Totals.sum([]) == Totals() == Totals.of([0] * len(NAMES))
    assert pack_counts(counts, "") != pack_counts([0] * len(NAMES), "")


def test_everything_has_a_count_of_its_own():
    indexes = [*OUTCOME.values(), *BYTES_OF.values(), dropped_index("no_room"), dropped_index("draining")]
    assert len({*indexes, dropped_index("ValueError"), dropped_index("other")}) == len(indexes) + 1
    assert OUTCOME.keys() == {*Source, *Miss}

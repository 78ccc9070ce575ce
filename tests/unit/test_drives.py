"""Which drive a block goes to, and which get none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvfleet.config import GIB, MIB
from kvfleet.core.drives import Backoff, Health, Load, choose, takes, uses_wanted

IDLE = Load(capacity_bytes=100 * GIB, free_bytes=50 * GIB, queued_bytes=0, pressure=0.0, written_bytes=0)


@pytest.mark.parametrize(("pressure", "uses"), [(0.0, 0), (1e-9, 1), (0.49, 1), (0.5, 2), (0.999, 2), (1.0, None)])
def test_admission_tightens_with_the_pressure(pressure: float, uses: int | None) -> None:
    assert uses_wanted(pressure) == uses
    for count in range(4):
        assert takes(replace(IDLE, pressure=pressure), MIB, count, GIB) == (uses is not None and count >= uses)


def test_a_drive_takes_what_fits_its_queue_and_itself() -> None:
    assert takes(replace(IDLE, queued_bytes=GIB - MIB), MIB, 0, GIB)
    assert not takes(replace(IDLE, queued_bytes=GIB - MIB + 1), MIB, 0, GIB)
    assert not takes(replace(IDLE, capacity_bytes=MIB), MIB + 1, 0, GIB)


def test_the_shortest_queue_then_the_most_room_then_what_was_written_least() -> None:
    assert choose([replace(IDLE, queued_bytes=2), replace(IDLE, queued_bytes=1, free_bytes=0)]) == 1
    assert choose([replace(IDLE, free_bytes=40 * GIB), IDLE]) == 1
    assert choose([replace(IDLE, written_bytes=1), IDLE]) == 1
    assert choose([IDLE, IDLE]) == 0
    assert choose([replace(IDLE, pressure=0.1), replace(IDLE, queued_bytes=GIB)]) == 1


def test_full_drives_share_by_their_sizes() -> None:
    loads = [replace(IDLE, free_bytes=0), replace(IDLE, free_bytes=0, capacity_bytes=300 * GIB)]
    for _ in range(400):
        index = choose(loads)
        loads[index] = replace(loads[index], written_bytes=loads[index].written_bytes + GIB)
    assert [load.written_bytes // GIB for load in loads] == [100, 300]


def slow_and_peers() -> tuple[Health, list[Health]]:
    health, peers = Health(), [Health(), Health()]
    for peer in peers:
        for _ in range(20):
            peer.note_write(MIB, 0.001)
            peer.note_read(MIB, 0.001)
    return health, peers


@pytest.mark.parametrize("kind", ["note_write", "note_read"])
def test_ten_times_slower_is_slow_after_enough_transfers(kind: str) -> None:
    health, peers = slow_and_peers()
    for number in range(16):
        health.judge(peers, now=0.0)
        assert not health.slow, number
        getattr(health, kind)(MIB, 0.011)
    health.judge([], now=0.0)
    assert not health.slow  # without peers nothing is slow
    health.judge([Health()], now=0.0)
    assert not health.slow
    health.judge(peers, now=0.0)
    assert health.slow
    other = Health()
    for _ in range(99):
        other.note_write(MIB, 0.009)
    other.judge(peers, now=0.0)
    assert not other.slow


def test_a_slow_drive_is_probed_now_and_then_until_one_is_fast() -> None:
    health, peers = slow_and_peers()
    for _ in range(16):
        health.note_write(MIB, 1.0)
    health.judge(peers, now=100.0)
    now, probes = 100.0, []
    while now < 2000:
        health.judge(peers, now)
        if health.accepts(now):
            probes.append(now)
            health.written(now)
            assert not health.accepts(now)
            health.note_write(MIB, 1.0)
        now += 1
    assert [int(probe) for probe in probes] == [110, 130, 170, 250, 410, 710, 1010, 1310, 1610, 1910]
    health.written(2300.0)
    health.note_write(MIB, 0.002)
    health.judge(peers, 2300.0)
    assert not health.slow
    assert health.accepts(2300.0)


def test_short_transfers_are_no_sign_of_slowness() -> None:
    health, peers = slow_and_peers()
    for _ in range(20):
        health.note_write(4096, 0.0005)  # 0.12 us a byte, but a seek takes its time
    health.judge(peers, now=0.0)
    assert not health.slow


def test_pauses_double_until_something_has_worked_for_a_while() -> None:
    backoff = Backoff(1.0, 60.0)
    assert [backoff.failed(0.0) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    backoff.worked(100.0)
    assert backoff.failed(159.0) == 60
    backoff.worked(200.0)
    assert backoff.failed(260.0) == 1
    assert backoff.failed(1000.0) == 2

"""Buffers are bounded, begin on pages, and are given to one taker at a time."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvfleet.connectors.vllm.staging import Staging, take_pages
from kvfleet.errors import ConfigError

PAGE = 4096


def test_buffers_are_whole_pages_in_one_piece_of_memory():
    sizes = []

    def allocate(num_bytes):
        sizes.append(num_bytes)
        memory = take_pages(num_bytes)
        memory[:] = 7
        return memory

    staging = Staging(PAGE + 1, 7 * PAGE, allocate)
    assert (staging.num_buffers, staging.num_free, staging.block_bytes) == (3, 3, PAGE + 1)
    assert sizes == [6 * PAGE]
    views = [staging.view(index) for index in range(3)]
    assert [view.shape for view in views] == [(PAGE + 1,)] * 3
    assert all(view.flags.c_contiguous and view.flags.writeable for view in views)
    start = views[0].ctypes.data
    assert start % PAGE == 0
    assert [view.ctypes.data - start for view in views] == [0, 2 * PAGE, 4 * PAGE]
    assert [int(view[0]) + int(view[PAGE]) for view in views] == [0, 0, 0]  # each page was touched


def test_buffers_are_taken_and_given():
    staging = Staging(PAGE, 4 * PAGE)
    assert staging.take(0) == []
    assert staging.take(3) == [0, 1, 2]
    assert staging.take(3) == [3]
    assert staging.take(3) == []
    staging.give(2)
    staging.give(0)
    assert staging.num_free == 2
    assert staging.take(1) == [0]
    assert staging.take(9) == [2]
    assert staging.num_free == 0


def test_what_is_in_a_buffer_stays_until_it_is_taken_again():
    staging = Staging(PAGE, 2 * PAGE)
    first, second = staging.take(2)
    staging.view(first)[:] = 1
    staging.view(second)[:] = 2
    assert (staging.view(first) == 1).all()
    staging.give(first)
    assert staging.take(1) == [first]
    assert (staging.view(second) == 2).all()


def test_a_block_over_the_capacity_has_one_buffer():
    staging = Staging(3 * PAGE, PAGE)
    assert staging.num_buffers == 1
    assert staging.view(0).shape == (3 * PAGE,)


def test_giving_twice_is_a_bug():
    staging = Staging(PAGE, 2 * PAGE)
    staging.take(1)
    staging.give(0)
    for index in (0, 1, 2, -1):
        with pytest.raises(AssertionError):
            staging.give(index)
    assert staging.num_free == 2


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (-1, 5)])
def test_sizes_are_positive(sizes):
    with pytest.raises(ConfigError, match="sizes must be positive"):
        Staging(*sizes)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda memory: memory[1:],
        lambda memory: memory[PAGE:],
        lambda memory: memory.view(np.int8),
        lambda memory: memory.reshape(2, -1),
        lambda memory: np.frombuffer(memory.data.toreadonly(), np.uint8),
        lambda memory: np.concatenate([memory, memory])[(PAGE - memory.ctypes.data) % PAGE + 1 :][: len(memory)],
    ],
)
def test_memory_of_another_kind_is_refused(spoil):
    with pytest.raises(ConfigError, match="allocate: gave"):
        Staging(PAGE, 2 * PAGE, lambda num_bytes: spoil(take_pages(num_bytes)))


def test_threads_never_share_a_buffer():
    staging = Staging(PAGE, 8 * PAGE)
    wrong = []
    start = threading.Barrier(4)

    def work(mark):
        start.wait(30)
        for _ in range(300):
            taken = staging.take(3)
            for index in taken:
                staging.view(index)[:] = mark
            wrong.extend(index for index in taken if (staging.view(index) != mark).any())
            for index in taken:
                staging.give(index)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert sorted(staging.take(9)) == list(range(8))

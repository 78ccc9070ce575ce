"""What the benchmarks store and load, and the fleet they do it with."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from kvfleet.bench.report import Run
from kvfleet.client import Client
from kvfleet.config import MIB, FleetConfig
from kvfleet.core.layout import BlockLayout, ModelSpec
from kvfleet.core.policies import DEFAULT
from kvfleet.errors import DeadlineExceededError
from kvfleet.fleet import Fleet, start

__all__ = [
    "Prompts",
    "arena_bytes",
    "kv_array",
    "mapped_client",
    "memcpy",
    "running_fleet",
    "spec_of",
    "wait_until_populated",
    "zero_kv",
]

Tokens = npt.NDArray[np.uint32]
Words = npt.NDArray[np.uint16]

_SEED = 20250101
_ALIGNMENT = 64
_POPULATE_TIMEOUT_S = 120.0


def spec_of(block_tokens: int) -> ModelSpec:
    """A model shaped like Llama-3-8B in bfloat16: 128 KiB of KV a token."""
    layout = BlockLayout.kv(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", block_tokens=block_tokens)
    return ModelSpec(model_id="bench", weight_revision="bench", layout=layout)


class Prompts:
    """Prompts without a common prefix, the same ones each time; others for another benchmark or length."""

    def __init__(self, bench: str, num_tokens: int) -> None:
        self._random = np.random.default_rng([_SEED, num_tokens, *bench.encode()])
        self._num_tokens = num_tokens

    def next(self) -> Tokens:
        """Token ids nobody has seen yet, shape `(num_tokens,)`."""
        return self._random.integers(0, 128_256, self._num_tokens, np.uint32)


def kv_array(layout: BlockLayout, num_blocks: int) -> Words:
    """KV of a prompt of `num_blocks` blocks, of random bits: the layout's shape, a longer token axis."""
    kv = zero_kv(layout, num_blocks)
    words = kv.reshape(-1).view(np.uint64)
    words[:] = np.random.default_rng(_SEED).integers(0, 2**64 - 1, len(words), np.uint64, endpoint=True)
    return kv


def zero_kv(layout: BlockLayout, num_blocks: int) -> Words:
    """Memory for as much KV, touched, and aligned to 64 bytes as torch's tensors are; numpy's are not."""
    assert layout.token_axis is not None
    assert layout.itemsize == 2
    shape = list(layout.shape)
    shape[layout.token_axis] *= num_blocks
    memory = np.empty(2 * math.prod(shape) + _ALIGNMENT, np.uint8)
    memory[:] = 0
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + 2 * math.prod(shape)].view(np.uint16).reshape(shape)


def memcpy(kv: Words, num_blocks: int) -> Run:
    """The floor: copy as many bytes, block by block, to an array of its own."""
    source = kv.view(np.uint8).reshape(num_blocks, -1)
    target = np.zeros_like(source)

    def run() -> float:
        started = time.perf_counter()
        for index in range(num_blocks):
            np.copyto(target[index], source[index])
        return time.perf_counter() - started

    return run


def arena_bytes(spec: ModelSpec, num_blocks: int) -> int:
    """Size of an arena in which a run's blocks are a quarter."""
    return max(256 * MIB, 4 * num_blocks * spec.layout.block_bytes)


@contextmanager
def running_fleet(
    dram_bytes: int, address: str | None, *, policy: str = DEFAULT, name: str = "bench"
) -> Iterator[Fleet]:
    """A fleet of its own name, with this node's arena in memory; gone afterwards."""
    config = FleetConfig(name=f"{name}-{os.getpid()}", dram_bytes=dram_bytes, policy=policy)
    fleet = start(config, address=address)
    try:
        wait_until_populated(fleet)
        yield fleet
    finally:
        fleet.stop()


def mapped_client(fleet: Fleet, spec: ModelSpec) -> Client:
    """A client that has touched the whole arena before, as an engine's has after a while."""
    client = fleet.client(spec)
    client.attach()
    arena = client._node.arena
    assert arena is not None
    arena.populate(threading.Event())
    return client


def wait_until_populated(fleet: Fleet) -> None:
    """Wait until no arena of the fleet has memory left that nobody has touched.

    Raises:
        DeadlineExceededError: that takes too long.
    """
    deadline = time.monotonic() + _POPULATE_TIMEOUT_S
    while True:
        status = fleet.status()
        if not status.silent and all(node.populated_bytes >= node.capacity_bytes for node in status.nodes):
            return
        if time.monotonic() > deadline:
            raise DeadlineExceededError("populating the arenas", _POPULATE_TIMEOUT_S)
        time.sleep(0.1)

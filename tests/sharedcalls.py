"""Failing the calls of the shared tier to its storage, one at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import xxhash

from kvfleet.core.block import BlockKey
from kvfleet.errors import TierError
from kvfleet.node.messages import Namespace
from kvfleet.node.shared import SharedTier

KEYS = [BlockKey(xxhash.xxh3_128_digest(bytes([number]))) for number in range(2)]
NUM_BYTES = 1 << 16
CALLS_MAX = 60


def fail_each_call(life: Callable[[int], tuple[int, bool]]) -> None:
    """Fail the first call, then the second one and so on, each in a life of its own, until there is none to fail.

    Args:
        life: given the number of the call to fail; returns how many steps failed, and whether the call was reached.
    """
    failed = 0
    for number in range(CALLS_MAX):
        steps, reached = life(number)
        failed += steps
        if not reached:
            break
    else:
        raise AssertionError("more calls than expected")
    assert failed > 0


def space_of(number: int) -> Namespace:
    return Namespace(bytes([number] * 16), '{"dtype":"uint8"}')


def data_of(key: bytes) -> tuple[np.ndarray, int]:
    data = np.frombuffer(key * (NUM_BYTES // 16), np.uint8)
    return data, xxhash.xxh3_64_intdigest(data.tobytes())


def read(tier: SharedTier, space: Namespace, key: BlockKey) -> bool:
    """Whether the block is there, with the right bytes."""
    target = np.full(NUM_BYTES, 7, np.uint8)
    if tier.read(space, 1, key, 0, target) is None:
        return False
    assert target.tobytes() == data_of(key)[0].tobytes()
    return True


def use_in_all_ways(tier: SharedTier, space: Namespace) -> int:
    """Use a namespace of a tier, whatever fails on the way. Returns how many steps did."""
    steps: list[Callable[[], object]] = [
        lambda: tier.probe_writes(5.0),
        lambda: tier.write(space, 1, KEYS[0], 0, *data_of(KEYS[0])),
        lambda: read(tier, space, KEYS[0]),
        lambda: read(tier, space, KEYS[1]),
        lambda: tier.write(space, 1, KEYS[1], 0, *data_of(KEYS[1])),
        lambda: read(tier, space, KEYS[1]),
        lambda: list(tier.list(100, [space.namespace_id])),
        lambda: tier.delete(space.namespace_id, 1, KEYS[0], 0),
    ]
    failed = 0
    for step in steps:
        try:
            step()
        except TierError:
            failed += 1
    return failed


def works(tier: SharedTier, space: Namespace) -> None:
    """Afterwards all is well."""
    for key in KEYS:
        tier.write(space, 1, key, 0, *data_of(key))
        assert read(tier, space, key)

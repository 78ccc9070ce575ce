"""Room for the blocks of a prefix, where not all find any."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from kvfleet.core.placement import NewBlock
from kvfleet.node.admission import Admitter
from kvfleet.node.dram import Granted, Incoming, Reservation
from kvfleet.testing.policies import block_key
from tests.workload import model, namespace


def test_blocks_behind_one_without_room_get_none() -> None:
    blocks = [Incoming(NewBlock(block_key(n), 0, block_key(n - 1) if n else None, 64), n) for n in range(4)]
    answers = [
        Reservation([Granted(0, 10, 1, 0), Granted(2, 12, 1, 0)], [3], [1], [], []),
        Reservation([], [], [0], [], []),
    ]
    aborted: list[tuple[int, int]] = []
    dram: Any = SimpleNamespace(
        reserve=lambda *_, **__: answers.pop(0),
        fits=lambda _: True,
        placement=SimpleNamespace(in_transfer=0),
        num_reserved=2,
        abort=lambda slot, generation: aborted.append((slot, generation)),
    )

    async def reserve() -> Reservation:
        return await Admitter(dram, lambda _: asyncio.sleep(0)).reserve(
            blocks, namespace(model()), 1, 5.0, patient=False
        )

    got = asyncio.run(reserve())
    assert ([granted.index for granted in got.granted], got.already, got.refused) == ([0], [3], [1, 2])
    assert aborted == [(12, 1)]

"""The object-store transport between two raylets, against a holder that is as plain as can be."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvfleet.core.directory import NodeId
from kvfleet.errors import DeadlineExceededError, KvFleetError, TierUnavailableError
from kvfleet.node.messages import FetchRequest, Namespace, Window, WindowPart
from kvfleet.node.transport import ObjectStoreTransport
from kvfleet.node.windows import ByteBudget, Span, plan_windows, stream_share
from tests.cluster.engine_process import spilled_bytes

MIB = 1 << 20
BLOCK_BYTES = 3 * MIB  # no multiple of a window
NAMESPACE = Namespace(bytes(16), "{}")
WINDOW_BYTES = 8 * MIB
IN_FLIGHT = 2
STREAM_BYTES = (IN_FLIGHT + 1) * WINDOW_BYTES
HOLDER = NodeId("holder")


def content(index: int) -> int:
    """The value of every byte of a block."""
    return index % 251 + 1


class Holder:
    """Sends blocks as a manager sends those of its arena, whose slots may be rewritten once a window is taken."""

    def __init__(self, pause_s: float, budget_bytes: int) -> None:
        self.pause_s = pause_s
        self.budget = ByteBudget(budget_bytes)
        self.slots = np.empty(WINDOW_BYTES, np.uint8)
        self.open = 0
        self.open_max = 0

    async def fetch(self, request: FetchRequest) -> AsyncIterator[Window]:
        sizes = [BLOCK_BYTES] * (len(request.keys) // 16)
        share = stream_share(sum(sizes), request.window_bytes_max, IN_FLIGHT, self.budget.capacity_bytes)
        await self.budget.acquire(share.num_bytes, request.timeout_s)
        self.open += 1
        self.open_max = max(self.open, self.open_max)
        try:
            for spans in plan_windows(sizes, MIB, share.window_bytes_max):
                yield Window(tuple(self.parts(spans)))
                self.slots[:] = 0
                await asyncio.sleep(self.pause_s)
        finally:
            self.open -= 1
            self.budget.release(share.num_bytes)

    def parts(self, spans: list[Span]) -> Iterator[WindowPart]:
        end = 0
        for span in spans:
            start, end = end, end + span.stop - span.start
            self.slots[start:end] = content(span.index)
            yield WindowPart(span.index, span.start, BLOCK_BYTES, checksum=0, data=self.slots[start:end])

    async def ping(self) -> None:
        pass

    async def state(self) -> tuple[int, int, int]:
        return self.open, self.open_max, self.budget.taken_bytes

    async def process(self) -> int:
        return os.getpid()


class BrokenHolder:
    """Sends one window, then fails."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def fetch(self, request: FetchRequest) -> AsyncIterator[Window]:
        yield Window((WindowPart(0, 0, BLOCK_BYTES, 0, np.full(MIB, content(0), np.uint8)),))
        raise self.error

    async def ping(self) -> None:
        raise self.error


@dataclass(frozen=True)
class Answer:
    num_bytes: int
    wrong: list[str]
    error: Exception | None
    taken_bytes: int


class Reader:
    """Reads and checks what a holder sends, as a manager copies it into its arena."""

    def __init__(self, holder: Any, holder_timeout_s: float, budget_bytes: int) -> None:
        self.budget = ByteBudget(budget_bytes)
        self.num_bytes = 0

        def resolve(node: NodeId) -> Any:
            if node != HOLDER:
                raise ValueError(f"no actor of node {node}")
            return holder

        self.transport = ObjectStoreTransport(
            resolve, self.budget, holder_timeout_s=holder_timeout_s, windows_in_flight=IN_FLIGHT
        )

    async def read(self, num_blocks: int, timeout_s: float, windows_max: int = 1 << 30, node: str = HOLDER) -> Answer:
        request = FetchRequest(NAMESPACE, bytes(16 * num_blocks), b"", 0, 0, BLOCK_BYTES, WINDOW_BYTES, timeout_s)
        self.num_bytes = num_windows = 0
        wrong: list[str] = []
        error: Exception | None = None
        try:
            async with aclosing(self.transport.fetch(NodeId(node), request, num_blocks * BLOCK_BYTES)) as windows:
                async for window in windows:
                    wrong += await asyncio.to_thread(self._check, window)
                    del window
                    num_windows += 1
                    if num_windows == windows_max:
                        break
        except KvFleetError as fault:
            error = fault
        return Answer(self.num_bytes, wrong, error, self.budget.taken_bytes)

    def _check(self, window: Window) -> list[str]:
        wrong = []
        for part in window.parts:
            expected = divmod(self.num_bytes, BLOCK_BYTES)
            if (part.index, part.start) != expected:
                wrong.append(f"{part.index}, {part.start} instead of {expected}")
            if part.data.flags.writeable or not (part.data == content(part.index)).all():
                wrong.append(f"content of {part.index}, {part.start}")
            self.num_bytes += part.data.nbytes
        return wrong

    async def ping(self, timeout_s: float, node: str = HOLDER) -> Exception | None:
        try:
            await self.transport.ping(NodeId(node), timeout_s)
        except KvFleetError as error:
            return error
        return None

    async def received_bytes(self) -> int:
        return self.num_bytes


@dataclass(frozen=True)
class Pair:
    """A holder on the second node, a reader on the first."""

    holder: Any
    reader: Any

    def read(self, num_blocks: int, timeout_s: float = 60.0, **how: Any) -> Answer:
        answer: Answer = ray.get(self.reader.read.remote(num_blocks, timeout_s, **how), timeout=120)
        return answer

    def ping(self, timeout_s: float = 30.0, **how: Any) -> Exception | None:
        error: Exception | None = ray.get(self.reader.ping.remote(timeout_s, **how), timeout=60)
        return error

    def holder_state(self) -> tuple[int, int, int]:
        state: tuple[int, int, int] = ray.get(self.holder.state.remote(), timeout=60)
        return state

    def signal(self, number: int) -> None:
        os.kill(ray.get(self.holder.process.remote(), timeout=60), number)


@pytest.fixture
def make_pair(ray_cluster: Any) -> Iterator[Callable[..., Pair]]:
    here = ray.get_runtime_context().get_node_id()
    there = next(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here)
    actors: list[Any] = []

    def on(node: str, cls: type, *args: Any) -> Any:
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        actor: Any = ray.remote(cls).options(num_cpus=0, scheduling_strategy=strategy).remote(*args)
        actors.append(actor)
        return actor

    def make(
        pause_s: float = 0.0,
        budget_bytes: int = STREAM_BYTES,
        holder_timeout_s: float = 30.0,
        holder: Any = None,
    ) -> Pair:
        holder = holder or on(there, Holder, pause_s, budget_bytes)
        return Pair(holder, on(here, Reader, holder, holder_timeout_s, 2 * STREAM_BYTES))

    yield make
    for actor in actors:
        ray.kill(actor)


def test_every_byte_arrives_and_nothing_spills(make_pair):
    pair = make_pair()
    answer = pair.read(170)  # 510 MiB through object stores of 256 MiB
    assert answer == Answer(170 * BLOCK_BYTES, [], None, 0)
    assert pair.holder_state() == (0, 1, 0)
    assert spilled_bytes() == 0


def test_less_than_one_window(make_pair):
    assert make_pair().read(1) == Answer(BLOCK_BYTES, [], None, 0)


def test_windows_shrink_to_a_small_budget(make_pair):
    pair = make_pair(budget_bytes=MIB)
    assert pair.read(3) == Answer(3 * BLOCK_BYTES, [], None, 0)
    assert pair.holder_state() == (0, 1, 0)


def test_the_holders_budget_bounds_streams(make_pair):
    pair = make_pair(budget_bytes=STREAM_BYTES)
    second = make_pair(holder=pair.holder)
    answers = ray.get([reader.read.remote(40, 60.0) for reader in (pair.reader, second.reader)], timeout=120)
    assert answers == [Answer(40 * BLOCK_BYTES, [], None, 0)] * 2
    assert pair.holder_state() == (0, 1, 0)


def test_leaving_early_stops_the_holder(make_pair, wait_for_condition):
    pair = make_pair()
    answer = pair.read(100, windows_max=3)
    assert (answer.wrong, answer.error, answer.taken_bytes) == ([], None, 0)
    wait_for_condition(lambda: pair.holder_state() == (0, 1, 0), "the holder's stream has ended")
    assert pair.read(5) == Answer(5 * BLOCK_BYTES, [], None, 0)


def test_a_killed_holder_is_unavailable(make_pair, wait_for_condition):
    pair = make_pair(pause_s=0.2)
    pending = pair.reader.read.remote(100, 60.0)
    wait_for_condition(lambda: ray.get(pair.reader.received_bytes.remote()) > 0, "the first bytes")
    pair.signal(signal.SIGKILL)
    answer = ray.get(pending, timeout=60)
    assert isinstance(answer.error, TierUnavailableError)
    assert (answer.wrong, answer.taken_bytes) == ([], 0)
    assert isinstance(pair.read(1).error, TierUnavailableError)


def test_a_frozen_holder_is_too_slow_until_it_wakes(make_pair, wait_for_condition):
    pair = make_pair(pause_s=0.2, holder_timeout_s=1.0)
    pending = pair.reader.read.remote(100, 60.0)
    wait_for_condition(lambda: ray.get(pair.reader.received_bytes.remote()) > 0, "the first bytes")
    process = ray.get(pair.holder.process.remote(), timeout=60)
    os.kill(process, signal.SIGSTOP)
    try:
        answer = ray.get(pending, timeout=60)
        assert isinstance(answer.error, DeadlineExceededError)
        assert (answer.wrong, answer.taken_bytes) == ([], 0)
        assert isinstance(pair.read(1).error, DeadlineExceededError)
        assert isinstance(pair.ping(1.0), DeadlineExceededError)
    finally:
        os.kill(process, signal.SIGCONT)
    wait_for_condition(lambda: pair.holder_state()[0] == 0, "the abandoned streams have ended")
    assert pair.ping() is None
    assert pair.read(1) == Answer(BLOCK_BYTES, [], None, 0)


def test_the_deadline_of_the_request_holds(make_pair, wait_for_condition):
    pair = make_pair(pause_s=0.2)
    answer = pair.read(100, timeout_s=0.5)
    assert isinstance(answer.error, DeadlineExceededError)
    assert (answer.wrong, answer.taken_bytes) == ([], 0)
    wait_for_condition(lambda: pair.holder_state()[0] == 0, "the holder's stream has ended")


@pytest.mark.parametrize(
    ("error", "seen_as"),
    [
        (TierUnavailableError("dram", "no arena"), TierUnavailableError),
        (DeadlineExceededError("room in flight", 1.0), DeadlineExceededError),
        (ZeroDivisionError(), TierUnavailableError),
    ],
    ids=repr,
)
def test_a_failing_holder(make_pair, error, seen_as):
    pair = make_pair(holder=ray.remote(BrokenHolder).remote(error))
    answer = pair.read(10)
    assert isinstance(answer.error, seen_as)
    assert (answer.num_bytes, answer.wrong, answer.taken_bytes) == (MIB, [], 0)
    assert isinstance(pair.ping(), seen_as)


def test_a_node_without_manager_is_unavailable(make_pair):
    pair = make_pair()
    answer = pair.read(1, node="elsewhere")
    assert isinstance(answer.error, TierUnavailableError)
    assert (answer.num_bytes, answer.taken_bytes) == (0, 0)
    assert isinstance(pair.ping(node="elsewhere"), TierUnavailableError)

"""One rank's loads and saves, with a pool of numbers and a fleet that is a dict."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvfleet.connectors.vllm.plan import Load, Save
from kvfleet.connectors.vllm.scopes import Scope, ScopedClients
from kvfleet.connectors.vllm.staging import Staging
from kvfleet.connectors.vllm.transfers import Transfers
from kvfleet.core.block import KEY_BYTES, split
from kvfleet.core.hints import Hints
from kvfleet.core.layout import BlockLayout
from kvfleet.core.planner import Leg, Plan
from kvfleet.hits import HitRun, Loaded, PrefixHit, StoreResult
from kvfleet.node.messages import Miss, Outcome, Source
from kvfleet.storing import StoreTask

PER = 4
RUN = 8
BLOCK_BYTES = PER * RUN
BLOCK_TOKENS = 64
LAYOUT = BlockLayout.opaque(block_bytes=BLOCK_BYTES, block_tokens=BLOCK_TOKENS, inner_order="test")

Bytes = npt.NDArray[np.uint8]


class Pool:
    """An engine's memory: `(engine blocks, RUN)`; fails or waits when told to."""

    blocks_per = PER
    block_bytes = BLOCK_BYTES

    def __init__(self) -> None:
        self.memory = np.zeros((40, RUN), np.uint8)
        self.fail_at: int | None = None
        self.entered = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self.fences = 0

    def read(self, engine_blocks: Sequence[Sequence[int]], targets: Sequence[Bytes]) -> Callable[[], None]:
        for block, target in zip(engine_blocks, targets, strict=True):
            target[:] = self.memory[list(block)].reshape(-1)
        return lambda: None

    def write(self, engine_blocks: Sequence[int], first: int, source: Bytes) -> None:
        self.entered.set()
        assert self.go_on.wait(30.0)
        if self.fail_at in engine_blocks:
            raise OSError("the device is gone")
        self.memory[list(engine_blocks)] = source.reshape(PER, RUN)[first : first + len(engine_blocks)]

    def fence(self) -> None:
        self.fences += 1

    def close(self) -> None:
        assert self.go_on.is_set()


@dataclass
class FakeClient:
    blocks: dict[bytes, Bytes] = field(default_factory=dict)
    stop_at: int | None = None
    tasks: list[tuple[StoreTask, Callable[[], None]]] = field(default_factory=list)
    at_once: bool = True
    fail_stores: bool = False
    timeouts: list[float] = field(default_factory=list)
    plans: list[Plan | None] = field(default_factory=list)
    stored: list[tuple[int, int]] = field(default_factory=list)
    hints: list[Hints] = field(default_factory=list)
    told: list[tuple[int, Hints]] = field(default_factory=list)

    def load(
        self, hit: PrefixHit, into: Callable[[int, Bytes], None], timeout_s: float, *, plan: Plan | None
    ) -> Loaded:
        self.timeouts.append(timeout_s)
        self.plans.append(plan)
        outcomes: list[Outcome] = []
        for index in range(hit.start_block, hit.num_blocks):
            if index == self.stop_at:
                outcomes.append(Miss.UNREACHABLE)
                break
            into(index, self.blocks[hit.keys_of(index, index + 1)])
            outcomes.append(Source.DRAM)
        rest = hit.num_blocks - hit.start_block - len(outcomes)
        return Loaded.of([*outcomes, *[Miss.BEHIND_MISS] * rest], LAYOUT)

    def absent(self, keys: bytes) -> npt.NDArray[np.bool_]:
        return np.array([key not in self.blocks for key in split(keys)], bool)

    def hint(self, keys: bytes, hints: Hints) -> None:
        self.told.append((len(split(keys)), hints))

    def store_keys(
        self, keys: bytes, put: Callable[[int, Bytes], None], *, start_block: int, hints: Hints
    ) -> StoreTask:
        self.hints.append(hints)
        if self.fail_stores:
            raise OSError("no more threads")
        task, names = StoreTask(), split(keys)
        self.stored.append((start_block, len(names)))

        def store() -> None:
            for index in range(start_block, len(names)):
                slot = np.zeros(BLOCK_BYTES, np.uint8)
                put(index, slot)
                self.blocks[names[index]] = slot
            count = len(names) - start_block
            task.finish(StoreResult(stored=count, num_bytes=count * BLOCK_BYTES))

        if self.at_once:
            store()
        else:
            self.tasks.append((task, store))
        return task


class Rig:
    def __init__(self, buffers: int = 16, *, start: bool = True) -> None:
        self.pool, self.client = Pool(), FakeClient()
        self.failures: list[str] = []
        self.staging = Staging(BLOCK_BYTES, buffers * 4096)
        pool: Any = self.pool
        self.transfers = Transfers(pool, self.staging, BLOCK_TOKENS, lambda where, error: self.failures.append(where))
        make: Any = lambda scope: self.client  # noqa: E731
        self.clients = ScopedClients(make, lambda where, error: self.failures.append(where))
        self.clients.get(Scope())
        if start:
            self.transfers.start(self.clients, 30.0)

    def ended(self, finished: Sequence[str] = (), wait: int = 1) -> tuple[set[str], set[int]]:
        """The next loads that end, and the bad engine blocks."""
        done: set[str] = set()
        bad: set[int] = set()
        barrier = threading.Event()
        for _ in range(3000):
            done |= self.transfers.ended(set(finished))
            bad |= self.transfers.bad_engine_blocks()
            if len(done) >= wait:
                return done, bad
            barrier.wait(0.01)
        raise AssertionError(f"only {done} ended")


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.pool.go_on.set()
    rig.transfers.close()


def keys(count: int) -> bytes:
    return b"".join(index.to_bytes(KEY_BYTES, "big") for index in range(1, count + 1))


def content(index: int) -> Bytes:
    return np.arange(index * BLOCK_BYTES, (index + 1) * BLOCK_BYTES).astype(np.uint8)


def fill(rig: Rig, count: int) -> None:
    rig.client.blocks.update({key: content(index) for index, key in enumerate(split(keys(count)))})


def test_a_load_is_paced_as_planned(rig):
    fill(rig, 2)
    plan = Plan(Leg(0, 2, 0.5, 0.1))
    for one in (replace(load(2), plan=plan), load(2)):
        rig.transfers.begin([one])
        rig.ended()
    assert rig.client.plans == [plan, None]


def load(count: int, first: int = 0, request: str = "r", table: int = 10) -> Load:
    """A load of `count` blocks from engine block `first` on into engine blocks from `table` on."""
    start = first // PER
    hit = PrefixHit(
        count * BLOCK_TOKENS, count, count, keys(count), (HitRun(start, count, local=True),), start_block=start
    )
    return Load(request, Scope(), hit, first, tuple(range(table, table + count * PER - first)))


def test_a_load_fills_the_engines_blocks(rig):
    fill(rig, 3)
    rig.transfers.begin([load(3)])
    assert rig.ended() == ({"r"}, set())
    assert (rig.pool.memory[10:22].reshape(3, -1) == [content(0), content(1), content(2)]).all()
    assert not rig.pool.memory[:10].any()
    assert not rig.pool.memory[22:].any()
    assert rig.transfers.take_counts() == {"loads": 1, "blocks:dram": 3, "loaded_bytes:dram": 3 * BLOCK_BYTES}
    assert rig.transfers.take_counts() == {}


def test_what_the_engine_has_of_a_block_is_left_alone(rig):
    fill(rig, 3)
    rig.transfers.begin([load(3, first=6)])
    assert rig.ended() == ({"r"}, set())
    rest = np.concatenate([content(1), content(2)]).reshape(-1, RUN)[2:]
    assert (rig.pool.memory[10:16] == rest).all()
    assert not rig.pool.memory[:10].any()
    assert not rig.pool.memory[16:].any()


@pytest.mark.parametrize(
    ("first", "stop_at", "bad"), [(0, 1, (14, 22)), (0, 0, (10, 22)), (6, 1, (10, 16)), (6, 2, (12, 16))]
)
def test_what_does_not_come_is_bad(rig, first, stop_at, bad):
    fill(rig, 3)
    rig.client.stop_at = stop_at
    rig.transfers.begin([load(3, first=first)])
    assert rig.ended() == ({"r"}, set(range(*bad)))
    counts = rig.transfers.take_counts()
    assert counts["blocks:unreachable"] == 1
    assert rig.failures == []


def test_a_device_that_fails_makes_the_whole_load_bad(rig):
    fill(rig, 3)
    rig.pool.fail_at = 15
    rig.transfers.begin([load(3)])
    assert rig.ended() == ({"r"}, set(range(10, 22)))
    assert rig.failures == ["load"]


def test_loads_fail_at_once_without_a_fleet_or_a_hit():
    rig = Rig(start=False)
    rig.transfers.begin([load(2)])
    assert rig.ended() == ({"r"}, set(range(10, 18)))
    rig.transfers.start(rig.clients, 30.0)
    rig.transfers.begin([Load("s", Scope(), None, 0, (3, 4))])
    assert rig.ended() == ({"s"}, {3, 4})
    rig.transfers.close()


def test_a_load_ends_early_when_its_request_does(rig):
    fill(rig, 3)
    rig.pool.go_on.clear()
    rig.transfers.begin([load(3)])
    assert rig.pool.entered.wait(30.0)
    assert rig.transfers.ended({"r", "unknown"}) == set(), "it is still writing to the engine's blocks"
    rig.pool.go_on.set()
    assert rig.ended() == ({"r"}, set(range(10, 22)))
    assert rig.transfers.take_counts() == {"loads_cancelled": 1}
    assert rig.transfers.ended({"r"}) == set(), "each load is told of once"


def test_time_runs_from_the_step_in_which_a_load_begins():
    """Loads behind slow ones do not get more time for having waited for their turn."""
    rig = Rig(start=False)
    fill(rig, 1)
    rig.transfers.start(rig.clients, 30.0)
    rig.pool.go_on.clear()
    rig.transfers.begin([load(1, request=str(number), table=4 * number) for number in range(6)])
    assert rig.pool.entered.wait(30.0)
    threading.Event().wait(0.05)
    rig.pool.go_on.set()
    assert rig.ended(wait=6) == ({str(number) for number in range(6)}, set())
    assert len(rig.client.timeouts) == 6
    assert min(rig.client.timeouts) < max(rig.client.timeouts) - 0.04
    rig.transfers.close()


def test_a_load_whose_request_ended_before_its_turn_does_not_begin(rig):
    fill(rig, 1)
    rig.pool.go_on.clear()
    rig.transfers.begin([load(1, request=str(number), table=4 * number) for number in range(6)])
    assert rig.pool.entered.wait(30.0)
    rig.transfers.ended({"5"})
    rig.pool.go_on.set()
    done, bad = rig.ended(wait=6)
    assert (len(done), bad) == (6, {20, 21, 22, 23})
    assert len(rig.client.timeouts) == 5


def test_loads_fail_when_there_are_no_threads(rig):
    fill(rig, 2)
    rig.transfers.close()
    rig.transfers.begin([load(1, request="a", table=0), load(1, request="b", table=4)])
    assert rig.ended(wait=2) == ({"a", "b"}, set(range(8)))
    assert rig.failures == ["load", "load"]


def test_several_loads_at_once(rig):
    fill(rig, 2)
    rig.transfers.begin([load(1, request="a", table=0), load(2, request="b", table=20)])
    assert rig.ended(wait=2) == ({"a", "b"}, set())
    assert (rig.pool.memory[0:4].reshape(-1) == content(0)).all()
    assert (rig.pool.memory[20:28].reshape(2, -1) == [content(0), content(1)]).all()


# saves


def save(count: int, start: int = 0, request: str = "r") -> Save:
    """Blocks [start, count), in engine blocks from 0 on."""
    return Save(request, Scope(), keys(count), start, tuple(range((count - start) * PER)))


def test_blocks_are_stored_as_they_were_in_their_step(rig):
    rig.pool.memory[:12] = np.arange(12 * RUN).reshape(12, RUN)
    before = rig.pool.memory.copy()
    rig.client.at_once = False
    rig.transfers.save([save(3)])
    rig.pool.memory[:] = 255  # vLLM gives the blocks to another request
    assert not rig.transfers.idle()
    for _, store in rig.client.tasks:
        store()
    assert rig.transfers.idle()
    stored = [rig.client.blocks[key] for key in split(keys(3))]
    assert (np.concatenate(stored) == before[:12].reshape(-1)).all()
    assert rig.transfers.take_counts() == {"saved_blocks": 3, "saved_bytes": 3 * BLOCK_BYTES}
    assert rig.staging.num_free == rig.staging.num_buffers


def test_what_this_node_has_is_not_copied(rig):
    fill(rig, 5)
    for index in (1, 2, 4):
        del rig.client.blocks[split(keys(5))[index]]
    rig.transfers.save([save(5)])
    assert rig.client.stored == [(1, 3), (4, 5)]


def test_stores_carry_the_hints_of_their_save(rig):
    rig.transfers.save([replace(save(3), hints=Hints.of("chat", turn=2)), save(2, request="s")])
    assert rig.client.hints == [Hints.of("chat", turn=2)]
    rig.transfers.save([save(4, 3)])
    assert rig.client.hints[1:] == [Hints()]


def test_hints_of_what_is_here_already_are_told_without_a_store(rig):
    fill(rig, 3)
    ends = Hints.of("chat", final=True)
    rig.transfers.save([replace(save(3), hints=ends), save(2, request="s")])
    assert rig.client.told == [(3, ends)]
    rig.transfers.save([replace(save(3, 3), hints=ends), replace(save(4), hints=ends)])
    assert (rig.client.told, rig.client.stored) == ([(3, ends)] * 2, [(3, 4)])


def test_more_than_the_buffers_hold_is_dropped_and_counted():
    """Nothing is stored behind what was dropped: nobody would find it."""
    rig = Rig(buffers=2)
    rig.client.at_once = False
    rig.transfers.save([save(3)])
    assert rig.client.stored == [(0, 2)]
    assert rig.transfers.take_counts() == {"dropped_blocks:buffer_full": 1}
    rig.client.tasks[0][1]()
    rig.transfers.save([save(4, start=3)])
    assert rig.client.stored == [(0, 2)]
    assert rig.transfers.take_counts() == {
        "saved_blocks": 2, "saved_bytes": 2 * BLOCK_BYTES, "dropped_blocks:behind_dropped": 1
    }  # fmt: skip
    rig.transfers.save([save(4, start=2, request="another")])
    assert rig.client.stored == [(0, 2), (2, 4)]
    assert rig.transfers.ended({"r"}) == set()
    rig.client.tasks[1][1]()
    rig.transfers.save([save(5, start=4)])
    assert rig.client.stored == [(0, 2), (2, 4), (4, 5)], "a request that has ended may have the name again"
    rig.transfers.close()


def test_buffers_come_back_when_a_store_cannot_begin(rig):
    rig.client.fail_stores = True
    with pytest.raises(OSError, match="no more threads"):
        rig.transfers.save([save(3)])
    assert rig.staging.num_free == rig.staging.num_buffers


def test_nothing_is_saved_without_a_fleet():
    rig = Rig(start=False)
    rig.transfers.save([save(3)])
    assert rig.client.stored == []
    assert rig.transfers.take_counts() == {"dropped_blocks:not_ready": 3}
    rig.transfers.close()


def test_a_new_scope_is_ready_for_the_next_save(rig):
    scope = Scope(reset="word")
    rig.transfers.save([Save("r", scope, keys(1), 0, tuple(range(PER)))])
    assert rig.client.stored == []
    assert rig.clients.get(scope) is rig.client
    rig.transfers.save([Save("s", scope, keys(1), 0, tuple(range(PER)))])
    assert rig.client.stored == [(0, 1)]


def test_the_engine_goes_on_after_the_copies(rig):
    rig.transfers.fence()
    assert rig.pool.fences == 1


def test_clients_used_longest_ago_are_closed():
    closed: list[str] = []

    class Closable:
        def __init__(self, scope: Scope) -> None:
            self.name = scope.reset

        def close(self) -> None:
            closed.append(self.name)

    make: Any = Closable
    clients = ScopedClients(make, lambda where, error: None)
    clients.get(Scope())
    for number in range(15):
        clients.get(Scope(reset=str(number)))
    assert clients.ready(Scope(reset="0")) is clients.get(Scope(reset="0"))
    clients.get(Scope(reset="15"))
    assert closed == ["1"]
    assert clients.ready(Scope(reset="1")) is None
    assert clients.ready(Scope()) is not None, "the model's own is kept"
    assert len(clients.all()) == 16


def test_a_scope_for_which_there_is_no_thread_is_made_later(monkeypatch):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    failures: list[str] = []
    made: Any = object()
    clients = ScopedClients(lambda scope: made, lambda where, error: failures.append(where))
    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", refuse)
        clients.prepare(Scope(reset="word"))
    assert failures == ["client"]
    clients.prepare(Scope(reset="word"))
    for thread in threading.enumerate():
        if thread.name == "kvfleet-client":
            thread.join(30.0)
    assert clients.ready(Scope(reset="word")) is made


def test_a_scope_that_takes_long_does_not_hold_up_the_others():
    slow, made = threading.Event(), threading.Event()

    def make(scope: Scope) -> Any:
        if scope.reset:
            made.set()
            assert slow.wait(30.0)
            raise OSError("no such node")
        return object()

    failures: list[str] = []
    clients = ScopedClients(make, lambda where, error: failures.append(where))
    clients.get(Scope())
    for _ in range(3):
        clients.prepare(Scope(reset="word"))
    assert made.wait(30.0)
    assert clients.get(Scope()) is clients.ready(Scope())
    slow.set()
    for thread in threading.enumerate():
        if thread.name == "kvfleet-client":
            thread.join(30.0)
    assert failures == ["client"], "made once, however often it was asked for"

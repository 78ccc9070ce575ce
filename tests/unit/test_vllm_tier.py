"""What the tier of vLLM's offloading remembers and has its client do, without vLLM."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from kvfleet import BlockLayout, Hints, ModelSpec, PrefixHit
from kvfleet.connectors.vllm.tier_book import Chain, ChunkRun, LookupBook, Question
from kvfleet.connectors.vllm.tier_transfers import Finished, Transfers, _MemoryClosedError
from kvfleet.core.block import KEY_BYTES, engine_keys, split
from kvfleet.hits import HitRun, Loaded, StoreResult
from kvfleet.node.messages import Miss, Source
from kvfleet.storing import StoreTask
from kvfleet.testing.clock import ManualClock

ROW_BYTES = 64
SPEC = ModelSpec(
    model_id="test",
    weight_revision="1",
    layout=BlockLayout.opaque(block_bytes=ROW_BYTES, block_tokens=8, inner_order="words"),
)
A, B, C, D, E = (letter * 36 for letter in (b"a", b"b", b"c", b"d", b"e"))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def book(clock: ManualClock) -> LookupBook:
    return LookupBook(timeout_s=2.0, clock=clock.now)


def asked(book: LookupBook, request: str, *names: bytes) -> list[bool | None]:
    return [book.ask(request, name) for name in names]


class TestLookupBook:
    def test_an_answer_comes_some_steps_later(self, book: LookupBook) -> None:
        assert asked(book, "r", A, B, C) == [None, None, None]
        [question] = book.flush()
        assert question.names == (A, B, C)
        assert asked(book, "r", A, B, C) == [None, None, None]
        assert book.flush() == []
        book.answer(question, 2)
        assert asked(book, "r", A, B, C) == [True, True, False]
        assert book.flush() == []

    def test_each_request_has_a_question_of_its_own(self, book: LookupBook) -> None:
        asked(book, "r", A, B)
        asked(book, "s", A)
        first, second = book.flush()
        assert (first.names, second.names) == ((A, B), (A,))
        book.answer(first, 0)
        assert asked(book, "r", A, B) == [False, False]
        assert asked(book, "s", A) == [None]
        book.answer(second, 1)  # stored meanwhile
        assert asked(book, "s", A) == [True]
        assert asked(book, "r", A) == [False]

    def test_an_answer_for_a_request_that_has_ended_is_for_nobody(self, book: LookupBook) -> None:
        asked(book, "r", A)
        [question] = book.flush()
        book.finish("r")
        assert asked(book, "r", A) == [None]  # another request of the same name
        book.answer(question, 1)
        assert asked(book, "r", A) == [None]
        [again] = book.flush()
        book.answer(again, 0)
        assert asked(book, "r", A) == [False]

    def test_what_a_request_asked_for_before_it_ended_is_not_looked_up(self, book: LookupBook) -> None:
        asked(book, "r", A)
        book.finish("r")
        book.finish("never seen")
        assert book.flush() == []

    def test_nobody_answers(self, book: LookupBook, clock: ManualClock) -> None:
        asked(book, "r", A, B)
        [question] = book.flush()
        clock.advance(2.0)
        assert asked(book, "r", A) == [None]
        clock.advance(0.1)
        assert asked(book, "r", A, B) == [False, False]
        assert book.timeouts == 2
        book.answer(question, 2)
        assert asked(book, "r", A, B) == [False, False]
        assert book.timeouts == 2

    def test_what_could_not_be_loaded_is_a_miss_for_all_who_had_asked(self, book: LookupBook) -> None:
        for request in ("r", "s"):
            asked(book, request, A, B)
        asked(book, "t", A, B)
        r, s, t = book.flush()
        book.answer(r, 2)
        book.answer(s, 2)
        book.fail([B])
        book.answer(t, 2)  # an answer from before the failure
        for request in ("r", "s", "t"):
            assert asked(book, request, A, B) == [True, False]

    def test_what_could_not_be_loaded_is_a_miss_for_others_for_a_while(
        self, book: LookupBook, clock: ManualClock
    ) -> None:
        book.fail([A])
        assert asked(book, "r", A, B) == [False, None]
        assert [question.names for question in book.flush()] == [(B,)]
        clock.advance(5.0)
        assert asked(book, "s", A) == [None]
        assert asked(book, "r", A) == [False]
        book.fail([C])
        assert asked(book, "s", A) == [None]


class TestChain:
    NAMES = (A, B, C, D, E)

    def keys(self, num_blocks: int) -> bytes:
        return engine_keys(SPEC.root, self.NAMES[:num_blocks])

    def test_chunks_are_put_in_order(self) -> None:
        chain = Chain(SPEC.root)
        chain.extend(self.NAMES)
        assert chain.runs([C, B, D], [7, 8, 9]) == [ChunkRun(self.keys(4), 1, (8, 7, 9))]

    def test_chunks_apart_are_runs_of_their_own(self) -> None:
        chain = Chain(SPEC.root)
        chain.extend(self.NAMES)
        assert chain.runs([E, A, D], [1, 2, 3]) == [
            ChunkRun(self.keys(1), 0, (2,)),
            ChunkRun(self.keys(5), 3, (3, 1)),
        ]

    def test_a_chain_grows(self) -> None:
        chain = Chain(SPEC.root)
        chain.extend([A, B])
        assert chain.runs([B], [1]) == [ChunkRun(self.keys(2), 1, (1,))]
        chain.extend(dict.fromkeys(self.NAMES))
        chain.extend([A])
        assert chain.runs([D, C], [1, 2]) == [ChunkRun(self.keys(4), 2, (2, 1))]
        assert chain.runs([E], [0]) == [ChunkRun(self.keys(5), 4, (0,))]

    def test_unknown_chunks_can_be_stored_too(self) -> None:
        chain = Chain(SPEC.root)
        chain.extend([A])
        assert chain.runs([C, A, D], [1, 2, 3]) == [
            ChunkRun(self.keys(1), 0, (2,)),
            ChunkRun(engine_keys(SPEC.root, [C]), 0, (1,)),
            ChunkRun(engine_keys(SPEC.root, [D]), 0, (3,)),
        ]

    def test_nothing_to_store(self) -> None:
        assert Chain(SPEC.root).runs([], []) == []


@dataclass
class FakeClient:
    """Keeps blocks in a dict. `gone`: found by lookups, but not there when loaded. `stuck`: no store gets anywhere."""

    spec: ModelSpec = SPEC
    blocks: dict[bytes, bytes] = field(default_factory=dict)
    gone: set[bytes] = field(default_factory=set)
    asked: list[tuple[bytes, int]] = field(default_factory=list)
    prefixes: list[tuple[bytes, int]] = field(default_factory=list)
    hints: list[Hints] = field(default_factory=list)
    broken: bool = False
    dropping: bool = False
    stuck: bool = False
    puts: list[Any] = field(default_factory=list)
    may_load: threading.Event = field(default_factory=threading.Event)
    tasks: list[StoreTask] = field(default_factory=list)

    def count(self, hit: PrefixHit) -> None:
        assert hit.start_block == hit.num_blocks, "what was found is counted when it is loaded"

    def lookup_keys(self, keys: bytes, *, start_block: int = 0, counted: bool = True) -> PrefixHit:
        if self.broken:
            raise RuntimeError("broken")
        asked = split(keys)
        self.asked.append((keys, start_block))
        holes = (i for i, key in enumerate(asked) if i >= start_block and key not in self.blocks)
        found = next(holes, len(asked))
        runs = (HitRun(start_block, found, local=True),) if found > start_block else ()
        return PrefixHit(found * SPEC.block_tokens, found, len(asked), keys, runs, None, start_block)

    def load(self, hit: PrefixHit, take: Any, timeout_s: float) -> Loaded:
        assert self.may_load.wait(30.0)
        outcomes: list[Source | Miss] = []
        for index, key in enumerate(split(hit.keys)[: hit.num_blocks]):
            if index < hit.start_block:
                continue
            take(index, np.frombuffer(self.blocks[key], np.uint8))
            if key in self.gone:
                outcomes.append(Miss.EVICTED)
                break
            outcomes.append(Source.DRAM)
        return Loaded.of(outcomes, SPEC.layout)

    def store_keys(self, keys: bytes, put: Any, *, start_block: int, hints: Hints) -> StoreTask:
        self.hints.append(hints)
        task = StoreTask()
        self.tasks.append(task)
        self.prefixes.append((keys, start_block))
        todo = split(keys)[start_block:]
        if self.dropping:
            task.finish(StoreResult(dropped=len(todo), reason="queue_full"))
            return task
        if self.stuck:
            self.puts.append(put)
            return task
        for index, key in enumerate(todo, start=start_block):
            block = np.zeros(ROW_BYTES, np.uint8)
            put(index, block)
            self.blocks[key] = block.tobytes()
        return task

    def finish(self) -> None:
        task = self.tasks.pop()
        task.finish(StoreResult(stored=len(self.blocks), num_bytes=len(self.blocks) * ROW_BYTES))


class Rig:
    def __init__(self) -> None:
        self.client = cast(Any, FakeClient())
        self.client.may_load.set()
        self.rows = np.arange(8 * ROW_BYTES, dtype=np.uint8).reshape(8, ROW_BYTES)
        self.faults: list[str] = []
        self.transfers = Transfers(self.client, self.rows, 30.0, lambda where, error: self.faults.append(where))
        self.chain = Chain(SPEC.root)
        self.chain.extend([A, B, C, D, E])

    def stored(self, *names: bytes) -> None:
        """Put blocks in the fleet; each consists of the first byte of its name."""
        for name in names:
            self.client.blocks[engine_keys(SPEC.root, [name])] = name[:1] * ROW_BYTES

    def finished(self) -> list[tuple[int, bool, int, int, int]]:
        """Wait for all jobs: id, whether it is a load, blocks that came through, blocks in all, bytes."""
        self.transfers.drain(30.0)
        jobs: list[Finished] = self.transfers.finished()
        assert not self.transfers.busy
        return [(job.job_id, job.is_load, job.num_blocks, job.total, job.num_bytes) for job in jobs]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.client.may_load.set()
    rig.transfers.close()


def answered(rig: Rig, deadline: float, *names: bytes) -> tuple[Question, int]:
    """Ask a question and wait for the answer."""
    question = Question(names, deadline, {})
    rig.transfers.ask(question)
    return rig.transfers._answers.get(timeout=30.0)


class TestTransfers:
    FOREVER = float("inf")

    def test_a_lookup_counts_up_to_the_first_hole(self, rig: Rig) -> None:
        rig.stored(A, B, D)
        question, num_found = answered(rig, self.FOREVER, A, B, C, D)
        assert (question.names, num_found) == ((A, B, C, D), 2)
        assert rig.transfers.answers() == []

    def test_a_lookup_that_comes_too_late_asks_nobody(self, rig: Rig) -> None:
        rig.stored(A)
        assert answered(rig, 0.0, A)[1] == 0

    def test_a_broken_client_has_nothing(self, rig: Rig) -> None:
        rig.client.broken = True
        assert answered(rig, self.FOREVER, A)[1] == 0
        rig.transfers.load(1, rig.chain.run([A], [0]))
        assert rig.finished() == [(1, True, 0, 1, 0)]
        assert rig.faults == ["lookup", "load"]

    def test_a_load_fills_its_rows(self, rig: Rig) -> None:
        rig.stored(A, B)
        before = rig.rows.copy()
        rig.transfers.load(4, rig.chain.run([A, B], [5, 2]))
        assert rig.finished() == [(4, True, 2, 2, 2 * ROW_BYTES)]
        before[5], before[2] = ord("a"), ord("b")
        assert np.array_equal(rig.rows, before)

    def test_a_load_gives_the_prefix_too(self, rig: Rig) -> None:
        rig.stored(C, D)
        before = rig.rows.copy()
        rig.transfers.load(4, rig.chain.run([C, D], [5, 2]))
        assert rig.finished() == [(4, True, 2, 2, 2 * ROW_BYTES)]
        assert rig.client.asked == [(engine_keys(SPEC.root, [A, B, C, D]), 2)]
        before[5], before[2] = ord("c"), ord("d")
        assert np.array_equal(rig.rows, before)

    def test_a_load_of_chunks_apart_ends_at_the_first_hole_too(self, rig: Rig) -> None:
        rig.stored(A, C)
        rig.transfers.load(4, rig.chain.run([A, C, D], [5, 2, 0]))
        assert rig.finished() == [(4, True, 2, 3, 2 * ROW_BYTES)]
        assert rig.client.asked == [(engine_keys(SPEC.root, [A, C, D]), 0)]
        assert (bytes(rig.rows[5, :1]), bytes(rig.rows[2, :1])) == (b"a", b"c")

    def test_a_load_ends_at_the_first_block_that_does_not_come(self, rig: Rig) -> None:
        rig.stored(A, B, C)
        rig.client.gone = {engine_keys(SPEC.root, [B])}
        rig.transfers.load(1, rig.chain.run([A, B, C], [0, 1, 2]))
        assert rig.finished() == [(1, True, 1, 3, ROW_BYTES)]

    def test_a_load_whose_blocks_have_left_since_the_lookup(self, rig: Rig) -> None:
        rig.transfers.load(1, rig.chain.run([A, B], [0, 1]))
        assert rig.finished() == [(1, True, 0, 2, 0)]

    def test_a_load_under_way_is_not_finished(self, rig: Rig) -> None:
        rig.stored(A)
        rig.client.may_load.clear()
        rig.transfers.load(1, rig.chain.run([A], [0]))
        assert rig.transfers.finished() == []
        assert rig.transfers.busy
        rig.client.may_load.set()
        assert rig.finished() == [(1, True, 1, 1, ROW_BYTES)]

    def test_a_store_gives_the_prefix_and_copies_from_the_rows(self, rig: Rig) -> None:
        rig.transfers.store(7, rig.chain.runs([D, C], [6, 3]))
        assert rig.client.prefixes == [(engine_keys(SPEC.root, [A, B, C, D]), 2)]
        assert rig.client.blocks == {
            engine_keys(SPEC.root, [C]): rig.rows[3].tobytes(),
            engine_keys(SPEC.root, [D]): rig.rows[6].tobytes(),
        }
        assert rig.transfers.busy
        assert rig.transfers.finished() == []
        rig.client.finish()
        assert rig.finished() == [(7, False, 2, 2, 2 * ROW_BYTES)]

    def test_a_store_of_several_runs_ends_with_the_last(self, rig: Rig) -> None:
        rig.transfers.store(7, rig.chain.runs([A, C], [0, 1]), Hints(final=True))
        assert set(rig.client.hints) == {Hints(final=True)}
        assert [len(keys) // KEY_BYTES - start for keys, start in rig.client.prefixes] == [1, 1]
        first, second = rig.client.tasks
        second.finish(StoreResult(already=1))
        assert rig.transfers.finished() == []
        first.finish(StoreResult(stored=1, num_bytes=ROW_BYTES))
        assert rig.finished() == [(7, False, 2, 2, ROW_BYTES)]

    def test_a_store_that_is_dropped_has_failed_at_once(self, rig: Rig) -> None:
        rig.client.dropping = True
        rig.transfers.store(7, rig.chain.runs([A, B], [0, 1]))
        jobs = rig.transfers.finished()
        assert [(job.job_id, job.num_blocks, job.total) for job in jobs] == [(7, 0, 2)]
        assert rig.client.blocks == {}

    def test_after_the_end_nothing_is_written(self, rig: Rig) -> None:
        rig.stored(A)
        before = rig.rows.copy()
        assert rig.transfers.close() == []
        assert rig.transfers._load(rig.chain.run([A], [0]), self.FOREVER) == 0
        assert np.array_equal(rig.rows, before)


@dataclass
class SlowBlock:
    """A block whose copy ends when it is told to."""

    begun: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)

    def __setitem__(self, where: slice, data: object) -> None:
        self.begun.set()
        assert self.go_on.wait(30.0)


class TestTheEnd:
    def test_what_has_ended_is_reported_and_what_has_not_has_failed(self, rig: Rig) -> None:
        before = rig.rows.copy()
        rig.transfers.store(1, rig.chain.runs([C], [2]))
        rig.client.finish()
        rig.stored(A, B)
        rig.transfers.store(2, rig.chain.runs([D, E], [3, 4]))
        rig.client.may_load.clear()
        rig.transfers.load(3, rig.chain.run([A, B], [0, 1]))
        rig.transfers.drain(0.0)
        jobs = [(job.job_id, job.is_load, job.num_blocks, job.total) for job in rig.transfers.close()]
        assert sorted(jobs) == [(1, False, 1, 1), (2, False, 0, 2), (3, True, 0, 2)]
        assert not rig.transfers.busy
        assert rig.transfers.finished() == []

        rig.client.may_load.set()
        rig.transfers._loading.shutdown(wait=True)
        assert np.array_equal(rig.rows, before)
        assert rig.faults == []

    def test_a_copy_under_way_is_waited_for(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        block: Any = SlowBlock()
        turn, waits = rig.transfers._memory._turn, threading.Event()

        def wait_for(condition: Callable[[], bool]) -> bool:
            waits.set()
            return threading.Condition.wait_for(turn, condition)

        monkeypatch.setattr(turn, "wait_for", wait_for)
        put = rig.transfers._put(rig.chain.run([A], [0]))
        with ThreadPoolExecutor(2) as threads:
            copying = threads.submit(put, 0, block)
            assert block.begun.wait(30.0)
            closing = threads.submit(rig.transfers.close)
            assert waits.wait(30.0)
            assert not closing.done()
            block.go_on.set()
            copying.result(30.0)
            assert closing.result(30.0) == []

    def test_stores_that_a_stuck_manager_holds_up_are_dropped(self, rig: Rig) -> None:
        rig.client.stuck = True
        rig.transfers.store(1, rig.chain.runs([A, B], [0, 1]))
        rig.transfers.store(2, rig.chain.runs([C], [2]))
        rig.transfers.drain(0.1)
        assert rig.transfers.finished() == []
        assert [(job.job_id, job.num_blocks, job.total) for job in rig.transfers.close()] == [(1, 0, 2), (2, 0, 1)]
        for first, put in enumerate(rig.client.puts):  # the manager has answered at last
            with pytest.raises(_MemoryClosedError):
                put(2 * first, np.zeros(ROW_BYTES, np.uint8))

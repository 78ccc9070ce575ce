"""What the connector tells vLLM's scheduler, with a fleet that is a set of keys."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvfleet.connectors.vllm.adapters import Adapters
from kvfleet.connectors.vllm.background import Background, Job
from kvfleet.connectors.vllm.identity import AdapterRef
from kvfleet.connectors.vllm.lookups import Lookups
from kvfleet.connectors.vllm.plan import Load
from kvfleet.connectors.vllm.scheduling import Scheduling
from kvfleet.connectors.vllm.scopes import Scope
from kvfleet.core.block import KEY_BYTES, engine_keys, split
from kvfleet.core.directory import NodeId, Run
from kvfleet.core.hints import Hints
from kvfleet.core.planner import Plan
from kvfleet.errors import ConfigError
from kvfleet.hits import PrefixHit, merge_runs
from kvfleet.node.messages import Miss
from kvfleet.planning import Planning

ENGINE_BLOCK = 16
BLOCK = 64  # 4 engine blocks
PER = BLOCK // ENGINE_BLOCK
TIMEOUT_S = 0.5


def root(scope: Scope) -> bytes:
    return (repr(scope).encode() + bytes(32))[-32:]


class HangingError(Exception):
    """A call does not come back."""


@dataclass
class FakeClient:
    """A client of a fleet that holds keys here, in memory or on drives, and keys elsewhere."""

    here: set[bytes] = field(default_factory=set)
    on_drives: set[bytes] = field(default_factory=set)
    elsewhere: set[bytes] = field(default_factory=set)
    asked: list[tuple[int, int]] = field(default_factory=list)
    counted: list[tuple[int, int, int]] = field(default_factory=list)
    labels: set[str] = field(default_factory=set)
    plans: list[Plan | None] = field(default_factory=list)
    planning: Planning | None = None
    fault: Miss | None = None
    hangs: bool = False

    def lookup_local(self, keys: bytes, *, start_block: int = 0, label: str = "") -> PrefixHit:
        self.labels.add(label)
        return self._hit(keys, start_block, self.here, ())

    def count(self, hit: PrefixHit, plan: Plan | None = None, *, num_tokens: int = 0) -> None:
        self.plans.append(plan)
        self.counted.append((hit.start_block, hit.num_blocks, hit.asked_blocks))

    def lookup_keys(self, keys: bytes, *, start_block: int = 0, label: str = "", counted: bool = True) -> PrefixHit:
        assert not counted
        self.asked.append((start_block, len(keys) // KEY_BYTES))
        if self.hangs:
            raise HangingError
        if self.fault is not None:
            return self._hit(keys, start_block, self.here, (), self.fault)
        return self._hit(keys, start_block, self.here, (NodeId("b" * 56),))

    def _hit(
        self, keys: bytes, start: int, here: set[bytes], nodes: tuple[NodeId, ...], fault: Miss | None = None
    ) -> PrefixHit:
        names = split(keys)[start:]
        local = np.array([name in here for name in names], bool)
        stored = local | np.array([name in self.on_drives for name in names], bool)
        head = len(stored) if stored.all() else int(stored.argmin())
        found = 0
        while nodes and head + found < len(names) and names[head + found] in self.elsewhere:
            found += 1
        end = head + found
        runs = merge_runs(local[:end], head, [Run(0, found, nodes, False)] if found else [], start, stored=stored[:end])
        stop = runs[-1].stop if runs else start
        return PrefixHit(stop * BLOCK, stop, len(keys) // KEY_BYTES, keys, runs, fault, start)


@dataclass
class FakeClients:
    clients: dict[Scope, FakeClient]
    makes: bool = False
    prepared: list[Scope] = field(default_factory=list)

    def ready(self, scope: Scope) -> FakeClient | None:
        return self.clients.get(scope)

    def prepare(self, scope: Scope) -> None:
        self.prepared.append(scope)
        if self.makes:
            self.clients[scope] = FakeClient()


@dataclass
class Request:
    request_id: str
    block_hashes: Any  # a list
    kv_transfer_params: dict[str, Any] | None = None
    lora_request: Any = None
    skip_reading_prefix_cache: bool | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.block_hashes) * ENGINE_BLOCK + 1


class Inline:
    """Runs what is submitted at once, or when told to."""

    def __init__(self) -> None:
        self.later: list[Any] = []
        self.held = False

    def submit(self, work: Any) -> Any:
        job: Any = Job(work)
        self.later.append(job)
        if not self.held:
            self.run()
        return job

    def run(self) -> None:
        for job in self.later:
            with suppress(HangingError):
                job.run()
                job.done = True
        self.later.clear()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Rig:
    def __init__(self, *, saves: bool = True) -> None:
        self.clock = Clock()
        self.failures: list[str] = []
        self.lookups = Lookups(BLOCK, ENGINE_BLOCK, Adapters(self.read_adapter), self.failed, self.clock)
        self.scheduling = Scheduling(self.lookups, ENGINE_BLOCK, BLOCK, saves=saves)
        self.threads = Inline()
        self.lookups.close()
        self.lookups._asking = self.threads  # type: ignore[assignment]
        self.client = FakeClient()
        self.clients = FakeClients({Scope(): self.client})
        self.adapters: dict[str, str] = {}

    def start(self) -> Rig:
        self.lookups.start(self.clients, root, TIMEOUT_S)  # type: ignore[arg-type]
        return self

    def failed(self, where: str, error: Exception) -> None:
        self.failures.append(where)

    def read_adapter(self, lora: Any) -> AdapterRef:
        if lora.lora_path not in self.adapters:
            raise ConfigError("adapter", "is not there")
        return AdapterRef(name=lora.lora_name, revision=self.adapters[lora.lora_path])


def hashes(count: int, seed: int = 0) -> list[bytes]:
    return [b"%d-%d" % (seed, index) for index in range(count)]


def keys(request: Request, scope: Scope | None = None) -> list[bytes]:
    names = request.block_hashes[PER - 1 :: PER]
    return list(split(engine_keys(root(scope or Scope()), names)))


@pytest.fixture
def rig() -> Rig:
    return Rig().start()


def step(
    new: Sequence[tuple[str, int, list[int]]] = (),
    cached: Sequence[tuple[str, int, list[int] | None]] = (),
    scheduled: dict[str, int] | None = None,
    resumed: Sequence[str] = (),
) -> Any:
    """A SchedulerOutput: new and running requests with computed tokens and (new) engine blocks."""
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=r, num_computed_tokens=n, block_ids=(b,)) for r, n, b in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[r for r, _, _ in cached],
            num_computed_tokens=[n for _, n, _ in cached],
            new_block_ids=[None if b is None else (b,) for _, _, b in cached],
            resumed_req_ids=set(resumed),
        ),
        num_scheduled_tokens=scheduled or {},
    )


# lookups


def test_what_is_here_is_answered_at_once(rig):
    request = Request("r", hashes(10))
    rig.client.here.update(keys(request))
    assert rig.scheduling.matched_tokens(request, 0) == 2 * BLOCK
    assert rig.client.asked == []


def test_what_is_elsewhere_is_answered_when_it_is_known(rig):
    request = Request("r", hashes(12))
    rig.client.here.update(keys(request)[:1])
    rig.client.elsewhere.update(keys(request)[1:2])
    rig.threads.held = True
    assert rig.scheduling.matched_tokens(request, 0) is None
    assert rig.scheduling.matched_tokens(request, 0) is None
    assert len(rig.threads.later) == 1, "asked once, however often vLLM asks"
    rig.threads.run()
    assert rig.scheduling.matched_tokens(request, 0) == 2 * BLOCK
    assert rig.client.asked == [(0, 3)]


def test_nothing_is_found_before_the_fleet_is_there():
    rig = Rig()
    request = Request("r", hashes(12))
    rig.client.here.update(keys(request))
    assert rig.scheduling.matched_tokens(request, 0) == 0
    rig.start()
    assert rig.scheduling.matched_tokens(request, 0) == 3 * BLOCK


@pytest.mark.parametrize(("computed", "expected"), [(0, 192), (16, 176), (64, 128), (80, 112), (176, 16), (192, 0)])
def test_only_what_the_engine_lacks_is_counted(rig, computed, expected):
    request = Request("r", hashes(12))
    rig.client.here.update(keys(request))
    assert rig.scheduling.matched_tokens(request, computed) == expected


def test_blocks_before_those_of_the_engine_are_not_needed(rig):
    request = Request("r", hashes(12))
    rig.client.here.update(keys(request)[1:])
    assert rig.scheduling.matched_tokens(Request("cold", hashes(12)), 0) == 0
    assert rig.scheduling.matched_tokens(request, 80) == 112


def test_a_directory_that_does_not_answer_delays_one_request_by_the_timeout(rig):
    rig.client.hangs = True
    first, second = Request("1", hashes(12)), Request("2", hashes(12, seed=1))
    rig.client.here.update(keys(first)[:1])
    assert rig.scheduling.matched_tokens(first, 0) is None
    rig.clock.now += TIMEOUT_S
    assert rig.scheduling.matched_tokens(first, 0) == BLOCK, "what is here is taken"
    assert rig.scheduling.matched_tokens(second, 0) == 0, "and who comes next does not wait"
    rig.clock.now += 10.0
    assert rig.scheduling.matched_tokens(Request("3", hashes(12)), 0) is None, "later it is asked again"


def test_a_directory_that_fails_is_left_alone_for_a_while(rig):
    rig.client.fault = Miss.DIRECTORY_UNAVAILABLE
    assert rig.scheduling.matched_tokens(Request("1", hashes(12)), 0) == 0
    assert rig.scheduling.matched_tokens(Request("2", hashes(12)), 0) == 0
    assert rig.client.asked == [(0, 3)]


def test_an_answer_holds_while_the_engine_gains_tokens_itself(rig):
    request = Request("r", hashes(12))
    rig.client.elsewhere.update(keys(request))
    rig.threads.held = True
    for computed in (0, 16, 32, 64):
        assert rig.scheduling.matched_tokens(request, computed) is None
    rig.threads.run()
    assert rig.scheduling.matched_tokens(request, 80) == 112
    assert rig.client.asked == [(0, 3)]
    rig.scheduling.allocated(request, list(range(12)), 112)
    (load,) = rig.scheduling.take_loads()
    assert load.hit is not None
    assert (load.first, load.hit.start_block, load.hit.num_blocks) == (5, 1, 3)
    assert [(run.start, run.stop) for run in load.hit.runs] == [(1, 3)]


def test_an_answer_does_not_hold_when_the_engine_loses_tokens(rig):
    request = Request("r", hashes(12))
    rig.client.elsewhere.update(keys(request))
    assert rig.scheduling.matched_tokens(request, 128) == 64
    assert rig.scheduling.matched_tokens(request, 0) == 192
    assert rig.client.asked == [(2, 3), (0, 3)]


def test_a_request_that_must_be_computed_is(rig):
    request = Request("r", hashes(12), skip_reading_prefix_cache=True)
    rig.client.here.update(keys(request))
    assert rig.scheduling.matched_tokens(request, 0) == 0
    (save,) = rig.scheduling.saves(step(new=[("r", 0, list(range(12)))], scheduled={"r": 64}))
    assert save.start_block == 0, "what it computes is as good as any"


def test_an_old_answer_is_asked_for_again(rig):
    request = Request("r", hashes(12))
    assert rig.scheduling.matched_tokens(request, 0) == 0
    rig.client.elsewhere.update(keys(request))
    assert rig.scheduling.matched_tokens(request, 0) == 0
    rig.clock.now += 60.0
    assert rig.scheduling.matched_tokens(request, 0) == 3 * BLOCK


def test_a_request_is_counted_once_however_long_it_waits(rig):
    request = Request("r", hashes(12))
    for _ in range(3):
        assert rig.scheduling.matched_tokens(request, 0) == 0
        rig.clock.now += 60.0
    assert rig.client.counted == []
    rig.client.elsewhere.update(keys(request)[:2])
    assert rig.scheduling.matched_tokens(request, 0) == 2 * BLOCK
    rig.scheduling.allocated(request, list(range(12)), 2 * BLOCK)
    assert rig.client.counted == [(0, 2, 3)], "the answer that is used"
    rig.scheduling.allocated(request, list(range(12)), 0)
    assert rig.scheduling.matched_tokens(request, 0) == 2 * BLOCK
    rig.scheduling.allocated(request, list(range(12)), 2 * BLOCK)
    assert len(rig.client.counted) == 1, "a preempted request is the same request"


def test_a_request_that_finds_nothing_is_counted_when_it_is_computed(rig):
    request = Request("r", hashes(12))
    assert rig.scheduling.matched_tokens(request, 0) == 0
    rig.scheduling.allocated(request, list(range(12)), 0)
    rig.scheduling.allocated(request, list(range(12)), 0)
    assert rig.client.counted == [(0, 0, 3)]


# loads


def test_a_load_begins_inside_a_block_where_the_engine_has_its_beginning(rig):
    request = Request("r", hashes(12))
    rig.client.here.update(keys(request))
    assert rig.scheduling.matched_tokens(request, 80) == 112
    rig.scheduling.allocated(request, list(range(100, 112)), 112)
    (load,) = rig.scheduling.take_loads()
    assert (load.first, load.engine_blocks) == (5, tuple(range(105, 112)))
    assert load.hit is not None
    assert (load.hit.start_block, load.hit.num_blocks) == (1, 3)
    assert rig.scheduling.sources(request, 112) == {"host": 112}
    assert rig.scheduling.take_loads() == ()


def test_what_is_on_the_drives_is_said_to_come_from_disk(rig):
    request = Request("r", hashes(12))
    rig.client.here.update(keys(request)[:2])
    rig.client.on_drives.update(keys(request))
    assert rig.scheduling.matched_tokens(request, 80) == 112
    rig.scheduling.allocated(request, list(range(100, 112)), 112)
    assert rig.scheduling.sources(request, 112) == {"host": 48, "disk": 64}


def test_a_shorter_allocation_shortens_the_load(rig):
    request = Request("r", hashes(12))
    rig.client.here.update(keys(request))
    rig.scheduling.matched_tokens(request, 0)
    rig.scheduling.allocated(request, list(range(12)), 5 * ENGINE_BLOCK)
    (load,) = rig.scheduling.take_loads()
    assert load.hit is not None
    assert (load.hit.num_blocks, load.hit.num_tokens, load.engine_blocks) == (2, 2 * BLOCK, tuple(range(5)))


def test_a_load_without_a_hit_is_told_to_the_workers_to_fail(rig):
    rig.scheduling.allocated(Request("r", hashes(12)), list(range(12)), 32)
    assert rig.scheduling.take_loads() == (Load("r", Scope(), None, 0, (0, 1)),)


def test_a_load_that_cannot_be_planned_fails_too(rig):
    rig.scheduling.give_up("r", list(range(12)), 32)
    assert rig.scheduling.take_loads() == (Load("r", Scope(), None, 0, (10, 11)),)
    rig.scheduling.give_up("r", list(range(12)), 0)
    assert rig.scheduling.take_loads() == ()


def test_nothing_to_load_is_no_load(rig):
    rig.scheduling.allocated(Request("r", hashes(12)), list(range(12)), 0)
    assert rig.scheduling.take_loads() == ()


def loaded(rig: Rig, request: Request, table: list[int]) -> None:
    """Have a request load all it has in the fleet."""
    tokens = rig.scheduling.matched_tokens(request, 0)
    assert tokens
    rig.scheduling.allocated(request, table, tokens)
    rig.scheduling.take_loads()


def test_a_request_whose_load_failed_is_never_promised_anything_again(rig):
    request, other = Request("r", hashes(12)), Request("o", hashes(12))
    rig.client.here.update(keys(request))
    loaded(rig, request, list(range(12)))
    rig.scheduling.output(SimpleNamespace(finished_recving={"r"}, invalid_block_ids={6, 7}))
    assert rig.scheduling.matched_tokens(request, 0) == 0
    assert rig.scheduling.matched_tokens(other, 0) == 3 * BLOCK
    # What it computes instead of what did not come is saved.
    (save,) = rig.scheduling.saves(step(new=[("r", 96, list(range(12)))], scheduled={"r": 96}))
    assert (save.start_block, save.engine_blocks) == (1, tuple(range(4, 12)))


def test_a_load_that_came_is_not_saved_again(rig):
    request = Request("r", hashes(16))
    rig.client.here.update(keys(request)[:3])
    loaded(rig, request, list(range(16)))
    rig.scheduling.output(SimpleNamespace(finished_recving={"r"}, invalid_block_ids=set()))
    (save,) = rig.scheduling.saves(step(new=[("r", 192, list(range(16)))], scheduled={"r": 64}))
    assert (save.start_block, save.engine_blocks) == (3, (12, 13, 14, 15))


# saves


def admit(rig: Rig, request: Request) -> None:
    assert rig.scheduling.matched_tokens(request, 0) == 0


def test_blocks_are_saved_in_the_step_that_completes_them(rig):
    request = Request("r", hashes(9))
    admit(rig, request)
    assert rig.scheduling.saves(step(new=[("r", 0, [7, 8, 9])], scheduled={"r": 48})) == ()
    (save,) = rig.scheduling.saves(step(cached=[("r", 48, [3, 4, 5])], scheduled={"r": 48}))
    assert (save.start_block, save.engine_blocks) == (0, (7, 8, 9, 3))
    assert split(save.keys) == keys(request)[:1]
    (save,) = rig.scheduling.saves(step(cached=[("r", 96, [6, 2, 1])], scheduled={"r": 48}))
    assert (save.start_block, save.engine_blocks) == (1, (4, 5, 6, 2))
    assert split(save.keys) == keys(request)[:2]
    assert rig.scheduling.saves(step(cached=[("r", 144, None)], scheduled={"r": 1})) == ()


def test_generated_tokens_are_saved_when_their_hashes_are_known(rig):
    request = Request("r", hashes(3))
    admit(rig, request)
    assert rig.scheduling.saves(step(new=[("r", 0, [0, 1, 2, 3])], scheduled={"r": 60})) == ()
    assert rig.scheduling.saves(step(cached=[("r", 60, None)], scheduled={"r": 4})) == (), "hash not there yet"
    request.block_hashes.extend(hashes(4)[3:])
    (save,) = rig.scheduling.saves(step(cached=[("r", 64, [9])], scheduled={"r": 1}))
    assert (save.start_block, save.engine_blocks) == (0, (0, 1, 2, 3))


def test_a_preempted_request_starts_with_a_new_table(rig):
    request = Request("r", hashes(9))
    admit(rig, request)
    rig.scheduling.saves(step(new=[("r", 0, [0, 1, 2])], scheduled={"r": 48}))
    rig.scheduling.saves(step(cached=[("r", 0, [20, 21, 22])], scheduled={"r": 48}, resumed=["r"]))
    (save,) = rig.scheduling.saves(step(cached=[("r", 48, [23])], scheduled={"r": 16}))
    assert save.engine_blocks == (20, 21, 22, 23)


def test_an_engine_that_only_consumes_saves_nothing():
    rig = Rig(saves=False).start()
    admit(rig, Request("r", hashes(8)))
    assert rig.scheduling.saves(step(new=[("r", 0, list(range(8)))], scheduled={"r": 128})) == ()


def test_no_more_is_saved_in_a_step_than_there_is_room_for(rig):
    """What does not fit is saved in the next steps: a hole would hide what is behind it."""
    rig.scheduling.limit(2)
    request, other = Request("r", hashes(12)), Request("o", hashes(12, seed=1))
    admit(rig, request)
    admit(rig, other)
    new = [("r", 0, list(range(12))), ("o", 0, list(range(20, 32)))]
    (save,) = rig.scheduling.saves(step(new=new, scheduled={"r": 192, "o": 64}))
    assert (save.request_id, save.start_block, len(save.engine_blocks)) == ("r", 0, 2 * PER)
    cached = [("r", 192, None), ("o", 64, None)]
    first, second = rig.scheduling.saves(step(cached=cached, scheduled={"r": 1, "o": 1}))
    assert (first.request_id, first.start_block, first.engine_blocks) == ("r", 2, tuple(range(8, 12)))
    assert (second.request_id, second.start_block, second.engine_blocks) == ("o", 0, tuple(range(20, 24)))


def test_what_is_here_already_takes_no_room(rig):
    """A new turn behind a long prompt that vLLM has cached is saved in the step that computes it."""
    rig.scheduling.limit(2)
    request = Request("r", hashes(48))
    rig.client.here.update(keys(request)[:9])
    rig.client.on_drives.update(keys(request)[9:])
    assert rig.scheduling.matched_tokens(request, 11 * BLOCK) == BLOCK
    rig.scheduling.allocated(request, list(range(48)), 0)
    new = [("r", 11 * BLOCK, list(range(48)))]
    (save,) = rig.scheduling.saves(step(new=new, scheduled={"r": BLOCK}))
    assert (save.start_block, save.engine_blocks) == (0, tuple(range(11 * PER)))
    (save,) = rig.scheduling.saves(step(cached=[("r", 12 * BLOCK, None)], scheduled={"r": 1}))
    assert (save.start_block, save.engine_blocks) == (11, tuple(range(11 * PER, 12 * PER)))


def test_nothing_is_saved_in_a_step_in_which_another_connector_loads(rig):
    request = Request("r", hashes(8))
    admit(rig, request)
    loading = step(new=[("r", 0, list(range(8)))], scheduled={"r": 64})
    loading.has_sync_kv_loads = True
    assert rig.scheduling.saves(loading) == ()
    (save,) = rig.scheduling.saves(step(cached=[("r", 64, None)], scheduled={"r": 64}))
    assert (save.start_block, len(save.engine_blocks)) == (0, 2 * PER)


# adapters, resets, prefill and decode


def lora(path: str, number: int = 1, *, name: str = "ada", again: bool = False) -> Any:
    return SimpleNamespace(lora_name=name, lora_path=path, lora_int_id=number, load_inplace=again)


def test_adapters_are_told_apart_by_their_weights(rig):
    rig.adapters.update(one="digest 1", same="digest 1", two="digest 2")
    names = {"one": "ada", "same": "ada", "two": "bert"}
    scopes = {path: Scope(AdapterRef(names[path], digest)) for path, digest in rig.adapters.items()}
    rig.clients.clients.update({scope: FakeClient() for scope in scopes.values()})
    request = Request("r", hashes(8), lora_request=lora("one", 1))
    rig.clients.clients[scopes["one"]].elsewhere.update(keys(request, scopes["one"]))
    assert rig.scheduling.matched_tokens(request, 0) == 2 * BLOCK
    assert rig.scheduling.matched_tokens(Request("s", hashes(8), lora_request=lora("same", 2)), 0) == 2 * BLOCK
    assert rig.scheduling.matched_tokens(Request("t", hashes(8), lora_request=lora("two", 3, name="bert")), 0) == 0
    assert rig.scheduling.matched_tokens(Request("u", hashes(8)), 0) == 0


def test_an_adapter_is_read_once_unless_it_is_loaded_again(rig):
    """A name that has stood for other weights is this engine's own: vLLM's cache still has blocks of the old ones."""
    rig.adapters["path"] = "old"
    old = AdapterRef(name="ada", revision="old")
    rig.clients.clients[Scope(old)] = FakeClient()
    rig.clients.makes = True
    rig.scheduling.matched_tokens(Request("1", hashes(8), lora_request=lora("path")), 0)
    rig.adapters["path"] = "new"  # the engine still computes with what it has loaded
    rig.scheduling.matched_tokens(Request("2", hashes(8), lora_request=lora("path")), 0)
    assert set(rig.clients.clients) == {Scope(), Scope(old)}
    for name, request in (("3", lora("path", again=True)), ("4", lora("path")), ("5", lora("path", number=2))):
        rig.scheduling.matched_tokens(Request(name, hashes(8), lora_request=request), 0)
        (own,) = set(rig.clients.clients) - {Scope(), Scope(old)}
        assert own.adapter == AdapterRef(name="ada", revision="new")
        assert len(own.reset) == 32


def test_a_client_that_is_not_made_in_time_is_a_miss(rig, monkeypatch):
    rig.adapters["path"] = "digest"
    monkeypatch.setattr("time.sleep", lambda seconds: setattr(rig.clock, "now", rig.clock.now + seconds))
    request = Request("r", hashes(8), lora_request=lora("path"))
    started = rig.clock.now
    assert rig.scheduling.matched_tokens(request, 0) == 0
    assert TIMEOUT_S <= rig.clock.now - started < 2 * TIMEOUT_S
    assert rig.clients.prepared == [Scope(AdapterRef(name="ada", revision="digest"))]


def test_an_adapter_that_cannot_be_read_is_a_miss(rig):
    request = Request("r", hashes(8), lora_request=lora("nowhere"))
    assert rig.scheduling.matched_tokens(request, 0) == 0
    assert rig.failures == ["adapter"]
    assert rig.scheduling.saves(step(new=[("r", 0, list(range(8)))], scheduled={"r": 128})) == ()


def test_an_adapter_that_is_read_late_is_saved_all_the_same(rig):
    rig.adapters["path"] = "digest"
    scope = Scope(AdapterRef(name="ada", revision="digest"))
    rig.clients.clients[scope] = FakeClient()
    request = Request("r", hashes(8), lora_request=lora("path"))
    rig.threads.held = True
    assert rig.scheduling.matched_tokens(request, 0) is None
    rig.clock.now += TIMEOUT_S
    assert rig.scheduling.matched_tokens(request, 0) == 0
    assert rig.scheduling.saves(step(new=[("r", 0, list(range(8)))], scheduled={"r": 64})) == ()
    rig.threads.run()
    (save,) = rig.scheduling.saves(step(cached=[("r", 64, None)], scheduled={"r": 64}))
    assert (save.scope, save.start_block, split(save.keys)) == (scope, 0, keys(request, scope))


def test_a_lookup_under_way_does_not_touch_the_keys_of_a_running_request(rig):
    """The directory answers when the request runs already, and its blocks are being saved."""
    request = Request("r", hashes(12))
    rig.threads.held = True
    assert rig.scheduling.matched_tokens(request, 0) is None
    rig.clock.now += TIMEOUT_S
    assert rig.scheduling.matched_tokens(request, 0) == 0
    (save,) = rig.scheduling.saves(step(new=[("r", 0, list(range(12)))], scheduled={"r": 64}))
    rig.threads.run()
    (later,) = rig.scheduling.saves(step(cached=[("r", 64, None)], scheduled={"r": 128}))
    assert split(save.keys) + split(later.keys)[1:] == keys(request)


def test_a_reset_holds_for_an_adapter_that_is_being_read(rig):
    """Its request may have computed with the old weights: nothing of it is saved as if it were of the new ones."""
    rig.adapters["path"] = "digest"
    request = Request("r", hashes(8), lora_request=lora("path"))
    rig.threads.held = True
    assert rig.scheduling.matched_tokens(request, 0) is None
    rig.scheduling.reset("word")
    rig.threads.run()
    assert rig.scheduling.matched_tokens(request, 0) == 0
    assert rig.scheduling.saves(step(new=[("r", 0, list(range(8)))], scheduled={"r": 128})) == ()


def test_after_a_reset_nothing_of_before_is_found(rig):
    request = Request("r", hashes(8))
    rig.client.here.update(keys(request))
    assert rig.scheduling.matched_tokens(request, 0) == 2 * BLOCK
    rig.clients.clients[Scope(reset="word")] = FakeClient()
    rig.scheduling.reset("word")
    assert rig.scheduling.matched_tokens(request, 0) == 0
    assert rig.scheduling.matched_tokens(Request("s", hashes(8)), 0) == 0
    (save,) = rig.scheduling.saves(step(new=[("s", 0, list(range(8)))], scheduled={"s": 128}))
    assert save.scope == Scope(reset="word")


def test_decode_waits_for_what_prefill_is_storing(rig):
    prefill = Request("p", hashes(8), kv_transfer_params={"do_remote_decode": True})
    admit(rig, prefill)
    rig.scheduling.allocated(prefill, list(range(8)), 0)
    rig.scheduling.saves(step(new=[("p", 0, list(range(8)))], scheduled={"p": 128}))
    params = rig.scheduling.finished(prefill)
    assert params == {"do_remote_prefill": True, "do_remote_decode": False, "kvfleet_blocks": 2}

    decode = Request("d", hashes(8), kv_transfer_params=params)
    rig.client.elsewhere.update(keys(decode)[:1])
    assert rig.scheduling.matched_tokens(decode, 0) is None
    assert rig.scheduling.matched_tokens(decode, 0) is None
    assert len(rig.client.asked) == 2, "prefill's own and one: it is not asked without end"
    rig.clock.now += 0.02
    assert rig.scheduling.matched_tokens(decode, 0) is None
    rig.client.elsewhere.update(keys(decode))
    rig.clock.now += 0.02
    assert rig.scheduling.matched_tokens(decode, 0) == 2 * BLOCK
    assert len(rig.client.asked) == 4
    rig.scheduling.allocated(decode, list(range(8)), 2 * BLOCK)
    assert rig.client.counted == [(0, 0, 2), (0, 2, 2)], "one answer a request, the one that is used"
    assert rig.client.labels == {"p", "d"}


def test_decode_does_not_wait_for_ever(rig):
    decode = Request("d", hashes(8), kv_transfer_params={"kvfleet_blocks": 2})
    rig.client.elsewhere.update(keys(decode)[:1])
    assert rig.scheduling.matched_tokens(decode, 0) is None
    rig.clock.now += 3.0
    assert rig.scheduling.matched_tokens(decode, 0) == BLOCK


@pytest.mark.parametrize("nonsense", ["2", -1, 10**9, None, True, [1]])
def test_nonsense_of_another_engine_is_harmless(rig, nonsense):
    decode = Request("d", hashes(8), kv_transfer_params={"kvfleet_blocks": nonsense})
    rig.client.elsewhere.update(keys(decode))
    assert rig.scheduling.matched_tokens(decode, 0) == 2 * BLOCK


def test_a_finished_request_leaves_nothing(rig):
    request = Request("r", hashes(8))
    rig.client.here.update(keys(request))
    loaded(rig, request, list(range(8)))
    assert rig.scheduling.finished(request) is None
    rig.scheduling.output(SimpleNamespace(finished_recving={"r"}, invalid_block_ids={0}))
    assert (rig.scheduling._requests, rig.scheduling._loading) == ({}, {})


# the threads behind it


def test_work_is_done_in_the_background_and_faults_do_not_end_it():
    failures: list[str] = []
    background = Background(1, "kvfleet-lookup", lambda where, error: failures.append(f"{where}: {error}"))

    def fail(job: Job[int]) -> int:
        job.result = 1
        raise OSError("no luck")

    bad, good = background.submit(fail), background.submit(lambda _: 2)
    background.close()
    for thread in background._threads:
        thread.join(30.0)
        assert not thread.is_alive()
    assert (bad.done, bad.result, good.done, good.result) == (True, 1, True, 2)
    assert failures == ["lookup: no luck"]


# hints


@pytest.mark.parametrize(
    "params",
    [
        {"kvfleet": {"session": "chat", "turn": 2, "final": True, "priority": -1}},
        {"kvfleet_session": "chat", "kvfleet_turn": 2, "kvfleet_final": True, "kvfleet_priority": -1},
    ],
)
def test_saves_carry_the_hints_of_their_request(rig, params):
    request = Request("r", hashes(8), kv_transfer_params=params)
    admit(rig, request)
    rig.scheduling.allocated(request, list(range(8)), 0)
    (save,) = rig.scheduling.saves(step(new=[("r", 0, list(range(8)))], scheduled={"r": 128}))
    assert save.hints == Hints.of("chat", turn=2, final=True, priority=-1)
    assert rig.scheduling.hints.take("ignored") == {}


@pytest.mark.parametrize("params", [None, {"kvfleet_turn": 2}, {"kvfleet_session": "chat"}])
def test_hints_of_a_prompt_that_is_loaded_whole_are_told_once(rig, params):
    request = Request("r", hashes(8), kv_transfer_params=params)
    rig.client.here.update(keys(request))
    assert rig.scheduling.matched_tokens(request, 0) == 128
    rig.scheduling.allocated(request, list(range(9)), 128)
    saves = rig.scheduling.saves(step(new=[("r", 128, list(range(9)))], scheduled={"r": 1}))
    told = [(save.keys, save.start_block, save.engine_blocks, save.hints) for save in saves]
    expected = (b"".join(keys(request)), 2, (), Hints.of("chat"))
    assert told == ([expected] if params == {"kvfleet_session": "chat"} else [])
    assert rig.scheduling.saves(step(cached=[("r", 129, None)], scheduled={"r": 1})) == ()


def test_an_engine_that_only_consumes_tells_hints_of_what_it_loaded():
    rig = Rig(saves=False).start()
    request = Request("r", hashes(12), kv_transfer_params={"kvfleet_session": "chat", "kvfleet_final": True})
    rig.client.here.update(keys(request)[:2])
    loaded(rig, request, list(range(12)))
    (save,) = rig.scheduling.saves(step(new=[("r", 128, list(range(12)))], scheduled={"r": 64}))
    assert (split(save.keys), save.start_block, save.engine_blocks) == (keys(request)[:2], 2, ())
    assert save.hints == Hints.of("chat", final=True)
    assert rig.scheduling.saves(step(cached=[("r", 192, None)], scheduled={"r": 1})) == ()


@pytest.mark.parametrize(
    "params",
    [
        {"kvfleet": "chat"},
        {"kvfleet": ["session"]},
        {"kvfleet": {"session": 7}},
        {"kvfleet": {"session": "chat", "turn": -1}},
        {"kvfleet": {"final": "yes"}},
        {"kvfleet_priority": 17},
    ],
)
def test_wrong_hints_are_ignored_counted_and_logged_once(rig, params, caplog):
    for name in ("r", "s"):
        request = Request(name, hashes(8), kv_transfer_params=params)
        admit(rig, request)
        rig.scheduling.allocated(request, list(range(8)), 0)
        (save,) = rig.scheduling.saves(step(new=[(name, 0, list(range(8)))], scheduled={name: 128}))
        assert save.hints == Hints()
        rig.scheduling.finished(request)
    assert rig.scheduling.hints.take("ignored") == {"ignored": 2}
    assert len(caplog.records) == 1


def test_hints_go_on_to_decode(rig):
    hints = {"kvfleet": {"session": "chat"}, "kvfleet_turn": 3}
    prefill = Request("p", hashes(8), kv_transfer_params={"do_remote_decode": True, "other": 1, **hints})
    admit(rig, prefill)
    params = rig.scheduling.finished(prefill)
    assert params == {"do_remote_prefill": True, "do_remote_decode": False, "kvfleet_blocks": 0, **hints}

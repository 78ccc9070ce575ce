"""Real engines with the fleet behind vLLM's own offloading: same text with and without it, and KV really reused."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvfleet.config import MIB
from kvfleet.counts import ClientStats
from kvfleet.errors import ConfigError
from kvfleet.node.messages import Source
from tests.cluster.engine_process import BLOCK_BYTES, MODEL, elsewhere, here
from tests.conftest import SHARED_MEMORY, wait_for
from tests.rig import Fault, Rig
from tests.vllm.conftest import running_fleet
from tests.vllm.engines import Answer, EngineProcess
from tests.vllm.tier_engine import CHUNK_BYTES, CHUNK_TOKENS, TierEngineProcess

_SENTENCE = "You are a helpful assistant that answers geography questions briefly. "
_RULES = "".join(f"{_SENTENCE}Rule {i}: be precise about place {i}. " for i in range(17))
PROMPTS = [
    f"Case {case}. {_RULES}The capital of {land} is"
    for case, land in enumerate(("Italy", "France", "Japan", "Kenya", "Peru"))
]
FIRST, SECOND, THIRD, FOURTH, FIFTH = range(len(PROMPTS))
CHUNKS = 6  # whole ones of each prompt
CPU_CHUNKS = CHUNKS  # of one prompt: what vLLM finds of an earlier one in its own CPU memory is not asked of the fleet

EXTERNAL = "vllm:prompt_tokens_by_source{source=external_kv_transfer}"
COMPUTED = "vllm:prompt_tokens_by_source{source=local_compute}"
HITS = "vllm:external_prefix_cache_hits"
READ = "vllm:kv_offload_tiering_read_bytes{tier=1:KVFleetTier}"
LOADED = "vllm:kvfleet_tier_loaded_bytes"
FAILED_LOADS = "vllm:kv_offload_tiering_promotion_job_failures{tier=1:KVFleetTier}"
FAILED_STORES = "vllm:kv_offload_tiering_cascade_job_failures{tier=1:KVFleetTier}"


@dataclass(frozen=True)
class Asked:
    """What one round of prompts came to.

    Attributes:
        reused: tokens that vLLM says it got from outside.
        read_bytes: that vLLM says the tier read.
        sources: bytes loaded by the fleet's client, by source.
        metrics: by how much vLLM's counters rose.
    """

    answers: list[Answer]
    reused: float
    read_bytes: float
    sources: dict[Source, int]
    metrics: dict[str, float]


def ask(engine: EngineProcess, *which: int) -> Asked:
    """Ask prompts all at once, and wait until what was computed is stored."""
    metrics, stats = engine.metrics(), engine.stats() if engine.has_joined() else None
    answers = engine.ask([PROMPTS[i] for i in which])
    wait_for(engine.is_saved, "all is stored", 60.0)
    after = engine.metrics()
    rose = {name: value - metrics.get(name, 0.0) for name, value in after.items()}
    assert rose.get(HITS, 0.0) == rose.get(EXTERNAL, 0.0)
    assert rose.get(EXTERNAL, 0.0) + rose.get(COMPUTED, 0.0) == sum(answer.prompt_tokens for answer in answers)
    sources = loaded(stats, engine.stats()) if stats is not None else {}
    return Asked(answers, rose.get(EXTERNAL, 0.0), rose.get(READ, 0.0), sources, rose)


def loaded(before: ClientStats, after: ClientStats) -> dict[Source, int]:
    risen = {source: n - before.num_bytes.get(source, 0) for source, n in after.num_bytes.items()}
    return {source: n for source, n in risen.items() if n}


def check_reused(asked: Asked, num_chunks: int, source: Source, expected: list[str]) -> None:
    """All whole chunks came from the fleet, and the text is the same as without it."""
    assert [answer.text for answer in asked.answers] == expected
    assert asked.reused == num_chunks * CHUNK_TOKENS
    assert asked.read_bytes == num_chunks * CHUNK_BYTES
    assert asked.sources == {source: num_chunks * CHUNK_BYTES}
    assert asked.metrics[f"{LOADED}{{source={source.value}}}"] == num_chunks * CHUNK_BYTES


def check_computed(asked: Asked, expected: list[str]) -> None:
    """Nothing came from the fleet, and the text is the same as without it."""
    assert [answer.text for answer in asked.answers] == expected
    assert (asked.reused, asked.read_bytes, asked.sources) == (0.0, 0.0, {})


class RestartableFleet:
    """A fleet with a directory as shared storage. The test starts and restarts it.

    Lookups may take longer than by default: the machine may be busy with the engine.
    """

    def __init__(self, shared: Path, arena_root: Path) -> None:
        self.shared = shared
        self.name = secrets.token_hex(4)
        self._settings: dict[str, Any] = {
            "name": self.name,
            "dram_bytes": 320 * MIB,
            "shared_url": f"file://{shared}",
            "arena_root": str(arena_root),
            "lookup_timeout_s": 10.0,
        }
        self._running = ExitStack()

    def start(self) -> None:
        self.fleet = self._running.enter_context(running_fleet(**self._settings))

    def stop(self) -> None:
        self._running.close()


@pytest.fixture(scope="module")
def fleet(ray_cluster: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RestartableFleet]:
    """Not running yet."""
    with tempfile.TemporaryDirectory(prefix="kvfleet-test-", dir=SHARED_MEMORY) as root:
        fleet = RestartableFleet(tmp_path_factory.mktemp("shared"), Path(root))
        yield fleet
        fleet.stop()


@dataclass(frozen=True)
class Engines:
    """Two engines that have found the fleet when they started, and what all prompts are answered without it."""

    near: EngineProcess
    other: EngineProcess
    expected: list[str]


def answers_without_fleet(engine: EngineProcess) -> list[str]:
    rounds = [ask(engine, which) for which in range(len(PROMPTS))]
    assert not engine.has_joined()
    for asked in rounds:
        check_computed(asked, [answer.text for answer in asked.answers])
        assert asked.metrics[FAILED_STORES] > 0
    assert engine.faults() == {}
    texts = [asked.answers[0].text for asked in rounds]
    assert len(set(texts)) > 1
    return texts


def store_all(engine: EngineProcess, expected: list[str]) -> None:
    """Have an engine that was there before the fleet find it and fill it."""
    wait_for(engine.has_joined, "the engine has joined the fleet", 60.0)
    engine.forget()
    for which, text in enumerate(expected):
        check_computed(ask(engine, which), [text])
    stats: ClientStats = engine.stats()
    assert stats.stored_bytes == len(PROMPTS) * CHUNKS * CHUNK_BYTES
    assert stats.dropped_blocks == {}
    engine.forget()
    check_reused(ask(engine, SECOND), CHUNKS, Source.DRAM, [expected[SECOND]])
    assert engine.faults() == {}


@pytest.fixture(scope="module")
def engines(fleet: RestartableFleet, model: Path) -> Iterator[Engines]:
    """One on this node and one on the other. Another one, which has ended, has put all prompts in this node's arena."""
    with ExitStack() as stack:

        def start(node: str, cpu_chunks: int) -> EngineProcess:
            engine = TierEngineProcess(node, str(model), fleet.name, cpu_chunks)
            stack.callback(engine.stop)
            return engine

        first = start(here(), CPU_CHUNKS).wait_until_up()
        expected = answers_without_fleet(first)
        fleet.start()
        near, other = start(here(), 3 * CHUNKS), start(elsewhere(), CPU_CHUNKS)
        store_all(first, expected)
        first.stop()
        yield Engines(near.wait_until_up(), other.wait_until_up(), expected)


def test_an_engine_on_the_same_node_reuses_it(engines: Engines) -> None:
    near, expected = engines.near, engines.expected
    assert near.has_joined()
    check_reused(ask(near, FIRST, SECOND), 2 * CHUNKS, Source.DRAM, [expected[FIRST], expected[SECOND]])
    stats: ClientStats = near.stats()
    assert stats.stored_bytes == 0
    assert near.faults() == {}


def test_an_engine_on_another_node_reuses_it(engines: Engines) -> None:
    other, expected = engines.other, engines.expected
    assert other.has_joined()
    check_reused(ask(other, SECOND), CHUNKS, Source.PEER, [expected[SECOND]])
    assert other.faults() == {}


def test_what_only_shared_storage_has_is_reused_and_what_it_has_lost_is_computed(
    engines: Engines, fleet: RestartableFleet
) -> None:
    other, expected = engines.other, engines.expected
    fleet.stop()
    fleet.start()
    assert fleet.fleet.wait_for_shared(60.0)
    # A client asks those it knows before it looks for others.
    wait_for(lambda: other.num_found(PROMPTS[THIRD]) == CHUNKS, "the engine's client knows the new fleet", 60.0)
    check_reused(ask(other, THIRD), CHUNKS, Source.SHARED, [expected[THIRD]])

    # Found by the lookup, for the directory has seen them, but not there any more.
    lost = set(other.chunk_keys(PROMPTS[FOURTH]) + other.chunk_keys(PROMPTS[FIFTH])[2:])
    objects = [path for path in fleet.shared.rglob("*.arrow") if path.name.partition(".")[0] in lost]
    assert len(objects) == len(lost) == CHUNKS + CHUNKS - 2
    for path in objects:
        path.unlink()

    asked = ask(other, FOURTH)
    assert asked.metrics[FAILED_LOADS] == 1
    check_computed(asked, [expected[FOURTH]])
    asked = ask(other, FIFTH)
    assert asked.metrics[FAILED_LOADS] == 1
    check_reused(asked, 2, Source.SHARED, [expected[FIFTH]])
    assert other.faults() == {}


def test_an_engine_told_to_forget_shares_no_more(engines: Engines) -> None:
    other, expected = engines.other, engines.expected
    other.reset()
    wait_for(other.has_joined, "the engine has a new client", 60.0)
    check_computed(ask(other, THIRD), [expected[THIRD]])
    check_computed(ask(other, FIRST), [expected[FIRST]])
    other.forget()
    check_reused(ask(other, THIRD), CHUNKS, Source.DRAM, [expected[THIRD]])
    assert other.faults() == {}


# a manager that hangs


def until(event: threading.Event) -> Fault:
    """A call that arrives when something has happened."""

    async def fault() -> None:
        await asyncio.to_thread(event.wait, 30.0)

    return fault


def tier_in(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A `KVFleetTier` without an engine, in a fleet without Ray."""
    from kvfleet.connectors.vllm import KVFleetTier, tier

    fleet = SimpleNamespace(config=rig.config, client=rig.client)
    membership = SimpleNamespace(join=lambda then: then(fleet), close=lambda: None)
    monkeypatch.setattr(tier, "Membership", lambda _: membership)
    monkeypatch.setattr(tier, "tier_spec", lambda *_, **__: MODEL)
    monkeypatch.setattr(tier, "_DRAIN_S", 0.1)
    memory = np.arange(4 * BLOCK_BYTES, dtype=np.uint64).astype(np.int8).reshape(4, BLOCK_BYTES)
    return KVFleetTier(SimpleNamespace(), memory.data, "KVFleetTier")


def test_a_manager_that_hangs_does_not_hold_up_the_scheduler(arena_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.kv_offload.base import LookupResult

    with Rig(arena_root) as rig:
        engine, request = tier_in(rig, monkeypatch), SimpleNamespace(req_id="r", kv_transfer_params=None)

        def job(number: int) -> Any:
            return SimpleNamespace(job_id=number, keys=[bytes([number])], chunk_ids=[number], req_context=request)

        def results() -> list[tuple[int, bool]]:
            return [(result.job_id, result.success) for result in engine.get_finished_jobs()]

        answer = threading.Event()
        rig.faults["0.reserve"] = rig.faults["0.attach"] = until(answer)
        engine.submit_store(job(0))
        engine.submit_store(job(1))
        engine.submit_load(job(3))  # nobody has it
        wait_for(lambda: bool(rig.calls["0.reserve"]), "the manager has been called")

        engine.drain_jobs()
        assert sorted(results()) == [(0, False), (1, False), (3, False)]
        assert not engine.has_pending_work()
        assert engine.lookup(bytes([0]), request) == LookupResult.MISS
        engine.submit_store(job(0))
        assert results() == [(0, False)]
        old = rig._clients[0]
        assert old.stats().stored_blocks == 0

        wait_for(lambda: len(rig._clients) == 2, "a new client is being made")
        engine.drain_jobs()  # so that one is not used any more either
        answer.set()
        wait_for(lambda: engine.transfers is not None, "there is a new client")
        engine.submit_store(job(2))
        ended: list[tuple[int, bool]] = []

        def some_ended() -> bool:
            ended.extend(results())
            return bool(ended)

        wait_for(some_ended, "it is stored")
        assert ended == [(2, True)]
        wait_for(lambda: bool(old.stats().dropped_blocks), "what was in the queue is dropped")
        assert old.stats().stored_blocks == 0
        wait_for(lambda: [client.closed for client in rig._clients] == [True, True, False], "only the last one is used")
        assert engine.faults.take() == {}
        engine.shutdown()


def test_without_a_thread_to_open_a_new_client_all_is_a_miss(arena_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.kv_offload.base import LookupResult

    def no_more(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with Rig(arena_root) as rig:
        engine, request = tier_in(rig, monkeypatch), SimpleNamespace(req_id="r", kv_transfer_params=None)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_more)
            engine.drain_jobs()
        assert engine.lookup(bytes([0]), request) == LookupResult.MISS
        assert engine.faults.take() == {"errors:open": 1}
        engine.shutdown()


# what is refused


def test_a_setting_that_does_not_exist() -> None:
    from kvfleet.connectors.vllm import KVFleetTier

    memory = np.zeros((2, 64), np.int8).data
    with pytest.raises(ConfigError, match=r"^block_tokens, flet: no such setting of KVFleetTier; "):
        KVFleetTier(SimpleNamespace(), memory, "KVFleetTier", flet="default", block_tokens=64)


def test_a_tier_that_is_not_behind_the_offloading_connector() -> None:
    from kvfleet.connectors.vllm import KVFleetTier

    memory = np.zeros((2, 64), np.int8).data
    with pytest.raises(ConfigError, match="behind vLLM's OffloadingConnector only"):
        KVFleetTier(SimpleNamespace(), memory, "KVFleetTier")


@pytest.mark.parametrize(
    ("setting", "changed"),
    [
        ("enable_lora", {"lora_config": object()}),
        ("distributed_executor_backend", {"nnodes_within_dp": 2}),
        ("distributed_executor_backend", {"world_size": 2, "distributed_executor_backend": "ray"}),
    ],
)
def test_engines_whose_chunks_cannot_be_told_apart_or_seen(setting: str, changed: dict[str, Any]) -> None:
    from kvfleet.connectors.vllm.tier_identity import _check_rows

    def engine(**settings: Any) -> Any:
        defaults = {"nnodes_within_dp": 1, "world_size": 1, "distributed_executor_backend": "uni", "lora_config": None}
        values = defaults | settings
        return SimpleNamespace(lora_config=values.pop("lora_config"), parallel_config=SimpleNamespace(**values))

    _check_rows(engine())
    _check_rows(engine(world_size=2, distributed_executor_backend="mp"))
    with pytest.raises(ConfigError, match=f"^{setting}: "):
        _check_rows(engine(**changed))

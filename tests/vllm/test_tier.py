"""Real engines with the fleet behind vLLM's own offloading: same text with and without it, and KV really reused."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvfleet.config import MIB
from kvfleet.errors import ConfigError
from kvfleet.hits import ClientStats
from kvfleet.node.messages import Source
from tests.cluster.engine_process import elsewhere, here
from tests.conftest import SHARED_MEMORY, wait_for
from tests.vllm.conftest import running_fleet
from tests.vllm.engines import Answer, EngineProcess
from tests.vllm.tier_engine import CHUNK_BYTES, CHUNK_TOKENS, TierEngineProcess

_SENTENCE = "You are a helpful assistant that answers geography questions briefly. "
_RULES = "".join(f"{_SENTENCE}Rule {i}: be precise about place {i}. " for i in range(40))
PROMPTS = [
    f"Case {case}. {_RULES}The capital of {land} is"
    for case, land in enumerate(("Italy", "France", "Japan", "Kenya", "Peru", "Norway"))
]
BEFORE, FIRST, SECOND, THIRD, FOURTH, FIFTH = range(len(PROMPTS))
CHUNKS = 14  # whole ones of each prompt
CPU_CHUNKS = 16  # no room in vLLM's own CPU memory for two prompts

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


@pytest.fixture(scope="module")
def expected(ray_cluster: object, model: Path) -> list[str]:
    """What an engine without the tier answers to each prompt."""
    engine = EngineProcess(here(), str(model)).wait_until_up()
    texts = [engine.ask([prompt])[0].text for prompt in PROMPTS]
    assert engine.metrics().get(EXTERNAL, 0.0) == 0.0
    engine.stop()
    assert len(set(texts)) > 1
    return texts


def check_no_fleet(engine: EngineProcess, expected: list[str]) -> None:
    asked = ask(engine, BEFORE)
    check_computed(asked, [expected[BEFORE]])
    assert not engine.has_joined()
    assert asked.metrics[FAILED_STORES] > 0
    assert engine.faults() == {}


@pytest.fixture(scope="module")
def stored(fleet: RestartableFleet, model: Path, expected: list[str]) -> None:
    """All prompts but the first are in this node's arena.

    The engine that stored them was there before the fleet. It has ended: few engines fit in memory at once.
    """
    engine = TierEngineProcess(here(), str(model), fleet.name, CPU_CHUNKS).wait_until_up()
    check_no_fleet(engine, expected)
    fleet.start()
    wait_for(engine.has_joined, "the engine has joined the fleet", 60.0)
    for which in (FIRST, SECOND, THIRD, FOURTH, FIFTH):
        check_computed(ask(engine, which), [expected[which]])
    stats: ClientStats = engine.stats()
    assert stats.stored_bytes == 5 * CHUNKS * CHUNK_BYTES
    assert stats.dropped_blocks == {}
    engine.forget()
    check_reused(ask(engine, SECOND), CHUNKS, Source.DRAM, [expected[SECOND]])
    assert engine.faults() == {}
    engine.stop()


def test_an_engine_on_the_same_node_reuses_it(
    stored: None, fleet: RestartableFleet, model: Path, expected: list[str]
) -> None:
    engine = TierEngineProcess(here(), str(model), fleet.name, 3 * CHUNKS).wait_until_up()
    assert engine.has_joined()
    check_reused(ask(engine, FIRST, SECOND), 2 * CHUNKS, Source.DRAM, [expected[FIRST], expected[SECOND]])
    stats: ClientStats = engine.stats()
    assert stats.stored_bytes == 0
    assert engine.faults() == {}
    engine.stop()


@pytest.fixture(scope="module")
def other(stored: None, fleet: RestartableFleet, model: Path) -> Iterator[EngineProcess]:
    """An engine on the other node."""
    engine = TierEngineProcess(elsewhere(), str(model), fleet.name, CPU_CHUNKS).wait_until_up()
    yield engine
    engine.stop()


def test_an_engine_on_another_node_reuses_it(other: EngineProcess, expected: list[str]) -> None:
    check_reused(ask(other, SECOND), CHUNKS, Source.PEER, [expected[SECOND]])
    assert other.faults() == {}


def test_what_only_shared_storage_has_is_reused_and_what_it_has_lost_is_computed(
    other: EngineProcess, fleet: RestartableFleet, expected: list[str]
) -> None:
    fleet.stop()
    fleet.start()
    assert fleet.fleet.wait_for_shared(60.0)
    # A client asks those it knows before it looks for others.
    wait_for(lambda: other.num_found(PROMPTS[THIRD]) == CHUNKS, "the engine's client knows the new fleet", 60.0)
    check_reused(ask(other, THIRD), CHUNKS, Source.SHARED, [expected[THIRD]])

    # Found by the lookup, for the directory has seen them, but not there any more.
    lost = set(other.chunk_keys(PROMPTS[FOURTH]) + other.chunk_keys(PROMPTS[FIFTH])[5:])
    objects = [path for path in fleet.shared.rglob("*.arrow") if path.name.partition(".")[0] in lost]
    assert len(objects) == len(lost) == CHUNKS + CHUNKS - 5
    for path in objects:
        path.unlink()

    asked = ask(other, FOURTH)
    assert asked.metrics[FAILED_LOADS] == 1
    check_computed(asked, [expected[FOURTH]])
    asked = ask(other, FIFTH)
    assert asked.metrics[FAILED_LOADS] == 1
    check_reused(asked, 5, Source.SHARED, [expected[FIFTH]])
    assert other.faults() == {}


def test_an_engine_told_to_forget_shares_no_more(other: EngineProcess, expected: list[str]) -> None:
    other.reset()
    check_computed(ask(other, THIRD), [expected[THIRD]])
    check_computed(ask(other, FIRST), [expected[FIRST]])
    other.forget()
    check_reused(ask(other, THIRD), CHUNKS, Source.DRAM, [expected[THIRD]])
    assert other.faults() == {}


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

"""The same text with and without the fleet, wherever the KV comes from; and it does come from there."""

from __future__ import annotations

import os
import signal

import pytest

from kvfleet.node.messages import Source
from tests.cluster.engine_process import here, node_status
from tests.conftest import wait_for
from tests.vllm.conftest import running_fleet
from tests.vllm.engines import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    ENGINE_BLOCK_TOKENS,
    OTHER,
    PROMPT,
    UNIQUE,
    connector,
    fleet_tokens,
    saved,
    whole_blocks,
)


def test_cold_then_warm(fleet, first, plain):
    (cold,) = first.ask([PROMPT])
    assert (cold.text, cold.token_ids) == (plain[PROMPT].text, plain[PROMPT].token_ids)
    assert (cold.cached_tokens, fleet_tokens(first)) == (0, 0)
    saved(first)
    blocks = whole_blocks(cold)
    assert first.stats().stored_blocks == blocks
    assert first.stats().stored_bytes == blocks * BLOCK_BYTES

    first.forget()
    (warm,) = first.ask([PROMPT])
    assert (warm.text, warm.token_ids) == (cold.text, cold.token_ids)
    assert warm.cached_tokens == fleet_tokens(first) == blocks * BLOCK_TOKENS
    assert first.stats().num_bytes == {Source.DRAM: blocks * BLOCK_BYTES}
    counted = first.metrics()
    assert counted["vllm:kvfleet_loaded_bytes{source=dram}"] == blocks * BLOCK_BYTES
    assert counted["vllm:kvfleet_blocks{outcome=dram}"] == blocks
    assert counted["vllm:kvfleet_saved_bytes"] == blocks * BLOCK_BYTES
    assert not [name for name in counted if "errors" in name or "dropped" in name]

    # The scheduler has looked it up and a worker loaded it: one request, under vLLM's name for it.
    totals = fleet.status().totals
    assert (totals.outcomes["dram"], totals.outcomes.get("unclaimed", 0)) == (blocks, 0)
    assert sum(totals.outcomes.values()) == totals.asked_blocks == 2 * blocks
    told = [request for _, request in fleet.requests() if request.hit_blocks]
    assert len({(request.asked_ns, request.label) for request in told}) == 1
    assert told[0].label
    assert [request.from_dram for request in told if request.loaded] == [blocks]


def test_another_process_on_the_same_node(fleet, first, plain, start_engine, model):
    engine = start_engine("here", model, kv_transfer_config=connector(fleet.config.name, block_tokens=BLOCK_TOKENS))
    (answer,) = engine.ask([PROMPT])
    blocks = whole_blocks(answer)
    assert answer.text == plain[PROMPT].text
    assert answer.cached_tokens == fleet_tokens(engine) == blocks * BLOCK_TOKENS
    assert engine.stats().num_bytes == {Source.DRAM: blocks * BLOCK_BYTES}
    engine.stop()


def test_another_node(fleet, first, other_node, plain):
    (answer,) = other_node.ask([PROMPT])
    blocks = whole_blocks(answer)
    assert answer.text == plain[PROMPT].text
    assert answer.cached_tokens == fleet_tokens(other_node) == blocks * BLOCK_TOKENS
    assert other_node.stats().num_bytes == {Source.PEER: blocks * BLOCK_BYTES}
    status = node_status(fleet, here())
    assert status is not None
    assert status.sent_bytes == blocks * BLOCK_BYTES
    assert other_node.metrics()["vllm:prompt_tokens_cached_by_source{source=p2p}"] == blocks * BLOCK_TOKENS


def test_only_what_vllm_lacks_is_loaded(other_node, plain):
    """vLLM holds the first half of a block: the rest of it is filled, and what it holds stays."""
    other_node.forget()
    before = fleet_tokens(other_node)
    ids = other_node.call(_tokens, PROMPT)
    held = BLOCK_TOKENS + ENGINE_BLOCK_TOKENS
    (short,) = other_node.ask([{"prompt_token_ids": ids[: held + 1]}], max_tokens=1)
    assert short.cached_tokens == BLOCK_TOKENS  # whole blocks from the fleet; the half block is computed
    (answer,) = other_node.ask([PROMPT])
    assert answer.text == plain[PROMPT].text
    assert answer.cached_tokens == whole_blocks(answer) * BLOCK_TOKENS
    assert fleet_tokens(other_node) - before == answer.cached_tokens - held + BLOCK_TOKENS


def test_another_end(first, other_node, plain):
    """A prompt that shares all but its end, and one that shares nothing, at the same time."""
    first.forget()
    before = fleet_tokens(first)
    answers = first.ask([OTHER, UNIQUE])
    assert [answer.text for answer in answers] == [plain[OTHER].text, plain[UNIQUE].text]
    assert [answer.cached_tokens for answer in answers] == [whole_blocks(answers[0]) * BLOCK_TOKENS, 0]
    assert fleet_tokens(first) - before == answers[0].cached_tokens


def test_generated_tokens_are_found_in_the_next_turn(first, other_node):
    (turn,) = first.ask([UNIQUE], max_tokens=80)
    saved(first)
    ids = [*first.call(_tokens, UNIQUE), *turn.token_ids, 198]
    (answer,) = other_node.ask([{"prompt_token_ids": ids}], max_tokens=8)
    # The last generated token is never run through the model.
    assert answer.cached_tokens == (len(ids) - 2) // BLOCK_TOKENS * BLOCK_TOKENS
    assert answer.cached_tokens > turn.prompt_tokens


def test_salts_are_apart(first, other_node, plain):
    before = fleet_tokens(other_node)
    salted = {"prompt": PROMPT, "cache_salt": "tenant"}
    (cold,) = first.ask([salted])
    assert (cold.text, cold.cached_tokens) == (plain[PROMPT].text, 0)
    saved(first)
    (other,) = other_node.ask([{"prompt": PROMPT, "cache_salt": "another"}])
    assert (other.text, other.cached_tokens) == (plain[PROMPT].text, 0)
    (same,) = other_node.ask([salted])
    assert (same.text, same.cached_tokens) == (plain[PROMPT].text, whole_blocks(same) * BLOCK_TOKENS)
    assert fleet_tokens(other_node) - before == same.cached_tokens


def test_the_end_of_a_session_reaches_the_manager(fleet, first):
    before = sum(node.retired_blocks for node in fleet.status().nodes)
    said = {"kvfleet": {"session": "chat 7", "final": True}}
    (answer,) = first.ask([{"prompt": PROMPT, "cache_salt": "ends"}], transfer_params=said)
    saved(first)
    assert sum(node.retired_blocks for node in fleet.status().nodes) - before == whole_blocks(answer)


@pytest.mark.parametrize("kept", [True, False])
def test_the_end_of_a_session_with_nothing_to_store_reaches_the_manager(fleet, first, kept):
    """VLLM has all of the prompt itself, or loads all of it."""
    asked = {"prompt": PROMPT, "cache_salt": "has it" if kept else "loads it"}
    first.ask([asked], transfer_params={"kvfleet_session": "chat 8"})
    saved(first)
    if not kept:
        first.forget()
    before, loaded = sum(node.retired_blocks for node in fleet.status().nodes), fleet_tokens(first)
    (answer,) = first.ask([asked], transfer_params={"kvfleet_session": "chat 8", "kvfleet_final": True})
    blocks = whole_blocks(answer)
    assert fleet_tokens(first) - loaded == (0 if kept else blocks * BLOCK_TOKENS)
    wait_for(
        lambda: sum(node.retired_blocks for node in fleet.status().nodes) - before == blocks, "the manager knows of it"
    )


def _tokens(engine: object, prompt: str) -> list[int]:
    return engine._llm.get_tokenizer().encode(prompt)  # type: ignore[attr-defined,no-any-return]


def test_the_first_engine_dies_and_another_node_goes_on(plain, start_engine, model, ray_cluster):
    with running_fleet() as fleet:
        settings = connector(fleet.config.name, block_tokens=BLOCK_TOKENS)
        engine = start_engine("here", model, kv_transfer_config=settings)
        (cold,) = engine.ask([PROMPT])
        assert cold.cached_tokens == 0
        saved(engine)
        os.kill(engine.process, signal.SIGKILL)
        heir = start_engine("elsewhere", model, kv_transfer_config=settings)
        (answer,) = heir.ask([PROMPT])
        blocks = whole_blocks(answer)
        assert answer.text == plain[PROMPT].text
        assert answer.cached_tokens == fleet_tokens(heir) == blocks * BLOCK_TOKENS
        assert heir.stats().num_bytes == {Source.PEER: blocks * BLOCK_BYTES}
        heir.stop()

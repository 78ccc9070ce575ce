"""What must not be shared is not: other adapters, dtypes, weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.vllm.engines import BLOCK_TOKENS, PROMPT, EngineProcess, connector, fleet_tokens, saved, whole_blocks
from tests.vllm.models import adapter, with_other_weights


def test_adapters(fleet, start_engine: Callable[..., EngineProcess], model: Path, tmp_path: Path):
    one, two = adapter(model, tmp_path / "one", seed=1), adapter(model, tmp_path / "two", seed=2)
    settings = {
        "kv_transfer_config": connector(fleet.config.name, block_tokens=BLOCK_TOKENS),
        "enable_lora": True,
        "max_loras": 2,
        "max_lora_rank": 8,
    }
    engine = start_engine("here", model, **settings)
    base = engine.ask([PROMPT])[0]
    first = engine.ask([PROMPT], adapter=("ada", 1, str(one)))[0]
    second = engine.ask([PROMPT], adapter=("bert", 2, str(two)))[0]
    assert len({base.text, first.text, second.text}) == 3
    assert [answer.cached_tokens for answer in (first, second)] == [0, 0]
    # Whether the first request of an adapter was saved depends on whether its client was ready by then.
    engine.forget()
    engine.ask([PROMPT], adapter=("ada", 1, str(one)))
    saved(engine)
    before = fleet_tokens(engine)
    engine.forget()
    again = engine.ask([PROMPT], adapter=("ada", 1, str(one)))[0]
    assert again.text == first.text
    assert again.cached_tokens == fleet_tokens(engine) - before == whole_blocks(again) * BLOCK_TOKENS

    # Another process; the adapter's name now stands for other weights, at the same place.
    engine.stop()
    (one / "adapter_model.safetensors").write_bytes((two / "adapter_model.safetensors").read_bytes())
    engine = start_engine("here", model, **settings)
    changed = engine.ask([PROMPT], adapter=("ada", 1, str(one)))[0]
    assert (changed.text, changed.cached_tokens) == (second.text, 0)
    assert engine.ask([PROMPT])[0].text == base.text
    assert fleet_tokens(engine) == whole_blocks(base) * BLOCK_TOKENS
    engine.stop()


def test_weights_and_dtypes(fleet, start_engine: Callable[..., EngineProcess], model: Path, tmp_path: Path):
    """A model served again in the same place with other weights starts cold, and so does one in another dtype."""
    place = tmp_path / "model"
    with_other_weights(model, place)
    settings = {"kv_transfer_config": connector(fleet.config.name, block_tokens=BLOCK_TOKENS)}
    engine = start_engine("here", place, **settings)
    changed = engine.ask([PROMPT])[0]
    assert (changed.cached_tokens, fleet_tokens(engine)) == (0, 0)
    saved(engine)
    engine.stop()

    (place / "model.safetensors").unlink()
    (place / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    engine = start_engine("here", place, **settings)
    answer = engine.ask([PROMPT])[0]
    assert answer.text != changed.text
    # What is there of the model proper, from the test before, is found: the place plays no role.
    assert answer.cached_tokens == fleet_tokens(engine) == whole_blocks(answer) * BLOCK_TOKENS
    engine.stop()

    engine = start_engine("here", model, dtype="bfloat16", **settings)
    assert (engine.ask([PROMPT])[0].cached_tokens, fleet_tokens(engine)) == (0, 0)
    engine.stop()

"""`kvfleet bench planner`, with a model too small to say anything: computing it is faster than any load."""

from __future__ import annotations

import torch
import transformers

from kvfleet.bench import planner


def test_a_slow_tier_is_not_loaded_and_what_was_expected_is_told():
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=10_000, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with planner.open_site(model, num_tokens=64, repeats=1, block_tokens=16) as site:
        (case,) = site.cases([0.05])
    assert case.loaded == [0] * 3
    assert len(case.alone) == len(case.cached) == len(case.predicted) == 3
    rows = planner.rows([case], 64)
    assert [(row.name, len(row.seconds)) for row in rows] == [
        ("model alone", 1), ("first at 0.05x", 1), ("model alone", 1), ("known, 0.05x", 1),
    ]  # fmt: skip
    assert planner.expectations([case]).startswith("0.05x: ")
    assert "MB/s, and 10 ms latency" in planner.measures(site)

"""Real and tiny models with and without the cache: the same logits, bit for bit, and less work."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
import transformers
from transformers import DynamicCache

from kvfleet.cli.demo_model import cache_directory, load_model, load_tokenizer, prepare_smollm2
from kvfleet.connectors.transformers import TransformersConnector, spec_for
from kvfleet.core.block import KEY_BYTES
from kvfleet.core.hints import Hints
from kvfleet.core.planner import Leg, Plan
from kvfleet.core.speeds import Speed
from kvfleet.errors import ConfigError, LayoutMismatchError
from kvfleet.node.messages import Miss, Source
from tests.engine.memory_client import MemoryClient

BLOCK = 16
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
FULL_ATTENTION: dict[str, dict[str, object]] = {
    "Llama": {},
    "Mistral": {"sliding_window": None},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "GPTNeoX": {},
    "Phi": {},
    "Falcon": {},
}
OTHER_STATE: dict[str, dict[str, object]] = {
    "Mistral": {"sliding_window": 32},
    "Gemma2": {"head_dim": 16},
    "Gemma3": {"head_dim": 16},
    "Mamba": {},
    "Qwen3Next": {"num_experts": 2, "head_dim": 16},
    "Jamba": {"num_experts": 2, "use_mamba_kernels": False},
    "Rwkv": {},
}


def tiny(name, dtype=torch.float32, **more):
    """A small model with random weights."""
    torch.manual_seed(7)
    config_class = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    config = config_class(**{**SIZES, **more}, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return getattr(transformers, f"{name}ForCausalLM")(config).to(dtype).eval()


def prompt_of(num_tokens, seed=1):
    return torch.randint(3, 128, (1, num_tokens), generator=torch.Generator().manual_seed(seed))


def connect(model, block_tokens=BLOCK, **scope):
    return TransformersConnector(model, MemoryClient(spec_for(model, block_tokens=block_tokens, **scope)))


@contextmanager
def tokens_seen(model):
    """Lengths of what the model was run over meanwhile."""
    lengths = []

    def count(module, args, kwargs):
        lengths.append(kwargs["input_ids"].shape[1])

    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    yield lengths
    hook.remove()


@torch.no_grad()
def live(model, prompt, block_tokens):
    """Logits after the prompt, all computed in one process, split where the connector splits."""
    cache = DynamicCache(config=model.config)
    whole = prompt.shape[1] // block_tokens * block_tokens
    for start in range(0, whole, block_tokens):
        model(input_ids=prompt[:, start : start + block_tokens], cache=cache)
    if whole == prompt.shape[1]:
        cache.crop(-1)
    return after(model, prompt, cache)


@torch.no_grad()
def after(model, prompt, cache):
    return model(input_ids=prompt[:, cache.get_seq_length() :], cache=cache).logits


# --- the real model


@pytest.fixture(scope="module")
def smollm2():
    directory = prepare_smollm2(cache_directory())
    return load_model(directory), load_tokenizer(directory)


@pytest.fixture(scope="module")
def question(smollm2):
    text = "The keeper's cat is called Marmalade. " + "The rest of this page is of no importance. " * 50
    messages = [{"role": "user", "content": f"{text}\n\nWhat is the keeper's cat called?"}]
    return smollm2[1].apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)


def test_smollm2_answers_the_same_from_the_cache(smollm2, question):
    model, tokenizer = smollm2
    spec = spec_for(model)
    assert spec.bytes_per_token == 2 * 23_040
    num_blocks = question.shape[1] // 256
    assert num_blocks >= 2
    kv = TransformersConnector(model, MemoryClient(spec))

    with tokens_seen(model) as cold_seen:
        cold = kv.generate(question, max_new_tokens=12, do_sample=False)
    assert sum(cold_seen[: num_blocks + 1]) == question.shape[1]
    assert kv.last is not None
    assert kv.last.reused_tokens == 0
    assert kv.last.wait(10).stored == num_blocks

    with tokens_seen(model) as warm_seen:
        warm = kv.generate(question, max_new_tokens=12, do_sample=False)
    assert warm_seen[0] == question.shape[1] - num_blocks * 256
    assert set(warm_seen[1:]) == {1}
    assert kv.last is not None
    assert kv.last.reused_tokens == num_blocks * 256
    assert kv.last.blocks_by_source == {Source.DRAM: num_blocks}
    assert kv.last.loaded.bytes_by_source == {Source.DRAM: num_blocks * spec.layout.block_bytes}
    assert kv.last.stores == ()

    assert torch.equal(cold, warm)
    assert "Marmalade" in tokenizer.decode(warm[0, question.shape[1] :])
    reused = kv.prefill(question)
    assert torch.equal(after(model, question, reused.cache), live(model, question, 256))


# --- other architectures


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FULL_ATTENTION)
def test_full_attention_models_give_the_same_logits(name, dtype):
    model = tiny(name, dtype, **FULL_ATTENTION[name])
    prompt = prompt_of(5 * BLOCK + 3)
    kv = connect(model)
    expected = live(model, prompt, BLOCK)
    assert torch.equal(after(model, prompt, kv.prefill(prompt).cache), expected)
    reused = kv.prefill(prompt)
    assert reused.reused_tokens == 5 * BLOCK
    assert torch.equal(after(model, prompt, reused.cache), expected)
    warm = kv.generate(prompt, max_new_tokens=6, do_sample=False)
    assert torch.equal(warm, connect(model).generate(prompt, max_new_tokens=6, do_sample=False))


@pytest.mark.parametrize("name", OTHER_STATE)
def test_models_with_other_state_are_refused(name):
    model = tiny(name, **OTHER_STATE[name])
    with pytest.raises(ConfigError, match="full-attention KV"):
        spec_for(model)


def test_keys_and_values_of_different_shape_are_refused():
    model = tiny(
        "DeepseekV3", kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
        n_routed_experts=4, moe_intermediate_size=16, num_key_value_heads=4,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="one shape"):
        spec_for(model)


def test_keys_that_depend_on_the_length_of_the_prompt_are_refused():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    with pytest.raises(ConfigError, match="dynamic rotary"):
        spec_for(tiny("Llama", rope_parameters=rope))


def test_a_model_in_training_is_refused():
    with pytest.raises(ConfigError, match=r"model\.eval"):
        spec_for(tiny("Llama").train())


# --- how much is reused


def test_the_last_token_is_always_computed():
    model = tiny("Llama")
    kv = connect(model)
    prompt = prompt_of(3 * BLOCK)
    assert torch.equal(after(model, prompt, kv.prefill(prompt).cache), live(model, prompt, BLOCK))
    with tokens_seen(model) as seen:
        kv.generate(prompt, max_new_tokens=1, do_sample=False)
    assert seen == [1]
    assert kv.last.reused_tokens == 3 * BLOCK - 1


def test_smollm2_computes_what_would_be_slower_to_load(smollm2, question):
    model, _ = smollm2
    client = MemoryClient(spec_for(model, block_tokens=64))
    kv = TransformersConnector(model, client)
    blocks = question.shape[1] // 64
    kv.prefill(question)
    for speed, loaded in ((Speed(1000.0, 1.0), 0), (Speed(0.0, 1e15), blocks)):
        client.planning.tell({"dram": speed})
        with tokens_seen(model) as seen:
            prefill = kv.prefill(question)
        assert (prefill.reused_tokens, seen) == (loaded * 64, [64] * (blocks - loaded))
        assert client.plans[-1].recompute_s > client.plans[-1].predicted_ttft_s * (loaded > 0)
        assert (client.plans[-1].reason == "") == (loaded > 0)


def test_a_common_prefix_is_reused_and_the_rest_is_stored():
    model = tiny("Llama")
    kv = connect(model)
    first = prompt_of(4 * BLOCK + 5)
    second = torch.cat((first[:, : 2 * BLOCK + 3], prompt_of(3 * BLOCK, seed=2)), dim=1)
    assert kv.prefill(first).wait(1).stored == 4
    prefill = kv.prefill(second)
    assert (prefill.reused_tokens, prefill.wait(1).stored) == (2 * BLOCK, 3)
    assert torch.equal(after(model, second, prefill.cache), live(model, second, BLOCK))


def test_a_short_prompt_has_nothing_to_reuse():
    model = tiny("Llama")
    kv = connect(model)
    prompt = prompt_of(BLOCK - 1)
    for _ in range(2):
        prefill = kv.prefill(prompt)
        assert (prefill.reused_tokens, prefill.stores, prefill.cache.get_seq_length()) == (0, (), 0)
        assert prefill.wait(1).stored == 0
    assert torch.equal(after(model, prompt, prefill.cache), live(model, prompt, BLOCK))


@pytest.mark.parametrize("fail_from", range(4))
def test_blocks_that_do_not_come_are_computed(fail_from):
    model = tiny("Llama")
    client = MemoryClient(spec_for(model, block_tokens=BLOCK))
    kv = TransformersConnector(model, client)
    prompt = prompt_of(3 * BLOCK + 5)
    kv.prefill(prompt)
    client.fail_from = fail_from
    with tokens_seen(model) as seen:
        prefill = kv.prefill(prompt)
    assert seen == [BLOCK] * (3 - fail_from)
    assert prefill.reused_tokens == fail_from * BLOCK
    assert prefill.loaded.miss == (Miss.UNREACHABLE if fail_from < 3 else None)
    assert torch.equal(after(model, prompt, prefill.cache), live(model, prompt, BLOCK))


@pytest.mark.parametrize(
    ("head", "tail", "computed"),
    [(2, (4, 6), 2), (0, (1, 6), 1), (0, (5, 6), 5), (1, (2, 4), 3), (0, None, 6), (3, None, 3), (6, None, 0)],
)
def test_what_is_not_worth_loading_is_computed(head, tail, computed):
    model = tiny("Llama")
    client = MemoryClient(spec_for(model, block_tokens=BLOCK))
    kv = TransformersConnector(model, client)
    prompt = prompt_of(6 * BLOCK + 5)
    kv.prefill(prompt)
    plan = Plan(Leg(0, head), Leg(*tail) if tail else None)
    client.planning.plan = lambda *_, can_split: plan
    with tokens_seen(model) as seen:
        prefill = kv.prefill(prompt)
    assert seen == [BLOCK] * computed
    assert prefill.reused_tokens == (6 - computed) * BLOCK
    assert prefill.wait(1).stored == computed
    assert torch.equal(after(model, prompt, prefill.cache), live(model, prompt, BLOCK))


@pytest.mark.parametrize("fail_from", range(7))
def test_a_plan_that_fails_costs_a_recompute(fail_from):
    model = tiny("Llama")
    client = MemoryClient(spec_for(model, block_tokens=BLOCK))
    kv = TransformersConnector(model, client)
    prompt = prompt_of(6 * BLOCK + 5)
    kv.prefill(prompt)
    client.fail_from = fail_from
    client.planning.plan = lambda *_, can_split: Plan(Leg(0, 2), Leg(3, 6))
    prefill = kv.prefill(prompt)
    assert prefill.reused_tokens == (min(fail_from, 2) + max(0, fail_from - 3)) * BLOCK
    assert torch.equal(after(model, prompt, prefill.cache), live(model, prompt, BLOCK))


def test_the_planner_is_told_of_computed_blocks_and_whole_prompts():
    kv = connect(tiny("Llama"))
    client = kv._client
    kv.prefill(prompt_of(3 * BLOCK + 5))
    assert client.planning.prefill() is not None
    prefill = kv.prefill(prompt_of(3 * BLOCK + 5))
    assert [plan.num_blocks for plan in client.plans] == [0, 3]
    assert client.ready_s[1] == prefill.seconds


def test_hints_come_with_stores_and_once_more_for_what_was_loaded():
    """That a prompt is the last one is said when all of it is stored: said before, it would go while it comes."""
    kv = connect(tiny("Llama"))
    client = kv._client
    first, last = Hints.of("chat", turn=1), Hints.of("chat", turn=2, final=True)
    kv.prefill(prompt_of(2 * BLOCK), hints=first)
    keys = client.spec.keys(prompt_of(3 * BLOCK)[0].numpy())
    kv.prefill(prompt_of(3 * BLOCK), hints=last)
    assert client.hints == [first, first, first, last, Hints.of("chat", turn=2)]
    assert client.hinted == [(keys[: 2 * KEY_BYTES], first), (keys, last)]
    kv.generate(prompt_of(2 * BLOCK), max_new_tokens=1, do_sample=False)
    assert len(client.hinted) == 2, "nothing is said without hints"


# --- who shares with whom


def test_equal_weights_share_and_others_do_not():
    spec = spec_for(tiny("Llama"))
    assert spec_for(tiny("Llama")).root == spec.root
    changed = tiny("Llama")
    with torch.no_grad():
        changed.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-6
    others = [
        spec_for(changed),
        spec_for(tiny("Llama", rms_norm_eps=1e-5)),
        spec_for(tiny("Llama", dtype=torch.bfloat16)),
        spec_for(tiny("Llama"), tenant="other"),
        spec_for(tiny("Llama"), block_tokens=BLOCK),
    ]
    assert len({spec.root, *(other.root for other in others)}) == 6


def test_a_given_revision_stands_for_the_weights():
    model = tiny("Llama")
    spec = spec_for(model, model_id="maker/model", weight_revision="abc")
    assert (spec.model_id, spec.weight_revision) == ("maker/model", "abc")
    with pytest.raises(ConfigError, match="model_id"):
        spec_for(model, weight_revision="abc")


def test_a_client_of_another_model_is_refused():
    other = MemoryClient(spec_for(tiny("Llama", dtype=torch.bfloat16)))
    with pytest.raises(LayoutMismatchError, match="bfloat16"):
        TransformersConnector(tiny("Llama"), other)


# --- what generate refuses


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"attention_mask": torch.tensor([[0] + [1] * 39])}, "attention_mask"),
        ({"num_beams": 2}, "num_beams"),
        ({"do_sample": True, "num_return_sequences": 2}, "num_return_sequences"),
        ({"use_cache": False}, "use_cache"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"inputs_embeds": torch.zeros(1, 40, 64)}, "inputs_embeds"),
        ({"generation_config": transformers.GenerationConfig(num_beams=3)}, "num_beams"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_that_would_be_wrong_are_refused(settings, name):
    kv = connect(tiny("Llama"))
    with pytest.raises(ConfigError, match=name):
        kv.generate(prompt_of(40), **settings)
    assert kv.last is None


@pytest.mark.parametrize("shape", [(2, 40), (40,), (1, 0)])
def test_only_one_prompt_at_a_time(shape):
    with pytest.raises(ConfigError, match="one prompt at a time"):
        connect(tiny("Llama")).generate(torch.ones(shape, dtype=torch.long))

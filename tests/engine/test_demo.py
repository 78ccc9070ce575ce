"""The demo as users run it, on a tiny model: from start to end, interrupted, and given things that cannot work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

from kvfleet.cli import demo_flow
from kvfleet.cli.demo_screen import same_everywhere
from kvfleet.node.messages import Source

SIZES = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1_200,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
COMMAND = [sys.executable, "-c", "from kvfleet.cli.main import app; app()", "demo"]


def save(model, directory):
    """Save a model with a tokenizer that has one token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(["<end>", *alphabet])}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>").save_pretrained(directory)
    model.save_pretrained(directory)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    torch.manual_seed(3)
    directory = tmp_path_factory.mktemp("tiny")
    save(LlamaForCausalLM(LlamaConfig(**SIZES)), directory)
    return directory


def leftovers():
    return {*Path("/tmp").glob("kvfleet-*"), *Path("/dev/shm").glob("kvfleet-demo-*")}


@pytest.fixture(autouse=True)
def _nothing_is_left():
    before = leftovers()
    yield
    assert leftovers() <= before


def test_every_run_finds_the_kv_and_gives_the_same_answer(tiny_model, tmp_path, capsys):
    storage = tmp_path / "storage"
    with demo_flow.scratch(f"file://{storage}") as places:
        demo = demo_flow.Demo(places, "All work and no play. " * 60, "Who works?", 2, tiny_model)
        rows = demo.show([])
        assert list(storage.rglob("*.arrow"))
    assert not list(storage.rglob("*.arrow"))
    assert same_everywhere(rows)
    prompt = rows[0].answer.computed_tokens
    reused = prompt // 256 * 256
    assert reused >= 1_024
    assert [(row.title, row.node) for row in rows] == [
        ("recompute", "A"),
        ("same node", "A"),
        ("other node", "B"),
        ("evicted", "B"),
        ("restarted", "A"),
    ]
    num_bytes = reused * 2 * 3 * 2 * 16 * 4
    sources = [None, Source.DRAM, Source.PEER, Source.SHARED, Source.SHARED]
    for row, source in zip(rows, sources, strict=True):
        expected = (0, prompt, {}) if source is None else (reused, prompt - reused, {source: num_bytes})
        answer = row.answer
        assert (answer.reused_tokens, answer.computed_tokens, dict(answer.bytes_by_source)) == expected
        assert answer.shortfall == ""
    shown = capsys.readouterr().out
    assert "All runs gave the same answer" in shown
    for text in ("own memory", "other node", "shared storage", "Total time"):
        assert text in shown


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupted_demo_cleans_up(tiny_model, number, tmp_path):
    output = tmp_path / "output"
    with output.open("wb") as file:
        demo = subprocess.Popen(
            [*COMMAND, "--model", tiny_model, "--document", __file__],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until(lambda: "Starting the fleet" in output.read_text() or demo.poll() is not None)
        # As a terminal does: every process of the group that has not gone into a session of its own gets it.
        os.killpg(demo.pid, number) if number == signal.SIGINT else demo.send_signal(number)
        assert demo.wait(60) == 130
    finally:
        demo.kill()
        demo.wait()
    assert "interrupted" in output.read_text()
    wait_until(lambda: not processes_of_session(demo.pid))


def wait_until(condition, timeout_s=120.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def processes_of_session(session):
    """Command lines of the processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, belongs = stat.read_text().rpartition(")")[2].split()[:4]
            command = stat.with_name("cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(belongs) == session and state != "Z":
            found.append(command)
    return found


def run_demo(*arguments, cwd):
    """The demo's exit status and error output."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([*COMMAND, *arguments], check=False, cwd=cwd, env=environment, capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--document", "missing.txt"], "--document: cannot read missing.txt"),
        (["--model", "."], "--model: . is not the directory of a model"),
        (["--shared", "memory://demo"], "--shared: must be a URL of storage that processes can share"),
        (["--shared", "/mnt/cluster"], "--shared: must be a URL"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_work_is_said_at_once(arguments, problem, tmp_path):
    status, errors = run_demo(*arguments, cwd=tmp_path)
    assert status == 1
    assert problem in errors
    assert "Traceback" not in errors


def test_a_model_that_cannot_be_cached_is_named(tmp_path):
    save(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=64)), tmp_path)
    status, errors = run_demo("--model", ".", "--nodes", "1", cwd=tmp_path)
    assert status == 1
    assert "sliding windows and linear attention cannot be cached" in errors
    assert "Traceback" not in errors

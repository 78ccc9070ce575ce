"""`kvfleet record` on a fleet that runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from kvfleet import Hints
from kvfleet.sim.trace import load_trace
from tests.cluster.engine_process import BLOCK_TOKENS, prompt
from tests.conftest import wait_for


def test_what_engines_ask_is_recorded(ray_cluster, make_fleet, engine_here, tmp_path):
    fleet = make_fleet(name="recorded")
    engine = engine_here(fleet)
    root, path = Path(fleet.config.arena_root), tmp_path / "asked.jsonl"
    command = [Path(sys.executable).with_name("kvfleet"), "record", str(path), "--name", "recorded"]
    environment = {**os.environ, "RAY_ADDRESS": ray_cluster.address, "COLUMNS": "160"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as recording:
        try:
            wait_for(lambda: list(root.rglob("recording")), f"nodes record: {sorted(root.rglob('*'))}", 60)
            engine.client._recorder._look_at = 0.0
            said = Hints(), Hints.of("other"), Hints.of("chat", turn=2, final=True)
            for (number, blocks), hints in zip(((1, 3), (2, 2), (1, 4)), said, strict=True):
                tokens = prompt(number, blocks)[: blocks * BLOCK_TOKENS - 1]
                assert engine.client.lookup(tokens, hints=hints).num_blocks == 0
        finally:
            recording.send_signal(signal.SIGINT)
            _, told = recording.communicate(timeout=60)
    assert recording.returncode == 0, told
    assert f"3 requests; {path}: 6 blocks, " in told
    trace = load_trace(path)
    assert (trace.block_tokens, trace.token_bytes) == (BLOCK_TOKENS, engine.client.spec.layout.bytes_per_token)
    assert [one.keys for one in trace.requests] == [(0, 1), (2,), (0, 1, 3)]
    assert [one.prompt_tokens for one in trace.requests] == [n * BLOCK_TOKENS - 1 for n in (3, 2, 4)]
    assert [(one.turn, one.final) for one in trace.requests] == [(None, False), (None, False), (2, True)]
    sessions = [one.session for one in trace.requests]
    assert sessions[0] == ""
    assert len({*sessions}) == 3
    assert not {Hints.of("chat").session.hex()[:16], "chat"} & {*sessions}, "they are salted"
    assert not list(root.rglob("recording*"))

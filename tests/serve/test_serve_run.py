"""The one documented command, `serve run kvfleet.connectors.serve:app`: a replica, and the fleet that it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from ray import serve

import kvfleet
from tests.conftest import MIB, wait_for
from tests.serve.conftest import ENGINE, MODEL, RULES, START_TIMEOUT_S, Serving

FLEET = "from-the-command"

pytestmark = pytest.mark.timeout(START_TIMEOUT_S)


@contextmanager
def serve_run(serving: Serving, log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """The command, until it is interrupted as a user would. What it leaves, its fleet, is stopped."""
    with log.open("wb") as output:
        running = subprocess.Popen(
            [Path(sys.executable).with_name("serve"), "run", "kvfleet.connectors.serve:app", *arguments],
            env={**os.environ, "RAY_ADDRESS": serving.cluster.address},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield running
        finally:
            serving.note_processes()
            running.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                running.wait(timeout=60)
            running.kill()
            running.wait()
            with suppress(kvfleet.ConfigError):  # it was never started
                assert kvfleet.connect(FLEET).stop() == 0


def runs(application: str) -> bool:
    """Whether all of its replicas are up."""
    found = serve.status().applications.get(application)
    return found is not None and found.status == "RUNNING"


def test_the_command_starts_a_fleet_and_serves_over_it(serving, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    log = tmp_path / "log"
    arguments = [
        f"model={MODEL}",
        "replicas=1",
        f"fleet={FLEET}",
        "dram=256MiB",
        f"shared=file://{shared}",
        *(f"{name}={value}" for name, value in ENGINE.items() if name != "engine_kwargs"),
        'engine_kwargs={"enforce_eager": true}',
    ]
    with serve_run(serving, log, *arguments) as running:
        wait_for(lambda: runs("default") or running.poll() is not None, "it runs", START_TIMEOUT_S * 0.75)
        assert running.poll() is None, log.read_text()
        fleet = kvfleet.connect(FLEET)
        assert (fleet.config.dram_bytes, fleet.config.shared_url) == (256 * MIB, f"file://{shared}")
        assert {node.node_id for node in fleet.status().nodes} <= set(serving.nodes)
        answer = serving.ask(RULES + "The capital of France is")
        assert len(answer.chunks) > 3
        blocks = answer.usage["prompt_tokens"] // 256
        wait_for(lambda: sum(node.saved_blocks for node in fleet.status().nodes) == blocks, "its blocks are saved")

"""What a fleet publishes, read back from Ray's metrics agents. They run where Ray has them, as with `ray[serve]`."""

from __future__ import annotations

import re
import secrets
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import ray

import kvfleet
from kvfleet import FleetConfig
from kvfleet.metrics import METRICS
from tests.conftest import MIB, wait_for

_SAMPLE = re.compile(r"ray_(kvfleet_\w+)\{(.*)\} (\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def exported(fleet: str) -> dict[tuple[str, str, str], float]:
    """Metrics of a fleet on all nodes: (name, node, its own label's value) → value."""
    samples = {}
    for node in ray.nodes():
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                text = answer.read().decode()
        except OSError:  # the agent is starting
            continue
        for name, inner, value in _SAMPLE.findall(text):
            labels = dict(_LABEL.findall(inner))
            if labels["fleet"] == fleet:
                samples[name, labels.get("node", ""), labels.get(METRICS[name].label, "")] = float(value)
    return samples


@pytest.mark.timeout(180)
def test_a_fleet_is_seen_by_prometheus(fresh_cluster: object, arena_root: Path) -> None:
    fleet = kvfleet.start(
        FleetConfig(name=secrets.token_hex(4), dram_bytes=64 * MIB, arena_root=str(arena_root), heartbeat_s=0.2)
    )
    try:
        layout = kvfleet.BlockLayout.opaque(block_bytes=MIB, block_tokens=16, inner_order="words")
        client = fleet.client(kvfleet.ModelSpec(model_id="m", weight_revision="1", layout=layout))
        tokens = np.arange(160, dtype=np.uint32)
        client.store(tokens[:64], lambda index, view: view.fill(index)).wait(30)
        assert client.load(client.lookup(tokens), lambda index, view: None) == 64
        node, missing = ray.get_runtime_context().get_node_id(), client.lookup(tokens).missing
        assert missing is not None
        expected = {
            ("kvfleet_lookups_total", node, ""): 2,
            ("kvfleet_asked_blocks_total", node, ""): 20,
            ("kvfleet_blocks_total", node, "dram"): 4,
            ("kvfleet_blocks_total", node, missing.value): 12,
            ("kvfleet_loaded_bytes_total", node, "dram"): 4 * MIB,
            ("kvfleet_stored_blocks_total", node, ""): 4,
            ("kvfleet_used_bytes", node, "dram"): 4 * MIB,
            ("kvfleet_capacity_bytes", node, "dram"): 64 * MIB,
            ("kvfleet_resident_blocks", node, "dram"): 4,
            ("kvfleet_directory_rows", "", ""): 4,
            ("kvfleet_directory_lookups_total", "", ""): 2,
        }
        wait_for(lambda: expected.items() <= exported(fleet.config.name).items(), "the metrics are exported", 90)
    finally:
        fleet.stop()

"""`ray_cluster.yaml` is what `ray up` accepts, and its sizes fit together."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import validate_config

PATH = Path(__file__).parents[2] / "ray_cluster.yaml"
UNITS = {"g": 1 << 30, "GiB": 1 << 30}


@pytest.fixture(scope="module")
def config() -> Any:
    return yaml.safe_load(PATH.read_text())


def size(pattern: str, text: str) -> int:
    found = re.search(pattern + r"[= ](\d+)(\w*)", text)
    assert found is not None
    return int(found[1]) * UNITS.get(found[2], 1)


def test_ray_accepts_it(config):
    # The field is filled in by `ray up` itself.
    validate_config({**config, "cluster_synced_files": []})


def test_an_unknown_field_is_refused(config):
    with pytest.raises(Exception, match="Additional properties are not allowed"):
        validate_config({**config, "cluster_synced_files": [], "shm_size": "64g"})


@pytest.mark.parametrize("role", ["head", "worker"])
def test_shared_memory_holds_object_store_and_arena(config, role):
    shared_memory = size("--shm-size", " ".join(config["docker"][f"{role}_run_options"]))
    object_store = size("--object-store-memory", " ".join(config[f"{role}_start_ray_commands"]))
    arena = size("--dram-bytes", PATH.read_text())
    assert object_store + arena <= 0.9 * shared_memory


def test_the_shell_understands_every_command(config):
    for name in ("initialization", "setup", "head_start_ray", "worker_start_ray"):
        for command in config[f"{name}_commands"]:
            subprocess.run(["bash", "-n", "-c", command], check=True)

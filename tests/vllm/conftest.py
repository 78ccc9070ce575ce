"""A cluster, a fleet, a model and engines for the tests with a real vLLM."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import kvfleet
from kvfleet import Fleet, FleetConfig
from kvfleet.cli.demo_model import cache_directory, prepare_smollm2
from tests.cluster.engine_process import elsewhere, fleet_actors, here
from tests.conftest import MIB, SHARED_MEMORY, wait_for
from tests.seaweed import KEY, SECRET
from tests.vllm.engines import BLOCK_TOKENS, OTHER, PROMPT, UNIQUE, Answer, EngineProcess, connector

# Nodes take credentials from their environment: it is that of the process that starts the cluster.
os.environ |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # vLLM and what it brings warn of much that is theirs to change; an engine takes long to start here.
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def model() -> Path:
    """SmolLM2-135M-Instruct in float32."""
    return prepare_smollm2(cache_directory())


@contextmanager
def running_fleet(**settings: Any) -> Iterator[Fleet]:
    """A fleet of the tests' own. At the end nothing may be wrong in its books, and nothing is left of it."""
    with tempfile.TemporaryDirectory(prefix="kvfleet-test-", dir=SHARED_MEMORY) as root:
        # The models are so small that computing them is faster than most loads.
        defaults: dict[str, Any] = {
            "name": secrets.token_hex(4), "dram_bytes": 512 * MIB, "arena_root": root, "plan_loads": False,
        }  # fmt: skip
        fleet = kvfleet.start(FleetConfig(**(defaults | settings)))
        fleet.up()
        yield fleet
        wait_for(lambda: not findings(fleet), f"the books are in order: {findings(fleet)}")
        fleet.stop()
        assert fleet_actors(fleet.config.name) == {}


def findings(fleet: Fleet) -> list[str]:
    """What is wrong in the managers' books, or left of what was under way."""
    status = fleet.status()
    wrong = [str(node) for node in status.nodes if node.problem or node.audit or node.reserved_blocks]
    return [*wrong, *(f"{node} does not answer" for node in status.silent)]


@pytest.fixture(scope="session")
def fleet(ray_cluster: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The fleet that most tests share. What does not come in 3 seconds is not loaded."""
    with running_fleet(load_timeout_s=3.0, attach_timeout_s=15.0) as running:
        yield running


@pytest.fixture(scope="session")
def start_engine() -> Iterator[Callable[..., EngineProcess]]:
    """`start_engine(node, model, **arguments)`: an engine on a node, "here" or "elsewhere"; stopped at the end."""
    with ExitStack() as stack:

        def start(place: str, model: Path, **arguments: Any) -> EngineProcess:
            node = here() if place == "here" else elsewhere()
            engine = EngineProcess(node, str(model), **arguments)
            stack.callback(engine.stop)
            return engine.wait_until_up()

        yield start


@pytest.fixture(scope="session")
def plain(start_engine: Callable[..., EngineProcess], model: Path) -> dict[str, Answer]:
    """Answers of a vLLM that knows nothing of kvfleet."""
    engine = start_engine("here", model)
    answers = {prompt: engine.ask([prompt])[0] for prompt in (PROMPT, OTHER, UNIQUE)}
    engine.stop()
    return answers


@pytest.fixture(scope="session")
def first(fleet: Fleet, start_engine: Callable[..., EngineProcess], model: Path) -> EngineProcess:
    """An engine on this node. All tests keep it: what it has asked once, the fleet holds."""
    return start_engine("here", model, kv_transfer_config=connector(fleet.config.name, block_tokens=BLOCK_TOKENS))


@pytest.fixture(scope="session")
def other_node(fleet: Fleet, start_engine: Callable[..., EngineProcess], model: Path) -> EngineProcess:
    """An engine on the other node."""
    return start_engine("elsewhere", model, kv_transfer_config=connector(fleet.config.name, block_tokens=BLOCK_TOKENS))

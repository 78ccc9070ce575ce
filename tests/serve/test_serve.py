"""Two replicas on two nodes: a prefix that one has computed is loaded by the other."""

from __future__ import annotations

from typing import Any

import pytest
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.llm import build_openai_app

from kvfleet.connectors.serve import app, llm_config
from kvfleet.errors import ConfigError
from tests.conftest import wait_for
from tests.serve.conftest import ENGINE, MODEL, RULES, START_TIMEOUT_S, Serving, deploy
from tests.serve.replicas import Metered

HITS = "vllm:external_prefix_cache_hits_total"
APP = "two-replicas"
BY_NODE: Any = "tests.serve.replicas.ByNode"  # a name is allowed, whatever its type says

pytestmark = pytest.mark.timeout(START_TIMEOUT_S)


@pytest.fixture(scope="module")
def replicas(serving: Serving) -> DeploymentHandle[Any]:
    """What `app` would serve, with requests sent to the node they name, and counters that can be read."""
    config = llm_config({"model": MODEL, "replicas": "2", "fleet": serving.fleet.config.name, **ENGINE})
    config.server_cls = Metered
    config.log_engine_metrics = False  # counters stay in the replica, where `Metered` finds them
    config.deployment_config["request_router_config"] = RequestRouterConfig(request_router_class=BY_NODE)
    application = build_openai_app({"llm_configs": [config], "ingress_deployment_config": {"num_replicas": 1}})
    deploy(application, APP)
    (deployment,) = (name for name in serve.status().applications[APP].deployments if name.startswith("Metered"))
    return serve.get_deployment_handle(deployment, APP)


def report(replicas: DeploymentHandle[Any], node: str) -> dict[str, Any]:
    found: dict[str, Any] = replicas.report.remote(node).result(timeout_s=60)
    return found


def test_each_replica_knows_its_node_before_its_engine_starts(serving, replicas):
    for node in serving.nodes:
        found = report(replicas, node)
        assert found["node"] == node
        assert found["extra"] == {
            "fleet": serving.fleet.config.name,
            "address": serving.cluster.address,
            "node_id": node,
        }


def test_a_prefix_computed_on_one_node_is_loaded_on_the_other(serving, replicas):
    a, b = serving.nodes
    stored = serving.findable(a)
    first = serving.ask(RULES + "The capital of France is", user=a)
    tokens = first.usage["prompt_tokens"]
    assert 800 < tokens < 1800
    wait_for(lambda: serving.findable(a) == stored + tokens // 256, "the prompt's blocks are stored")
    before, moved = report(replicas, b)["totals"], serving.from_peers(b)

    second = serving.ask(RULES + "The capital of France is", user=b)

    after = report(replicas, b)["totals"]
    assert second.text == first.text
    assert len(first.chunks) > 3
    assert len(second.chunks) > 3
    assert after[HITS] - before[HITS] == tokens // 256 * 256
    assert serving.from_peers(b) - moved == serving.node(a).used_bytes
    assert serving.node(a).sent_bytes == serving.node(a).used_bytes
    assert serving.from_peers(a) == 0


def test_another_salt_finds_nothing(serving, replicas):
    a, b = serving.nodes
    before = report(replicas, b)["totals"]
    plain = serving.ask(RULES + "The capital of Spain is", user=a)
    salted = serving.ask(RULES + "The capital of Spain is", user=b, cache_salt="another tenant's")
    assert salted.text == plain.text
    assert report(replicas, b)["totals"][HITS] == before[HITS]


def test_hints_in_the_body_of_a_request_reach_the_manager(serving, replicas):
    a, _ = serving.nodes
    before = serving.node(a).retired_blocks
    said = {"kvfleet": {"session": "chat 7", "final": True}}
    answer = serving.ask(RULES + "Goodbye!", user=a, cache_salt="ends", kv_transfer_params=said)
    blocks = answer.usage["prompt_tokens"] // 256
    wait_for(lambda: serving.node(a).retired_blocks - before == blocks, "the manager knows that the session has ended")


def test_a_fleet_that_runs_is_joined_unless_other_settings_are_asked_for(serving):
    args = {"model": MODEL, "fleet": serving.fleet.config.name}
    before = serving.fleet.status()
    assert isinstance(app(args), Application)
    assert isinstance(app(args | {"dram": "256MiB"}), Application)
    with pytest.raises(ConfigError, match="runs with other settings"):
        app(args | {"dram": "512MiB"})
    assert [node.epoch for node in serving.fleet.status().nodes] == [node.epoch for node in before.nodes]

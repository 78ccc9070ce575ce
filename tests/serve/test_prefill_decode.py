"""Prefill on one node, decode on the other: what prefill has stored, decode loads."""

from __future__ import annotations

import pytest
from ray.serve.llm import build_pd_openai_app

from kvfleet.connectors.serve import llm_config
from tests.serve.conftest import ENGINE, MODEL, RULES, START_TIMEOUT_S, Serving, deploy

pytestmark = pytest.mark.timeout(START_TIMEOUT_S)


@pytest.fixture(scope="module", autouse=True)
def _replicas(serving: Serving) -> None:
    """Each takes more than half of a node, so they land on different ones."""
    args = {"model": MODEL, "fleet": serving.fleet.config.name, **ENGINE}
    configs = {"prefill_config": llm_config(args), "decode_config": llm_config(args)}
    deploy(build_pd_openai_app({**configs, "ingress_deployment_config": {"num_replicas": 1}}), "prefill-decode")


def test_decode_loads_what_prefill_has_stored(serving):
    answer = serving.ask(RULES + "The capital of France is")
    blocks = answer.usage["prompt_tokens"] // 256
    assert len(answer.chunks) > 3
    decode, prefill = sorted(serving.nodes, key=lambda node: serving.node(node).sent_bytes)
    assert serving.node(prefill).sent_bytes == serving.from_peers(decode) == serving.node(prefill).used_bytes
    assert serving.findable(prefill) == blocks
    assert serving.from_peers(prefill) == 0
    assert serving.ask(RULES + "The capital of France is", cache_salt="another tenant's").text == answer.text

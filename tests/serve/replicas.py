"""What the tests put into Serve: requests that go to the node they name, and replicas that tell their counters."""

from __future__ import annotations

from typing import Any

import ray
from ray.serve.llm import LLMServer
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from typing_extensions import override


class ByNode(RequestRouter):
    """Sends a request to the replica on the node that its `user`, or a call's only argument, names."""

    @override
    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        asked = pending_request.args[0] if pending_request is not None and pending_request.args else None
        node = getattr(asked, "user", asked)
        return [[replica for replica in candidate_replicas if replica.node_id == node] or candidate_replicas]


class Metered(LLMServer):
    """A server that tells what its engine counts."""

    async def report(self, node: str) -> dict[str, Any]:
        """Totals of vLLM's counters, this replica's node, and how its engine was told to find the fleet."""
        from prometheus_client import REGISTRY

        totals: dict[str, float] = {}
        for family in REGISTRY.collect():
            for sample in family.samples:
                if family.type == "counter" and sample.name.endswith("_total"):
                    totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        config = await self.llm_config()
        assert config is not None
        return {
            "node": ray.get_runtime_context().get_node_id(),
            "totals": totals,
            "extra": config.engine_kwargs["kv_transfer_config"]["kv_connector_extra_config"],
        }

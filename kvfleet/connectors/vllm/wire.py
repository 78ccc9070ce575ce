"""What the halves of the connector send each other, through vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

from kvfleet.connectors.vllm.plan import Plan
from kvfleet.core.layout import ModelSpec

__all__ = ["Step", "Worker"]


@dataclass
class Step(KVConnectorMetadata):
    """What the scheduler tells the workers in a step."""

    plan: Plan = field(default_factory=Plan)


@dataclass
class Worker(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler when it starts: what its KV is, and how many blocks it can take in a step."""

    spec: ModelSpec
    step_blocks_max: int

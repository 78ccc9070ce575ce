"""What of vLLM's tiers of offloading differs between its versions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

__all__ = ["chunk_ids", "hit_source", "job_result", "known_order"]


def hit_source() -> object:
    """What vLLM calls KV of other engines. 0.29 has no name for it."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.P2P


def known_order(req_context: ReqContext) -> Iterable[OffloadKey]:
    """All chunks of a request in order, as far as vLLM tells: from 0.32 on."""
    positions: Mapping[OffloadKey, int] = getattr(req_context, "_offload_key_positions", {})
    return positions


def chunk_ids(job: TransferJob) -> list[int]:
    """Rows of a job's chunks. 0.29 calls them blocks."""
    ids: np.ndarray = job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids
    return [int(i) for i in ids]


def job_result(**facts: Any) -> JobResult:  # noqa: ANN401  the fields of a JobResult
    """A result with those of the facts that this version asks for: 0.29 does not ask for `transfer_bytes`."""
    known = {field.name for field in fields(JobResult)}
    return JobResult(**{name: value for name, value in facts.items() if name in known})

"""vLLM engines with the fleet as a tier of their offloading, in processes of their own."""

from __future__ import annotations

import threading
from typing import Any

import ray
from typing_extensions import override

from kvfleet.client import Client
from kvfleet.core.block import engine_keys, split
from tests.cluster.engine_process import on
from tests.vllm.engines import ENGINE_BLOCK_TOKENS, Engine, EngineProcess

CHUNK_TOKENS = 64
CHUNK_BYTES = CHUNK_TOKENS * 46_080  # SmolLM2 in float32


def offloading(fleet: str, cpu_chunks: int, **settings: object) -> dict[str, Any]:
    """What a user writes in `kv_transfer_config`; `spec_name` would be TieringOffloadingSpec on a GPU.

    Args:
        fleet: its name.
        cpu_chunks: of memory between the engine and the fleet.
        **settings: of the tier.
    """
    tier = {"type": "KVFleetTier", "module_path": "kvfleet.connectors.vllm", "fleet": fleet, **settings}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "tests.vllm.cpu_tiering",
            "block_size": CHUNK_TOKENS,
            "cpu_bytes_to_use": cpu_chunks * CHUNK_BYTES,
            "secondary_tiers": [tier],
        },
    }


class TierEngine(Engine):
    """vLLM in this process, with the tier."""

    def tier(self) -> Any:
        """The `KVFleetTier`."""
        scheduler, _ = self.connectors()
        return scheduler.connector_scheduler.manager.secondary_tiers[0]

    @override
    def _clients(self) -> list[Client]:
        return [self.tier().transfers.client]

    def has_joined(self) -> bool:
        """Whether the fleet has been found."""
        return self.tier().transfers is not None

    @override
    def is_saved(self) -> bool:
        """Whether the tier has nothing under way. What has ended is told in the engine's next step."""
        self._llm.llm_engine.step()
        return not self.tier().has_pending_work()

    @override
    def close(self) -> bool:
        """Shut vLLM down. Returns whether the tier is done with everything."""
        tier = self.tier()
        self._llm.llm_engine.engine_core.shutdown()
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("kvfleet-")]
        for thread in threads:
            thread.join(30.0)
        return tier.transfers is None and not tier._rows.size and not any(thread.is_alive() for thread in threads)

    def chunk_keys(self, prompt: str) -> list[str]:
        """The fleet's keys of a prompt's chunks, in hex, worked out without the tier."""
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils

        ids = self._llm.get_tokenizer().encode(prompt)
        hash_function, parent = get_hash_fn_by_name("sha256"), None
        names = []
        for start in range(0, len(ids) - ENGINE_BLOCK_TOKENS + 1, ENGINE_BLOCK_TOKENS):
            block = tuple(ids[start : start + ENGINE_BLOCK_TOKENS])
            parent = kv_cache_utils.hash_block_tokens(hash_function, parent, block, None)
            if (start + ENGINE_BLOCK_TOKENS) % CHUNK_TOKENS == 0:
                names.append(parent + bytes(4))  # of KV cache group 0
        return [key.hex() for key in split(engine_keys(self.tier()._spec.root, names))]

    def num_found(self, prompt: str) -> int:
        """How many of a prompt's chunks a lookup finds; 0 while the client is not at one with its fleet."""
        keys = b"".join(bytes.fromhex(key) for key in self.chunk_keys(prompt))
        hit = self._clients()[0].lookup_keys(keys)
        return hit.num_blocks if hit.fault is None else 0

    def faults(self) -> dict[str, int]:
        """Hooks of the tier that failed since the last call."""
        counts: dict[str, int] = self.tier().faults.take()
        return counts


class TierEngineProcess(EngineProcess):
    """A `TierEngine` on a node, called from the test."""

    def __init__(self, node: str, model: str, fleet: str, cpu_chunks: int, **settings: object) -> None:
        options: dict[str, Any] = on(node) | {"max_concurrency": 2}
        arguments = {"kv_transfer_config": offloading(fleet, cpu_chunks, **settings)}
        self._actor: Any = ray.remote(TierEngine).options(**options).remote(model, arguments, {})

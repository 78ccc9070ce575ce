"""vLLM's door to the fleet: `KVFleetConnector`, a KV connector of vLLM's version 1 interface.

vLLM makes two of them: one in the process that schedules, one in every worker. The scheduler's decides what is loaded
and saved, for all ranks at once; the workers' move their rank's bytes. All waiting is done on threads of ours, and no
hook ever raises: once the engine has started, whatever fails here is a miss.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from typing import TYPE_CHECKING, Any

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from kvfleet.config import MIB
from kvfleet.connectors.vllm import identity, versions
from kvfleet.connectors.vllm.adapters import Adapters
from kvfleet.connectors.vllm.faults import Faults, guarded
from kvfleet.connectors.vllm.joining import Membership, Settings
from kvfleet.connectors.vllm.lookups import Lookups
from kvfleet.connectors.vllm.metrics import FleetMetrics, FleetStats
from kvfleet.connectors.vllm.plan import Plan, Save
from kvfleet.connectors.vllm.pool import make_pool
from kvfleet.connectors.vllm.scheduling import Scheduling
from kvfleet.connectors.vllm.scopes import Scope, clients_of, spec_of
from kvfleet.connectors.vllm.staging import Staging
from kvfleet.connectors.vllm.transfers import Transfers
from kvfleet.connectors.vllm.wire import Step, Worker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    import kvfleet

__all__ = ["KVFleetConnector"]

_log = logging.getLogger(__name__)
_BUFFER_BYTES_MIN = 256 * MIB


class KVFleetConnector(KVConnectorBase_V1, SupportsHMA):
    """Shares vLLM's KV with the fleet.

    `kv_connector_extra_config` takes the fields of `Settings`. Beside other connectors in vLLM's MultiConnector it must
    be the first, and none of them may have workers that introduce themselves, as NIXL's do: vLLM hands on only the
    first one's word.

    Raises:
        ConfigError: at start only: a setting that does not exist, a load failure policy other than `recompute`, block
            hashes that other processes cannot make, or a model or parallelism that is not supported; and why.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.faults = Faults()
        self._settings = Settings.read(self._kv_transfer_config.kv_connector_extra_config)
        identity.check_supported(vllm_config, kv_cache_config)
        self._membership = Membership(self._settings)
        self._engine_block_tokens: int = vllm_config.cache_config.block_size
        self._block_tokens = identity.block_tokens(self._settings.block_tokens, self._engine_block_tokens)
        self._worker: Worker | None = None
        self._transfers: Transfers | None = None
        self._scheduling: Scheduling | None = None
        self._lookups: Lookups | None = None
        if role is KVConnectorRole.SCHEDULER:
            hash_tokens = versions.hash_block_tokens(vllm_config, kv_cache_config)
            adapters = Adapters(identity.adapter_ref)
            self._lookups = Lookups(self._block_tokens, hash_tokens, adapters, self.faults.failed)
            saves = self._kv_transfer_config.is_kv_producer
            self._scheduling = Scheduling(self._lookups, self._engine_block_tokens, self._block_tokens, saves=saves)

    @property
    @override
    def requires_kv_delivery(self) -> bool:
        return False  # what is not stored is computed again

    @override
    @guarded(lambda: None)
    def shutdown(self) -> None:
        for part in (self._lookups, self._transfers, self._membership):
            if part is not None:
                part.close()

    # --- the workers

    @override
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        per_block = self._block_tokens // self._engine_block_tokens
        pool = make_pool(kv_caches, self._kv_cache_config.num_blocks, per_block)
        layout = versions.engine_layout(self._vllm_config, self._kv_cache_config, pool)
        settings = self._settings
        spec = identity.model_spec(
            self._vllm_config,
            layout,
            tenant=settings.tenant,
            model_id=settings.model_id,
            weight_revision=settings.weight_revision,
        )
        staging = Staging(pool.block_bytes, self._buffer_bytes(pool.block_bytes), pool.allocate)
        transfers = Transfers(pool, staging, self._block_tokens, self.faults.failed)
        shard = versions.tensor_parallel_rank() if spec.layout.num_shards > 1 else 0

        def start(fleet: kvfleet.Fleet) -> None:
            clients = clients_of(fleet, spec, shard, self.faults.failed)
            memory = clients.get(Scope()).memory
            if memory is not None:
                pool.pin(memory)
            transfers.start(clients, fleet.config.load_timeout_s)
            mib, namespace = pool.block_bytes / MIB, spec.namespace_id.hex()
            _log.info("kvfleet: blocks of %d tokens, %.1f MiB a rank, namespace %s", self._block_tokens, mib, namespace)

        self._worker, self._transfers = Worker(spec, staging.num_buffers), transfers
        self._membership.join(start)

    def _buffer_bytes(self, block_bytes: int) -> int:
        step_tokens = self._vllm_config.scheduler_config.max_num_batched_tokens
        step_blocks = -(-step_tokens // self._block_tokens) + 1
        return self._settings.save_buffer_bytes or max(_BUFFER_BYTES_MIN, step_blocks * block_bytes)

    @override
    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._worker

    @override
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._fence()

    @guarded(lambda: None)
    def _fence(self) -> None:
        if self._transfers is not None:
            self._transfers.fence()

    def _plan(self) -> Plan:
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        return step.plan

    @override
    @guarded(lambda: None)
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self._transfers is not None:
            self._transfers.begin(self._plan().loads)

    @override
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request runs when its load has ended."""

    @override
    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do: whole blocks are saved when all layers are there."""

    @override
    @guarded(lambda: None)
    def wait_for_save(self) -> None:
        if self._transfers is not None:
            self._transfers.save(self._plan().saves)

    @override
    @guarded(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._transfers.ended(finished_req_ids) if self._transfers is not None else None

    @override
    @guarded(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._transfers.bad_engine_blocks() if self._transfers is not None else set()

    # --- the scheduler

    @override
    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        workers = [worker for worker in metadata.values() if isinstance(worker, Worker)]
        specs = {worker.spec for worker in workers}
        if len(specs) != 1:
            reason = (
                "do not agree on what their KV is" if specs else "said nothing: is there another connector beside it?"
            )
            _log.error("no KV is reused or kept: the workers of KVFleetConnector %s", reason)
            return
        (spec,) = specs
        assert self._lookups is not None
        assert self._scheduling is not None
        lookups, plans = self._lookups, self._scheduling.plans
        self._scheduling.limit(min(worker.step_blocks_max for worker in workers))

        def start(fleet: kvfleet.Fleet) -> None:
            clients = clients_of(fleet, spec, 0, self.faults.failed)
            plans.start(clients.get(Scope()).planning)
            lookups.start(clients, lambda scope: spec_of(spec, scope).root, fleet.config.lookup_timeout_s)

        self._membership.join(start)

    @override
    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduling is not None
        tokens = self._scheduling.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    @override
    @guarded(dict)
    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        assert self._scheduling is not None
        return versions.cache_hit_sources(self._scheduling.sources(request, num_external_tokens))

    @override
    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        assert self._scheduling is not None
        engine_blocks = blocks.get_block_ids()[0]
        try:
            self._scheduling.allocated(request, engine_blocks, num_external_tokens)
        except Exception as error:  # noqa: BLE001  vLLM waits for this load: it has to end
            self.faults.failed("update_state_after_alloc", error)
            self._scheduling.give_up(request.request_id, engine_blocks, num_external_tokens)

    @override
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        assert self._scheduling is not None
        return Step(Plan(self._scheduling.take_loads(), self._saves(scheduler_output)))

    @guarded(tuple)
    def _saves(self, scheduler_output: SchedulerOutput) -> tuple[Save, ...]:
        assert self._scheduling is not None
        return self._scheduling.saves(scheduler_output)

    @override
    @guarded(lambda: None)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        assert self._scheduling is not None
        self._scheduling.output(connector_output)

    @override
    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @override
    @guarded(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduling is not None
        return False, self._scheduling.finished(request)

    @override
    @guarded(lambda: False)
    def reset_cache(self) -> bool | None:
        assert self._scheduling is not None
        self._scheduling.reset(secrets.token_hex(16))
        return True

    # --- metrics

    @override
    @guarded(lambda: None)
    def get_kv_connector_stats(self) -> FleetStats | None:
        counts = Counter(self.faults.take())
        if self._transfers is not None:
            counts.update(self._transfers.take_counts())
        if self._scheduling is not None:
            counts.update(self._scheduling.hints.take("ignored_hints"))
        return FleetStats(dict(counts)) if counts else None

    @classmethod
    @override
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> FleetStats | None:
        return FleetStats(data or {})

    @classmethod
    @override
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> FleetMetrics | None:
        return FleetMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

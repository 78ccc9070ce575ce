"""kvfleet as a tier of vLLM's own offloading: behind the engine's CPU memory, shared by all engines of a fleet.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592, "block_size": 256,
        "secondary_tiers": [{"type": "KVFleetTier", "module_path": "kvfleet.connectors.vllm", "fleet": "default"}]}}'

vLLM copies KV between the GPU and its CPU memory. The tier runs in the scheduler's process alone and moves chunks
between that memory and the fleet. A *chunk* is vLLM's word for a block with the bytes of all ranks.

No fault of the fleet reaches the engine: what cannot be had is a miss, what cannot be kept is dropped.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvfleet.connectors.vllm.faults import Faults, guarded
from kvfleet.connectors.vllm.identity import scoped
from kvfleet.connectors.vllm.joining import Membership, Settings, attached
from kvfleet.connectors.vllm.requesthints import RequestHints
from kvfleet.connectors.vllm.tier_book import Chain, LookupBook
from kvfleet.connectors.vllm.tier_identity import tier_spec
from kvfleet.connectors.vllm.tier_metrics import TierMetrics
from kvfleet.connectors.vllm.tier_transfers import Finished, Transfers
from kvfleet.connectors.vllm.tier_versions import chunk_ids, hit_source, job_result, known_order
from kvfleet.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec

    import kvfleet
    from kvfleet.client import Client
    from kvfleet.core.layout import ModelSpec

__all__ = ["KVFleetTier"]

# vLLM's scheduler stands still while jobs are drained, and every request with it.
_DRAIN_S = 3.0

# A client that is not used any more may take its time, on a thread of its own.
_LET_GO_S = 600.0

# Longest wait for an answer, in lookups: a client that attaches takes two, another request's may be before it.
_LOOKUPS_WAITED_FOR = 4

_SETTINGS = ("address", "fleet", "node_id", "tenant")


class KVFleetTier(SecondaryTierManager):
    """A `SecondaryTierManager` whose chunks are the fleet's blocks.

    Threads: the scheduler's. Blocking: never, but for the start, `shutdown`, and `drain_jobs`, some seconds at most.

    Args:
        offloading_spec: whose tier it is.
        primary_kv_view: the engine's CPU memory, shape (num_chunks, row_bytes), int8.
        tier_type: what vLLM calls it.
        backpressure_detector: vLLM's, from 0.32 on.
        **settings: fleet, address, node_id and tenant: see `Settings`.

    Raises:
        ConfigError: a setting that does not exist, or an engine whose KV cannot be told apart, or put together again.
    """

    # For vLLM's counts of hits by source, from 0.32 on: all chunks are the fleet's, wherever they are.
    cache_hit_source: ClassVar[Any] = hit_source()

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: object | None = None,
        **settings: Any,  # noqa: ANN401  from the engine's configuration
    ) -> None:
        detector = () if backpressure_detector is None else (backpressure_detector,)
        super().__init__(offloading_spec, primary_kv_view, tier_type, *detector)
        if unknown := sorted(settings.keys() - set(_SETTINGS)):
            raise ConfigError(", ".join(unknown), f"no such setting of {tier_type}; there are {', '.join(_SETTINGS)}")
        read = Settings(**settings)
        self.faults = Faults()
        self.transfers: Transfers | None = None  # None: no fleet yet, or no more
        self._rows = np.asarray(primary_kv_view.obj).view(np.uint8)
        self._spec = tier_spec(offloading_spec, self._rows.shape[1], tenant=read.tenant)
        self._book = LookupBook(timeout_s=0.0)
        self._answers_taken = False  # in this step
        self._chains: dict[str, Chain] = {}
        self._loading: dict[int, list[OffloadKey]] = {}
        self._ended: list[JobResult] = []  # jobs of which vLLM has not heard yet
        self._metrics = TierMetrics()
        self._hints = RequestHints()
        self._lock = threading.Lock()  # for what threads of ours touch; held for moments only
        self._closed = False
        self._fleet: kvfleet.Fleet | None = None
        self._membership = Membership(read)
        self._membership.join(self._joined)

    def _joined(self, fleet: kvfleet.Fleet) -> None:
        with self._lock:
            self._fleet, spec = fleet, self._spec
        self._open(fleet, spec)

    def _open(self, fleet: kvfleet.Fleet, spec: ModelSpec) -> None:
        """Make a client, and use it unless the engine was told to forget meanwhile, or has ended.

        Blocking: as long as the node's manager takes to answer or not.
        """
        client = attached(fleet.client(spec))
        with self._lock:
            wanted = spec is self._spec and self.transfers is None and not self._closed
            if wanted:
                self._book = LookupBook(_LOOKUPS_WAITED_FOR * fleet.config.lookup_timeout_s)
                self.transfers = Transfers(client, self._rows, fleet.config.load_timeout_s, self.faults.failed)
        if not wanted:
            client.close()

    # requests

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    @override
    @guarded(lambda: None)
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        # Recency is seen to where blocks are found and loaded. But before 0.32 only this call tells the order of a
        # request's chunks.
        self._chain(req_context).extend(keys)

    @override
    @guarded(lambda: None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._book.finish(req_context.req_id)
        self._chains.pop(req_context.req_id, None)

    def _chain(self, req_context: ReqContext) -> Chain:
        chain = self._chains.setdefault(req_context.req_id, Chain(self._spec.root))
        chain.extend(known_order(req_context))
        return chain

    # lookups

    @override
    @guarded(lambda: LookupResult.MISS)
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if self.transfers is None:
            return LookupResult.MISS
        if not self._answers_taken:  # before anything is found to be late: a step may take long
            self._take_answers(self.transfers)
        found = self._book.ask(req_context.req_id, key)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    @override
    @guarded(lambda: None)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        if self.transfers is not None:
            self._take_answers(self.transfers)
            for question in self._book.flush():
                self.transfers.ask(question)
        self._answers_taken = False

    def _take_answers(self, transfers: Transfers) -> None:
        for question, num_found in transfers.answers():
            self._book.answer(question, num_found)
        self._answers_taken = True

    # jobs: vLLM waits for the end of each, so one that cannot be started has failed

    @override
    def submit_store(self, job_metadata: TransferJob) -> None:
        if not self._store(job_metadata):
            self._ended.append(JobResult(job_metadata.job_id, success=False))

    @guarded(lambda: False)
    def _store(self, job: TransferJob) -> bool:
        if self.transfers is None:
            return False
        runs = self._chain(job.req_context).runs(list(job.keys), chunk_ids(job))
        self.transfers.store(job.job_id, runs, self._hints.of(job.req_context.kv_transfer_params))
        return True

    @override
    def submit_load(self, job_metadata: TransferJob) -> None:
        if not self._load(job_metadata):
            self._book.fail(job_metadata.keys)
            self._ended.append(JobResult(job_metadata.job_id, success=False))

    @guarded(lambda: False)
    def _load(self, job: TransferJob) -> bool:
        names = list(job.keys)
        if self.transfers is None:
            return False
        self.transfers.load(job.job_id, self._chain(job.req_context).run(names, chunk_ids(job)))
        self._loading[job.job_id] = names
        return True

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        ended, self._ended = self._ended + self._finished(), []
        return ended

    @guarded(list)
    def _finished(self) -> list[JobResult]:
        return [] if self.transfers is None else [self._result(job) for job in self.transfers.finished()]

    def _result(self, job: Finished) -> JobResult:
        loaded: list[OffloadKey] | None = None
        if job.is_load:
            names = self._loading.pop(job.job_id)
            loaded, failed = names[: job.num_blocks], names[job.num_blocks :]
            self._book.fail(failed)
        return job_result(
            job_id=job.job_id,
            success=job.num_blocks == job.total,
            successful_keys=loaded,
            transfer_time=job.seconds,
            transfer_bytes=job.num_bytes,
        )

    @override
    def has_pending_work(self) -> bool:
        return bool(self._ended) or (self.transfers is not None and self.transfers.busy)

    @override
    def drain_jobs(self) -> None:
        # vLLM calls this when it forgets its KV, as it does after its weights were changed in place. Nobody knows what
        # they are then, so from now on this engine's blocks are nobody else's.
        fleet, old = self._stop()
        if fleet is not None:
            again = (fleet, self._spec, old)
            try:
                threading.Thread(target=self._open_again, args=again, name="kvfleet-open", daemon=True).start()
            except RuntimeError as error:  # no more threads: from now on all is a miss
                self.faults.failed("open", error)

    def _stop(self) -> tuple[kvfleet.Fleet | None, Client | None]:
        """End all jobs soon, and forget. Every lookup misses until a client is opened for the new spec.

        Returns:
            The fleet, and the client that did the jobs.
        """
        with self._lock:
            self._spec = scoped(self._spec, None, reset=secrets.token_hex(16))
            self._book = LookupBook(self._book.timeout_s)
            fleet, transfers, self.transfers = self._fleet, self.transfers, None
        self._chains.clear()
        self._metrics.restart()
        if transfers is None:
            return fleet, None
        transfers.drain(_DRAIN_S)
        self._ended += [self._result(job) for job in transfers.close()]
        return fleet, transfers.client

    def _open_again(self, fleet: kvfleet.Fleet, spec: ModelSpec, old: Client | None) -> None:
        try:
            self._open(fleet, spec)
        except Exception as error:  # noqa: BLE001  on a thread of ours: nobody else would hear of it
            self.faults.failed("open", error)
        if old is not None:
            old.close(_LET_GO_S)

    @override
    def shutdown(self) -> None:
        with self._lock:
            self._closed = True
        self._stop()
        self._membership.close()
        self._rows = self._rows[:0].copy()  # vLLM unmaps that memory next

    # metrics

    @classmethod
    @override
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return TierMetrics.definitions()

    @override
    @guarded(lambda: None)
    def get_stats(self) -> OffloadingConnectorStats | None:
        client = None if self.transfers is None else self.transfers.client.stats()
        return self._metrics.report(client, self._book.timeouts, self.faults.take() | self._hints.take("errors:hints"))

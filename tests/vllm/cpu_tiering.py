"""vLLM's tiered offloading on a CPU, for the tests of the tier behind it.

All of it is vLLM's own but for the worker that copies between the engine's KV memory and the offloading's: vLLM has
one for GPUs only.
"""

from __future__ import annotations

import inspect
import time
from typing import Any

from typing_extensions import override
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

__all__ = ["CpuTieringSpec"]


class _CopyingWorker(OffloadingWorker):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Copies while it is asked to."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: Any, blocks_per_chunk: int) -> None:
        self._kv = kv_caches
        self._region = region
        self._per_chunk = blocks_per_chunk
        self._views = [
            region.create_next_worker_view(tensor.page_size_bytes * blocks_per_chunk) for tensor in kv_caches.tensors
        ]
        self._finished: list[TransferResult] = []

    def _copy(self, job_id: int, engine: GPULoadStoreSpec, memory: Any, *, store: bool) -> bool:
        started = time.monotonic()
        num_bytes = 0
        skipped = engine.block_indices[0] % self._per_chunk
        for position, block in enumerate(engine.block_ids, start=skipped):
            chunk, part = memory.block_ids[position // self._per_chunk], position % self._per_chunk
            for tensor, view in zip(self._kv.tensors, self._views, strict=True):
                page = tensor.page_size_bytes
                here, there = tensor.tensor[block], view[chunk, part * page : (part + 1) * page]
                if store:
                    there.copy_(here)
                else:
                    here.copy_(there)
                num_bytes += page
        self._finished.append(TransferResult(job_id, True, num_bytes, time.monotonic() - started))
        return True

    @override
    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, store=True)

    @override
    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, store=False)

    @override
    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    @override
    def wait(self, job_ids: Any) -> None:
        pass

    @override
    def shutdown(self) -> None:
        self._views.clear()
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """`TieringOffloadingSpec` with a worker that needs no GPU."""

    @override
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not self._worker:
            # 0.29 says blocks where later versions say chunks.
            word = "chunk" if "num_chunks" in inspect.signature(SharedOffloadRegion.__init__).parameters else "block"
            sizes = {f"num_{word}s": getattr(self, f"num_{word}s"), f"kv_bytes_per_{word}": self.kv_bytes_per_chunk}
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                rank=self.config.parallel.rank,
                cpu_page_size=self.cpu_page_size_per_worker,
                **sizes,
            )
            self._worker: Any = _CopyingWorker(kv_caches, region, self.blocks_per_chunk)
        return self._worker

"""vLLM's own offloading on a CPU, where it has no worker: its scheduler, keys and rows are vLLM's.

"kv_connector_extra_config": {"spec_name": "TieringOnCpu",
                              "spec_module_path": "kvcore_devtools.vllm_offloading", ...}
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

__all__ = ["TieringOnCpu", "offloading"]


def offloading(
    tier: dict[str, Any], rows_nbytes: int = 256 << 20, *, zeroes: bool = False
) -> dict[str, Any]:
    """Return a ``kv_transfer_config`` with kvcore below ``rows_nbytes`` bytes of host memory.

    ``tier`` has kvcore's settings. With ``zeroes`` every load brings zeros: a test whose answers
    are right nevertheless proves nothing.
    """
    named = {"type": "KVCoreTier", "module_path": "kvcore_vllm.tier", **tier}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOnCpu",
            "spec_module_path": "kvcore_devtools.vllm_offloading",
            "cpu_bytes_to_use": rows_nbytes,
            "zeroes": zeroes,
            "secondary_tiers": [named],
        },
    }


class TieringOnCpu(TieringOffloadingSpec):
    """vLLM's offloading in tiers, with a worker for caches in host memory."""

    _copies: Copies | None = None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._copies is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            zeroes = bool(self.extra_config.get("zeroes"))
            self._copies = Copies(region, kv_caches, self.blocks_per_chunk, zeroes)
        return self._copies


class Copies(OffloadingWorker):
    """Copies between a worker's caches and its part of the rows, at once."""

    def __init__(
        self,
        region: SharedOffloadRegion,
        caches: CanonicalKVCaches,
        blocks_per_chunk: int,
        zeroes: bool,
    ) -> None:
        self._region = region
        self._zeroes = zeroes
        self._groups = caches.group_data_refs
        self._per_chunk = blocks_per_chunk
        self._sizes = [each.page_size_bytes for each in caches.tensors]
        self._pages = [
            each.tensor.view(torch.int8).view(-1, each.page_size_bytes) for each in caches.tensors
        ]
        self._rows = [region.create_next_worker_view(n * blocks_per_chunk) for n in self._sizes]
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, to_rows=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, dst_spec, src_spec, to_rows=False)

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        return None

    def shutdown(self) -> None:
        self._rows.clear()
        self._region.cleanup()

    def _copy(self, job: int, paged: GPULoadStoreSpec, rows: Any, *, to_rows: bool) -> bool:
        nbytes, blocks, chunks = 0, iter(paged.block_ids), iter(rows.block_ids)
        parts = zip(self._groups, paged.group_sizes, paged.block_indices, strict=True)
        for refs, count, first in parts:
            chunk = -1
            for index in range(first, first + count):
                at = index % self._per_chunk
                if index == first or at == 0:
                    chunk = int(next(chunks))
                block = int(next(blocks))
                for ref in refs:
                    start, size = at * self._sizes[ref.tensor_idx], ref.page_size_bytes
                    row = self._rows[ref.tensor_idx][chunk, start : start + size]
                    page = self._pages[ref.tensor_idx][block, :size]
                    if to_rows:
                        row.copy_(page)
                    else:
                        page.copy_(torch.zeros_like(row) if self._zeroes else row)
                    nbytes += size
        self._ended.append(TransferResult(job, True, nbytes, 1e-3))
        return True

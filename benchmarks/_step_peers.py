"""Copies on a CPU for vLLM's `OffloadingConnector` and for LMCache, whose own need a GPU.

Everything else is theirs: schedulers, managers, keys and stores. The pages are copied with torch
when they are asked for, so the time of their workers includes the copies.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class TorchWorker(OffloadingWorker):
    """Copies pages with torch into rows of one tensor for each of vLLM's tensors."""

    def __init__(self, caches: CanonicalKVCaches, chunks: int) -> None:
        [self._refs] = caches.group_data_refs
        self._tensors = [caches.tensors[ref.tensor_idx].tensor for ref in self._refs]
        self._held = [torch.empty((chunks, t.shape[1]), dtype=t.dtype) for t in self._tensors]
        self._done: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        pages, rows = _ids(src_spec), _ids(dst_spec)
        return self._copy(job_id, self._held, rows, self._tensors, pages)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        pages, rows = _ids(dst_spec), _ids(src_spec)
        return self._copy(job_id, self._tensors, pages, self._held, rows)

    def _copy(
        self,
        job_id: int,
        to: list[torch.Tensor],
        at: torch.Tensor,
        source: list[torch.Tensor],
        rows: torch.Tensor,
    ) -> bool:
        start, moved = time.perf_counter(), 0
        for into, out_of in zip(to, source, strict=True):
            into[at] = out_of[rows]
            moved += out_of.shape[1] * len(rows)
        seconds = time.perf_counter() - start
        self._done.append(TransferResult(job_id, True, moved, seconds))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Do nothing: a job has ended when it was submitted."""


def _ids(spec: LoadStoreSpec) -> torch.Tensor:
    return torch.as_tensor(spec.block_ids)  # type: ignore[attr-defined]


class TorchSpec(CPUOffloadingSpec):
    """vLLM's own spec with `TorchWorker`."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not self._worker:
            self._worker = TorchWorker(kv_caches, self.num_chunks)
        return self._worker


class LMCachePages:
    """LMCache's interface to the pages of an engine, on a CPU."""

    def __init__(self, page_tokens: int, shape: Sequence[int]) -> None:
        self._page_tokens = page_tokens
        self._layers, self._planes, _, *heads = shape
        self._width = heads[0] * heads[1]

    def initialize_kvcaches_ptr(self, **kwargs: Any) -> None:
        """Do nothing: every copy is given the pages."""

    def get_shape(self, num_tokens: int) -> torch.Size:
        """Return the shape of the memory for so many tokens."""
        return torch.Size([self._planes, self._layers, num_tokens, self._width])

    def batched_from_gpu(
        self, memory_objs: list[Any], starts: list[int], ends: list[int], **kwargs: Any
    ) -> None:
        """Copy tokens [start, end) of each chunk out of the pages."""
        for held, start, end in zip(memory_objs, starts, ends, strict=True):
            for rows, pages, at in self._parts(held, start, end, **kwargs):
                rows.copy_(pages[at])

    def batched_to_gpu(
        self, memory_objs: list[Any], starts: list[int], ends: list[int], **kwargs: Any
    ) -> None:
        """Copy tokens [start, end) of each chunk into the pages."""
        for held, start, end in zip(memory_objs, starts, ends, strict=True):
            for rows, pages, at in self._parts(held, start, end, **kwargs):
                pages[at] = rows

    def _parts(
        self,
        held: Any,
        start: int,
        end: int,
        *,
        kvcaches: list[torch.Tensor],
        slot_mapping: torch.Tensor,
        **_: Any,
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        at = slot_mapping[start : end : self._page_tokens] // self._page_tokens
        layers = held.tensor.view(self._layers, len(at), -1)
        pages = [cache.view(cache.shape[0], -1) for cache in kvcaches]
        return [(rows, page, at) for rows, page in zip(layers, pages, strict=True)]


class LMCacheOnCPU(LMCacheConnectorV1):
    """LMCache's connector, which makes `LMCachePages` where it would make its interface to a GPU.

    LMCache is imported here and not earlier: vLLM's start on a CPU stumbles over its modules.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        import lmcache.v1.gpu_connector as made

        page_tokens = vllm_config.cache_config.block_size
        made.CreateGPUConnector = lambda config, metadata, engine, **_: LMCachePages(
            page_tokens, metadata.kv_shape
        )
        super().__init__(vllm_config, role, kv_cache_config)

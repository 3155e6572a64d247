"""Context parallelism: ranks that keep the KV of different tokens of one request.

With ``decode_context_parallel_size`` of D, a page of vLLM's page tables stands for D times the
tokens that one rank's memory of it has room for. Token by token, or a run of tokens at a time (the
interleave), the ranks of a group take turns:

    tokens of the page   0 1 2 3 4 5 6 7          pages of 4 tokens, D = 2, one token at a time
    rank 0               0 2 4 6
    rank 1               1 3 5 7

So what a rank has of a page cannot be read without all these numbers, and kvcore stores it as it
is. With ``prefill_context_parallel_size`` there are as many ranks more for each tensor-parallel
one. They share the computation of a prompt. Each has all KV, unless there is D beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvcore.errors import UnsupportedError
from kvcore_vllm.engine import verdict
from kvcore_vllm.machines import machines
from kvcore_vllm.probes import CONTEXT
from kvcore_vllm.specs import first_specs

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = [
    "check_context",
    "context_parallel",
    "context_sizes",
    "page_tokens",
    "ranks_of_stage",
]

_NIXL = "NixlConnector"


def context_parallel(vllm_config: VllmConfig) -> bool:
    """Return True if ranks keep the KV of different tokens, or share the work on a prompt."""
    parallel = vllm_config.parallel_config
    return _sizes(parallel) != (1, 1)


def context_sizes(vllm_config: VllmConfig) -> dict[str, int] | None:
    """Return all numbers that say which tokens a rank has of a page; None if it has all.

    They are the same in the scheduler and in the workers, unless `check_context` refuses them.
    """
    parallel = vllm_config.parallel_config
    if not context_parallel(vllm_config):
        return None
    decode, prefill = _sizes(parallel)
    # vLLM's workers take the older setting, if it is set.
    older = int(parallel.dcp_kv_cache_interleave_size)
    interleave = older if older > 1 else int(parallel.cp_kv_cache_interleave_size)
    return {"decode": decode, "prefill": prefill, "interleave": interleave}


def ranks_of_stage(vllm_config: VllmConfig) -> int:
    """Return how many ranks have the layers of one pipeline stage."""
    parallel = vllm_config.parallel_config
    return int(parallel.tensor_parallel_size) * _sizes(parallel)[1]


def page_tokens(vllm_config: VllmConfig, spec: Any) -> int:
    """Return the tokens that a page of a cache of ``spec`` stands for, on all its ranks."""
    decode, _ = _sizes(vllm_config.parallel_config)
    if decode == 1:
        return int(getattr(spec, "block_size", 1))
    from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size

    return int(resolve_dcp_kv_block_size(spec, decode))


def check_context(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise UnsupportedError unless kvcore can store what ranks have of pages, as it is."""
    if not context_parallel(vllm_config):
        return
    verdict().holds(CONTEXT)
    decode, prefill = _sizes(vllm_config.parallel_config)
    told = f"decode_context_parallel_size={decode}, prefill_context_parallel_size={prefill}"
    stages, several = vllm_config.parallel_config.pipeline_parallel_size, machines(vllm_config)
    if prefill > 1 and (stages > 1 or several > 1):
        raise UnsupportedError(
            f"prefill_context_parallel_size={prefill} in {stages} pipeline stages on {several} "
            "machines: kvcore serves it in one stage on one machine"
        )
    for spec in first_specs(kv_cache_config):
        if not isinstance(spec, FullAttentionSpec):
            raise UnsupportedError(
                f"{told} beside a cache of type {type(spec).__name__}: kvcore serves context "
                "parallelism with full and latent attention only, without windows and states"
            )
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.has_connector(_NIXL):
        raise UnsupportedError(
            f"{told} beside {_NIXL}: vLLM then arranges the tokens of a page in a way that it does "
            "not tell its scheduler"
        )


def _sizes(parallel: ParallelConfig) -> tuple[int, int]:
    return (
        int(parallel.decode_context_parallel_size),
        int(parallel.prefill_context_parallel_size),
    )

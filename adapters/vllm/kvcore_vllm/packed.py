"""Models whose pages kvcore stores as they are: their format is vLLM's own.

Such are two caches in a layer (latents and a sparse index), layers with unlike heads, values with
their scales beside them, and packed latents. An index keeps the keys of a page, then their scales.

`kvcore.model.packed` says what a block of them is. The leader knows less of them than the workers:
of layers that share a page table it sees one spec. So both derive what they need from what both
have: the names of the layers, the first spec of each group, and where pages lie in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from kvcore.errors import UnsupportedError
from kvcore.memory.layout import KVView
from kvcore.memory.runs import byte_pages, whole_pages
from kvcore.model.packed import PackedPages
from kvcore_vllm.specs import first_specs, leaf_specs, page_nbytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvcore.model.spec import LayerGroup

__all__ = ["PLAIN_QUANTISATION", "packed_pages", "packed_view", "why_packed"]

PLAIN_QUANTISATION = ("NONE", "FP8_PER_TENSOR")
"""vLLM's modes whose pages hold K and V only. The other modes pack scales beside the values."""

_SERVED = (FullAttentionSpec, MLAAttentionSpec)
"""Exact types: a subclass keeps something else in its pages (sinks, hidden states, a window)."""


def why_packed(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    order: Sequence[tuple[bool, int, str]],
) -> str:
    """Return why blocks keep vLLM's pages as they are; empty if they can keep heads and dims.

    ``order`` names the layers, with the number of each.
    """
    specs, nbytes = first_specs(kv_cache_config), page_nbytes(vllm_config, kv_cache_config)
    if len({place[:2] for place in order}) < len(order):
        return "two caches in a layer"
    for group, spec in zip(kv_cache_config.kv_cache_groups, specs, strict=True):
        if type(spec) not in _SERVED:
            continue
        if len({nbytes[name] for name in group.layer_names}) > 1:
            return "layers with unlike heads or types"
        if spec.state_content_bytes is not None or spec.tokens_per_state != 1:
            return "packed or compressed tokens"
        if spec.page_size_padded not in (None, spec.unpadded_page_size_bytes):
            return "padded pages"
        if (mode := spec.kv_quant_mode.name) not in PLAIN_QUANTISATION:
            return f"KV quantisation {mode}"
    kinds = {
        (type(s), s.num_kv_heads, s.head_size, s.head_size_v, s.dtype, s.kv_quant_mode)
        for s in specs
        if type(s) in _SERVED
    }
    return "groups of layers with unlike heads or types" if len(kinds) > 1 else ""


def packed_pages(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, names: Sequence[str], why: str
) -> PackedPages:
    """Return the pages of the layers ``names`` on one rank. ``why`` is that of `why_packed`.

    Raises UnsupportedError if vLLM keeps anything but whole pages of every token, or zeroes them.
    """
    specs, groups = first_specs(kv_cache_config), kv_cache_config.kv_cache_groups
    for group in groups:
        _check_kinds(group, why)
    sizes = {spec.block_size for spec in specs}
    if len(sizes) > 1:
        raise UnsupportedError(f"{why} in pages of {sorted(sizes)} tokens: kvcore serves one size")
    if len({(spec.dtype, spec.kv_quant_mode) for spec in specs}) > 1:
        raise UnsupportedError(
            f"{why} in page tables of several precisions, whose pages vLLM zeroes within a step, "
            "in no order with the copies of a connector"
        )
    parallel = vllm_config.parallel_config
    kinds = {type(spec) for group in groups for spec in leaf_specs(group)}
    if parallel.tensor_parallel_size > 1 and len(kinds) > 1:
        raise UnsupportedError(
            f"{why}, latents beside K and V, on {parallel.tensor_parallel_size} ranks: use 1"
        )
    if parallel.pipeline_parallel_size > 1:
        raise UnsupportedError(
            f"{why} with pipeline_parallel_size > 1: use 1, or tensor parallelism"
        )
    nbytes = page_nbytes(vllm_config, kv_cache_config)
    return PackedPages(sizes.pop(), tuple(nbytes[name] for name in names))


def _check_kinds(group: Any, why: str) -> None:
    """Raise UnsupportedError if a group has a cache without whole pages of every token.

    The leader sees one spec of a group. A worker that sees another one refuses all work.
    """
    for spec in leaf_specs(group):
        if type(spec) not in _SERVED:
            raise UnsupportedError(
                f"{why} beside a cache of type {type(spec).__name__}: kvcore serves full and "
                "latent attention in pages of vLLM's own format"
            )
        unnamed = spec.dtype.itemsize == 1 and spec.kv_quant_mode.name == "NONE"
        if unnamed and type(spec) is not MLAAttentionSpec:  # indexes and latents are named
            raise UnsupportedError(f"KV of {spec.dtype} whose numbers have no known format")


def packed_view(
    kv_caches: Mapping[str, torch.Tensor], group: LayerGroup, packed: PackedPages, num_blocks: int
) -> KVView:
    """Return the pages of one group's layers on this rank, as runs of bytes.

    ``num_blocks`` is the number of vLLM's pages, which its kernels may have cut into smaller ones.
    Raises LayoutError if a page is not one run.
    """
    return whole_pages(
        [
            byte_pages(
                kv_caches[name],
                packed.page_nbytes[layer],
                name,
                max(len(kv_caches[name]) // num_blocks, 1),
            )
            for name, layer in zip(group.names, group.layers, strict=True)
        ]
    )

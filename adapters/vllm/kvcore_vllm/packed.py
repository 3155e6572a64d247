"""Models whose pages kvcore stores as they are: their format is vLLM's own.

Such are two caches in a layer (latents and a sparse index), layers with unlike heads, values with
their scales beside them, packed latents, and pages of which each rank has other tokens
(`kvcore_vllm.context`). An index keeps the keys of a page, then their scales.
Beside them there may be layers with a window: DeepSeek V4 has windows of latents, and of the states
of its compressors. Resume points have the last pages of those.

`kvcore.model.packed` says what a block of them is. The leader knows less of them than the workers:
of layers that share a page table it sees one spec. So both derive what they need from what both
have: the names of the layers, the first spec of each group, and where pages lie in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from kvcore.errors import UnsupportedError
from kvcore.memory.layout import KVView
from kvcore.memory.runs import byte_pages, whole_pages
from kvcore.model.packed import PackedPages
from kvcore.model.points import PageWindow
from kvcore_vllm.context import context_parallel, page_tokens
from kvcore_vllm.specs import first_specs, keeps_states, leaf_specs, page_nbytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvcore.model.spec import LayerGroup

__all__ = [
    "PLAIN_QUANTISATION",
    "all_latents",
    "packed_pages",
    "packed_view",
    "packed_windows",
    "page_window",
    "raw_pages",
    "why_packed",
]

PLAIN_QUANTISATION = ("NONE", "FP8_PER_TENSOR")
"""vLLM's modes whose pages hold K and V only. The other modes pack scales beside the values."""

_SERVED = (FullAttentionSpec, MLAAttentionSpec)
"""Exact types: a subclass keeps something else in its pages (sinks, hidden states, a window)."""

_WINDOWS = (SlidingWindowSpec, SlidingWindowMLASpec)
"""Exact types of the caches of windows that may be beside them."""

_LATENTS = (MLAAttentionSpec, SlidingWindowMLASpec)
"""Types of caches that all tensor-parallel ranks keep alike."""


def why_packed(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    order: Sequence[tuple[bool, int, str]],
) -> str:
    """Return why blocks keep vLLM's pages as they are; empty if they can keep heads and dims.

    ``order`` names the layers, with the number of each.
    """
    specs, nbytes = first_specs(kv_cache_config), page_nbytes(vllm_config, kv_cache_config)
    if context_parallel(vllm_config):
        return "context parallelism"
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


def packed_windows(kv_cache_config: KVCacheConfig) -> tuple[int, ...]:
    """Return the groups whose layers have a window."""
    specs = first_specs(kv_cache_config)
    return tuple(index for index, spec in enumerate(specs) if type(spec) in _WINDOWS)


def all_latents(specs: Sequence[Any]) -> bool:
    """Return True if all ranks keep the same in the caches of these specs."""
    return all(isinstance(spec, _LATENTS) for spec in specs)


def packed_pages(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    names: Sequence[str],
    why: str,
    windows: Sequence[int] = (),
) -> PackedPages:
    """Return the pages of the layers ``names`` on one rank. ``why`` is that of `why_packed`.

    The groups ``windows`` and those of states are not among them. Raises UnsupportedError if vLLM
    keeps anything but whole pages of every token, or zeroes them.
    """
    groups = kv_cache_config.kv_cache_groups
    states = [index for index, group in enumerate(groups) if keeps_states(group)]
    beside = {*windows, *states}
    specs = [s for i, s in enumerate(first_specs(kv_cache_config)) if i not in beside]
    for index, group in enumerate(groups):
        if index not in states:
            _check_kinds(group, why, _WINDOWS if index in windows else _SERVED)
    if not specs:
        raise UnsupportedError(f"{why}, and every layer has a window: nothing is left for blocks")
    sizes = {page_tokens(vllm_config, spec) for spec in specs}
    if len(sizes) > 1:
        raise UnsupportedError(f"{why} in pages of {sorted(sizes)} tokens: kvcore serves one size")
    if not beside and len({(spec.dtype, spec.kv_quant_mode) for spec in specs}) > 1:
        raise UnsupportedError(
            f"{why} in page tables of several precisions, whose pages vLLM zeroes within a step, "
            "in no order with the copies of a connector"
        )
    parallel = vllm_config.parallel_config
    leaves = [spec for group in groups if not keeps_states(group) for spec in leaf_specs(group)]
    mixed = len({isinstance(spec, _LATENTS) for spec in leaves}) > 1
    if parallel.tensor_parallel_size > 1 and mixed:
        raise UnsupportedError(
            f"{why}, latents beside K and V, on {parallel.tensor_parallel_size} ranks: use 1"
        )
    nbytes = page_nbytes(vllm_config, kv_cache_config)
    return PackedPages(sizes.pop(), tuple(nbytes[name] for name in names))


def page_window(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, index: int, spare: int
) -> PageWindow:
    """Return what a resume point has of the group ``index``, with ``spare`` tokens more."""
    names = tuple(sorted(kv_cache_config.kv_cache_groups[index].layer_names))
    spec, nbytes = first_specs(kv_cache_config)[index], page_nbytes(vllm_config, kv_cache_config)
    return PageWindow(
        index,
        names,
        spec.block_size,
        tuple(nbytes[name] for name in names),
        spec.sliding_window - 1,
        spare,
    )


def _check_kinds(group: Any, why: str, served: Sequence[type]) -> None:
    """Raise UnsupportedError if a group has a cache of a kind that is not ``served``.

    The leader sees one spec of a group. A worker that sees another one refuses all work.
    """
    for spec in leaf_specs(group):
        if type(spec) not in served:
            raise UnsupportedError(
                f"{why} beside a cache of type {type(spec).__name__}: kvcore serves full and "
                "latent attention in pages of vLLM's own format, and windows of both"
            )
        unnamed = spec.dtype.itemsize == 1 and spec.kv_quant_mode.name == "NONE"
        if unnamed and not isinstance(spec, _LATENTS):  # indexes and latents are named
            raise UnsupportedError(f"KV of {spec.dtype} whose numbers have no known format")
        if getattr(spec, "bounded_replay", False):
            raise UnsupportedError(
                f"{why} beside a window that vLLM computes again after each hit (bounded_replay)"
            )


def packed_view(
    kv_caches: Mapping[str, torch.Tensor], group: LayerGroup, packed: PackedPages, num_blocks: int
) -> KVView:
    """Return the pages of one group's layers on this rank, as runs of bytes. See `raw_pages`."""
    nbytes = [packed.page_nbytes[layer] for layer in group.layers]
    return whole_pages(raw_pages(kv_caches, group.names, nbytes, num_blocks))


def raw_pages(
    kv_caches: Mapping[str, torch.Tensor],
    names: Sequence[str],
    nbytes: Sequence[int],
    num_blocks: int,
) -> list[torch.Tensor]:
    """Return the pages of the layers ``names`` on this rank, [pages, bytes of a page] each.

    ``num_blocks`` is the number of vLLM's pages, which its kernels may have cut into smaller ones.
    Raises LayoutError if a page is not one run.
    """
    return [
        byte_pages(kv_caches[name], size, name, max(len(kv_caches[name]) // num_blocks, 1))
        for name, size in zip(names, nbytes, strict=True)
    ]

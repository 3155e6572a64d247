"""What vLLM says of its caches, as its leader and its workers both know it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["first_specs", "layout_of", "leaf_specs", "page_nbytes"]


def leaf_specs(group: Any) -> list[Any]:
    """Return the spec of each kind of layer of a group. The leader sees the first one only."""
    spec = group.kv_cache_spec
    if type(spec) is UniformTypeKVCacheSpecs:
        return list(spec.kv_cache_specs.values())
    return [spec]


def first_specs(kv_cache_config: KVCacheConfig) -> list[Any]:
    """Return the first spec of each group, the only one that the leader knows."""
    return [leaf_specs(group)[0] for group in kv_cache_config.kv_cache_groups]


def layout_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Return the name of the order in which vLLM lays out its pages; empty if it has not said."""
    told = kv_cache_config.kv_cache_layout or vllm_config.cache_config.kv_cache_layout
    return str(getattr(told, "name", told) or "")


def page_nbytes(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, int]:
    """Return the bytes of a page of every layer, filler included.

    They are the distance between two pages, of one layer or of two layers of one block.
    """
    found = {
        name: int(spec.page_size_bytes)
        for group, spec in zip(
            kv_cache_config.kv_cache_groups, first_specs(kv_cache_config), strict=True
        )
        for name in group.layer_names
    }
    if not layout_of(vllm_config, kv_cache_config).startswith(("LB", "BL")):
        return found  # a page is no run of bytes
    for tensor in kv_cache_config.kv_cache_tensors:
        for name in tensor.layers:
            if name in found:
                found[name] = min(tensor.layer_stride, tensor.block_stride)
    return found

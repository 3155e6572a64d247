"""What vLLM says of its caches, as its leader and its workers both know it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import MambaSpec, UniformTypeKVCacheSpecs

from kvcore.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["first_specs", "keeps_states", "layout_of", "leaf_specs", "page_nbytes", "state_specs"]


def leaf_specs(group: Any) -> list[Any]:
    """Return the spec of each kind of layer of a group. The leader sees the first one only."""
    spec = group.kv_cache_spec
    if type(spec) is UniformTypeKVCacheSpecs:
        return list(spec.kv_cache_specs.values())
    return [spec]


def first_specs(kv_cache_config: KVCacheConfig) -> list[Any]:
    """Return the first spec of each group, the only one that the leader knows."""
    return [leaf_specs(group)[0] for group in kv_cache_config.kv_cache_groups]


def keeps_states(group: Any) -> bool:
    """Return True if a group has states, in place of KV."""
    return all(type(spec) is MambaSpec for spec in leaf_specs(group))


def state_specs(kv_cache_config: KVCacheConfig) -> list[MambaSpec]:
    """Return the spec of each group of states, in order.

    Raises UnsupportedError if layers with unlike states share a group. Only workers see that.
    """
    groups = [leaf_specs(group) for group in kv_cache_config.kv_cache_groups if keeps_states(group)]
    for specs in groups:
        if len(kinds := {(spec.shapes, spec.dtypes) for spec in specs}) > 1:
            raise UnsupportedError(
                f"states of {len(kinds)} shapes in one page table: kvcore serves one, since vLLM "
                "tells its scheduler of one"
            )
    return [specs[0] for specs in groups]


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

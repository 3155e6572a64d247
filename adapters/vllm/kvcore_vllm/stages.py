"""The caches of all stages of a pipeline, which no rank of vLLM knows by itself.

vLLM forms page tables over the layers of the whole model, and tells a rank of those of its own
stage; the scheduler hears of the first stage's. Names and kinds of the other layers follow from
neither. So the ranks tell each other while vLLM starts them, and one of them tells the leader:

    worker, stage 0 ──┐ all_gather          handshake
    worker, stage 1 ──┴───────────▶ Stages ──────────▶ leader, before the first request
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

from kvcore.errors import RankLostError, UnsupportedError
from kvcore_vllm.machines import machines
from kvcore_vllm.specs import leaf_specs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["Stages", "gather"]

_PATIENCE = timedelta(minutes=5)
"""How long a rank waits for those of other machines, which may have larger weights to load."""


@dataclass
class Stages:
    """What vLLM told the ranks of each stage of their caches, in order of the stages."""

    configs: list[KVCacheConfig]

    @property
    def names(self) -> tuple[frozenset[str], ...]:
        """The names of the layers of each stage."""
        return tuple(
            frozenset(name for group in config.kv_cache_groups for name in group.layer_names)
            for config in self.configs
        )

    def whole(self) -> KVCacheConfig:
        """Return what vLLM would tell a rank that has the layers of all stages.

        Raises UnsupportedError if the stages do not fit each other.
        """
        first, *others = self.configs
        groups = [config.kv_cache_groups for config in self.configs]
        if len({len(own) for own in groups}) > 1 or not groups[0]:
            raise UnsupportedError(
                f"pipeline stages with {[len(own) for own in groups]} groups of caches: kvcore "
                "serves stages that share their page tables"
            )
        if getattr(first, "hisparse_host_num_blocks", None) is not None:
            raise UnsupportedError("caches that vLLM keeps in host memory, in pipeline stages")
        return replace(
            first,
            kv_cache_groups=[_joined(parts) for parts in zip(*groups, strict=True)],
            kv_cache_tensors=[
                tensor for config in (first, *others) for tensor in config.kv_cache_tensors
            ],
        )

    def of_leader(self) -> KVCacheConfig:
        """Return `whole` as vLLM would tell it to a scheduler: with one spec for each group."""
        whole = self.whole()
        groups = [
            replace(group, kv_cache_spec=leaf_specs(group)[0]) for group in whole.kv_cache_groups
        ]
        return replace(whole, kv_cache_groups=groups)


def _joined(parts: Sequence[Any]) -> Any:
    """Return the group of all stages' layers. ``parts`` are those of each stage."""
    names = [name for part in parts for name in part.layer_names]
    filled = next((part for part in parts if part.layer_names), parts[0])
    spec = filled.kv_cache_spec
    if type(spec) is UniformTypeKVCacheSpecs:
        leaves = [part.kv_cache_spec.kv_cache_specs for part in parts if part.layer_names]
        merged = {name: own[name] for own in leaves for name in own if name in names}
        spec = replace(spec, kv_cache_specs=merged)
    return replace(filled, layer_names=names, kv_cache_spec=spec)


def gather(vllm_config: VllmConfig, own: KVCacheConfig) -> Stages | None:
    """Return the caches of all stages; None if there is one stage.

    A collective of the ranks of a pipeline: each calls it once, while vLLM makes its connectors.
    Blocks until all have; on several machines, one of which may run without kvcore, for
    `_PATIENCE` at most. Raises RankLostError if this rank fails where the others wait.
    """
    size = vllm_config.parallel_config.pipeline_parallel_size
    if size == 1:
        return None
    import torch
    from vllm.distributed.parallel_state import get_pp_group

    found: list[Any] = [None] * size
    try:
        ranks = get_pp_group().cpu_group
        if machines(vllm_config) > 1:
            torch.distributed.monitored_barrier(ranks, _PATIENCE)
        torch.distributed.all_gather_object(found, own, group=ranks)
    except Exception as error:
        raise RankLostError(
            "this rank failed where those of a pipeline tell their layers: start vLLM with the "
            "same --kv-transfer-config on every machine"
        ) from error
    return Stages(found)

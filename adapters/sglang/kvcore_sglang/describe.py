"""The description of a model that SGLang serves, and the checks that kvcore can serve it.

Every rank derives the same description from the same arguments, so leader and workers agree without
a handshake.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch.distributed

from kvcore.errors import UnsupportedError
from kvcore.model.shape import BlockShape
from kvcore.model.spec import LayerGroup, ModelDescription
from kvcore_sglang.identity import checkpoint_configs, find_model, model_identity
from kvcore_sglang.layout import Pool, read_pool

SERVED_COMPONENTS = frozenset({"FULL"})


class Rank(NamedTuple):
    """One of ``ranks`` ranks that share the model's heads.

    ``group`` is their torch process group; None for a rank that is alone.
    """

    number: int
    ranks: int
    group: Any


class Checkpoint(NamedTuple):
    """The model's architecture, and the text model's ``config.json`` from its checkpoint."""

    architecture: str
    text: dict[str, Any]


class Served(NamedTuple):
    """A model, this rank of it, and this rank's pool."""

    model: ModelDescription
    rank: Rank
    pool: Pool
    page_tokens: int
    vocabulary: int
    checkpoint: Checkpoint = Checkpoint("", {})


def describe(server_args: Any, params: Any, components: Iterable[Any], block_tokens: int) -> Served:
    """Return the description of the model. Raises UnsupportedError if kvcore cannot serve it."""
    _check_components(components)
    _check_arguments(server_args, params)
    from sglang.srt.configs.model_config import ModelConfig

    config = ModelConfig.from_server_args(server_args)
    rank = find_rank(params)
    page_tokens = int(params.page_size)
    kept = params.token_to_kv_pool_allocator.get_kvcache()
    pool = read_pool(kept, page_tokens)
    mla = pool.v_dim is None
    if mla and rank.ranks > 1:
        raise UnsupportedError(
            f"MLA on {rank.ranks} tensor-parallel ranks: each holds the same latent; use 1"
        )
    heads = 1 if mla else int(config.get_total_num_kv_heads())
    if max(heads // rank.ranks, 1) != pool.heads:
        raise UnsupportedError(
            f"{pool.heads} KV heads per rank with {heads} heads over {rank.ranks} ranks: kvcore "
            "expects heads split evenly over tensor-parallel ranks"
        )
    shape = BlockShape(
        layers=pool.layers,
        kv_heads=heads,
        head_dim=pool.dim,
        v_head_dim=pool.v_dim,
        kv_factor=1 if mla else 2,
        block_tokens=block_tokens,
        dtype=pool.dtype,
    )
    _, text = checkpoint_configs(server_args, config)
    identity = model_identity(server_args, config, pool.dtype, find_model(kept))
    model = ModelDescription(
        shape,
        (LayerGroup(0, page_tokens, tuple(range(pool.layers))),),
        identity.fingerprint,
        rank.ranks,
        alone=identity.alone,
    )
    checkpoint = Checkpoint(str(config.hf_config.architectures[0]), text)
    return Served(model, rank, pool, page_tokens, int(config.vocab_size), checkpoint)


def find_rank(params: Any) -> Rank:
    """Return this process's rank among those that share the attention heads."""
    group = params.attn_tp_cache_group or params.tp_cache_group
    if group is None:
        return Rank(0, 1, None)
    ranks = torch.distributed.get_world_size(group=group)
    return Rank(torch.distributed.get_rank(group=group), ranks, group if ranks > 1 else None)


def _check_components(components: Iterable[Any]) -> None:
    other = sorted(component.name for component in components)
    if set(other) != SERVED_COMPONENTS:
        raise UnsupportedError(
            f"a cache of {', '.join(other)} components: state-space layers keep one state per "
            "sequence, and sliding windows a second pool; kvcore serves full and multi-head "
            "latent attention on SGLang"
        )


def _check_arguments(server_args: Any, params: Any) -> None:
    for name in ("pp_size", "nnodes", "attn_cp_size", "dcp_size"):
        size = getattr(server_args, name, 1) or 1
        if size > 1:
            raise UnsupportedError(f"{name}={size}; kvcore serves {name}=1 on SGLang")
    if params.pp_size > 1 or params.attn_cp_size > 1:
        raise UnsupportedError("pipeline or context parallel ranks")
    if getattr(server_args, "speculative_algorithm", None) or params.is_eagle:
        raise UnsupportedError("speculative decoding: the draft model's KV is not stored")
    mode = getattr(server_args, "disaggregation_mode", "null")
    if mode not in (None, "null"):
        raise UnsupportedError(f"disaggregation_mode={mode!r}; kvcore serves one whole engine")
    if getattr(server_args, "enable_dp_attention", False):
        raise UnsupportedError("enable_dp_attention: ranks hold the KV of different requests")

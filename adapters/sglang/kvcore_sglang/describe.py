"""The description of a model that SGLang serves, and the checks that kvcore can serve it.

Every rank derives the same description from the same arguments, so leader and workers agree without
a handshake.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch.distributed

from kvcore.errors import UnsupportedError
from kvcore.model.identity import rope_rule, weights_identity
from kvcore.model.ingredients import ModelIdentity, split_config
from kvcore.model.shape import BlockShape
from kvcore.model.spec import LayerGroup, ModelDescription
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
    pool = read_pool(params.token_to_kv_pool_allocator.get_kvcache(), page_tokens)
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
    text = _checkpoint_config(server_args, config)
    identity = model_identity(server_args, config, pool.dtype)
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


def model_identity(server_args: Any, config: Any, dtype: str) -> ModelIdentity:
    """Return what shapes the engine's KV; it equals that of other adapters that apply the same."""
    text = _checkpoint_config(server_args, config)
    overrides = str(getattr(server_args, "json_model_override_args", None) or "{}")
    weights = weights_identity(
        str(config.model_path),
        getattr(server_args, "revision", None),
        getattr(config.hf_config, "_commit_hash", None),
    )
    shared, _ = split_config(text, text)
    return ModelIdentity(
        config=shared,
        weights=weights.digest,
        load=None,
        code=None,
        compute_dtype=str(config.dtype),
        quantization=config.quantization,
        kv_dtype=f"torch.{dtype}",
        kv_scales=None,
        rope=rope_rule(text, "sglang", config.context_len),
        windows=None,
        attention=None,
        lora=None,
        own=None if overrides.strip() == "{}" else overrides,
        alone=(weights.alone,) if weights.alone else (),
    )


def _checkpoint_config(server_args: Any, config: Any) -> dict[str, Any]:
    """Return the text model's config as its checkpoint has it.

    SGLang changes the config that it works with. In every config that is read it also writes an
    older name beside the rope's type; that name is removed here.
    """
    import transformers

    hf: Any = transformers
    try:
        loaded = hf.AutoConfig.from_pretrained(
            str(config.model_path),
            revision=getattr(server_args, "revision", None),
            trust_remote_code=bool(getattr(server_args, "trust_remote_code", False)),
        ).get_text_config()
    except (OSError, ValueError):  # not a Hugging Face checkpoint: use what SGLang works with
        loaded = config.hf_text_config
    found = dict(loaded.to_dict())
    for name in ("rope_parameters", "rope_scaling"):
        rope = found.get(name)
        if isinstance(rope, dict) and rope.get("type") == rope.get("rope_type"):
            found[name] = {key: value for key, value in rope.items() if key != "type"}
    return found

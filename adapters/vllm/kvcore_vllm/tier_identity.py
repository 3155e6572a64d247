"""What makes two rows of vLLM's offloading the same bytes, beside the key that vLLM gives them.

A row has one chunk of tokens of one cache group, of every rank. Its key is vLLM's hash of the
tokens and of all tokens before them, and the group's number. That says nothing of the model, the
layout or the ranks: two engines with equal keys may have other bytes in their rows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.kv_cache_interface import AttentionSpec

from kvcore.errors import UnsupportedError
from kvcore.model.keys import canonical_bytes
from kvcore_vllm.context import context_sizes
from kvcore_vllm.identity import device_kind, model_identity, state_kernels
from kvcore_vllm.specs import leaf_specs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.config import OffloadingConfig

__all__ = ["RowsIdentity", "Starting", "check", "rows_identity", "starting"]

_OF_RANKS = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
_COLLIDING = ("xxhash", "xxhash_cbor")
"""vLLM's hashes whose collisions can be made on purpose."""


class Starting(NamedTuple):
    """The configs of the engine whose offloading is being made."""

    vllm_config: VllmConfig
    kv_cache_config: KVCacheConfig


def starting() -> Starting:
    """Return the configs of the offloading that is making its tiers, which they are not told.

    vLLM's tiers get a short form of the configs, without the quantisation, the rope, overrides and
    the like. So the whole ones are read from the caller that makes the tiers: the ``__init__`` of
    `OffloadingConnector`'s scheduler. A probe checks the names. Raises UnsupportedError without it.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        OffloadingConnectorScheduler,
    )

    frame = sys._getframe(1)
    while frame is not None:
        told = frame.f_locals
        if frame.f_code.co_name == "__init__" and isinstance(
            told.get("self"), OffloadingConnectorScheduler
        ):
            return Starting(told["vllm_config"], told["kv_cache_config"])
        frame = frame.f_back  # type: ignore[assignment]  # None at the end
    raise UnsupportedError(
        "a tier that vLLM's OffloadingConnector does not make: the model's configuration is unknown"
    )


def check(vllm_config: VllmConfig) -> None:
    """Raise UnsupportedError if equal keys of vLLM may mean other KV, whatever the model is."""
    if vllm_config.lora_config is not None:
        raise UnsupportedError(
            "LoRA: vLLM's keys name an adapter by its name and path, which do not tell its "
            "weights; use KVCoreConnector"
        )
    model = vllm_config.model_config
    media = model.multimodal_config
    if media is not None and not getattr(media, "language_model_only", False):
        raise UnsupportedError(
            "a model that takes media: in vLLM's keys a client may name the content of a medium "
            "(`uuid`); use KVCoreConnector, or serve text only (--language-model-only)"
        )
    hashed = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if hashed in _COLLIDING:
        raise UnsupportedError(
            f"prefix_caching_hash_algo={hashed}: prompts with equal keys can be made on purpose, "
            "and stored blocks outlive the engine; use sha256 or sha256_cbor"
        )


class RowsIdentity(NamedTuple):
    """``digest`` is equal for two engines if equal keys mean equal rows in them.

    ``alone`` says what cannot be told apart, one sentence each; empty if everything can.
    """

    digest: bytes
    alone: tuple[str, ...]


def rows_identity(engine: Starting, told: OffloadingConfig, row_nbytes: int) -> RowsIdentity:
    """Return the identity of rows of ``row_nbytes`` bytes. Reads the weights' files.

    Raises UnsupportedError if they cannot be read.
    """
    import vllm

    config, groups = engine.vllm_config, engine.kv_cache_config.kv_cache_groups
    specs = [spec for group in groups for spec in leaf_specs(group)]
    model = model_identity(config, [spec for spec in specs if isinstance(spec, AttentionSpec)])
    found = {
        "model": model.fingerprint,
        "vllm": vllm.__version__,  # which may change a layout
        "device": device_kind(),
        "backend": str(getattr(config.attention_config, "backend", None)),
        "states": state_kernels(config),
        "runner": str(config.use_v2_model_runner),
        "groups": [[group.layer_names, _spec(group.kv_cache_spec)] for group in groups],
        "offloaded": [[each.group_id, each.tokens_per_block] for each in told.groups],
        "ranks": {name: getattr(told.parallel, name) for name in _OF_RANKS},
        "layout": [str(told.kv_cache_layout), told.canonical_layout, told.replicated_layout],
        "chunk": told.cache.blocks_per_chunk,
        "row": row_nbytes,
        "byte order": sys.byteorder,
        "keys": _keys(config, told),
    }
    if context := context_sizes(config):  # which tokens are in a rank's part of a row
        found["context"] = context
    digest = hashlib.sha256(b"kvcore rows of vllm-1" + canonical_bytes(found)).digest()
    return RowsIdentity(digest, model.alone)


def _keys(config: VllmConfig, told: OffloadingConfig) -> list[object]:
    """Return how vLLM makes the keys."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    name = config.cache_config.prefix_caching_hash_algo
    seed = resolve_none_hash_seed(get_hash_fn_by_name(name))
    return [str(name), hashlib.sha256(seed.encode()).digest(), told.cache.tokens_per_hash]


def _spec(spec: Any) -> list[object]:
    """Return the name and all fields of a cache's spec, as text."""
    names = [field.name for field in dataclasses.fields(spec)]
    return [type(spec).__name__, {name: str(getattr(spec, name)) for name in names}]

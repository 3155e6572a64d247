"""The layout of SGLang's K and V: views over the token slots of its pools.

Page ``p`` of ``n`` tokens is slots ``p * n .. p * n + n - 1`` of every layer's buffer. Page 0 is
padding. MHA and GQA have one buffer for K and one for V, ``[slots, heads, dim]``. MLA has one
buffer, ``[slots, 1, latent + rope]``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kvcore.errors import UnsupportedError
from kvcore.memory.layout import KVView, sglang_layout
from kvcore.model.shape import ITEM_BYTES

MHA_POOLS = ("MHATokenToKVPool",)
MLA_POOLS = ("MLATokenToKVPool",)


class Pool(NamedTuple):
    """One rank's pool. ``v_dim`` is None for MLA. ``dtype`` is a torch name."""

    layers: int
    heads: int
    dim: int
    v_dim: int | None
    dtype: str
    view: KVView


def read_pool(pool: Any, page_tokens: int) -> Pool:
    """Read the pool of a rank. Raises UnsupportedError if kvcore cannot copy its pages."""
    kind = type(pool).__name__
    if kind not in (*MHA_POOLS, *MLA_POOLS):
        raise UnsupportedError(
            f"a KV pool of type {kind}; kvcore serves {', '.join((*MHA_POOLS, *MLA_POOLS))}"
        )
    mla = kind in MLA_POOLS
    if getattr(pool, "use_dsa", False):
        raise UnsupportedError("sparse attention keeps an index beside its latents")
    order = getattr(pool, "kv_cache_layout", "nhd")
    if order != "nhd":
        raise UnsupportedError(f"a KV pool laid out as {order!r}; kvcore serves 'nhd'")
    dtype = _dtype(pool)
    keys = list(pool.kv_buffer if mla else pool.k_buffer)
    values = None if mla else list(pool.v_buffer)
    if not keys:
        raise UnsupportedError("a model without a KV cache")
    for buffer in (*keys, *(values or ())):
        _check_buffer(buffer, keys[0].shape[:2], dtype, page_tokens)
    view = KVView(sglang_layout(keys, values, page_tokens, dtype), [*keys, *(values or ())])
    view.check()
    v_dim = None if values is None else int(values[0].shape[2])
    return Pool(len(keys), int(keys[0].shape[1]), int(keys[0].shape[2]), v_dim, dtype, view)


def _dtype(pool: Any) -> str:
    name = str(pool.dtype).removeprefix("torch.")
    if pool.store_dtype != pool.dtype or ITEM_BYTES.get(name, 1) == 1:
        raise UnsupportedError(
            f"KV of type {name}: its scales are not part of a block's identity; kvcore serves "
            "float32, float16 and bfloat16 on SGLang"
        )
    return name


def _check_buffer(buffer: torch.Tensor, slots: torch.Size, dtype: str, page_tokens: int) -> None:
    fits = buffer.dim() == 3 and buffer.shape[:2] == slots and buffer.shape[0] % page_tokens == 0
    if not fits or buffer.dtype != getattr(torch, dtype):
        raise UnsupportedError(
            f"a KV buffer of {buffer.dtype} and shape {tuple(buffer.shape)}; kvcore expects {dtype}"
            f" and [{slots[0]} slots, {slots[1]} heads, dim], whole pages of {page_tokens} tokens"
        )

"""The round trip at start, with attention that writes pages as vLLM's backends do, or wrongly."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcore.errors import LayoutError
from kvcore.memory.copy import builtin_ops
from kvcore.memory.layout import KVView, from_strides
from kvcore.model.shape import BlockShape
from kvcore_vllm.round_trip import verify

PAGES, LAYERS, HEADS, TOKENS, DIM = 4, 3, 2, 16, 8

Write = Callable[[Any, Tensor, Tensor, Tensor, Tensor], None]


def flash(layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write [tokens, heads, dim] into [pages, heads, tokens, K|V], as vLLM's GPU backends do."""
    keys, values = cache.transpose(1, 2).split(DIM, dim=-1)
    page, token = slots // TOKENS, slots % TOKENS
    keys[page, token] = key.to(cache.dtype)
    values[page, token] = value.to(cache.dtype)


def swapped(layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    flash(layer, value, key, cache, slots)


def other_heads(layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    flash(layer, key.flip(1), value, cache, slots)


def other_page(layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    flash(layer, key, value, cache, slots - TOKENS)


def packed(layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """K column-major, as a backend might pack it one day."""
    flash(layer, key, value, cache, slots)
    page = cache[int(slots[0]) // TOKENS]
    keys = page[..., :DIM]
    page[..., :DIM] = keys.transpose(1, 2).reshape(keys.shape)


def fails(layer: Any, *given: Tensor) -> None:
    raise RuntimeError("no kernel for this device")


def quantised(layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """FP8 with scales, kept as bytes."""
    kind = torch.float8_e5m2
    low_key = (key / layer._k_scale_float).to(kind).view(torch.uint8)
    low_value = (value / layer._v_scale_float).to(kind).view(torch.uint8)
    flash(layer, low_key, low_value, cache, slots)


def run(write: Write | None, dtype: str = "bfloat16", **of_layer: Any) -> list[Tensor]:
    kind = getattr(torch, dtype)
    caches = [torch.ones(PAGES, HEADS, TOKENS, 2 * DIM).to(kind) for _ in range(LAYERS)]
    shape = BlockShape(LAYERS, HEADS, DIM, TOKENS, dtype)
    view = KVView(from_strides(caches, shape), caches)
    layers = []
    for _ in caches:
        layer = SimpleNamespace(impl=SimpleNamespace(), **of_layer)
        if write is not None:
            layer.impl.do_kv_cache_update = write
        layers.append(layer)
    verify(layers, view, shape, torch.bfloat16, builtin_ops())
    return caches


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_right_layout_holds_and_the_page_is_as_before(dtype: str) -> None:
    for cache in run(flash, dtype):
        assert torch.equal(cache, torch.ones_like(cache))


def test_a_quantised_cache_is_compared_without_its_encoding() -> None:
    run(quantised, "uint8", _k_scale_float=0.37, _v_scale_float=2.5)


@pytest.mark.parametrize("write", [swapped, other_heads, other_page, packed])
def test_another_order_is_refused(write: Write) -> None:
    with pytest.raises(LayoutError, match=r"in another order .* stores nothing"):
        run(write)


def test_layers_that_are_exchanged_are_refused() -> None:
    caches: list[Tensor] = []

    def exchanged(layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        caches.append(cache)
        if len(caches) % LAYERS == 2:
            flash(layer, key, value, caches[-2], slots)
        else:
            flash(layer, key, value, cache, slots)

    with pytest.raises(LayoutError, match="in another order"):
        run(exchanged)


def test_a_backend_that_raises_is_refused() -> None:
    with pytest.raises(LayoutError, match="no kernel for this device; kvcore stores nothing"):
        run(fails)


def test_a_backend_that_writes_in_its_forward_only_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvcore.vllm")
    run(None)
    run(flash, kv_sharing_target_layer_name="another")
    assert [line.partition(":")[0] for line in caplog.messages] == ["layout not verified"] * 2


# -- latents -------------------------------------------------------------------------------------

LATENT, ROPE = 24, 8


def latents(
    kv_c: Tensor, k_pe: Tensor, cache: Tensor, slots: Tensor, kind: str, scale: Any
) -> None:
    """Write [tokens, latent] and [tokens, 1, rope] into [pages, tokens, latent|rope]."""
    page, token = slots // TOKENS, slots % TOKENS
    cache[page, token, :LATENT] = kv_c.to(cache.dtype)
    cache[page, token, LATENT:] = k_pe.squeeze(1).to(cache.dtype)


def rope_first(kv_c: Tensor, k_pe: Tensor, cache: Tensor, slots: Tensor, *rest: Any) -> None:
    page, token = slots // TOKENS, slots % TOKENS
    cache[page, token] = torch.cat([k_pe.squeeze(1), kv_c], dim=1).to(cache.dtype)


def tiled(kv_c: Tensor, k_pe: Tensor, cache: Tensor, slots: Tensor, *rest: Any) -> None:
    """Column-major, as a kernel for tiles might pack it."""
    rows = torch.cat([kv_c, k_pe.squeeze(1)], dim=1).to(cache.dtype)
    cache[int(slots[0]) // TOKENS] = rows.t().reshape(TOKENS, -1)


def low(kv_c: Tensor, k_pe: Tensor, cache: Tensor, slots: Tensor, kind: str, scale: Any) -> None:
    """FP8 with a scale, kept as bytes."""
    parts = [(part / scale).to(torch.float8_e4m3fn).view(torch.uint8) for part in (kv_c, k_pe)]
    latents(parts[0], parts[1], cache, slots, kind, scale)


def run_latents(write: Callable[..., None], dtype: str = "bfloat16", scale: float = 1.0) -> None:
    kind = getattr(torch, dtype)
    caches = [torch.ones(PAGES, 1, TOKENS, LATENT + ROPE).to(kind) for _ in range(LAYERS)]
    shape = BlockShape(LAYERS, 1, LATENT + ROPE, TOKENS, dtype, kv_factor=1)
    impl = SimpleNamespace(do_kv_cache_update=write, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE)
    layers = [
        SimpleNamespace(impl=impl, kv_cache_dtype="auto", _k_scale=scale, _k_scale_float=scale)
        for _ in caches
    ]
    view = KVView(from_strides(caches, shape), caches)
    verify(layers, view, shape, torch.bfloat16, builtin_ops())
    for cache in caches:
        assert torch.equal(cache, torch.ones_like(cache)), "the page is not as before"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_latents_that_lie_as_the_view_says_hold(dtype: str) -> None:
    run_latents(latents, dtype)


def test_quantised_latents_are_compared_without_their_encoding() -> None:
    run_latents(low, "uint8", 0.37)


@pytest.mark.parametrize("write", [rope_first, tiled])
def test_latents_in_another_order_are_refused(write: Callable[..., None]) -> None:
    with pytest.raises(LayoutError, match=r"in another order .* stores nothing"):
        run_latents(write)


def test_latents_that_lie_elsewhere_within_the_page_are_refused() -> None:
    def flipped(kv_c: Tensor, k_pe: Tensor, cache: Tensor, slots: Tensor, *rest: Any) -> None:
        latents(kv_c, k_pe, cache, slots.flip(0), *rest)

    with pytest.raises(LayoutError, match="in another order"):
        run_latents(flipped)


def test_latent_attention_that_does_not_tell_its_parts_is_refused() -> None:
    def unlike(*given: Any) -> None:
        raise AttributeError("no kv_lora_rank")

    with pytest.raises(LayoutError, match="no kv_lora_rank; kvcore stores nothing"):
        run_latents(unlike)

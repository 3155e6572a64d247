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

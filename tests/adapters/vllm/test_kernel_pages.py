"""Copies to and from vLLM's own views of its memory, whose pages the attention kernels have cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheTensor, create_kv_cache_views
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvcore.connector.page_table import Paging
from kvcore.errors import UnsupportedError
from kvcore.memory.copy import builtin_ops
from kvcore.memory.device_group import DeviceGroup
from kvcore.memory.layout import KVView, arena_layout, from_strides
from kvcore.model.shape import BlockShape
from kvcore.model.spec import LayerGroup
from kvcore.worker.executors import DeviceCopy
from kvcore_vllm.attention import check_writes, install
from kvcore_vllm.fusion import _attention
from kvcore_vllm.layout import group_view
from support.pairs import paired

LAYERS, HEADS, DIM, PAGES, PAGE = 2, 2, 8, 6, 128
TOKENS = 256
OWN = [4, 1]
"""The scheduler blocks of the request."""
GROUP = LayerGroup(0, PAGE, tuple(range(LAYERS)), ("model.layers.0.attn", "model.layers.1.attn"))


def memory(layout: KVCacheLayout, kernel: int) -> list[torch.Tensor]:
    """Every layer's cache ``[kernel pages, heads, tokens, K|V]``, as vLLM makes it."""
    spec = FullAttentionSpec(
        block_size=PAGE, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float32
    )
    nbytes = spec.page_size_bytes
    inner = nbytes // HEADS if layout is KVCacheLayout.LHBNC else nbytes
    place = KVCacheTensor(
        size=LAYERS * PAGES * nbytes,
        layers=list(GROUP.names),
        layer_stride=PAGES * nbytes,
        block_stride=inner,
    )
    raw = torch.zeros(place.size, dtype=torch.int8)
    return create_kv_cache_views(raw, spec, PAGES, layout, place, kernel_block_size=kernel)


NUMBERS = torch.arange(LAYERS * 2 * HEADS * TOKENS * DIM, dtype=torch.float32) + 1
NUMBERS = NUMBERS.view(LAYERS, 2, HEADS, TOKENS, DIM)
"""The request's KV, no number twice."""


def write(caches: list[torch.Tensor], kernel: int) -> None:
    """Write the request's tokens into slots, as vLLM numbers them: block * 128 + offset."""
    for layer, cache in enumerate(caches):
        for token in range(TOKENS):
            slot = OWN[token // PAGE] * PAGE + token % PAGE
            cache[slot // kernel, :, slot % kernel] = torch.cat([*NUMBERS[layer, :, :, token]], 1)


@pytest.mark.parametrize(
    ("kernel", "block", "layout", "ops"),
    paired(
        [16, 32, 64, 128],
        [16, 64, 128],
        [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC],
        builtin_ops(),
        name=lambda value: getattr(value, "name", str(value)),
    ),
)
def test_blocks_of_any_size_are_copied_whatever_the_kernels_pages(
    kernel: int, block: int, layout: KVCacheLayout, ops: Any
) -> None:
    caches = memory(layout, kernel)
    write(caches, kernel)
    shape = BlockShape(LAYERS, HEADS, DIM, block, "float32")
    pages = KVView(from_strides(caches, shape), caches)
    count = TOKENS // block
    flat = torch.zeros(count * shape.nbytes // 4)
    arena = KVView(arena_layout(shape, count), [flat])
    [table] = Paging((GROUP,), block, no_page=0).units([OWN], 0, count)
    whole = range(LAYERS)
    group = DeviceGroup(tuple(whole), pages)

    def copy(to_device: bool) -> None:
        sync: Any = None
        executor = DeviceCopy(ops, [group], arena, to_device, sync, 0)
        executor._copy(
            pages, table.array(), arena, np.arange(count), list(whole), table.unit_tokens
        )

    copy(to_device=False)
    canonical = flat.view(count, LAYERS, HEADS, 2, block, DIM)
    for token in (0, 15, 16, 63, 64, 127, 128, 200, 255):
        got = canonical[token // block, :, :, :, token % block]  # [layers, heads, K|V, dim]
        assert torch.equal(got, NUMBERS[:, :, :, token].transpose(1, 2)), token
    before = [cache.clone() for cache in caches]
    for cache in caches:
        cache.zero_()
    copy(to_device=True)
    assert all(map(torch.equal, caches, before))


def test_pages_into_which_no_scheduler_block_can_be_cut_are_refused() -> None:
    caches = dict(zip(GROUP.names, memory(KVCacheLayout.LBHNC, 64), strict=True))
    shape = BlockShape(LAYERS, HEADS, DIM, 16, "float32")
    config: Any = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
    group = LayerGroup(0, 96, GROUP.layers, GROUP.names)
    with pytest.raises(UnsupportedError, match="pages of 64 tokens"):
        group_view(config, caches, group, shape)


# -- models that write KV themselves (0.33) ------------------------------------------------------


def layer(**fields: Any) -> Any:
    def forward(
        layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any
    ) -> None: ...

    impl = SimpleNamespace(forward=forward, scale=1.0)
    backend = SimpleNamespace(forward_includes_kv_cache_update=False)
    return SimpleNamespace(impl=impl, attn_backend=backend, **fields)


def test_a_layer_whose_model_writes_kv_is_neither_blended_nor_hooked() -> None:
    for plain in (layer(), layer(kv_cache_update_bypass=False)):
        check_writes(plain)
        assert _attention(plain).scale == 1.0
    own = layer(kv_cache_update_bypass=True)
    forward = own.impl.forward
    with pytest.raises(UnsupportedError, match="kv_cache_update_bypass"):
        _attention(own)
    with pytest.raises(UnsupportedError, match="kv_cache_update_bypass"):
        install([own], [], lambda: (), 16)
    assert own.impl.forward is forward

"""`vllm_cpu_layout` against the kernel with which vLLM's CPU attention writes its cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvcore.memory.copy import DeviceOps, builtin_ops
from kvcore.memory.layout import KVView, arena_layout, vllm_cpu_layout
from kvcore.model.shape import BlockShape

pytestmark = pytest.mark.engine

PAGES, HEADS, BLOCK = 5, 3, 16


def engine_write(
    cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, isa: str
) -> None:
    """vLLM's own write of `[tokens, heads, dim]` into `[pages, heads, tokens, 2 * dim]`."""
    ops = pytest.importorskip("vllm._custom_ops")
    pages, heads, tokens, content = cache.shape
    halves = cache.view(pages, heads, 2 * tokens, content // 2).chunk(2, dim=2)
    try:
        ops.cpu_attn_reshape_and_cache(key, value, *halves, slots, isa)
    except RuntimeError as error:
        if "Unsupported CPU attention configuration" not in str(error):
            raise
        pytest.skip(f"this CPU or this build of vLLM has no {isa!r} kernel")


@pytest.mark.parametrize("ops", builtin_ops(), ids=lambda ops: ops.name)
@pytest.mark.parametrize("page_tokens", [32, 128])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("isa", ["vec", "vec16", "amx"])
def test_what_the_engine_wrote_is_read_and_written_alike(
    isa: str, head_dim: int, page_tokens: int, ops: DeviceOps
) -> None:
    shape = BlockShape(1, HEADS, head_dim, BLOCK, "bfloat16")
    generator = torch.Generator().manual_seed(head_dim + page_tokens)
    count = PAGES * page_tokens
    key, value = torch.randn(2, count, HEADS, head_dim, generator=generator).bfloat16().unbind(0)
    slots = torch.randperm(count, generator=generator)  # slot of each token
    cache = torch.zeros(PAGES, HEADS, page_tokens, 2 * head_dim, dtype=torch.bfloat16)
    engine_write(cache, key, value, slots, isa)

    layout = vllm_cpu_layout(
        isa,
        layers=1,
        num_pages=PAGES,
        page_tokens=page_tokens,
        kv_heads=HEADS,
        head_dim=head_dim,
        dtype="bfloat16",
    )
    pages = KVView(layout, [cache])
    pages.check()
    blocks = count // BLOCK
    arena = KVView(
        arena_layout(shape, blocks), [torch.zeros(blocks * shape.nbytes // 2).bfloat16()]
    )
    units = np.arange(blocks)
    ops.copy_blocks(pages, units, arena, units, unit_tokens=BLOCK)

    # Canonical order is layer, head, k/v, token, dim: written out here, not through a layout.
    in_slots = torch.stack([key, value])[:, slots.argsort()]
    expected = in_slots.view(2, blocks, BLOCK, HEADS, head_dim).permute(1, 3, 0, 2, 4)
    assert torch.equal(arena.tensors[0].view(expected.shape), expected)

    back = KVView(layout, [torch.zeros_like(cache)])
    ops.copy_blocks(arena, units, back, units, unit_tokens=BLOCK)
    assert torch.equal(back.tensors[0], cache)

"""Every kernel finds KV beyond 2^31 elements: what it does there is what it does near by.

By stride alone, in memory that is never touched between. It begins at an odd element: were it
aligned, a copy would count in words of 8 bytes, of which there are not as many.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from kvcore.fusion.rope import Pairing, Rope
from kvcore.memory.copy import HeadRange
from kvcore.memory.layout import Axis, KVLayout, KVView, Plane
from kvcore.model.shape import BlockShape
from kvcore_kernels.attend.launch import attend_rows
from kvcore_kernels.deviation.launch import deviations
from kvcore_kernels.merge.launch import merge_rows
from kvcore_kernels.ops import TritonOps
from kvcore_kernels.pack.launch import pack_blocks, unpack_blocks
from kvcore_kernels.shift.launch import copy_shifted
from kvcore_kernels.testing import arena_view, normal

TOKENS, DIM = 16, 64
PAGE = TOKENS * 2 * DIM
NEAR, FAR = PAGE, (1 << 31) + 4096
"""Elements from page 0 to page 1."""
SHAPE = BlockShape(1, 1, DIM, TOKENS, "bfloat16")
SLOTS = torch.tensor([TOKENS + 3, 2 * TOKENS - 1], dtype=torch.int32)
PAGES, SLOT = np.array([1]), np.array([0])
WHOLE = [0], HeadRange(0, 0, 1)


def pages(stride: int) -> tuple[KVView, Tensor]:
    """Two pages, K beside V, and the memory of the second."""
    memory = torch.empty(1 + stride + PAGE, dtype=torch.bfloat16)[1:]
    second = memory[stride:]
    second.copy_(torch.randn(PAGE, generator=torch.Generator().manual_seed(1)))
    planes = tuple(
        Plane(0, part * DIM, stride, 0, Axis(2 * DIM), Axis(1), DIM) for part in range(2)
    )
    return KVView(KVLayout("bfloat16", 2, TOKENS, 1, (planes,)), [memory]), second


def rows(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(count, 1, DIM, generator=generator).bfloat16()


def gather(view: KVView) -> Tensor:
    arena = arena_view(SHAPE, 1)
    TritonOps().copy_blocks(view, PAGES, arena, SLOT)
    return arena.tensors[0]


def scatter(view: KVView) -> None:
    TritonOps().copy_blocks(normal(arena_view(SHAPE, 1)), SLOT, view, PAGES)


def attend(view: KVView) -> Tensor:
    at, table = torch.tensor([0, 7, 15]), torch.tensor([1], dtype=torch.int32)
    return attend_rows(rows(3), at, view, 0, table, scale=0.125)


def deviation(view: KVView) -> Tensor:
    return deviations(rows(2), rows(2), view, 0, SLOTS)


def merge(view: KVView) -> None:
    merge_rows(rows(2), rows(2), view, 0, SLOTS)


def shift(view: KVView) -> None:
    rope, arena = Rope(DIM, DIM, Pairing.NEOX, 1e4), normal(arena_view(SHAPE, 1))
    layers, heads = WHOLE
    copy_shifted(arena, SLOT, view, PAGES, layers, TOKENS, heads, [rope], np.array([5]))


def packed() -> tuple[KVView, Tensor]:
    shape = BlockShape(1, 1, DIM, TOKENS, "float8_e4m3fn")
    return arena_view(shape, 1), torch.zeros(1, 1, 2, 1)


def pack(view: KVView) -> Tensor:
    arena, scales = packed()
    pack_blocks(view, PAGES[:, None], arena, SLOT, scales, *WHOLE)
    return torch.cat([arena.tensors[0].float().ravel(), scales.ravel()])


def unpack(view: KVView) -> None:
    arena, scales = packed()
    pack_blocks(pages(NEAR)[0], PAGES[:, None], arena, SLOT, scales, *WHOLE)
    view.tensors[0][-PAGE:] = 0
    unpack_blocks(arena, SLOT, scales, view, PAGES[:, None], *WHOLE)


@pytest.mark.parametrize("do", [gather, scatter, attend, deviation, merge, shift, pack, unpack])
def test_far_is_as_near(do: Callable[[KVView], Tensor | None]) -> None:
    (near, here), (far, there) = pages(NEAR), pages(FAR)
    untouched = here.clone()
    given, got = do(near), do(far)
    assert torch.equal(here, there)
    if given is None:
        assert do is unpack or not torch.equal(here, untouched)
        assert here.any()
    else:
        assert got is not None
        assert torch.equal(given, got)
        assert given.any()

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
from kvcore_kernels.attend.launch import attend_parts, attend_rows
from kvcore_kernels.deviation.launch import deviations, parts_off
from kvcore_kernels.fusion_rows import strided_rows
from kvcore_kernels.merge.launch import merge_rows
from kvcore_kernels.ops import TritonOps
from kvcore_kernels.pack.launch import pack_blocks, unpack_blocks
from kvcore_kernels.planes import plane_table
from kvcore_kernels.shift.launch import Shifts, copy_shifted
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


def tokens(view: KVView) -> tuple[Tensor, Tensor]:
    """K and V as rows, whose second one is as far as the second page."""
    plane = view.layout.planes[0][0]
    k, v = (
        view.tensors[0][part * DIM :].as_strided(
            (2, 1, DIM), (plane.page, DIM, 1), view.tensors[0].storage_offset() + part * DIM
        )
        for part in range(2)
    )
    return k, v


BOTH = torch.tensor([0, 1])


def merge_far_rows(view: KVView) -> Tensor:
    """The computed rows are far too."""
    given = tokens(view)
    for part in given:
        part[0] = 3
    into, second = pages(NEAR)
    merge_rows(*given, into, 0, torch.tensor([TOKENS + 3, 2 * TOKENS - 1]))
    return second.clone()


def deviation_far_rows(view: KVView) -> Tensor:
    """The computed rows are far, and then the cached ones."""
    (k, _), near, last = tokens(view), rows(2), BOTH[1:]
    fresh = parts_off([k], last, [strided_rows(near)], last, 1)
    return torch.cat([fresh, parts_off([near], last, [strided_rows(k)], last, 1)])


def attend_far_rows(view: KVView) -> Tensor:
    """Queries, keys and values of the second row are far."""
    k, v = tokens(view)
    k[0], v[0] = 1, 2
    return attend_parts(k, BOTH, k, v, 0.125, 0.0, 0)


def shift_many(view: KVView) -> None:
    """One launch of several, from a table of more planes than it writes."""
    arena = normal(arena_view(BlockShape(2, 1, DIM, TOKENS, "bfloat16"), 1))
    rope = Rope(DIM, DIM, Pairing.NEOX, 1e4)
    Shifts(
        arena, SLOT, plane_table(view, [0], 0), TOKENS, PAGES, [0, 1], TOKENS, HeadRange(0, 0, 1),
        [rope, rope], np.array([5]), torch.device("cpu"),
    ).launch(2)  # fmt: skip


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


@pytest.mark.parametrize(
    "do",
    [
        gather,
        scatter,
        attend,
        deviation,
        merge,
        shift,
        pack,
        unpack,
        merge_far_rows,
        deviation_far_rows,
        attend_far_rows,
        shift_many,
    ],
)
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

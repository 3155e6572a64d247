"""Every kernel finds KV beyond 2^31 elements: what it does there is what it does near by.

By stride alone, in memory that is never touched between. It begins at an odd element: were it
aligned, a copy would count in words of 8 bytes, of which there are not as many.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from kvcore.fusion.rope import Pairing, Rope
from kvcore.memory.checksums import FIRST, KEY, SECOND
from kvcore.memory.copy import HeadRange
from kvcore.memory.copy.base import Copy
from kvcore.memory.layout import Axis, KVLayout, KVView, Plane
from kvcore.model.shape import BlockShape
from kvcore_kernels.attend.launch import attend_parts, attend_rows
from kvcore_kernels.copy.kernel import bounded_copy_kernel
from kvcore_kernels.copy.launch import tile_for
from kvcore_kernels.deviation.launch import deviations, parts_off
from kvcore_kernels.fusion_rows import strided_rows
from kvcore_kernels.merge.launch import merge_rows
from kvcore_kernels.ops import KernelOps
from kvcore_kernels.pack.launch import pack_blocks, unpack_blocks
from kvcore_kernels.planes import Words, plane_table
from kvcore_kernels.shift.launch import Shifts, copy_shifted
from kvcore_kernels.sums.kernel import sum_kernel
from kvcore_kernels.testing import arena_view, normal
from support.moved_kernels import at_program, interpreted

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


def gather(view: KVView, programs: int | None = None) -> Tensor:
    arena = arena_view(SHAPE, 1)
    KernelOps(programs).copy_blocks(view, PAGES, arena, SLOT)
    return arena.tensors[0]


def scatter(view: KVView, programs: int | None = None) -> None:
    KernelOps(programs).copy_blocks(normal(arena_view(SHAPE, 1)), SLOT, view, PAGES)


gather_few, scatter_few = partial(gather, programs=2), partial(scatter, programs=2)


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
    copy_shifted(Copy(arena, SLOT, view, PAGES, layers, TOKENS, heads), [rope], np.array([5]))


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
        gather_few,
        scatter,
        scatter_few,
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


# ---- every stride and number that the copies, sums and packs take ----


FAR_AXES = ("page", "head", "token", "token in a run", "dim")


def strided(axis: str, far: int) -> KVView:
    """Return two of everything, K alone; the second along ``axis`` is ``far`` elements away."""
    apart = {name: 2 ** (4 - place) for place, name in enumerate(FAR_AXES)} | {axis: far}
    memory = torch.empty(1 + sum(apart.values()) + 1, dtype=torch.bfloat16)[1:]
    if axis == "token in a run":
        token = Axis(apart["token"], 2, apart[axis])
        plane = Plane(0, 0, apart["page"], apart["head"], token, Axis(apart["dim"]), 2)
        return KVView(KVLayout("bfloat16", 2, 4, 2, ((plane,),)), [memory])
    plane = Plane(0, 0, apart["page"], apart["head"], Axis(apart["token"]), Axis(apart["dim"]), 2)
    return KVView(KVLayout("bfloat16", 2, 2, 2, ((plane,),)), [memory])


def dense(view: KVView) -> KVView:
    shape = BlockShape(1, 2, 2, view.layout.page_tokens, "bfloat16", kv_factor=1)
    return normal(arena_view(shape, 2))


@pytest.mark.parametrize("programs", [None, 2])
@pytest.mark.parametrize("axis", FAR_AXES)
def test_far_along_every_axis(axis: str, programs: int | None) -> None:
    """There and back: what was written far away is what is read there."""
    far = strided(axis, FAR)
    first, second = dense(far), dense(far)
    second.tensors[0].zero_()
    ops, both = KernelOps(programs), np.arange(2)
    ops.copy_blocks(first, both, far, both)
    for layer, page, head, token, dim in np.ndindex(1, 2, 2, far.layout.page_tokens, 2):
        there = far.layout.offset(layer, 0, page, head, token, dim)
        here = first.layout.offset(layer, 0, page, head, token, dim)
        assert far.tensors[0][there] == first.tensors[0][here]
    ops.copy_blocks(far, both, second, both)
    assert torch.equal(first.tensors[0], second.tensors[0])


@pytest.mark.parametrize("axis", ["page", "head", "token", "dim"])
def test_packs_far_along_every_axis(axis: str) -> None:
    far = strided(axis, FAR)
    near = dense(far)
    both = np.arange(2)
    KernelOps().copy_blocks(near, both, far, both)
    results = []
    for view in (near, far):
        shape = BlockShape(1, 2, 2, 2, "float8_e4m3fn", kv_factor=1)
        arena, scales = arena_view(shape, 2), torch.zeros(2, 1, 1, 2)
        pack_blocks(view, both[:, None], arena, both, scales, [0], HeadRange(0, 0, 2))
        unpack_blocks(arena, both, scales, view, both[:, None], [0], HeadRange(0, 0, 2))
        out = dense(far)
        KernelOps().copy_blocks(view, both, out, both)
        results.append((arena.tensors[0].float(), scales, out.tensors[0]))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("programs", [None, 2])
def test_units_beyond_32_bits(programs: int | None) -> None:
    """There and back, with pages that overlap, so that their memory is small enough."""
    pages, far_page = (1 << 31) + 8, (1 << 31) + 4
    plane = Plane(0, 0, 1, 24, Axis(2), Axis(1), 2)
    memory = torch.empty(pages + 48, dtype=torch.bfloat16)
    crowd = KVView(KVLayout("bfloat16", pages, 10, 2, ((plane,),)), [memory])
    far = np.array([4, 5 * far_page + 1, 5 * far_page + 3, 0])
    shape = BlockShape(1, 2, 2, 8, "bfloat16", kv_factor=1)
    first, second = normal(arena_view(shape, 1)), arena_view(shape, 1)
    ops, order = KernelOps(programs), np.array([1, 2, 3, 0])
    ops.copy_blocks(first, order, crowd, far, unit_tokens=2)
    for unit, block_unit in zip(far.tolist(), order.tolist(), strict=True):
        for head, token, dim in np.ndindex(2, 2, 2):
            there = crowd.layout.offset(0, 0, unit // 5, head, unit % 5 * 2 + token, dim)
            here = first.layout.offset(0, 0, 0, head, block_unit * 2 + token, dim)
            assert memory[there] == first.tensors[0][here]
    ops.copy_blocks(crowd, far, second, order, unit_tokens=2)
    assert torch.equal(first.tensors[0], second.tensors[0])


@interpreted
def test_the_sum_of_a_block_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its part after 2^31 words, by the formula; the words before are never read."""
    steps, block = 2, 64
    part = (1 << 31) // (steps * block)
    words = np.random.default_rng(0).integers(0, 1 << 63, 100)
    there = torch.from_numpy(words)
    out = torch.zeros(1, dtype=torch.int64)
    at_program(monkeypatch, (part, 1), -part)  # so that the result goes to the first place
    offsets = torch.tensor([0, -(1 << 31)])  # so that word 2^31 is the first of `there`
    sum_kernel[(1,)](
        there, offsets, out, (1 << 31) + 100, -1,
        KEY=KEY, FIRST=FIRST, SECOND=SECOND, BLOCK=block, STEPS=steps,
    )  # fmt: skip
    wanted = 0
    for place, word in enumerate(words.tolist(), (1 << 31) + 1):
        x = (word ^ (place * KEY)) * FIRST % 2**64
        x = (x ^ (x >> 32)) * SECOND % 2**64
        wanted += x ^ (x >> 29)
    assert int(out) % 2**64 == wanted % 2**64


@interpreted
def test_tiles_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn 2 of a program is tile 2^31 + 5: unit 2 of plane 5 if there are 2^30 planes."""
    shape = BlockShape(6, 1, 2, 4, "bfloat16", kv_factor=1)
    src, dst = normal(arena_view(shape, 1)), arena_view(shape, 1)
    before = dst.tensors[0].clone()
    tables = [torch.from_numpy(plane_table(v, range(6), 0).rows.copy()) for v in (src, dst)]
    tile = tile_for(Words(2, 2), contiguous=True, cut=False, rows=4, dim=2)
    units = torch.tensor([-1, -1, 0])
    at_program(monkeypatch, (10, 0), (1 << 31) - 5)
    bounded_copy_kernel[(1,)](*tables, units, units, 3, 1 << 30, 1, 4, 1, 1, **tile.constants())
    assert torch.equal(dst.tensors[0][40:48], src.tensors[0][40:48])
    assert torch.equal(dst.tensors[0][:40], before[:40])

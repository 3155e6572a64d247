"""The Triton copy, in the interpreter, against the torch reference: every byte of both memories."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcore_kernels.copy import launch, naive
from kvcore_kernels.ops import TritonOps
from kvcore_kernels.planes import Words, plane_table, widen

from kvcore.layout import (
    Axis,
    BlockShape,
    KVLayout,
    KVView,
    Plane,
    arena_layout,
    from_strides,
    sglang_layout,
    trtllm_layout,
    unit_tokens,
    vllm_cpu_layout,
)
from kvcore.ops import HeadRange
from kvcore.ops.base import DeviceOps
from kvcore.ops.reference import ReferenceOps

DTYPES = ["bfloat16", "float16", "float32", "float8_e4m3fn"]
ORDERS = [(0, 1, 2, 3, 4), (0, 1, 3, 2, 4), (1, 0, 2, 3, 4), (1, 2, 0, 3, 4)]
RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

Maker = Callable[[BlockShape, int, int], KVView]


def noise(count: int, dtype: str, seed: int = 0) -> torch.Tensor:
    """Random bits: NaNs, infinities and all."""
    size = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (count * size,), generator=generator, dtype=torch.uint8)
    return bits.view(getattr(torch, dtype))


def vllm_view(shape: BlockShape, pages: int, page: int, order: tuple[int, ...]) -> KVView:
    logical = (shape.layers, pages, shape.kv_heads, page, sum(shape.dims()))
    physical = [logical[axis] for axis in order]
    whole = noise(math.prod(physical), shape.dtype).view(physical)
    tensors = list(whole.permute(sorted(range(5), key=order.__getitem__)).unbind(0))
    return KVView(from_strides(tensors, shape), tensors)


def slot_view(shape: BlockShape, pages: int, page: int) -> KVView:
    """A tensor a layer for K and one for V, addressed by token."""
    parts = [
        [noise(pages * page * shape.kv_heads * dim, shape.dtype, n).view(-1, shape.kv_heads, dim)
         for n in range(shape.layers)]
        for dim in shape.dims()
    ]  # fmt: skip
    values = parts[1] if len(parts) == 2 else None
    return KVView(
        sglang_layout(parts[0], values, page, shape.dtype), [t for part in parts for t in part]
    )


def one_tensor_view(shape: BlockShape, pages: int, page: int, order: str) -> KVView:
    count = pages * shape.layers * shape.kv_factor * shape.kv_heads * page * shape.head_dim
    layout = trtllm_layout(shape, pages, page, order)
    return KVView(layout, [noise(count, shape.dtype)])


def packed_view(shape: BlockShape, pages: int, page: int) -> KVView:
    """K column-major: axes that are not contiguous, and with "amx" cut into runs."""
    isa = "amx" if page % 32 == 0 and shape.itemsize == 2 and shape.head_dim % 16 == 0 else "vec"
    layout = vllm_cpu_layout(
        isa, layers=shape.layers, num_pages=pages, page_tokens=page,
        kv_heads=shape.kv_heads, head_dim=shape.head_dim, dtype=shape.dtype,
    )  # fmt: skip
    count = pages * shape.kv_heads * page * 2 * shape.head_dim
    return KVView(layout, [noise(count, shape.dtype, n) for n in range(shape.layers)])


def arena_view(shape: BlockShape, slots: int, arrangement: str = "blockwise") -> KVView:
    count = slots * shape.nbytes // shape.itemsize
    return KVView(arena_layout(shape, slots, arrangement), [noise(count, shape.dtype, 9)])


ENGINES: dict[str, Maker] = {
    **{f"vllm-{o}": (lambda s, n, p, o=o: vllm_view(s, n, p, o)) for o in ORDERS},
    "slots": slot_view,
    "one-HND": lambda s, n, p: one_tensor_view(s, n, p, "HND"),
    "one-NHD": lambda s, n, p: one_tensor_view(s, n, p, "NHD"),
    "packed": packed_view,
}


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's whole storage as integers."""
    kind = RAW[tensor.element_size()]
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.view(kind).as_strided((count,), (1,), 0)


def twin(view: KVView) -> KVView:
    """The same view over a copy of its memory, with storages shared as before."""
    copies: dict[int, torch.Tensor] = {}
    tensors = []
    for tensor in view.tensors:
        key = tensor.untyped_storage().data_ptr()
        if key not in copies:
            copies[key] = raw(tensor).clone().view(tensor.dtype)
        tensors.append(
            copies[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        )
    return KVView(view.layout, tensors)


def assert_same(a: KVView, b: KVView) -> None:
    assert all(torch.equal(raw(x), raw(y)) for x, y in zip(a.tensors, b.tensors, strict=True))


def check(src: KVView, dst: KVView, *args: object) -> None:
    """Both ops from the same start: the same bytes after, in both memories."""
    results = []
    for ops in (TritonOps(), ReferenceOps()):
        pair = twin(src), twin(dst)
        units, targets, *rest = args
        ops.copy_blocks(pair[0], units, pair[1], targets, *rest)  # type: ignore[arg-type]
        results.append(pair)
    for ours, naives in zip(*results, strict=True):
        assert_same(ours, naives)
    assert_same(results[0][0], src)


@given(data=st.data())
@settings(max_examples=40)
def test_between_any_engine_and_canonical_blocks(data: st.DataObject) -> None:
    block = data.draw(st.sampled_from([1, 8, 16, 63]))
    page = data.draw(st.sampled_from([1, 16, 32, 63]))
    shape = BlockShape(
        layers=data.draw(st.integers(1, 3)),
        kv_heads=data.draw(st.integers(1, 3)),
        head_dim=data.draw(st.sampled_from([64, 80, 128, 256])),
        block_tokens=block,
        dtype=data.draw(st.sampled_from(DTYPES)),
    )
    view = ENGINES[data.draw(st.sampled_from(sorted(ENGINES)))](shape, 3, page)
    arena = arena_view(shape, 3, data.draw(st.sampled_from(["blockwise", "layerwise"])))
    unit = unit_tokens(page, block)
    ours = data.draw(st.permutations(range(3 * page // unit)))
    theirs = data.draw(st.permutations(range(3 * block // unit)))
    count = data.draw(st.integers(0, min(len(ours), len(theirs), 6)))
    a, b = np.array(ours[:count], np.int64), np.array(theirs[:count], np.int64)
    a[data.draw(st.lists(st.booleans(), min_size=count, max_size=count))] = -1
    layers = sorted(data.draw(st.sets(st.integers(0, shape.layers - 1))))
    first = data.draw(st.integers(0, shape.kv_heads - 1))
    heads = HeadRange(first, 0, data.draw(st.integers(0, shape.kv_heads - first)))
    if data.draw(st.booleans()):
        check(view, arena, a, b, layers, unit, heads)
    else:
        check(arena, view, b, a, layers, unit, heads)


@pytest.mark.parametrize("count", [1, 63, 500])
def test_many_units_in_one_launch(count: int) -> None:
    shape = BlockShape(1, 2, 64, 4, "bfloat16", kv_factor=1)
    view, arena = slot_view(shape, 500, 4), arena_view(shape, 500)
    order = np.random.default_rng(count).permutation(500)[:count]
    check(view, arena, order, np.arange(count))


def test_a_latent_has_one_head() -> None:
    shape = BlockShape(2, 1, 576, 8, "bfloat16", kv_factor=1)
    check(slot_view(shape, 4, 8), arena_view(shape, 4), np.array([3, 1]), np.array([0, 2]))


def test_k_and_v_of_unlike_dims() -> None:
    shape = BlockShape(2, 2, 192, 8, "bfloat16", v_head_dim=128)
    check(slot_view(shape, 4, 8), arena_view(shape, 4), np.array([3, 1]), np.array([0, 2]))


def test_an_offset_beyond_2_to_31_elements_is_exact() -> None:
    """By stride alone, in memory that is never touched between."""
    far = (1 << 31) + 4096
    memory = torch.empty(far + 4096, dtype=torch.uint8)
    planes = ((Plane(0, 0, far, 0, Axis(64), Axis(1), 64),),)
    view = KVView(KVLayout("uint8", 2, 16, 1, planes), [memory])
    memory[far : far + 1024] = noise(1024, "uint8", 4)
    arena = arena_view(BlockShape(1, 1, 64, 16, "uint8", kv_factor=1), 1)
    TritonOps().copy_blocks(view, np.array([1]), arena, np.array([0]))
    assert torch.equal(arena.tensors[0], memory[far : far + 1024])
    arena.tensors[0].add_(1)
    TritonOps().copy_blocks(arena, np.array([0]), view, np.array([1]))
    assert torch.equal(arena.tensors[0], memory[far : far + 1024])


@pytest.mark.parametrize("copy", [launch.copy_units, naive.copy_units])
def test_nothing_to_copy_touches_nothing(copy: Callable[..., None]) -> None:
    shape = BlockShape(2, 2, 64, 8, "bfloat16")
    view, arena = vllm_view(shape, 2, 8, ORDERS[0]), arena_view(shape, 2)
    before = twin(arena)
    none = np.zeros(0, np.int64)
    copy(view, none, arena, none, [0, 1], 8, HeadRange(0, 0, 2))
    copy(view, np.array([0]), arena, np.array([0]), [], 8, HeadRange(0, 0, 2))
    copy(view, np.array([0]), arena, np.array([0]), [0], 8, HeadRange(0, 0, 0))
    assert_same(arena, before)


@pytest.mark.parametrize(
    ("dtype", "dim", "offset", "words"),
    [
        ("bfloat16", 64, 0, Words(8, 16)),
        ("bfloat16", 68, 0, Words(8, 8)),
        ("bfloat16", 66, 0, Words(4, 4)),
        ("bfloat16", 64, 2, Words(4, 4)),
        ("bfloat16", 65, 0, Words(2, 2)),
        ("uint8", 64, 1, Words(1, 1)),
        ("float32", 64, 0, Words(8, 16)),
    ],
)
def test_words_are_as_wide_as_every_address_allows(
    dtype: str, dim: int, offset: int, words: Words
) -> None:
    shape = BlockShape(1, 2, dim, 4, dtype)
    memory = noise(shape.nbytes // shape.itemsize + offset, dtype)
    assert memory.data_ptr() % 16 == 0
    view = KVView(arena_layout(shape, 1), [memory[offset:]])
    tables, found = widen([plane_table(view, [0], 0)], shape.itemsize)
    assert found == words
    assert tables[0].rows[0, 9] * found.size == dim * shape.itemsize


def test_packed_memory_is_moved_by_the_element() -> None:
    shape = BlockShape(1, 1, 64, 32, "bfloat16")
    tables = [plane_table(v, [0], 0) for v in (packed_view(shape, 1, 32), arena_view(shape, 1))]
    assert widen(tables, 2)[1] == Words(2, 2)


def test_host_memory_alone_is_left_to_others() -> None:
    view = arena_view(BlockShape(1, 1, 64, 8, "bfloat16"), 1)
    ops: DeviceOps = TritonOps()
    assert not ops.supports(view, view)

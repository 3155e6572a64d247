"""Layouts and copies: the definition (`KVLayout.offset`), the torch reference, and the C code."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import ConfigError, LayoutError
from kvcore.memory.copy import HeadRange, builtin_ops, select_ops
from kvcore.memory.copy.base import DeviceOps
from kvcore.memory.copy.native import NativeOps
from kvcore.memory.copy.reference import ReferenceOps
from kvcore.memory.layout import (
    Arrangement,
    Axis,
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
from kvcore.model.shape import BlockShape
from support.budget import examples

DTYPES = ["bfloat16", "float16", "float32", "float8_e4m3fn"]
POISON = 0x5A
VLLM_ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


def both_ops() -> list[DeviceOps]:
    return [ReferenceOps(), NativeOps()]


def poisoned(count: int, dtype: str) -> torch.Tensor:
    raw = torch.full(
        (count * torch.empty(0, dtype=getattr(torch, dtype)).element_size(),),
        POISON,
        dtype=torch.uint8,
    )
    return raw.view(getattr(torch, dtype))


def vllm_view(shape: BlockShape, pages: int, page_tokens: int, order: str) -> KVView:
    """Per-layer views, as vLLM gives them, of one allocation in the physical order named."""
    content = sum(shape.dims())
    logical = (shape.layers, pages, shape.kv_heads, page_tokens, content)
    physical = [logical[axis] for axis in VLLM_ORDERS[order]]
    whole = poisoned(math.prod(physical), shape.dtype).view(physical)
    inverse = sorted(range(5), key=VLLM_ORDERS[order].__getitem__)
    tensors = list(whole.permute(inverse).unbind(0))
    return KVView(from_strides(tensors, shape), tensors)


def cpu_view(shape: BlockShape, pages: int, page_tokens: int, isa: str) -> KVView:
    layout = vllm_cpu_layout(
        isa,
        layers=shape.layers,
        num_pages=pages,
        page_tokens=page_tokens,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=shape.dtype,
    )
    count = pages * shape.kv_heads * page_tokens * 2 * shape.head_dim
    return KVView(layout, [poisoned(count, shape.dtype) for _ in range(shape.layers)])


def sglang_view(shape: BlockShape, pages: int, page_tokens: int) -> KVView:
    size = (pages * page_tokens, shape.kv_heads, shape.head_dim)
    buffers = [
        [poisoned(math.prod(size), shape.dtype).view(size) for _ in range(shape.layers)]
        for _ in range(2)
    ]
    return KVView(sglang_layout(*buffers, page_tokens, shape.dtype), buffers[0] + buffers[1])


def trtllm_view(shape: BlockShape, pages: int, page_tokens: int, order: str) -> KVView:
    count = pages * shape.layers * 2 * shape.kv_heads * page_tokens * shape.head_dim
    layout = trtllm_layout(shape, pages, page_tokens, order)
    return KVView(layout, [poisoned(count, shape.dtype)])


def arena_view(shape: BlockShape, slots: int, arrangement: Arrangement) -> KVView:
    layout = arena_layout(shape, slots, arrangement)
    return KVView(layout, [poisoned(slots * shape.nbytes // shape.itemsize, shape.dtype)])


Maker = Callable[[BlockShape, int, int], KVView]
ENGINES: dict[str, Maker] = {
    **{f"vllm-{o}": (lambda s, n, p, o=o: vllm_view(s, n, p, o)) for o in VLLM_ORDERS},
    "vllm-cpu-vec": lambda s, n, p: cpu_view(s, n, p, "vec"),
    "vllm-cpu-amx": lambda s, n, p: cpu_view(s, n, p, "amx"),
    "sglang": sglang_view,
    "trtllm-HND": lambda s, n, p: trtllm_view(s, n, p, "HND"),
    "trtllm-NHD": lambda s, n, p: trtllm_view(s, n, p, "NHD"),
}


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes behind a tensor's whole storage, as integers of its element size."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.view(kind).as_strided((count,), (1,), 0)


def elements(view: KVView, heads: range | None = None) -> Iterator[tuple[int, ...]]:
    layout = view.layout
    for layer, planes in enumerate(layout.planes):
        for kv, plane in enumerate(planes):
            for head in heads or range(layout.kv_heads):
                for dim in range(plane.head_dim):
                    yield layer, kv, head, dim


def fill(view: KVView, seed: int) -> None:
    """Every element of every page a random bit pattern."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in view.tensors:
        flat = raw(tensor)
        flat.copy_(torch.randint(0, 127, flat.shape, generator=generator, dtype=torch.int32))


def token_bytes(view: KVView, token: int) -> list[int]:
    """All elements of one token (counted through all pages), through the definition alone."""
    page, inside = divmod(token, view.layout.page_tokens)
    flats = [raw(t) for t in view.tensors]
    out = []
    for layer, kv, head, dim in elements(view):
        plane = view.layout.planes[layer][kv]
        tensor = view.tensors[plane.tensor]
        offset = view.layout.offset(layer, kv, page, head, inside, dim) + tensor.storage_offset()
        out.append(int(flats[plane.tensor][offset]))
    return out


def shapes(block_tokens: int, *, heads: int | None = None) -> st.SearchStrategy[BlockShape]:
    return st.builds(
        BlockShape,
        layers=st.integers(1, 3),
        kv_heads=st.integers(1, 3) if heads is None else st.just(heads),
        head_dim=st.sampled_from([16, 32]),
        block_tokens=st.just(block_tokens),
        dtype=st.sampled_from(DTYPES),
    )


def fits(engine: str, shape: BlockShape, page_tokens: int) -> bool:
    return engine != "vllm-cpu-amx" or (shape.itemsize == 2 and page_tokens % 32 == 0)


@pytest.mark.parametrize("ops", both_ops(), ids=lambda o: o.name)
@pytest.mark.parametrize("engine", ENGINES)
@given(data=st.data())
@settings(max_examples=examples(8), deadline=None)
def test_copies_agree_with_the_definition(ops: DeviceOps, engine: str, data: st.DataObject) -> None:
    block = data.draw(st.sampled_from([4, 8, 16]))
    page = data.draw(st.sampled_from([4, 8, 32]))
    shape = data.draw(shapes(block))
    if not fits(engine, shape, page):
        return
    view = ENGINES[engine](shape, 3, page)
    arena = arena_view(shape, 3, data.draw(st.sampled_from(Arrangement)))
    view.check()
    arena.check()
    fill(view, data.draw(st.integers(0, 99)))
    unit = unit_tokens(page, block)
    rows = data.draw(st.permutations(range(min(3 * page, 3 * block) // unit)))
    targets = data.draw(st.permutations(range(min(3 * page, 3 * block) // unit)))
    count = data.draw(st.integers(0, len(rows)))
    src = np.array(rows[:count], dtype=np.int64)
    dst = np.array(targets[:count], dtype=np.int64)
    skip = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    src[np.array(skip, dtype=bool)] = -1
    ops.copy_blocks(view, src, arena, dst, unit_tokens=unit)
    written = set()
    for a, b in zip(src.tolist(), dst.tolist(), strict=True):
        for t in range(unit):
            if a >= 0:
                assert token_bytes(arena, b * unit + t) == token_bytes(view, a * unit + t)
                written.add(b * unit + t)
    untouched = set(range(3 * block)) - written
    poison = int(raw(poisoned(1, shape.dtype))[0])
    assert all(set(token_bytes(arena, t)) == {poison} for t in untouched), "wrote too much"


@given(data=st.data())
@settings(max_examples=examples(60), deadline=None)
def test_from_one_engine_through_canonical_blocks_to_another_and_back(data: st.DataObject) -> None:
    block = data.draw(st.sampled_from([8, 16, 32]))
    shape = data.draw(shapes(block))
    names = data.draw(st.tuples(*[st.sampled_from(sorted(ENGINES))] * 2))
    pages = data.draw(st.tuples(*[st.sampled_from([8, 32, 64])] * 2))
    if not all(fits(name, shape, page) for name, page in zip(names, pages, strict=True)):
        return
    ops = data.draw(st.sampled_from(both_ops()))
    blocks = 128 // block
    views = [
        ENGINES[name](shape, 128 // page, page) for name, page in zip(names, pages, strict=True)
    ]
    arenas = [arena_view(shape, blocks, data.draw(st.sampled_from(Arrangement))) for _ in range(2)]
    fill(views[0], 1)
    chain = [views[0], arenas[0], views[1], arenas[1]]
    for a, b in itertools.pairwise(chain):
        unit = unit_tokens(a.layout.page_tokens, b.layout.page_tokens)
        units = np.arange(128 // unit)
        ops.copy_blocks(a, units, b, units, unit_tokens=unit)
    for token in (0, 1, block - 1, 63, 127):
        assert token_bytes(arenas[1], token) == token_bytes(views[0], token)


@pytest.mark.slow
@pytest.mark.parametrize("ops", both_ops(), ids=lambda o: o.name)
@pytest.mark.parametrize("readers", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("writers", [1, 2, 3])
def test_blocks_of_one_tensor_parallel_size_are_read_at_another(
    ops: DeviceOps, writers: int, readers: int
) -> None:
    whole = BlockShape(2, 12, 16, 8, "bfloat16")
    engine = vllm_view(whole, 2, 8, "LBNHC")
    fill(engine, 7)
    units = np.arange(2)
    shards = []
    for rank in range(writers):
        share = 12 // writers
        shard = arena_view(whole.with_heads(share), 2, Arrangement.BLOCKWISE)
        ops.copy_blocks(engine, units, shard, units, heads=HeadRange(rank * share, 0, share))
        shards.append(shard)
    back = vllm_view(whole, 2, 8, "BHLNC")
    for rank in range(readers):
        mine = range(rank * 12 // readers, (rank + 1) * 12 // readers)
        for writer, shard in enumerate(shards):
            share = 12 // writers
            theirs = range(writer * share, (writer + 1) * share)
            start, stop = max(mine.start, theirs.start), min(mine.stop, theirs.stop)
            if start < stop:
                span = HeadRange(start - theirs.start, start, stop - start)
                ops.copy_blocks(shard, units, back, units, heads=span)
    assert all(token_bytes(back, t) == token_bytes(engine, t) for t in range(16))


@given(data=st.data())
@settings(max_examples=examples(80), deadline=None)
def test_native_equals_reference_on_odd_shapes(data: st.DataObject) -> None:
    """Head sizes and pages that no fast path likes, a range of layers and of heads."""
    block = data.draw(st.sampled_from([1, 3, 8, 16, 63]))
    page = block * data.draw(st.integers(1, 5))
    dim = data.draw(st.sampled_from([1, 7, 64, 80, 128]))
    shape = BlockShape(3, 4, dim, block, data.draw(st.sampled_from(DTYPES)))
    source = data.draw(st.sampled_from(["vec", "rows"]))
    view = (
        cpu_view(shape, 4, page, "vec") if source == "vec" else vllm_view(shape, 4, page, "LBNHC")
    )
    fill(view, data.draw(st.integers(0, 9)))
    units = page // block * 4
    a = np.array(data.draw(st.lists(st.integers(-1, units - 1), max_size=20, unique=True)))
    b = np.array(data.draw(st.permutations(range(20)))[: len(a)])
    layers = data.draw(st.sets(st.integers(0, 2)))
    first = data.draw(st.integers(0, 3))
    span = HeadRange(first, 0, data.draw(st.integers(0, 4 - first)))
    results = []
    for ops in both_ops():
        arena = arena_view(shape, 20, Arrangement.BLOCKWISE)
        ops.copy_blocks(view, a, arena, b, sorted(layers), block, span)
        back = cpu_view(shape, 4, page, "vec")
        ops.copy_blocks(arena, b, back, np.where(b % 3 == 0, -1, a), sorted(layers), block)
        results.append([raw(t).clone() for t in (*arena.tensors, *back.tensors)])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize("direction", ["gather", "scatter"])
def test_a_large_copy_that_streams_equals_the_reference(direction: str) -> None:
    shape = BlockShape(4, 3, 64, 16, "bfloat16")
    outcomes = []
    for ops in both_ops():
        view = cpu_view(shape, 4, 128, "vec")
        arena = arena_view(shape, 32, Arrangement.BLOCKWISE)
        fill(view if direction == "gather" else arena, 3)
        units = np.random.default_rng(5).permutation(32)
        pair = (view, np.arange(32), arena, units)
        if direction == "scatter":
            pair = (arena, units, view, np.arange(32))
        ops.copy_blocks(*pair, unit_tokens=16)
        outcomes.append([raw(t).clone() for t in (*view.tensors, *arena.tensors)])
    assert all(torch.equal(x, y) for x, y in zip(*outcomes, strict=True))


def test_mla_has_one_latent_head() -> None:
    shape = BlockShape(2, 1, 576, 8, "bfloat16", kv_factor=1)
    assert shape.nbytes == 2 * 576 * 8 * 2
    buffers = [poisoned(32 * 576, "bfloat16").view(32, 1, 576) for _ in range(2)]
    view = KVView(sglang_layout(buffers, None, 8, "bfloat16"), buffers)
    fill(view, 2)
    arena = arena_view(shape, 4, Arrangement.LAYERWISE)
    for ops in both_ops():
        ops.copy_blocks(view, np.array([3, 1]), arena, np.array([0, 2]))
        assert token_bytes(arena, 17) == token_bytes(view, 9)


def test_an_offset_beyond_2_to_31_elements_is_exact() -> None:
    """By stride alone: two pages, 2^31 elements apart, in memory that is never touched between."""
    far = (1 << 31) + 4096
    memory = torch.empty(far + 4096, dtype=torch.uint8)
    planes = ((Plane(0, 0, far, 0, Axis(64), Axis(1), 64),),)
    view = KVView(KVLayout("uint8", 2, 16, 1, planes), [memory])
    view.check()
    memory[far : far + 1024] = torch.arange(1024) % 251
    shape = BlockShape(1, 1, 64, 16, "uint8", kv_factor=1)
    for ops in both_ops():
        arena = arena_view(shape, 1, Arrangement.BLOCKWISE)
        ops.copy_blocks(view, np.array([1]), arena, np.array([0]))
        assert torch.equal(arena.tensors[0], memory[far : far + 1024])


SHAPE = BlockShape(2, 2, 16, 8, "bfloat16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: KVView(v.layout, [t[:1] for t in v.tensors][:1]), "names tensor"),
        (lambda v: KVView(v.layout, [t.float() for t in v.tensors]), "layout of bfloat16"),
        (lambda v: KVView(v.layout, [t[:3].clone() for t in v.tensors]), "reaches element"),
    ],
)
def test_memory_that_is_not_as_described_is_refused(
    change: Callable[[KVView], KVView], message: str
) -> None:
    view = vllm_view(SHAPE, 4, 8, "LBHNC")
    with pytest.raises(LayoutError, match=message):
        change(view).check()


def test_elements_that_share_a_place_are_refused() -> None:
    plane = Plane(0, 0, 256, 16, Axis(16), Axis(1), 16)
    with pytest.raises(LayoutError, match="share a place"):
        KVView(KVLayout("bfloat16", 1, 8, 2, ((plane,),)), [poisoned(512, "bfloat16")]).check()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"unit_tokens": 3}, "do not divide"),
        ({"src_units": np.array([8])}, "source unit 8 is out of range: there are 4"),
        ({"dst_units": np.array([9])}, "destination unit 9 is out of range: there are 4"),
        ({"dst_units": np.array([0, 1])}, "1 source units for 2"),
        ({"layers": [2]}, r"layers \[2\]"),
        ({"heads": HeadRange(1, 0, 2)}, "heads"),
    ],
)
def test_a_copy_that_does_not_fit_is_refused(call: dict[str, object], message: str) -> None:
    args = {
        "src": vllm_view(SHAPE, 4, 8, "LBHNC"),
        "src_units": np.array([0]),
        "dst": arena_view(SHAPE, 4, Arrangement.BLOCKWISE),
        "dst_units": np.array([0]),
    }
    for ops in both_ops():
        with pytest.raises(LayoutError, match=message):
            ops.copy_blocks(**(args | call))  # type: ignore[arg-type]


def test_unlike_blocks_are_not_copied() -> None:
    a = vllm_view(SHAPE, 4, 8, "LBHNC")
    other = BlockShape(2, 2, 16, 8, "float16")
    with pytest.raises(LayoutError, match="does not copy"):
        ReferenceOps().copy_blocks(
            a, np.array([0]), arena_view(other, 1, Arrangement.BLOCKWISE), np.array([0])
        )


def test_the_shape_of_a_block() -> None:
    shape = BlockShape(30, 3, 64, 16, "bfloat16")
    assert shape.nbytes == 30 * 3 * 2 * 64 * 16 * 2 == 368_640
    assert shape.with_heads(1).nbytes * 3 == shape.nbytes
    assert BlockShape.from_dict(shape.to_dict()) == shape
    with pytest.raises(LayoutError, match="not the shape"):
        BlockShape.from_dict({"layers": 1})
    with pytest.raises(LayoutError, match="float12"):
        BlockShape(1, 1, 1, 1, "float12")
    with pytest.raises(LayoutError, match="not the shape"):
        BlockShape(0, 1, 1, 1, "bfloat16")


def test_padded_slots_keep_blocks_apart() -> None:
    layout = arena_layout(SHAPE, 3, slot_nbytes=8192)
    assert layout.offset(0, 0, 1, 0, 0, 0) * 2 == 8192
    with pytest.raises(LayoutError, match="slots of 64 bytes"):
        arena_layout(SHAPE, 3, slot_nbytes=64)


def test_the_fastest_that_fits_is_chosen() -> None:
    a, b = vllm_view(SHAPE, 1, 8, "LBHNC"), arena_view(SHAPE, 1, Arrangement.BLOCKWISE)
    assert select_ops(a, b, builtin_ops()).name == "native"
    assert select_ops(a, b, builtin_ops(), "reference").name == "reference"
    with pytest.raises(ConfigError, match="available here are auto, link, native, reference"):
        select_ops(a, b, builtin_ops(), "triton")

"""The Triton copy, in the interpreter, against the torch reference: every byte of both memories."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.memory.copy import Copy, HeadRange, link
from kvcore.memory.copy.base import DeviceOps
from kvcore.memory.copy.link import Way
from kvcore.memory.copy.reference import ReferenceOps
from kvcore.memory.device import device_of
from kvcore.memory.layout import KVView, arena_layout, unit_tokens
from kvcore.model.shape import BlockShape
from kvcore_devtools.gpu import Machine, installed
from kvcore_devtools.gpu.device import RecordedEvent
from kvcore_kernels.copy import launch, naive
from kvcore_kernels.ops import KernelOps, TritonOps
from kvcore_kernels.planes import Words, plane_table, widen
from kvcore_kernels.testing import (
    ENGINES,
    ORDERS,
    arena_view,
    assert_same,
    noise,
    packed_view,
    slot_view,
    twin,
    vllm_view,
)
from support.links import on_gpu, on_host
from support.moved_kernels import interpreted

GPU = torch.device("cuda", 0)
DTYPES = ["bfloat16", "float16", "float32", "float8_e4m3fn"]


def check(src: KVView, dst: KVView, *args: object, ours: DeviceOps | None = None) -> None:
    """Both ops from the same start: the same bytes after, in both memories."""
    results = []
    for ops in (ours or KernelOps(), ReferenceOps()):
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
    ours = KernelOps(data.draw(st.sampled_from([None, 1, 3, 12])))
    if data.draw(st.booleans()):
        check(view, arena, a, b, layers, unit, heads, ours=ours)
    else:
        check(arena, view, b, a, layers, unit, heads, ours=ours)


@interpreted
@given(data=st.data())
@settings(max_examples=25)
def test_over_the_link_by_every_way(data: st.DataObject) -> None:
    """The kernels run in the interpreter, at once, and the rest is copied by address."""
    page, block = data.draw(st.sampled_from([(16, 32), (32, 16), (8, 8)]))
    shape = BlockShape(2, 2, data.draw(st.sampled_from([64, 80])), block, "bfloat16")
    view = ENGINES[data.draw(st.sampled_from(sorted(ENGINES)))](shape, 4, page)
    arena = arena_view(shape, 3, data.draw(st.sampled_from(["blockwise", "layerwise"])))
    unit = min(page, block)
    count = 3 * min(page, block) // unit
    a = np.array(data.draw(st.permutations(range(4 * page // unit)))[:count])
    b = np.array(data.draw(st.permutations(range(3 * block // unit)))[:count])
    a[data.draw(st.lists(st.booleans(), min_size=count, max_size=count))] = -1
    layers = data.draw(st.sampled_from([[0, 1], [1]]))
    heads = data.draw(st.sampled_from([HeadRange(0, 0, 2), HeadRange(1, 0, 1)]))
    way, to_host = data.draw(st.sampled_from([*Way, None])), data.draw(st.booleans())
    results = []
    for ops in (TritonOps(way), ReferenceOps()):
        ours, theirs = twin(view), twin(arena)
        with installed(Machine(eager=1.0)) as machine:
            here = on_gpu(machine, ours) if ops.name == "triton" else ours
            on_host(machine, theirs)
            ends = [(here, a), (theirs, b)] if to_host else [(theirs, b), (here, a)]
            ops.copy_blocks(*ends[0], *ends[1], layers, unit, heads)
        machine.check()
        results.append((ours, theirs))
    for mine, naives in zip(*results, strict=True):
        assert_same(mine, naives)


@interpreted
def test_tables_are_sent_once_and_ordered_with_every_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device has not come to the end of the first upload when the second stream copies."""
    monkeypatch.setattr(RecordedEvent, "passed", lambda event: False)
    shape = BlockShape(2, 2, 64, 16, "bfloat16")
    ops = KernelOps()
    with installed(Machine()) as machine:
        view = on_gpu(machine, slot_view(shape, 4, 16))
        arena = on_gpu(machine, arena_view(shape, 4))
        uploads, streams = [], [device_of(GPU).stream() for _ in range(2)]
        for stream in streams:
            before = len(machine.calls)
            with stream.issuing():
                ops.copy_blocks(view, np.array([2, 1]), arena, np.array([0, 3]))
            mine = machine.calls[before:]
            uploads.append([call.what for call in mine if call.kind == "upload"])
    assert uploads[0][-1] == uploads[1][0] == 2 * 2 * 8, "two units, of two sides"
    assert len(uploads[1]) == 1, "the tables were sent again"
    first, second = (stream.queue for stream in streams)
    found = [(call.kind, call.stream) for call in machine.calls]
    sent = machine.calls[found.index(("record", first))].what
    assert ("follow", sent, second) in [call[:3] for call in machine.calls]
    assert ("hold", second) in found


@interpreted
def test_what_is_prepared_copies_nothing() -> None:
    shape = BlockShape(2, 2, 64, 16, "bfloat16")
    view, arena = slot_view(shape, 4, 16), arena_view(shape, 4)
    before = twin(view), twin(arena)
    with installed(Machine(eager=1.0)) as machine:
        ours = on_gpu(machine, view)
        TritonOps().prepare(ours, on_host(machine, arena), 16)
        assert len(machine.allocated) == 2 * link.SLOTS
        TritonOps().prepare(ours, on_gpu(machine, arena), 16)
    machine.check()
    assert_same(view, before[0])
    assert_same(arena, before[1])


@pytest.mark.parametrize("count", [1, 63, 130, pytest.param(500, marks=pytest.mark.exhaustive)])
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


@pytest.mark.parametrize("copy", [launch.copy_units, naive.copy_units])
def test_nothing_to_copy_touches_nothing(copy: Callable[..., None]) -> None:
    shape = BlockShape(2, 2, 64, 8, "bfloat16")
    view, arena = vllm_view(shape, 2, 8, ORDERS[0]), arena_view(shape, 2)
    before = twin(arena)
    none = np.zeros(0, np.int64)
    copy(Copy(view, none, arena, none, [0, 1], 8, HeadRange(0, 0, 2)))
    copy(Copy(view, np.array([0]), arena, np.array([0]), [], 8, HeadRange(0, 0, 2)))
    copy(Copy(view, np.array([0]), arena, np.array([0]), [0], 8, HeadRange(0, 0, 0)))
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
    ops: DeviceOps
    for ops in (TritonOps(), KernelOps()):
        assert not ops.supports(view, view)

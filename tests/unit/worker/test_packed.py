"""A worker's copies of pages of a format that only the engine knows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.connector.page_table import Paging
from kvcore.errors import LayoutError
from kvcore.memory.arena import HostArena
from kvcore.memory.copy import DeviceOps
from kvcore.memory.copy.native import NativeOps
from kvcore.memory.copy.reference import ReferenceOps
from kvcore.memory.device_group import DeviceGroup
from kvcore.memory.layout import Arrangement, KVView
from kvcore.memory.runs import PagesInBlock, SlotPlace, byte_pages, whole_pages
from kvcore.model.packed import PackedPages
from kvcore.model.spec import LayerGroup, ModelDescription
from kvcore.transfer.graph import Span
from kvcore.transfer.plan import Chain, build_load, build_save
from kvcore.worker import EnginePages, KVWorker, WorkerLimits
from support.budget import examples

both = pytest.mark.parametrize("ops", [ReferenceOps(), NativeOps()], ids=lambda ops: ops.name)
PAGES, SLOTS, WAIT = 10, 12, 60.0


class Cache(NamedTuple):
    """How an engine keeps the pages of one cache."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    """The axes of a page from the outermost in memory to the innermost."""
    filler: int
    """Elements behind the numbers of a page that count as part of it."""
    gap: int
    """Elements between two pages that do not."""
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return (int(np.prod(self.shape)) + self.filler) * self.dtype.itemsize

    def memory(self) -> torch.Tensor:
        page = self.nbytes // self.dtype.itemsize + self.gap
        raw = torch.randint(0, 256, ((1 + PAGES * page) * self.dtype.itemsize,), dtype=torch.uint8)
        strides, stride = [0] * len(self.shape), 1
        for axis in reversed(self.order):
            strides[axis], stride = stride, stride * self.shape[axis]
        return raw.view(self.dtype).as_strided((PAGES, *self.shape), (page, *strides), 1)


caches = st.builds(
    lambda shape, order, filler, gap, dtype: Cache(shape, tuple(order), filler, gap, dtype),
    st.tuples(*[st.integers(1, 4)] * 3),
    st.permutations(range(3)),
    st.sampled_from([0, 0, 3]),
    st.sampled_from([0, 5]),
    st.sampled_from([torch.uint8, torch.bfloat16]),
)


def storage(tensor: torch.Tensor) -> Any:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()


@both
@settings(max_examples=examples(40, 1), deadline=None)
@given(
    kinds=st.lists(st.lists(caches, min_size=1, max_size=3), min_size=1, max_size=2),
    per_block=st.integers(1, 3),
    page_tokens=st.sampled_from([1, 4, 16]),
    source=st.permutations(range(PAGES)),
    target=st.permutations(range(PAGES)),
    slots=st.permutations(range(SLOTS)),
)
def test_pages_come_back_in_other_pages_and_nothing_else_is_touched(
    ops: DeviceOps,
    kinds: list[list[Cache]],
    per_block: int,
    page_tokens: int,
    source: list[int],
    target: list[int],
    slots: list[int],
) -> None:
    """Caches of unlike sizes, in one or two page tables; the oracle copies bytes by numpy."""
    every = [kind for group in kinds for kind in group]
    packed = PackedPages(page_tokens, tuple(kind.nbytes for kind in every))
    block = per_block * page_tokens
    shape, blocks = packed.shape(block, 1), PAGES // per_block
    assert 0 <= shape.nbytes - packed.offsets(block)[-1] < len(every) * block
    numbers = iter(range(len(every)))
    layers = [tuple(next(numbers) for _ in group) for group in kinds]
    groups = tuple(LayerGroup(i, page_tokens, part) for i, part in enumerate(layers))
    ModelDescription(shape, groups, b"m", 1, packed=packed)
    memory = [kind.memory() for kind in every]
    arena = HostArena(shape, SLOTS, huge_pages=False)
    worker = KVWorker(
        arena=arena,
        arena_view=KVView(arena.layout(), [arena.tensor()]),
        ops=ops,
        pages=EnginePages(
            [
                DeviceGroup(
                    part,
                    whole_pages([byte_pages(memory[i], every[i].nbytes, "c") for i in part]),
                    page_tokens,
                    PagesInBlock.of(packed, block, part),
                )
                for part in layers
            ]
        ),
        limits=WorkerLimits(),
    )
    paging = Paging(groups, block, no_page=-1)

    def run(graph: Any, table: list[int]) -> None:
        units = paging.whole_units([table] * len(groups), 0, blocks)
        assert units is not None
        assert worker.submit(graph.bind(units)) == []
        assert worker.wait_idle(WAIT)
        assert not any(report.failed for report in worker.poll())

    try:
        keys = tuple(bytes([i]) * 16 for i in range(blocks))
        chain = Chain.of(keys, b"n" * 16, Span(0, blocks))
        run(build_save(1, chain, slots[:blocks], None, batch_rows=2), source)
        before = [storage(tensor).copy() for tensor in memory]
        for tensor in memory:
            storage(tensor)[:] ^= 0xFF
        expected = [storage(tensor).copy() for tensor in memory]
        for kind, tensor, raw, kept in zip(every, memory, expected, before, strict=True):
            size = kind.dtype.itemsize
            for here, there in zip(source[: blocks * per_block], target, strict=False):
                start, to = ((1 + page * tensor.stride(0)) * size for page in (here, there))
                raw[to : to + kind.nbytes] = kept[start : start + kind.nbytes]
        run(build_load(2, chain, slots[:blocks], (), batch_rows=2), target)
        for tensor, raw in zip(memory, expected, strict=True):
            assert np.array_equal(storage(tensor), raw)
    finally:
        assert worker.close()


def test_pages_that_are_no_run_of_bytes_are_refused() -> None:
    rows = torch.zeros(4, 2, 6)
    for tensor, nbytes in (
        (rows[:, :, :3], 24),  # with gaps inside of a page
        (rows, 40),  # smaller than a page
        (rows, 52),  # the next page begins before its end
        (torch.as_strided(torch.zeros(42), (3, 2), (20, 1)), 80),  # behind the end of the memory
        (torch.zeros(4), 4),
    ):
        with pytest.raises(LayoutError, match="cache of c"):
            byte_pages(tensor, nbytes, "c")
    assert byte_pages(rows, 96, "c", parts=2).shape == (2, 96)
    for tensor, nbytes in (
        (rows[:, 0], 48),  # parts that do not follow each other
        (rows.flatten(1)[1:], 96),  # an odd number of parts
    ):
        with pytest.raises(LayoutError, match="cache of c"):
            byte_pages(tensor, nbytes, "c", parts=2)


def test_slots_in_pieces_are_refused() -> None:
    packed = PackedPages(4, (8, 12))
    arena = HostArena(packed.shape(8, 1), 2, arrangement=Arrangement.LAYERWISE, huge_pages=False)
    view = KVView(arena.layout(), [arena.tensor()])
    with pytest.raises(LayoutError, match="one piece"):
        PagesInBlock.of(packed, 8, (0, 1)).memory(view, SlotPlace(arena.slot_nbytes))
    arena.close()


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"shape": PackedPages(4, (80, 12)).shape(8, 1)}, "one size"),
        ({"groups": (LayerGroup(0, 8, (0, 1)),)}, "one size"),
        ({"stages": ((0, 1), (1, 2)), "world_size": 2}, "one size"),  # no room for 13 in 11
    ],
)
def test_a_description_that_does_not_fit_is_refused(changed: dict[str, Any], match: str) -> None:
    packed = PackedPages(4, (8, 13))
    right: dict[str, Any] = {
        "shape": packed.shape(8, 1),
        "groups": (LayerGroup(0, 4, (0, 1)),),
        "fingerprint": b"m",
        "world_size": 1,
        "packed": packed,
    }
    ModelDescription(**right)
    with pytest.raises(LayoutError, match=match):
        ModelDescription(**right | changed)


def test_a_block_is_a_whole_number_of_pages() -> None:
    packed = PackedPages(64, (100,))
    assert [packed.block_tokens(wanted) for wanted in (16, 64, 65, 256)] == [64, 64, 128, 256]
    assert packed.block_tokens(16, [96, 4]) == 192
    with pytest.raises(LayoutError, match="whole number"):
        packed.shape(96, 1)
    with pytest.raises(LayoutError, match="not the pages"):
        PackedPages(64, ())


@given(st.lists(st.integers(1, 60), min_size=2, max_size=6), st.data())
def test_each_stage_has_room_for_its_own_pages(sizes: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(sizes) - 1))
    stages = ((0, cut), (cut, len(sizes)))
    packed = PackedPages(4, tuple(sizes))
    shape = packed.shape(8, 1, stages)
    group = LayerGroup(0, 4, tuple(range(len(sizes))))
    model = ModelDescription(shape, (group,), b"m", 2, stages=stages, packed=packed)
    for rank, (start, _) in enumerate(stages):
        [own] = model.rank_groups(rank)
        places = PagesInBlock.of(packed, 8, own.layers, start)
        ends = [at + 2 * size for at, size in zip(places.offsets, places.nbytes, strict=True)]
        assert [0, *ends[:-1]] == list(places.offsets), "one after another, from the begin"
        assert ends[-1] <= model.rank_shape(rank).nbytes
    filler = [model.rank_shape(i).nbytes - 2 * sum(sizes[a:b]) for i, (a, b) in enumerate(stages)]
    assert min(part // (b - a) for part, (a, b) in zip(filler, stages, strict=True)) < 8

"""States of resume points: from an engine's pages into rows of the arena, and back."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import LayoutError
from kvcore.memory.arena import HostArena
from kvcore.memory.copy import DeviceOps
from kvcore.memory.copy.native import NativeOps
from kvcore.memory.copy.reference import ReferenceOps
from kvcore.memory.layout import KVView
from kvcore.memory.points import RowCopy, row_copies
from kvcore.memory.runs import SlotPlace
from kvcore.model.points import PointShape, StateGroup
from kvcore.model.shape import BlockShape
from support.budget import examples

both = pytest.mark.parametrize("ops", [ReferenceOps(), NativeOps()], ids=lambda ops: ops.name)
BLOCKS = [
    BlockShape(1, 1, 1, 16, "bfloat16"),
    BlockShape(2, 1, 3, 4, "float32"),
    BlockShape(1, 3, 1, 11, "int8"),
    BlockShape(3, 2, 16, 16, "bfloat16"),
]
SLOTS, POISON = 12, 0x5A


class Kind(NamedTuple):
    """How an engine keeps the states of one layer."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    padding: int
    """Elements between two pages."""
    skipped: int
    """Elements of its memory before the first page."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def memory(self, pages: int) -> torch.Tensor:
        count = math.prod(self.shape)
        room = self.skipped + pages * (count + self.padding)
        raw = torch.full((room * self.dtype.itemsize,), POISON, dtype=torch.uint8)
        strides = [math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]
        size, page = (pages, *self.shape), count + self.padding
        return raw.view(self.dtype).as_strided(size, (page, *strides), self.skipped)


kinds = st.builds(
    Kind,
    st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
    st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple),
    st.sampled_from([0, 0, 1, 5]),
    st.sampled_from([0, 3]),
)


class Engine:
    """Pages of all groups, and rows for points; everything poisoned."""

    def __init__(self, layers: dict[int, list[Kind]], block: BlockShape, pages: int) -> None:
        self.pages = pages
        states = [
            StateGroup(group, tuple(f"{group}.{i}" for i in range(len(kinds))), kinds[0].nbytes)
            for group, kinds in layers.items()
        ]
        self.point = PointShape(tuple(states), block.nbytes, 1)
        self.tensors = {g: [kind.memory(pages) for kind in kinds] for g, kinds in layers.items()}
        self.arena = HostArena(block, SLOTS, huge_pages=False)
        self.rows = KVView(self.arena.layout(), [self.arena.tensor()])
        self.bytes_of_rows = self.rows.tensors[0].view(torch.uint8)
        self.bytes_of_rows.fill_(POISON)

    def fill(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for raw in self.storages():
            raw[:] = rng.integers(0, 256, len(raw), dtype=np.uint8)

    def storages(self) -> list[Any]:
        """All the memory behind the pages, as bytes that share it."""
        return [
            torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
            for tensors in self.tensors.values()
            for tensor in tensors
        ]

    def state(self, group: int, layer: int, page: int) -> bytes:
        return self.tensors[group][layer][page].contiguous().view(torch.uint8).numpy().tobytes()

    def run(self, ops: DeviceOps, pages: dict[int, int], slots: list[int], save: bool) -> None:
        """Copy all rows of a point between the pages of its groups and slots of the arena."""
        for part in row_copies(self.point, self.tensors):
            copy_row(ops, self, part, pages[part.group], slots[part.row], save)


def copy_row(
    ops: DeviceOps, engine: Engine, part: RowCopy, page: int, slot: int, save: bool
) -> None:
    memory = part.memory(engine.rows, SlotPlace(engine.arena.slot_nbytes))
    memory.check()
    one, other = np.array([page], dtype=np.int64), np.array([slot], dtype=np.int64)
    if save:
        ops.copy_blocks(part.pages, one, memory, other)
    else:
        ops.copy_blocks(memory, other, part.pages, one)


@st.composite
def engines(draw: st.DrawFn) -> Engine:
    """Layers of one group have states of one size, but may keep them differently."""
    layers = {}
    for group in draw(st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True)):
        kind = draw(kinds)
        count = draw(st.integers(1, 3))
        others = [
            kind._replace(padding=draw(st.sampled_from([0, 4])), skipped=draw(st.integers(0, 2)))
            for _ in range(count - 1)
        ]
        layers[group] = [kind, *others]
    block = draw(st.sampled_from(BLOCKS))
    made = Engine(layers, block, draw(st.integers(2, 5)))
    if made.point.state_rows > SLOTS:  # a large state and a small block
        made = Engine(layers, BLOCKS[-1], made.pages)
    return made


@both
@given(engine=engines(), seed=st.integers(0, 99), data=st.data())
@settings(max_examples=examples(80), deadline=None)
def test_a_point_comes_back_in_other_pages_and_nothing_else_is_touched(
    ops: DeviceOps, engine: Engine, seed: int, data: st.DataObject
) -> None:
    groups, rows = list(engine.tensors), engine.point.state_rows
    pages = st.integers(0, engine.pages - 1)
    source = {group: data.draw(pages, label=f"from, {group}") for group in groups}
    target = {group: data.draw(pages, label=f"to, {group}") for group in groups}
    slots = data.draw(st.permutations(range(SLOTS)), label="slots")[:rows]
    engine.fill(seed)
    before = [raw.copy() for raw in engine.storages()]
    saved = {(g, i): engine.state(g, i, source[g]) for g in groups for i in each(engine, g)}

    engine.run(ops, source, slots, save=True)
    assert all(map(np.array_equal, engine.storages(), before)), "a save wrote to a page"
    whole = b"".join(saved[s.group, i] for s in engine.point.states for i in each(engine, s.group))
    size = engine.point.row_nbytes
    for slot in range(SLOTS):
        found = bytes(engine.arena.slot_buffers(slot)[0])
        row = slots.index(slot) if slot in slots else rows
        expected = whole[row * size : (row + 1) * size]
        assert found == expected + bytes([POISON]) * (len(found) - len(expected))

    engine.fill(seed + 100)
    expected_pages = {
        (g, i, page): saved[g, i] if page == target[g] else engine.state(g, i, page)
        for g in groups
        for i in each(engine, g)
        for page in range(engine.pages)
    }
    between = [raw.copy() for raw in engine.storages()]
    rows_before = engine.bytes_of_rows.clone()
    engine.run(ops, target, slots, save=False)
    assert torch.equal(engine.bytes_of_rows, rows_before), "a load wrote to a row"
    assert {place: engine.state(*place) for place in expected_pages} == expected_pages
    changed = sum(int((a != b).sum()) for a, b in zip(engine.storages(), between, strict=True))
    most = sum(s.nbytes * len(s.names) for s in engine.point.states)
    assert changed <= most, "bytes between the pages were written"
    engine.arena.close()


def each(engine: Engine, group: int) -> range:
    return range(len(engine.tensors[group]))


@given(engine=engines())
@settings(max_examples=examples(40), deadline=None)
def test_rows_of_each_group_are_told_once(engine: Engine) -> None:
    parts = row_copies(engine.point, engine.tensors)
    assert len({(part.row, part.group) for part in parts}) == len(parts)
    assert [piece for part in parts for piece in part.pieces] == list(engine.point.pieces())
    for part in parts:
        assert {(p.row, p.group) for p in part.pieces} == {(part.row, part.group)}
        assert part.pages.layout.num_pages == engine.pages
    engine.arena.close()


# --- what is not as the point says ------------------------------------------------------------

POINT = PointShape((StateGroup(3, ("conv",), 24),), 64, 1)


def test_pages_of_the_right_size_are_taken() -> None:
    [part] = row_copies(POINT, {3: [torch.zeros(2, 3, 2)]})
    assert (part.row, part.group, len(part.pieces)) == (0, 3, 1)


@pytest.mark.parametrize(
    "pages",
    [
        torch.zeros(2, 3, 3),
        torch.zeros(2, 3, 1),
        torch.zeros(2, 3, 2, dtype=torch.bfloat16),
        torch.zeros(2, 2, 3).transpose(1, 2),  # the right size, in another order
        torch.zeros(2, 3, 4)[:, :, :2],  # with gaps
    ],
    ids=lambda pages: f"{tuple(pages.shape)}-{pages.dtype}",
)
def test_pages_that_are_not_one_run_of_the_right_size_are_refused(pages: torch.Tensor) -> None:
    with pytest.raises(LayoutError, match=r"cache of conv has pages of shape .* 24 bytes"):
        row_copies(POINT, {3: [pages]})


@pytest.mark.parametrize(
    "pages",
    [torch.zeros(24), torch.zeros(0, 3, 2), [torch.zeros(2, 3, 2)] * 2, None],
    ids=["one axis", "no page", "a list", "nothing"],
)
def test_what_is_not_one_tensor_of_pages_is_refused(pages: Any) -> None:
    with pytest.raises(LayoutError, match="cache of conv is not one tensor of pages"):
        row_copies(POINT, {3: [pages]})


def test_layers_are_neither_left_out_nor_made_up() -> None:
    with pytest.raises(ValueError, match="shorter"):
        row_copies(POINT, {3: []})
    with pytest.raises(ValueError, match="longer"):
        row_copies(POINT, {3: [torch.zeros(2, 3, 2)] * 2})


def test_a_layer_with_fewer_pages_than_the_first_of_its_group_is_refused() -> None:
    """The table of the group names pages that it does not have."""
    point = PointShape((StateGroup(0, ("a", "b"), 24),), 64, 1)
    with pytest.raises(LayoutError, match="those of the memory"):
        row_copies(point, {0: [torch.zeros(3, 6), torch.zeros(2, 6)]})

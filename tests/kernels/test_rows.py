"""Deviation and merge of computed rows, in the interpreter, against index operations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import LayoutError, UnsupportedError
from kvcore.memory.layout import KVView
from kvcore.model.shape import BlockShape
from kvcore_kernels.deviation import launch as deviation
from kvcore_kernels.deviation import naive as naive_deviation
from kvcore_kernels.fusion_rows import check_count, strided_rows
from kvcore_kernels.merge import launch as merge
from kvcore_kernels.merge import naive as naive_merge
from kvcore_kernels.testing import ENGINES, assert_same, normal, raw, slot_view, twin

WIDE = ["bfloat16", "float16", "float32"]


def fresh(view: KVView, rows: int, seed: int = 5) -> list[torch.Tensor]:
    """K and V of computed rows, cut out of one projection: rows that are not contiguous."""
    heads = view.layout.kv_heads
    dims = [plane.head_dim for plane in view.layout.planes[0]]
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(rows, heads * sum(dims), generator=generator)
    parts = whole.to(view.tensors[0].dtype).split([heads * dim for dim in dims], dim=1)
    return [part.view(rows, heads, dim) for part, dim in zip(parts, dims, strict=True)]


def drawn(data: st.DataObject, dtypes: list[str]) -> tuple[KVView, torch.Tensor]:
    """An engine's pages, and some of their slots in any order, with gaps below 0."""
    page = data.draw(st.sampled_from([1, 16, 32]))
    shape = BlockShape(
        layers=2,
        kv_heads=data.draw(st.integers(1, 3)),
        head_dim=data.draw(st.sampled_from([64, 80, 128, 256])),
        block_tokens=16,
        dtype=data.draw(st.sampled_from(dtypes)),
    )
    view = normal(
        ENGINES[data.draw(st.sampled_from(sorted({*ENGINES} - {"packed"})))](shape, 3, page)
    )
    slots = data.draw(st.permutations(range(3 * page)))[: data.draw(st.integers(0, 40))]
    gone = data.draw(st.sets(st.integers(0, 40), max_size=3))
    kind = data.draw(st.sampled_from([torch.int32, torch.int64]))
    wanted = [-1 if place in gone else slot for place, slot in enumerate(slots)]
    return view, torch.tensor(wanted, dtype=kind)


@given(data=st.data())
@settings(max_examples=25)
def test_merged_rows_are_where_they_belong(data: st.DataObject) -> None:
    view, slots = drawn(data, [*WIDE, "float8_e4m3fn"])
    parts = fresh(view, len(slots))
    ours, right = twin(view), twin(view)
    layer = data.draw(st.integers(0, 1))
    merge.merge_rows(*parts, ours, layer, slots)  # type: ignore[call-arg]
    naive_merge.merge_rows(*parts, right, layer, slots)  # type: ignore[call-arg]
    assert_same(ours, right)


@given(data=st.data())
@settings(max_examples=25)
def test_deviation_is_the_squared_distance(data: st.DataObject) -> None:
    """The order of up to 768 float32 terms is free: 1e-5 of their sum."""
    view, slots = drawn(data, WIDE)
    args = (*fresh(view, len(slots)), view, data.draw(st.integers(0, 1)), slots)
    before = twin(view)
    ours, right = deviation.deviations(*args), naive_deviation.deviations(*args)  # type: ignore[call-arg]
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert_same(view, before)


@given(data=st.data())
@settings(max_examples=15)
def test_some_of_the_computed_rows_are_measured(data: st.DataObject) -> None:
    """A blend does it so: the chunk rows among all rows, against K indexed by position."""
    cached, computed = (
        torch.randn(30, 2, 64, generator=torch.Generator().manual_seed(n)) for n in (1, 2)
    )
    which = torch.tensor(data.draw(st.lists(st.integers(0, 29), max_size=40)), dtype=torch.int64)
    slots = torch.tensor([data.draw(st.integers(0, 29)) for _ in which], dtype=torch.int64)
    found = deviation.parts_off([computed], which, [strided_rows(cached)], slots, 1)
    right = (computed[which] - cached[slots]).square().sum(dim=(1, 2))
    torch.testing.assert_close(found[0], right, rtol=1e-5, atol=1e-6)


def test_packed_kv_is_refused() -> None:
    view = normal(ENGINES["packed"](BlockShape(1, 1, 64, 16, "bfloat16"), 2, 32))
    for call in (merge.merge_rows, deviation.deviations):
        with pytest.raises(UnsupportedError, match="packed KV"):
            call(*fresh(view, 2), view, 0, torch.tensor([0, 1]))  # type: ignore[operator]


def test_more_rows_than_a_launch_counts_are_refused() -> None:
    with pytest.raises(LayoutError, match="2147483648 rows in one call"):
        check_count(1 << 31)


@pytest.mark.parametrize("rows", [1, 63, 500])
def test_a_latent_and_many_rows(rows: int) -> None:
    shape = BlockShape(1, 1, 576, 16, "bfloat16", kv_factor=1)
    view = normal(slot_view(shape, 32, 16))
    (keys,) = fresh(view, rows)
    slots = torch.randperm(512, generator=torch.Generator().manual_seed(rows))[:rows]
    found = deviation.deviations(keys, None, view, 0, slots)
    right = naive_deviation.deviations(keys, None, view, 0, slots)
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)
    merge.merge_rows(keys, None, view, 0, slots)
    assert torch.equal(raw(view.tensors[0][slots].clone()), raw(keys.clone()))
    assert deviation.deviations(keys, None, view, 0, slots).eq(0).all()


def test_equal_rows_are_at_distance_nothing_and_nan_shows() -> None:
    view = normal(slot_view(BlockShape(1, 2, 64, 4, "float32"), 4, 4))
    slots = torch.tensor([3, 7])
    keys, values = (tensor[slots].clone() for tensor in view.tensors)
    values[1, 1, 63] = float("nan")
    found = deviation.deviations(keys, values, view, 0, slots)
    assert found.tolist()[0] == [0.0, 0.0]
    assert found[1, 0] == 0
    assert found[1, 1].isnan()


VIEW = normal(slot_view(BlockShape(1, 2, 64, 4, "bfloat16"), 4, 4))
ROWS = fresh(VIEW, 2)
SLOTS = torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("keys", "values", "slots", "message"),
    [
        (ROWS[0], None, SLOTS, "1 tensors of rows for KV of 2 parts"),
        (ROWS[0], ROWS[1][:1], SLOTS, r"rows of \(1, 2, 64\)"),
        (ROWS[0][:, :1], ROWS[1], SLOTS, r"rows of \(2, 1, 64\)"),
        (*ROWS, SLOTS[:1], r"slots of torch.int64 \(1,\) for 2 rows"),
        (*ROWS, SLOTS.float(), "slots of torch.float32"),
        (*(part.float() for part in ROWS), SLOTS, "torch.float32|torch.bfloat16"),
    ],
)
@pytest.mark.parametrize(
    "twin",
    [
        merge.merge_rows,
        naive_merge.merge_rows,
        deviation.deviations,
        naive_deviation.deviations,
    ],
)
def test_what_does_not_fit_is_refused(twin, keys, values, slots, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises((LayoutError, UnsupportedError), match=message):
        twin(keys, values, VIEW, 0, slots)

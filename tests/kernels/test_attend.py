"""Attention of scattered rows, in the interpreter, against one row at a time in float64.

Pages that no row may see hold NaN: a key beyond a row's tile shows in the result.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import LayoutError, UnsupportedError
from kvcore.memory.layout import Axis, KVLayout, KVView, Plane
from kvcore_kernels.attend import launch, naive

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""float32: sums of 500 terms; the others: half an ulp of the result, and of the weights."""


def paged(
    tokens: int, page: int, heads: int, dims: tuple[int, ...], dtype: torch.dtype, seed: int = 0
) -> tuple[KVView, torch.Tensor]:
    """KV of ``tokens`` tokens in shuffled pages ``[pages, page, heads, sum(dims)]``; NaN else."""
    generator = torch.Generator().manual_seed(seed)
    pages = -(-tokens // page) + 2
    content = sum(dims)
    memory = torch.full((pages * page, heads, content), float("nan"))
    table = torch.randperm(pages, generator=generator)[: pages - 1].to(torch.int32)
    token = torch.arange(tokens)
    slots = table[token // page].long() * page + token % page
    memory[slots] = torch.randn(tokens, heads, content, generator=generator)
    memory = memory.to(dtype)
    planes, offset = [], 0
    for dim in dims:
        strides = page * heads * content, content, Axis(heads * content), Axis(1)
        planes.append(Plane(0, offset, *strides, dim))
        offset += dim
    name = str(dtype).removeprefix("torch.")
    return KVView(KVLayout(name, pages, page, heads, (tuple(planes),)), [memory]), table


def check(
    view: KVView, table: torch.Tensor, positions: list[int], group: int, **rest: float
) -> None:
    layout = view.layout
    dtype = view.tensors[0].dtype
    generator = torch.Generator().manual_seed(len(positions))
    size = (len(positions), group * layout.kv_heads, layout.planes[0][0].head_dim)
    queries = torch.randn(size, generator=generator).to(dtype)
    at = torch.tensor(positions, dtype=torch.int64)
    args = (queries, at, view, 0, table)
    scale = size[2] ** -0.5
    ours = launch.attend_rows(*args, scale=scale, **rest)  # type: ignore[arg-type]
    right = naive.attend_rows(*args, scale=scale, **rest)  # type: ignore[arg-type]
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@given(data=st.data())
@settings(max_examples=15)
def test_rows_see_their_own_past(data: st.DataObject) -> None:
    tokens = data.draw(st.sampled_from([1, 63, 200]))
    heads = data.draw(st.sampled_from([1, 2]))
    dim = data.draw(st.sampled_from([64, 80, 128, 192, 256]))
    dtype = data.draw(st.sampled_from(sorted(TOLERANCE, key=str)))
    page = data.draw(st.sampled_from([1, 16, 48]))
    view, table = paged(tokens, page, heads, (dim, data.draw(st.sampled_from([dim, 64]))), dtype)
    rows = sorted(data.draw(st.sets(st.integers(0, tokens - 1), min_size=1, max_size=20)))
    check(
        view, table, rows, data.draw(st.sampled_from([1, 3, 4])),
        window=data.draw(st.sampled_from([0, 0, 1, 40])),
        soft_cap=data.draw(st.sampled_from([0.0, 0.0, 5.0])),
    )  # fmt: skip


@pytest.mark.parametrize("rows", [[0], [499], [0, 499], [7, 3, 499, 0, 64], list(range(63))])
def test_the_first_the_last_and_any_order(rows: list[int]) -> None:
    view, table = paged(500, 16, 1, (64, 64), torch.float32)
    check(view, table, rows, 2)


def test_the_next_token_is_never_seen() -> None:
    """Not by one bit, also where a tile's other rows see it."""
    view, table = paged(64, 16, 1, (64, 64), torch.float32)
    queries = torch.randn(3, 2, 64)
    positions = torch.tensor([5, 20, 40])
    before = launch.attend_rows(queries, positions, view, 0, table, scale=0.125)
    memory = view.tensors[0].view(-1, 128)
    memory[int(table[1]) * 16 + 5] += 3.0
    after = launch.attend_rows(queries, positions, view, 0, table, scale=0.125)
    assert torch.equal(before[:2], after[:2])
    assert not torch.equal(before[2], after[2])


@pytest.mark.parametrize("latent_dim", [0, 512])
def test_what_lies_between_windows_may_be_anything(latent_dim: int) -> None:
    """Pages that the engine took back, inside a tile and between its rows."""
    dims = (576,) if latent_dim else (64, 64)
    view, table = paged(300, 16, 1, dims, torch.float32)
    gone = torch.arange(20, 270)
    slots = table[gone // 16].long() * 16 + gone % 16
    view.tensors[0].view(-1, sum(dims))[slots] = float("nan")
    check(view, table, [15, 290], 2, window=10, latent_dim=latent_dim)


def test_a_latent_is_keys_and_values() -> None:
    view, table = paged(40, 16, 1, (576,), torch.float32)
    check(view, table, [0, 17, 39], 40, latent_dim=512)
    check(view, table, [39], 2, latent_dim=500)


def test_packed_pages() -> None:
    """K column-major, V in tiles of two tokens."""
    page, dim = 32, 64
    planes = (
        Plane(0, 0, 2 * page * dim, 0, Axis(1), Axis(page), dim),
        Plane(0, page * dim, 2 * page * dim, 0, Axis(2 * dim, 2, 1), Axis(2), dim),
    )
    memory = torch.randn(3 * 2 * page * dim)
    view = KVView(KVLayout("float32", 3, page, 1, (planes,)), [memory])
    check(view, torch.tensor([2, 0]), [0, 31, 32, 63], 1)


def test_no_rows() -> None:
    view, table = paged(40, 16, 1, (64, 64), torch.float32)
    check(view, table, [], 1)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"queries": torch.zeros(1, 2, 32)}, LayoutError, "dim 32"),
        ({"queries": torch.zeros(1, 64)}, LayoutError, "queries of"),
        ({"queries": torch.zeros(1, 2, 64).half()}, UnsupportedError, "float16"),
        ({"positions": torch.zeros(2)}, LayoutError, "for 1 rows"),
        ({"window": -1}, LayoutError, "window -1"),
        ({"latent_dim": 64}, LayoutError, "latent_dim 64"),
    ],
)
@pytest.mark.parametrize("twin", [launch.attend_rows, naive.attend_rows])
def test_what_does_not_fit_is_refused(twin, change, error, message) -> None:  # type: ignore[no-untyped-def]
    view, table = paged(40, 16, 1, (64, 64), torch.float32)
    args = {"queries": torch.zeros(1, 2, 64), "positions": torch.zeros(1), "view": view}
    with pytest.raises(error, match=message):
        twin(**(args | {"layer": 0, "page_table": table, "scale": 1.0} | change))
